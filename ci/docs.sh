#!/usr/bin/env bash
# Install what is needed and build the pages as documentation, in build/docs or a folder that is
# named. Any warning fails.
set -euo pipefail
output="$(realpath -m "${1:-build/docs}")"
cd "$(dirname "$0")/.."
if [ $# = 0 ]; then
  source ci/environment.sh ci/requirements.txt ci/test-requirements.txt
fi
python -m sphinx --quiet --fresh-env --write-all --nitpicky --fail-on-warning \
  --keep-going --conf-dir ci/docs . "$output"
echo "The first page is $output/README.html"

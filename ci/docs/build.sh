#!/usr/bin/env bash
# Build the documentation pages into a folder; any warning fails.
set -euo pipefail
output="$(realpath -m "${1:?the folder to build into is missing}")"
cd "$(dirname "$0")/../.."
exec python -m sphinx --quiet --fresh-env --write-all --nitpicky --fail-on-warning \
  --keep-going --conf-dir ci/docs . "$output"

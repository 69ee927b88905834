#!/usr/bin/env bash
# Install what is needed and build the pages, as Ray's documentation would, in
# build/docs.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh ci/requirements.txt ci/test-requirements.txt

bash ci/docs/build.sh build/docs
echo "The first page is build/docs/README.html"

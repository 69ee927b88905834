#!/usr/bin/env bash
# Install what is needed and run every test; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
bash ci/docs/install.sh

ruff check .
ruff format --check .
codespell
exec pytest "$@" # all of tests/, unless files are named

#!/usr/bin/env bash
# Install what is needed and run the tests; arguments go to pytest. Those that take minutes
# each run with: bash ci/test.sh -m extra
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh ci/requirements.txt ci/test-requirements.txt
bash ci/browser.sh

ruff check .
ruff format --check .
codespell
python ci/reading_time.py
SECONDS=0
status=0
python -X faulthandler -m pytest "$@" || status=$? # all of tests/, unless files are named
echo "The tests took $((SECONDS / 60)) min $((SECONDS % 60)) s, installation not counted."
exit "$status"

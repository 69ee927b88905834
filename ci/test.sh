#!/usr/bin/env bash
# Install what is needed, and run the linters and the tests; arguments go to pytest. Those that
# take minutes each run with: bash ci/test.sh -m extra
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh ci/requirements.txt ci/test-requirements.txt
export TIKTOKEN_CACHE_DIR="$PWD/.venv/tiktoken"
python ci/offline_vocabulary.py "$TIKTOKEN_CACHE_DIR"
bash ci/browser.sh

ruff check .
ruff format --check .
codespell
exec python -X faulthandler -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

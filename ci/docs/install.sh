#!/usr/bin/env bash
# Install what the documentation page and its test need: Python packages into the active
# environment, and Chromium, where this user may install system packages.
set -euo pipefail
cd "$(dirname "$0")/../.."

installed="$(python -c 'import sys; print(sys.prefix)')/installed-docs-requirements.txt"
if ! cmp -s ci/docs/requirements.txt "$installed"; then
  echo "Installing ci/docs/requirements.txt ..."
  python -m pip install --quiet --disable-pip-version-check --no-compile \
    -r ci/requirements.txt -r ci/docs/requirements.txt # both, so that no pin moves
  cp ci/docs/requirements.txt "$installed"
fi

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Chromium and its driver are missing, and only tests/test_page.py needs them." \
    "Install them with: sudo apt-get install chromium chromium-driver" >&2
  exit
fi
echo "Installing Chromium ..."
apt-get update --quiet --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes \
  --no-install-recommends chromium chromium-driver

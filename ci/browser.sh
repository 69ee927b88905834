#!/usr/bin/env bash
# Install Chromium and its driver, which tests/test_page.py needs, where this user may install
# system packages.
set -euo pipefail

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

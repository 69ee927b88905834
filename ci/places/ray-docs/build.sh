#!/usr/bin/env bash
# What the image of the release test gets beyond Ray.
set -euxo pipefail

pip3 install --no-cache-dir papermill PACKAGES

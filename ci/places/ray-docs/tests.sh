#!/usr/bin/env bash
# The notebook in its smoke form, on two CPU workers: about five minutes.
set -euxo pipefail

export GPT2_CONFIG=configs/smoke.yaml
papermill README.ipynb /tmp/NAME.out.ipynb --log-output --kernel python3 --cwd .

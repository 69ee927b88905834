#!/usr/bin/env bash
# The package's tests, and the notebook on the template's GPUs for a few steps.
set -euxo pipefail

uv pip install -r python_depset.lock --system --no-deps --index-strategy unsafe-best-match
uv pip install --quiet --system papermill pytest
python -m pytest tests
sed -e 's/^max_steps: .*/max_steps: 40/' -e 's/^eval_interval: .*/eval_interval: 20/' \
  configs/stories.yaml >configs/stories-test.yaml
export GPT2_CONFIG=configs/stories-test.yaml
papermill README.ipynb /tmp/README.out.ipynb --log-output --kernel python3 --cwd .

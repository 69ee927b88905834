#!/usr/bin/env bash
# The package's tests, what the GPUs compute, and the notebook on all of them for a few steps.
set -euxo pipefail
gpus=4 # of the node in configs/gpt2-jaxtrainer

uv pip install -r python_depset.lock --system --no-deps --index-strategy unsafe-best-match
uv pip install --quiet --system papermill pytest
python -m pytest tests
python tests/on_gpus.py $gpus tests/test_device.py
sed -e 's/^max_steps: .*/max_steps: 40/' -e 's/^eval_interval: .*/eval_interval: 20/' \
  -e "s/num_workers: .,/num_workers: $gpus,/" configs/stories.yaml >configs/stories-test.yaml
export GPT2_CONFIG=configs/stories-test.yaml
papermill README.ipynb /tmp/README.out.ipynb --log-output --kernel python3 --cwd .
grep "stories-test-.* is new; .* | devices $gpus | " /tmp/README.out.ipynb # not what the page shows

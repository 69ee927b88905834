#!/usr/bin/env bash
# Run the notebook as a program, without the cells that are only for reading: those with the tag
# "aside". The second argument names the run, so that a job that is tried again continues it.
#
#     bash ci/job.sh configs/gpt2-124m.yaml my-run
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
export GPT2_CONFIG="build/$2.yaml"
{ awk '!/^run_name:/' "$1"; printf "run_name: '%s'\n" "$2"; } >"$GPT2_CONFIG"
jupyter nbconvert --to script --output "build/$2" README.ipynb \
  --TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_cell_tags=aside
PYTHONPATH=. exec python "build/$2.py"

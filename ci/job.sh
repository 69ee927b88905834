#!/usr/bin/env bash
# Run the notebook, as it was last saved, as a program, without the cells that have the tag
# "aside". The second argument names the run, so that a job that is tried again continues it. More
# arguments change keys of the configuration. NOTEBOOK names another notebook than README.ipynb.
#
#     bash ci/job.sh configs/gpt2-124m.yaml my-run scaling.num_workers=8 max_steps=1000
set -euo pipefail
cd "$(dirname "$0")/.."
notebook="${NOTEBOOK:-README.ipynb}"
digest=$(sha256sum "$notebook")
echo "$notebook of $(date -r "$notebook" '+%F %T'), SHA-256 ${digest:0:12}"
mkdir -p build
export GPT2_CONFIG="build/$2.yaml"
python - "$1" "$GPT2_CONFIG" "${@:2}" <<'PYTHON'
import sys
from pathlib import Path
from ruamel.yaml import YAML

yaml = YAML()
source, target, run_name, *changes = sys.argv[1:]
keys = yaml.load(Path(source)) or {}
for change in changes:
    name, equals, value = change.partition("=")
    if not equals:
        sys.exit(f"{change}: expected KEY=VALUE")
    *outer, last = name.split(".")
    place = keys
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = yaml.load(value)
yaml.dump(keys | {"run_name": run_name}, Path(target))
PYTHON
jupyter nbconvert --to script --output-dir build --output "$2" "$notebook" \
  --TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_cell_tags=aside
export TQDM_DISABLE=1 # a bar would fill the log with lines
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" exec python -P "build/$2.py"

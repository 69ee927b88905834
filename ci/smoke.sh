#!/usr/bin/env bash
# Install what is needed and run the notebook in its smoke form, on two CPU cores.
# The executed copy, with outputs and plots, is build/smoke/README.ipynb.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh ci/requirements.txt

rm -rf build/smoke
mkdir -p build/smoke
cp -r README.ipynb trainkit configs images build/smoke/
cd build/smoke
pytest --nbmake --overwrite --nbmake-timeout=900 README.ipynb
python - <<'PYTHON'
import nbformat

for cell in nbformat.read("README.ipynb", as_version=4).cells:
    if cell.id in ("drill", "fit", "generate"):  # a worker is killed; GPT-2; its text
        print("".join(output.get("text", "") for output in cell.outputs))
PYTHON
echo "The executed notebook, with its plots, is build/smoke/README.ipynb"

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
echo "The executed notebook is build/smoke/README.ipynb"

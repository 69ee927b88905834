#!/usr/bin/env bash
# Check on this machine what the pages say, with the Python that is active, in ten minutes;
# installs nothing, and needs no network. Arguments go to pytest, such as -k attention or
# --change n_layer=1. The report is build/verify/report.md; CONTRIBUTING.md has more.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(command -v python || command -v python3)"

# Each file has a process of its own: one that crashes or hangs leaves the others alone.
options=(-p no:cacheprovider -o addopts= -o faulthandler_timeout=300)
options+=(-o faulthandler_exit_on_timeout=true --tb=short --into build/verify)
rm -rf build/verify
status=0
for part in device step run; do
  TRANSFORMERS_VERBOSITY=error "$python" -m pytest "benchmarks/verify/test_$part.py" \
    "${options[@]}" "$@" || [ $? = 5 ] || status=1 # 5: no test was asked for
done
head -n 1 build/verify/report.md
echo "The report is build/verify/report.md. To show it, attach build/verify/report.zip."
exit "$status"

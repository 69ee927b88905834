#!/usr/bin/env bash
# Check on this machine what the pages say, with the Python that is active, in ten minutes;
# installs nothing, and needs no network. Arguments go to pytest, such as -k attention or
# --change n_layer=1. The report is build/verify/report.md; CONTRIBUTING.md has more.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(command -v python || command -v python3)"
into="${VERIFY_INTO:-build/verify}"
rm -rf "$into"

options=(--into "$into" --tb=short -p no:cacheprovider -o addopts=)
options+=(-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
status=0
for part in device run; do # in processes of their own, so a crash leaves the others alone
  TRANSFORMERS_VERBOSITY=error "$python" -m pytest "benchmarks/verify/test_$part.py" \
    "${options[@]}" "$@" || [ $? = 5 ] || status=1 # 5: no test was asked for
done
if [ -e "$into/report.md" ]; then
  head -n 1 "$into/report.md"
  echo "The report is $into/report.md. To show it, attach $into/report.zip to an issue."
fi
exit "$status"

#!/usr/bin/env bash
# Check on this machine what the pages say, with the Python that is active; installs nothing.
# The report is build/verify/report.md; CONTRIBUTING.md has more.
set -euo pipefail
python="$(command -v python || command -v python3)"
exec "$python" "$(dirname "$0")/verify.py" "$@"

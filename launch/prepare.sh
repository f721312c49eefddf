# Sourced by quickstart.sh and test.sh from the root of the repository:
#
#   . launch/prepare.sh EXTRA
#
# makes .venv if it is missing, installs the project there with that extra at the versions of constraints.txt, and puts
# the environment first on PATH. A second call with nothing changed returns at once. PYTHON names the interpreter to use
# for .venv (default: python3). pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) say where packages come from.
# shellcheck shell=bash

extra=$1
python=${PYTHON:-python3}

command -v "$python" >/dev/null || { echo "needs Python >= 3.10; '$python' was not found (PYTHON=... names another)" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "needs Python >= 3.10, got $("$python" --version) (PYTHON=... names another)" >&2; exit 1; }

# An interrupted first run leaves a folder without pip: make it again.
if [ ! -x .venv/bin/pip ]; then
    echo "== creating .venv"
    "$python" -m venv --clear .venv ||
        { echo "could not create .venv; on Debian and Ubuntu install python3-venv first" >&2; exit 1; }
fi

stamp=.venv/.prepared-$extra
key=$(cat constraints.txt pyproject.toml | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
    # torch first and by its pin: left to the resolver, it may pull several GB of another build.
    echo "== installing torch"
    .venv/bin/pip install --disable-pip-version-check --no-compile "$(grep '^torch==' constraints.txt)" -c constraints.txt
    echo "== installing cce-dist[$extra]"
    .venv/bin/pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".[$extra]"
    # pip would compile on one core. Some packages have files that are no Python, or another one's.
    .venv/bin/python -m compileall -qq -j 0 .venv/lib || true
    echo "$key" >"$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHON # it named the interpreter of .venv; launch/pretrain.sh would take it for its own

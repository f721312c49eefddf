#!/usr/bin/env bash
# Every check of the project, as CI runs them: sets up .venv, then ruff, pyright, the resolver of constraints.txt and pytest.
# Further arguments go to pytest, e.g. `launch/test.sh -k merge`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

# Two files of tests run side by side: most of them use one core.
# All checks run even when an early one fails; pytest comes last, so that its summary closes the output.
failed=()
ruff check . || failed+=("ruff check")
ruff format --check . || failed+=("ruff format")
pyright || failed+=("pyright")
launch/resolve.sh || failed+=("constraints.txt")
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
fi
pytest -n 2 --dist loadfile "$@" || failed+=("pytest")
[ ${#failed[@]} -eq 0 ]

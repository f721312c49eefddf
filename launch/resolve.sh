#!/usr/bin/env bash
# Asks the package index whether constraints.txt can be installed with every extra, for each Python that pyproject.toml allows.
# Nothing is installed. Local wheels and settings of pip or uv are not seen, so a stranger's machine gets the same answer.
# UV_DEFAULT_INDEX names a mirror of the index. Needs `uv`, which the extra [dev] brings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset UV_FIND_LINKS UV_INDEX UV_EXTRA_INDEX_URL UV_CONSTRAINT UV_OVERRIDE

for python in 3.10 3.11 3.12 3.13; do
    # The resolver of uv answers for a Python that is not installed here; pip evaluates markers for its own Python alone.
    uv pip compile --quiet --no-config --all-extras --python-version "$python" --python-platform linux \
        --constraint constraints.txt --output-file /dev/null pyproject.toml ||
        { echo "constraints.txt cannot be installed on Python $python" >&2; exit 1; }
    echo "constraints.txt resolves on Python $python"
done

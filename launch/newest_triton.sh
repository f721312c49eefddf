#!/usr/bin/env bash
# The kernels under the newest Triton, interpreted: it is newer than the one that torch asks for, and users meet it first.
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

newest=3.9.0
folder=$PWD/.venv/triton-$newest
[ -d "$folder" ] || pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "triton==$newest"
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
python -c "import triton; assert triton.__version__ == '$newest', triton.__version__"
pytest -n 2 --dist loadgroup -m "not slow and not sweep" \
    tests/test_{triton,filtered,screened,fallback,divergence,top_k}.py "$@"

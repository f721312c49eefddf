#!/usr/bin/env bash
# The kernels under the newest Triton, interpreted: it is newer than the one that torch asks for, and users meet it first. Its
# tests launch every kernel. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

newest=3.9.0
folder=$PWD/.venv/triton-$newest
[ -d "$folder" ] || pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "triton==$newest"
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} CCE_DIST_TEST_OVERFLOW=1
python -c "import triton; assert triton.__version__ == '$newest', triton.__version__"
of_kernels="(match and not divergence) or kept_exponentials or nothing or shrinkage or linear_correction or numbers or"
of_kernels+=" fp16-full-c or top_k or times"
pytest -n 2 --dist loadgroup -m "not slow and not sweep" -k "$of_kernels" \
    tests/kernels/test_{triton,filtered}.py tests/core/test_{divergence,top_k,log_probs,kept_ids,groups}.py "$@"

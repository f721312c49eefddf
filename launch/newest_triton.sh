#!/usr/bin/env bash
# Runs some tests of the kernels, interpreted, under a Triton that is newer than the one torch asks for: users meet it first. They
# launch every kernel. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

newest=3.9.0
folder=$PWD/.venv/triton-$newest
[ -d "$folder" ] || pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "triton==$newest"
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
python -c "import triton; assert triton.__version__ == '$newest', triton.__version__"
# Each kernel at least once, and nearly all of its flags.
cases="no-descriptor or whole-tiles or groups-of-tokens or groups-in-16-bits or part-made-again or of-a-padded-shard or numbers or"
cases+=" linear_correction or fp16-full-c or drops_nothing or too_high or 64-entropy or not_finite or threshold or"
cases+=" beside_kept or times or kept-everything"
pytest -p no:cacheprovider -m "not slow and not sweep" -k "$cases" \
    tests/kernels/test_{triton,filtered}.py tests/core/test_{divergence,log_probs,kept_ids,groups}.py "$@"

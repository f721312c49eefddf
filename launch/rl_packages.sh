#!/usr/bin/env bash
# Tests the adapters for reinforcement learning with the packages themselves, on a CPU, in the environment of test.sh:
#
#   NEMO_RL=~/RL launch/rl_packages.sh            # NEMO_RL: a checkout of NeMo-RL, which is on GitHub alone
#   MEGATRON=0.18.2 VERL=0.9.0 launch/rl_packages.sh
#
# verl, megatron-core and what they import go into a temporary folder, without what those need in turn: verl asks for an older
# transformers than the other tests have. NeMo-RL's tests run with a stand-in where NEMO_RL is not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# megatron-core asks for Python 3.12 since 0.17, and 0.18 and 0.19 run on 3.11.
pip install -q --disable-pip-version-check --no-deps --ignore-requires-python --target "$folder" \
    "megatron-core==${MEGATRON:-0.19.2}" "verl==${VERL:-0.9.1}" ray 'tensordict<=0.10' pyvers codetiming hydra-core omegaconf \
    'antlr4-python3-runtime==4.9.3' pandas orjson jsonschema jsonschema-specifications referencing rpds-py attrs msgpack \
    protobuf click cloudpickle importlib_metadata
export PYTHONPATH=$folder${NEMO_RL:+:$NEMO_RL}
python -c 'import verl.models.mcore.model_forward_fused' # else the tests would take their stand-in
[ -z "${NEMO_RL:-}" ] || python -c 'import nemo_rl.distributed.model_utils'
pytest -q tests/adapters/test_rl.py tests/adapters/test_replay.py tests/adapters/test_megatron_scores.py tests/adapters/test_nemo_rl.py

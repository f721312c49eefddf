#!/usr/bin/env bash
# One node of a pre-training run. Start it on every node with the same arguments, which go to `cce-dist pretrain`:
#
#   NNODES=4 RDZV=node0:29400 launch/pretrain.sh --tp 8 --dp 4 --out /shared/run
#
# NNODES           nodes of the run (default 1)
# RDZV             host:port where they meet: a name of the first node that all can reach (needed from 2 nodes on)
# NPROC_PER_NODE   ranks on this node (default: one for each GPU)
# RUN_ID           the same on all nodes, another for every run that meets at the same place (default cce-dist)
# MAX_RESTARTS     how often this node starts its ranks again after one of them, or of another node, was lost (default 10)
# RDZV_CONF        further settings of the rendezvous for torchrun, as key=value,...
#
# A node that was killed may be started again with the same line: the others wait for it, and all go on from the newest
# checkpoint under --out, which must be on storage that every node sees. Where the first node is lost all end, and go on when
# all are started again.
set -euo pipefail

nnodes=${NNODES:-1}
if [ "$nnodes" -gt 1 ] && [ -z "${RDZV:-}" ]; then
    echo "launch/pretrain.sh: RDZV=host:port is needed for $nnodes nodes" >&2
    exit 1
fi

# By default torchrun remembers the store of the first rendezvous, which a node that joins later never hears of.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun limits threads only where a node has several ranks. One thread each way, a CPU rank's sums do not depend on that.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Collectives that run behind matrix products wait for room on the GPU unless they go first.
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}

exec torchrun \
    --nnodes "$nnodes" \
    --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
    --max-restarts "${MAX_RESTARTS:-10}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${RDZV:-localhost:0}" \
    --rdzv-id "${RUN_ID:-cce-dist}" \
    --rdzv-conf "${RDZV_CONF:-}" \
    -m cce_dist pretrain "$@"

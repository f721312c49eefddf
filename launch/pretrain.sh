#!/usr/bin/env bash
# One node of a pre-training run. Start it on every node with the same arguments, which go to `cce-dist pretrain`:
#
#   NNODES=4 RDZV=node0:29400 launch/pretrain.sh --tp 8 --dp 4 --out /shared/run
#
# NNODES           nodes of the run (default 1)
# RDZV             host:port where they meet: a name of the first node that all can reach (needed from 2 nodes on)
# NPROC_PER_NODE   ranks on this node (default: one for each GPU)
# RUN_ID           the same on all nodes and whenever the run is started again, another for every run that meets at the same
#                  place (default cce-dist). If it is set, --no-resume deletes nothing of the run that has the same one
# MAX_RESTARTS     how often this node starts its ranks again after one of them, or of another node, was lost (default 10)
# RDZV_CONF        further settings of the rendezvous for torchrun, as key=value,...
# PYTHON           the interpreter (default: python3)
#
# A node that was killed may be started again with the same line: the others wait for it, and all go on from the newest
# checkpoint under --out, which must be on storage that every node sees. Where the first node is lost all end, and go on when
# all are started again.
#
# SIGTERM, SIGINT and SIGUSR1 have all ranks store a checkpoint after the same step. The exit code is 75 then, and the same line
# goes on; any other code than 0 is a reason to look. A second signal ends everything at once.
set -euo pipefail

nnodes=${NNODES:-1}
if [ "$nnodes" -gt 1 ] && [ -z "${RDZV:-}" ]; then
    echo "launch/pretrain.sh: RDZV=host:port is needed for $nnodes nodes" >&2
    exit 1
fi

# By default torch remembers the store of the first rendezvous, which a node that joins later never hears of.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# One thread each way, a CPU rank's sums do not depend on how many ranks a node has.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Collectives that run behind matrix products wait for room on the GPU unless they go first.
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}

where=(--nodes "$nnodes" --max-restarts "${MAX_RESTARTS:-10}" --run-id "${RUN_ID:-cce-dist}")
[ "$nnodes" -eq 1 ] || where+=(--meet "$RDZV")
[ -z "${NPROC_PER_NODE:-}" ] || [ "$NPROC_PER_NODE" = gpu ] || where+=(--ranks-per-node "$NPROC_PER_NODE")
[ -z "${RDZV_CONF:-}" ] || where+=(--meet-conf "$RDZV_CONF")
exec "${PYTHON:-python3}" -m cce_dist pretrain "${where[@]}" "$@"

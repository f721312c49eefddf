#!/usr/bin/env bash
# From a fresh clone to a figure: sets up .venv, then pre-trains a small GPT on two CPU ranks, its vocabulary split between them, and
# once more with all logits held, so that the figure shows both losses.
#
# Arguments go to `cce-dist pretrain`, which then runs once: `launch/quickstart.sh --loss filtered` adds another loss to the figure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh train

losses=(dense exact)
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        --loss) next=$((i + 1)) && losses=("${!next:?--loss needs a name}") ;;
        --loss=*) losses=("${!i#--loss=}") ;;
    esac
done
# A minute for both runs on two cores. Arguments of this script come later and win.
size=(--num-layers 2 --batch-size 8 --steps 60 --eval-every 20 --eval-batches 4 --corpus-mib 4)
for loss in "${losses[@]}"; do
    cce-dist pretrain --tp 2 --device cpu "${size[@]}" --out "runs/quickstart/$loss" "$@" --loss "$loss"
done
cce-dist plot runs/quickstart/*/metrics.jsonl --out runs/quickstart/loss.png
printf 'figure: %s\n' "$PWD/runs/quickstart/loss.png"

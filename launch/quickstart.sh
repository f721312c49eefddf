#!/usr/bin/env bash
# From a fresh clone to a figure: sets up .venv, then pre-trains a small GPT on two CPU ranks, its vocabulary split between them.
# Further arguments go to `cce-dist pretrain`, e.g. `launch/quickstart.sh --loss filtered`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh train

out=runs/quickstart
cce-dist pretrain --tp 2 --device cpu --out "$out" "$@"
printf 'figure: %s\n' "$PWD/$out"/*.png

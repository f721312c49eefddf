#!/usr/bin/env bash
# Disturbs a small training run for hours: kills, signals, full disks and damaged files at random, one each round, and compares
# every run that finishes with one that nothing happened to. Needs the environment of test.sh; tests/chaos.py has the options:
#
#   launch/chaos.sh --rounds 100000 --seconds 14400 --seed 7     # four hours on CPUs
#   launch/chaos.sh --device cuda --rounds 100                   # two GPUs, over NCCL
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

export OMP_NUM_THREADS=1
exec python tests/chaos.py "$@"

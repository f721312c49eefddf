#!/usr/bin/env bash
# Measures a group of T GPUs of this machine, in parts that each take less than four minutes:
#
#   launch/measure_group.sh 8                     all parts
#   launch/measure_group.sh 4 verify bench        these alone
#
# verify    the matrix of cases on T ranks; the first time its kernels are compiled
# bench     the vocabulary over T ranks and on one, two heads
# stages    the last stage of Megatron and of DeepSpeed
# pretrain  a short run, from 4 ranks on in two data-parallel halves
# kill      a rank of a run is killed; the run goes on in the same bits, and with half as many ranks
#
# Each step has a limit in seconds, so that a slow one does not cost the others. The folder $OUT (default: runs/group) gets a log
# of all output, a table of what came of each step, and what each step measured. The exit code is 0 if no step failed.
#
# DEVICE   cuda (default) or cpu, where only verify, pretrain and kill run
# SHAPES, TOKENS, REPEATS   of bench (default: Llama-3-8B and Gemma-2-2B; 8192; 4) and of the stages (Llama-3-8B)
# SIZES    of bench's groups (default: T,1)
# PRESET, STEPS, CORPUS     of pretrain (default: base, 20, Python's standard library)
# LIMIT    seconds of a step at most (default: its own limit)
# ONLY     text in the names of verify's cases (default: all)
# PYTHON   the interpreter (default: python3)
set -uo pipefail

ranks=${1:?usage: launch/measure_group.sh T [verify] [bench] [stages] [pretrain] [kill]}
shift
parts=(verify bench stages pretrain kill)
for part in "$@"; do
    [[ " ${parts[*]} " == *" $part "* ]] || { echo "launch/measure_group.sh: $part is none of: ${parts[*]}" >&2 && exit 2; }
done
[ $# -eq 0 ] || parts=("$@")
out=${OUT:-runs/group}
device=${DEVICE:-cuda}
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}  # collectives go before matrix products
cce=("${PYTHON:-python3}" -m cce_dist)
on_ranks=("${cce[0]}" -m torch.distributed.run --standalone --nproc-per-node "$ranks")
heads=$root/benchmarks/heads.py
rows=()
failed=0
: >"$out/log.txt"

# step NAME LIMIT FILE COMMAND...: run a command in $work/NAME for at most LIMIT seconds, and keep the FILE that it writes there.
step() {
    local name=$1 limit=$2 file=$3 start=$SECONDS code=0 outcome=ok from said
    shift 3
    limit=$((limit < ${LIMIT:-999} ? limit : LIMIT))
    printf '== %s: %s\n' "$name" "$*" | tee -a "$out/log.txt"
    from=$(wc -c <"$out/log.txt")
    # Into a file: a pipe would stay open as long as one lost rank lives.
    timeout -k 8 "$limit" "$@" >>"$out/log.txt" 2>&1 || code=$?
    said=$(tail -c "+$((from + 1))" "$out/log.txt")
    printf '%s\n' "$said"
    case $code in
        0) ;;
        124 | 137) outcome="stopped after $limit s" ;;
        *) outcome="failed, exit code $code" ;;
    esac
    [ "$code" -eq 0 ] || failed=1
    [ ! -f "$work/$name/$file" ] || cp "$work/$name/$file" "$out/$name.${file##*.}"
    rows+=("| $name | $outcome | $((SECONDS - start)) | $(grep '[a-z]' <<<"$said" | tail -n 1 | cut -c1-100 | tr '|' '/') |")
}

# on_gpus NAME ...: a step, or one line where there are none.
on_gpus() {
    if [ "$device" = cuda ]; then step "$@"; else rows+=("| $1 | not run: it needs GPUs | 0 | |"); fi
}

# heads NAME LIMIT SHAPES OPTIONS...: what benchmarks/heads.py measures of some heads.
heads() {
    local name=$1 limit=$2 shapes=$3
    shift 3
    # shellcheck disable=SC2086  # several shapes, several numbers of tokens
    on_gpus "$name" "$limit" bench.json "${on_ranks[@]}" "$heads" --shapes $shapes --tokens ${TOKENS:-8192} \
        --repeats "${REPEATS:-4}" --out "$work/$name" "$@"
}

verify() {
    step verify 230 none "${on_ranks[@]}" -m cce_dist verify --device "$device" --only "${ONLY:-}"
}

bench() {
    local group=(cce-dist-default cce-dist-cached cce-dist-filtered torch-compile) sizes=${SIZES:-$ranks}
    if [ "$ranks" -gt 1 ]; then
        sizes=${SIZES:-$ranks,1}
        group+=(megatron megatron-fused cce-dist-default-sp cce-dist-filtered-sp megatron-fused-sp deepspeed)
    fi
    heads bench 220 "${SHAPES:-llama-3-8b gemma-2-2b}" --tp "$sizes" --methods "${group[@]}"
}

stages() {
    local ours=(cce-dist-default cce-dist-cached cce-dist-filtered) split=()
    if [ "$ranks" -gt 1 ]; then
        split=(megatron-sp megatron-fused-sp cce-dist-default-sp cce-dist-filtered-sp)
    fi
    heads stage-megatron 110 "${SHAPES:-llama-3-8b}" --stage megatron \
        --no-forward --methods megatron megatron-fused "${ours[@]}" cce-dist-main-grad "${split[@]}"
    heads stage-deepspeed 110 "${SHAPES:-llama-3-8b}" --stage deepspeed \
        --no-forward --methods deepspeed deepspeed-linear "${ours[@]}"
}

# A run of STEPS steps, without checkpoints.
pretrain() {
    local dp=$((ranks % 4 == 0 ? 2 : 1))
    local half=(--dtype bfloat16 --batch-size $((4 * ranks)) --accumulate 2)
    [ "$device" = cuda ] || half=()
    step pretrain 75 metrics.jsonl "${cce[@]}" pretrain --device "$device" --no-resume --tp $((ranks / dp)) --dp "$dp" \
        --preset "${PRESET:-base}" --steps "${STEPS:-20}" --eval-every "${STEPS:-20}" --checkpoint-every 0 "${half[@]}" \
        ${CORPUS:+--corpus "$CORPUS"} --corpus-mib 4 --cache "$work/corpus" --out "$work/pretrain"
}

kill_and_go_on() {
    PYTHONPATH=$root/tests:$PYTHONPATH step kill 230 none "${cce[0]}" "$root/tests/lose_a_rank.py" --ranks "$ranks" \
        --then $((ranks > 1 ? ranks / 2 : 1)) --device "$device"
}

for part in "${parts[@]}"; do
    case $part in
        verify) verify ;;
        bench) bench ;;
        stages) stages ;;
        pretrain) pretrain ;;
        kill) kill_and_go_on ;;
    esac
done

{
    printf '\nT = %s, %s, %s s\n\n| step | outcome | s | last line |\n|---|---|---:|---|\n' "$ranks" "$device" "$SECONDS"
    printf '%s\n' "${rows[@]}"
    for name in bench stage-megatron stage-deepspeed; do
        [ ! -f "$out/$name.json" ] || { echo && "${cce[0]}" "$heads" --show "$out/$name.json" --columns total total/3 MiB; }
    done
    [ ! -f "$out/bench.json" ] || { echo && "${cce[0]}" "$heads" --show "$out/bench.json" --tp "$ranks" --columns sends; }
} 2>&1 | tee "$out/table.md"
exit $failed

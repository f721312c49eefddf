#!/usr/bin/env bash
# Measures a group of T GPUs of this machine, in under nine minutes:
#
#   launch/measure_group.sh 8 [FOLDER]
#
# The steps: verify on T ranks; bench of the vocabulary over T ranks and on one; the last stage of Megatron and of DeepSpeed; a
# short pretrain of each engine, with T = tensor x pipeline x data ranks. Each step has a limit in seconds, so that a slow one
# does not cost the others. FOLDER (default: $OUT, else runs/group) gets at most eight files: a log of all output, a table of
# what came of each step, and what each step measured. The exit code is 0 if no step failed.
#
# DEVICE   cuda (default) or cpu, where only verify and the torch engine run
# SHAPES, TOKENS, REPEATS   of bench (default: Llama-3-8B, Gemma-2-2B and Qwen-2.5-7B; 8192; 5)
# PRESET, STEPS, CORPUS     of pretrain (default: base, 20, Python's standard library)
# ONLY     text in the names of verify's cases (default: all)
# PYTHON   the interpreter (default: python3)
set -uo pipefail

ranks=${1:?usage: launch/measure_group.sh T [FOLDER]}
out=${2:-${OUT:-runs/group}}
device=${DEVICE:-cuda}
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}  # collectives go before matrix products
cce=("${PYTHON:-python3}" -m cce_dist)
rows=()
failed=0
: >"$out/log.txt"

# step NAME LIMIT FILE COMMAND...: run a command in $work/NAME for at most LIMIT seconds, and keep the FILE that it writes there.
step() {
    local name=$1 limit=$2 file=$3 start=$SECONDS code=0 outcome=ok from said
    shift 3
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

bench() {
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086  # several shapes, several numbers of tokens
    on_gpus "$name" "$limit" bench.json "${cce[@]}" bench --shapes ${SHAPES:-llama-3-8b gemma-2-2b qwen-2.5-7b} \
        --tokens ${TOKENS:-8192} --repeats "${REPEATS:-5}" --out "$work/$name" "$@"
}

# The layout: two pipeline stages from 4 ranks on, two data-parallel halves from 8 on, tensor-parallel ranks else.
pp=$((ranks % 4 == 0 ? 2 : 1))
dp=$((ranks % 8 == 0 ? 2 : 1))
pretrain() {
    local run=$1 limit=$2 engine=$3
    shift 3
    "$run" "pretrain-$engine" "$limit" metrics.jsonl "${cce[@]}" pretrain --engine "$engine" --device "$device" --no-resume \
        --preset "${PRESET:-base}" --steps "${STEPS:-20}" --eval-every "${STEPS:-20}" --checkpoint-every 0 \
        ${CORPUS:+--corpus "$CORPUS"} --corpus-mib 4 --cache "$work/corpus" --out "$work/pretrain-$engine" "$@"
}

step verify 100 none "${cce[0]}" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m cce_dist verify \
    --device "$device" --only "${ONLY:-}"
group=(cce-dist-default cce-dist-cached cce-dist-filtered torch-compile megatron-fused)
sizes=$ranks
if [ "$ranks" -gt 1 ]; then
    group+=(cce-dist-cached-sp cce-dist-default-sp cce-dist-filtered-sp)
    sizes=$ranks,1
fi
# A name that bench does not know is an error: rows of libraries that are not installed are left out.
if [ "$device" = cuda ]; then
    known=$("${cce[@]}" bench --methods list --tp "$sizes")
    mapfile -t group < <(grep -Fx -f <(printf '%s\n' "${group[@]}") <<<"$known")
fi
bench bench 145 --tp "$sizes" --methods "${group[@]}"
bench stage-megatron 50 --stage megatron --tp "$ranks"
bench stage-deepspeed 50 --stage deepspeed --tp "$ranks"
half=(--dtype bfloat16 --batch-size $((4 * ranks)) --accumulate 2)
[ "$device" = cuda ] || half=()
pretrain step 40 torch --tp $((ranks / dp)) --dp "$dp" "${half[@]}"
pretrain on_gpus 40 megatron --tp $((ranks / pp / dp)) --pp "$pp" --dp "$dp" "${half[@]}"
pretrain on_gpus 40 deepspeed --tp $((ranks / pp / dp)) --pp "$pp" --dp "$dp" "${half[@]}"

{
    printf '\nT = %s, %s, %s s\n\n| step | outcome | s | last line |\n|---|---|---:|---|\n' "$ranks" "$device" "$SECONDS"
    printf '%s\n' "${rows[@]}"
    for name in bench stage-megatron stage-deepspeed; do
        [ ! -f "$out/$name.json" ] || { echo && "${cce[@]}" bench --show "$out/$name.json" --columns total total/3 MiB; }
    done
    [ ! -f "$out/bench.json" ] || { echo && "${cce[@]}" bench --show "$out/bench.json" --tp "$ranks" --columns sends; }
} 2>&1 | tee "$out/table.md"
exit $failed

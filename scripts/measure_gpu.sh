#!/usr/bin/env bash
# Refreshes the figures of docs/benchmarks on one GPU, part by part, and prints them in one table.
#
#   scripts/measure_gpu.sh OUT [PART ...]       all parts, in this order, without a PART
#
#   kernels     the tests that need a GPU
#   experts     a layer of mixed experts: five shapes, every contender
#   moe_train   olmoe_1b by three routers: speed, memory and curves
#   large       product rates; GPT-2 1558M and Llama 1B; what watching costs; compile=whole and blocks from empty caches
#   verify      each switch of gpt2_124m_fast against gpt2_124m_plain
#   path        the nine steps: 0, and 14 to 18
#
# OUT holds a folder and a log for every command. A command that ended well is not run again: after an interruption the
# same line goes on. Each has a limit in seconds, and all together have SECONDS_IN_ALL: what no time is left for is said.
#
#   DATA='data=shards data.train=... data.heldout=... data.tokenizer=...'    of the GPT-2 and Llama runs
#   EXTRA='WORDS'       behind every command of forge: EXTRA='hardware=cpu model.layers=1 ...' tries all of it small
#   EXPERTS='WORDS'     behind bench=experts, as EXPERTS='bench.shapes=[[8192,2048,768,128,8]]'
#   TIMING='WORDS'      behind the benches that take turns
#   STEPS=60 MOE_STEPS=120 SECONDS_IN_ALL=1680 PYTHON=python3

set -u -o pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 5
shift
cd "$(dirname "$0")/.." || exit 5

PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-60}
MOE_STEPS=${MOE_STEPS:-120}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-1680}
read -r -a data <<<"${DATA:-}"
read -r -a extra <<<"${EXTRA:-}"
read -r -a experts_words <<<"${EXPERTS:-}"
read -r -a timing <<<"${TIMING:-bench.timing.blocks=4 bench.timing.seconds=0.4}"
deadline=$((SECONDS + SECONDS_IN_ALL))
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
LEAST=10        # seconds: with less left, nothing is begun

# limited NAME SECONDS COMMAND ...: its output in OUT/NAME.log, its exit code in OUT/NAME.code, its seconds in .seconds
limited() {
    local name=$1 most=$2 begun=$SECONDS left code
    shift 2
    left=$((deadline - SECONDS))
    if [[ $(cat "$out/$name.code" 2>/dev/null) == 0 ]]; then
        echo "measure: $name is there already"
        return
    fi
    if ((left < LEAST)); then
        echo "measure: $name: no time is left (SECONDS_IN_ALL=$SECONDS_IN_ALL)"
        echo "no time" >"$out/$name.code"
        return
    fi
    rm -rf "${out:?}/$name"
    echo "measure: $name, at most $((most < left ? most : left)) s"
    printf '%q ' "$@" >"$out/$name.command"
    timeout --signal=TERM --kill-after=60 "$((most < left ? most : left))" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$code" >"$out/$name.code"
    echo "$((SECONDS - begun))" >"$out/$name.seconds"
    ((code == 0)) || echo "measure: $name ended with exit code $code: $(tail -n 1 "$out/$name.log")"
}

# forge NAME SECONDS COMMAND WORDS ...
forge() {
    local name=$1 most=$2 command=$3
    shift 3
    limited "$name" "$most" "$PYTHON" -m "forge.$command" "$@" "${extra[@]}" "run_dir=$out/$name"
}

kernels() {
    limited kernels 400 "$PYTHON" -m pytest -q -m gpu tests/gpu --durations=15
}

experts() {
    forge experts 600 bench bench=experts precision=bf16 "${experts_words[@]}"
}

moe_train() {
    local router
    for router in fused sorted loop; do     # the slowest last: what it has no time for costs the others nothing
        forge "moe_$router" 240 train experiment=olmoe_1b "moe_router=$router" "steps=$MOE_STEPS" \
            "schedule.warmup=$((MOE_STEPS / 10 + 1))" tracker=[] tracker.every=5
    done
}

large() {
    local quiet=(tracker=[] tracker.every=5 "steps=$STEPS" "schedule.warmup=$((STEPS / 10 + 1))")
    forge micro 120 bench bench=micro 'bench.families=[matmul]' experiment=gpt2_124m_fast "${data[@]}"
    forge gpt2_1558m 200 train experiment=gpt2_1558m_fast "${quiet[@]}" "${data[@]}"
    forge llama_1b 200 train experiment=llama_1b_fast "${quiet[@]}" "${data[@]}"
    forge telemetry 150 bench bench=telemetry experiment=gpt2_124m_fast compile=blocks "${data[@]}" "${timing[@]}"
    forge compile 300 bench bench=ablation experiment=gpt2_124m_fast 'bench.switches=[compile=blocks]' \
        bench.verify=false bench.timing.cold=true "${data[@]}" "${timing[@]}"
}

verify() {
    local switch
    for switch in attention=cudnn precision.residual=bfloat16 loss=inplace operators=fused \
        optimizer.implementation=triton; do
        forge "verify_${switch//[=.]/_}" 120 verify experiment=gpt2_124m_plain "$switch" \
            baseline="experiment=gpt2_124m_plain ${DATA:-} ${EXTRA:-}" "${data[@]}"
    done
}

path() {
    local steps=experiment=nine_steps/step_0 step
    for step in 14 15 16 17 18; do steps+=,experiment=nine_steps/step_$step; done
    forge path 500 bench bench=path "bench.path=[$steps]" bench.timing.cold=false "${data[@]}" "${timing[@]}"
}

parts=("$@")
((${#parts[@]})) || parts=(kernels experts moe_train large verify path)
for part in "${parts[@]}"; do
    case $part in
        kernels | experts | moe_train | large | verify | path) ;;
        *) echo "measure: $part is not a part: kernels, experts, moe_train, large, verify and path are." >&2; exit 2 ;;
    esac
done
for part in "${parts[@]}"; do "$part"; done
"$PYTHON" scripts/measured.py "$out"

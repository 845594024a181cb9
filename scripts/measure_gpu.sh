#!/usr/bin/env bash
# Refreshes the figures of docs/benchmarks on one GPU, part by part, and prints them in one table.
#
#   scripts/measure_gpu.sh OUT [PART ...]       without a PART those of the three calls, in this order
#
#   call  part        limit, s  expected  what
#   1     kernels     150       120       the tests of routers and kernels, and each experiment's first updates
#         tune        100        90       scripts/tune_mixture.py; its tilings serve what follows, here and later
#         experts     305       270       a layer of mixed experts: five shapes; what losses cost at the first
#   2     large       395       310       GPT-2 1558M and Llama 1B; product rates; what watching costs; compile=whole and
#                                         blocks from empty caches
#         verify      160       150       the switches of gpt2_124m_fast, together and each, against gpt2_124m_plain
#   3     moe_train   330       280       olmoe_1b by three routers: speed, memory and curves
#         path        225       210       the nine steps: 0, 14 and 18
#   -     pictures    180       -         pictures a second of each way to augment them, of two sizes
#   -     rows        220       -         documents of skewed lengths: padded, bucketed and packed
#   -     vlm         420       -         vlm_222m: pictures augmented by the readers and on the device; steps 0 to 6
#   -     sonic       420       250       SonicMoE beside them, where SONIC is given
#   -     others      300         -       the other tests that need a GPU
#
#   scripts/measure_gpu.sh OUT kernels tune experts                 a call each, of at most SECONDS_IN_ALL=555
#   BEFORE=OUT scripts/measure_gpu.sh OUT2 large verify
#   BEFORE=OUT2 scripts/measure_gpu.sh OUT3 moe_train path
#
# OUT holds a folder and a log for every command. A command that ended well is not run again: after an interruption the
# same line goes on. One that fails does not stop the rest. Each has a limit in seconds, and all together have
# SECONDS_IN_ALL: what no time is left for is said. Expected figures are estimates until a record replaces them.
#
#   BEFORE=FOLDER       the OUT of an earlier call, which is copied first: its figures, and its tilings
#   DATA='data=shards data.train=... data.heldout=... data.tokenizer=...'    of the GPT-2 and Llama runs
#   EXTRA='WORDS'       behind every command of forge: EXTRA='hardware=cpu model.layers=1 ...' tries all of it small
#   EXPERTS='WORDS'     behind bench=experts, in the place of its own: 'bench.shapes=[[8192,2048,768,128,8]]'
#   TIMING='WORDS'      behind the benches that take turns
#   SONIC=WHEELS        a folder of wheels, which are installed beside, for that part alone. To fill it, for Python 3.12:
#                       pip download --no-deps --only-binary=:all: -d WHEELS sonic-moe==0.1.2.post1 \
#                           'quack-kernels>=0.3.11,<0.5' nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 \
#                           'apache-tvm-ffi>=0.1.6,<0.2' torch-c-dlpack-ext einops
#   PICTURES=FOLDER     the cache in which data=shapes has made, or makes, its pictures (6,000 in two minutes)
#   STEPS=40 MOE_STEPS=80 PATH_STEPS='0 14 18' PYTHON=python3

set -u -o pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 5
shift
here=$PWD
cd "$(dirname "$0")/.." || exit 5

PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-40}
MOE_STEPS=${MOE_STEPS:-80}
PATH_STEPS=${PATH_STEPS:-0 14 18}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-555}
read -r -a data <<<"${DATA:-}"
read -r -a extra <<<"${EXTRA:-}"
read -r -a experts_words <<<"${EXPERTS:-bench.blocks=3 bench.spare=1 bench.calls=3 bench.seconds=0.06}"
pictures_kept=(${PICTURES:+"data.cache=$PICTURES"})
read -r -a timing <<<"${TIMING:-bench.timing.blocks=4 bench.timing.seconds=0.4}"
deadline=$((SECONDS + SECONDS_IN_ALL))
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
LEAST=10        # seconds: with less left, nothing is begun

# within SECONDS: as many of them as are left
within() {
    local left=$((deadline - SECONDS))
    echo $(($1 < left ? $1 : left))
}

# limited NAME SECONDS COMMAND ...: its output in OUT/NAME.log, its exit code in OUT/NAME.code, its seconds in .seconds
limited() {
    local name=$1 begun=$SECONDS most code
    most=$(within "$2")
    shift 2
    if [[ $(cat "$out/$name.code" 2>/dev/null) == 0 ]]; then
        echo "measure: $name is there already"
        return
    fi
    if ((most < LEAST)); then
        echo "measure: $name: no time is left (SECONDS_IN_ALL=$SECONDS_IN_ALL)"
        echo "no time" >"$out/$name.code"
        return
    fi
    rm -rf "${out:?}/$name"
    echo "measure: $name, at most $most s"
    printf '%q ' "$@" >"$out/$name.command"
    timeout --signal="${signal:-TERM}" --kill-after=15 "$most" "$@" >"$out/$name.log" 2>&1
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

# bench NAME SECONDS SETTING WORDS ...: SETTING is the patience, which ends with the time that there is
bench() {
    local name=$1 most=$2 patience=$3
    shift 3
    forge "$name" "$most" bench "$@" "$patience=$(within "$most")"
}

# tests NAME SECONDS FILE ...
tests() {
    local name=$1 most=$2 several=()
    shift 2
    "$PYTHON" -c 'import xdist' 2>/dev/null && several=(-n 8)       # compiling takes longer than running
    # An interrupt, unlike a termination, lets pytest say what failed so far.
    signal=INT limited "$name" "$most" "$PYTHON" -m pytest -v -m gpu "${several[@]}" "$@" --durations=15
}

# The tilings that were found, where forge.kernels reads them.
tilings() {
    local file
    for file in "$out"/tune/sm_*.json; do
        [[ -e $file ]] || continue
        cmp -s "$file" "forge/kernels/tilings/${file##*/}" && continue
        cp "$file" forge/kernels/tilings/ && echo "measure: forge/kernels/tilings/${file##*/} is that of $file now"
    done
}

kernels() {
    tests kernels 150 tests/gpu/test_routers.py tests/gpu/test_kernels.py tests/gpu/test_experiment_runs.py
}

others() {
    tests others 300 tests/gpu --ignore=tests/gpu/test_routers.py --ignore=tests/gpu/test_kernels.py \
        --ignore=tests/gpu/test_experiment_runs.py
}

tune() {
    limited tune 100 "$PYTHON" scripts/tune_mixture.py "$out/tune"
    tilings             # also where it was stopped: it writes after each shape
}

experts() {
    local contenders=dense,grouped_kernels,sorted,sorted_compiled,fused,torchtitan_way
    bench experts 265 bench.patience bench=experts precision=bf16 "bench.contenders=[$contenders]" bench.aux_loss=0 \
        bench.z_loss=0 "${experts_words[@]}"
    bench experts_losses 40 bench.patience bench=experts precision=bf16 'bench.contenders=[sorted,fused]' \
        'bench.shapes=[[8192,2048,768,128,8]]' bench.skew=null "${experts_words[@]}"
}

pictures() {
    bench pictures 90 bench.patience bench=augment bench.num_pictures=256
    bench pictures_as_large 90 bench.patience bench=augment bench.num_pictures=256 bench.side=224
}

rows() {
    local words steps='' kind
    words=$("$PYTHON" scripts/skewed_tokens.py "$out/tokens" 2>"$out/rows_lengths.txt") || return
    # With the steps, since the default model knows no such tokens.
    for kind in padded bucketed packed; do
        steps+=${steps:+,}"'experiment=rows/$kind $words data.cache=$out/tokens'"
    done
    bench rows 220 bench.timing.patience bench=path bench.resident=2 bench.verify=false bench.timing.cold=false \
        "bench.path=[$steps]" "${timing[@]}" bench.timing.warmup=30
}

vlm() {
    local steps='' step last=experiment=vlm_steps/step_6 quiet=(tracker=[] tracker.every=10)
    # Runs, not turns: what readers have ready when a turn begins lasts longer than the turn.
    forge vlm_cpu_pipeline 60 train "$last" augment=cpu overlap=none steps=80 "${quiet[@]}" "${pictures_kept[@]}"
    forge vlm_gpu_pipeline 60 train "$last" steps=150 "${quiet[@]}" "${pictures_kept[@]}"
    for step in {0..6}; do steps+=${steps:+,}experiment=vlm_steps/step_$step; done
    bench vlm_path 300 bench.timing.patience bench=path "bench.path=[$steps]" bench.resident=2 bench.verify=false \
        bench.max_floor=0.05 bench.timing.cold=false "${pictures_kept[@]}" "${timing[@]}" bench.timing.steps=1 \
        bench.timing.settle=1
}

sonic() {
    local site paths=$PYTHONPATH wheels=${SONIC:-}
    if [[ -z $wheels ]]; then
        echo "measure: sonic: SONIC names no folder of wheels"
        return
    fi
    [[ $wheels == /* ]] || wheels=$here/$wheels
    site=$(mktemp -d)
    rm -f "$out/sonic_install.code"         # that was another folder
    limited sonic_install 60 "$PYTHON" -m pip install --no-index --no-deps --target "$site" "$wheels"/*.whl
    if [[ $(cat "$out/sonic_install.code") == 0 ]]; then
        PYTHONPATH=$paths:$site
        tests sonic_tests 120 tests/gpu/test_routers.py -k sonic
        bench sonic 240 bench.patience bench=experts precision=bf16 bench.aux_loss=0 bench.z_loss=0 \
            'bench.contenders=[dense,sorted,fused,sonic,sonic_way]' 'bench.shapes=[[8192,2048,768,128,8]]' \
            "${experts_words[@]}"
        PYTHONPATH=$paths
    fi
    rm -rf "${site:?}"
}

moe_train() {
    local router
    for router in fused sorted loop; do     # the slowest last: what it has no time for costs the others nothing
        forge "moe_$router" 110 train experiment=olmoe_1b "moe_router=$router" "steps=$MOE_STEPS" \
            "schedule.warmup=$((MOE_STEPS / 10 + 1))" tracker=[] tracker.every=5
    done
}

large() {
    local quiet=(tracker=[] tracker.every=5 "steps=$STEPS" "schedule.warmup=$((STEPS / 10 + 1))")
    forge gpt2_1558m 110 train experiment=gpt2_1558m_fast "${quiet[@]}" "${data[@]}"
    forge llama_1b 100 train experiment=llama_1b_fast "${quiet[@]}" "${data[@]}"
    bench micro 35 bench.patience bench=micro 'bench.families=[matmul]' experiment=gpt2_124m_fast "${data[@]}"
    bench telemetry 45 bench.timing.patience bench=telemetry experiment=gpt2_124m_fast compile=blocks \
        global_batch=8 "${data[@]}" "${timing[@]}"     # a step of 20 ms
    bench compile 105 bench.timing.patience bench=ablation experiment=gpt2_124m_fast 'bench.switches=[compile=blocks]' \
        bench.verify=false bench.timing.cold=true "${data[@]}" "${timing[@]}"
}

verify() {
    local switches=(loss=inplace operators=fused optimizer.implementation=triton attention=cudnn
        precision.residual=bfloat16) switch ends=$((SECONDS + 160))
    verified verify_all 60 "${switches[@]}"
    for switch in "${switches[@]}"; do      # the first are forge's own kernels
        verified "verify_${switch//[=.]/_}" $((ends - SECONDS < 50 ? ends - SECONDS : 50)) "$switch"
    done
}

# verified NAME SECONDS SWITCH ...
verified() {
    local name=$1 most=$2
    shift 2
    forge "$name" "$most" verify experiment=gpt2_124m_plain "$@" \
        baseline="experiment=gpt2_124m_plain ${DATA:-} ${EXTRA:-}" "${data[@]}"
}

path() {
    local steps='' step
    for step in $PATH_STEPS; do steps+=${steps:+,}experiment=nine_steps/step_$step; done
    bench path 225 bench.timing.patience bench=path "bench.path=[$steps]" bench.verify=false bench.timing.cold=false \
        "${data[@]}" "${timing[@]}"
}

parts=("$@")
((${#parts[@]})) || parts=(kernels tune experts large verify moe_train path)
for part in "${parts[@]}"; do
    case $part in
        kernels | tune | experts | large | verify | moe_train | path | pictures | rows | vlm | sonic | others) ;;
        *) echo "measure: $part is not a part: kernels, tune, experts, large, verify, moe_train, path, pictures, rows, vlm," \
               "sonic and others are." >&2
           exit 2 ;;
    esac
done
if [[ -n ${BEFORE:-} ]]; then
    before=$(cd "$here" && cd "$BEFORE" && pwd) || exit 2
    cp -Rpn "$before/." "$out/" && chmod -R u+w "$out"
fi
tilings
for part in "${parts[@]}"; do "$part"; done
"$PYTHON" scripts/measured.py "$out"

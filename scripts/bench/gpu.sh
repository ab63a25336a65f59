#!/usr/bin/env bash
# Run every benchmark that needs a GPU, in the order of what they decide.
#
#   scripts/bench/gpu.sh OUT [WHAT…]       # OUT: docs/results/h200, for one; WHAT: parts, or single benchmarks by name
#   SMOKE=1 scripts/bench/gpu.sh OUT       # the tiny shape on any machine, to see that every part runs
#
# Changed since a GPU last ran it, or never run to its end: decode generate calibrate-memory tests
#
#   1  kernels are right, in every dtype and head size; caches, backends and mixed precision on a GPU
#   2  attention, decoding, prefill and training steps beside LLaMA's
#   3  generation, evaluation, cost against length
#   4  what coca-train --plan predicts, the memory of calibration at 7B, and the paper's run projected
#
# Prints the tables and writes OUT/*.json, each file after every length, so an interrupted run keeps what it measured.
# SECONDS_LEFT (default 3600) bounds the whole run: a benchmark that no longer fits is named and skipped. It needs torch,
# triton, transformers and what `import coca_hf` needs; coca_hf itself need not be installed. Parts 1 and 4 use the
# wheels in .whl/ (pydantic, datasets, ruamel-yaml, typer and their companions).
set -uo pipefail
cd "$(dirname "$0")/../.."
if [[ -z ${1-} || $1 == [1-4] ]]; then
    echo "error: got ${1:-no} OUT, expected a directory: scripts/bench/gpu.sh OUT [WHAT…]" >&2
    exit 2
fi
out=$1
names=$(grep -oP '^    (bench \d+|tests \d+|if is_wanted) \K[\w-]+' "$0" | sort -u)
wanted=("${@:2}")
for what in "${wanted[@]}"; do
    if ! grep -qx -- "$what" <<< "$names"$'\n1\n2\n3\n4'; then
        echo "error: got $what, expected 1, 2, 3, 4 or one of" $names >&2
        exit 2
    fi
done
smoke=${SMOKE:+--smoke}
deadline=$((SECONDS + ${SECONDS_LEFT:-3600}))
mkdir -p "$out"

. scripts/bench/environment.sh
if [[ -z $smoke ]]; then
    python3 -c 'import coca_hf, torch; assert torch.cuda.is_available(), "no GPU"' || exit 2
fi

failed=()
run() { # LIMIT COMMAND…
    local began=$SECONDS left=$((deadline - SECONDS))
    echo "== ${*:2}"
    if ((left < 20)); then
        failed+=("out of time: ${*:2}")
        return
    fi
    timeout $(($1 < left ? $1 : left)) "${@:2}" || failed+=("$? after $((SECONDS - began)) s: ${*:2}")
    echo "== $((SECONDS - began)) s"
}
is_wanted() { # NAME
    [[ ${#wanted[@]} -eq 0 || " ${wanted[*]} " == *" $part "* || " ${wanted[*]} " == *" $1 "* ]]
}
bench() { # LIMIT NAME SCRIPT OPTIONS…
    is_wanted "$2" && run "$1" python3 "scripts/bench/$3.py" --out "$out/$2.json" "${@:4}" $smoke
}
tests() { # LIMIT NAME PATHS…: in several processes, because Triton's compiler takes most of the time
    is_wanted "$2" && run "$1" python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n logical "${@:3}"
}

part1() {
    tests 200 tests tests/kernels
    tests 200 tests -m gpu tests/models/test_backends.py tests/models/test_cache.py tests/train/test_options.py tests/convert
    if is_wanted flash; then  # FlashAttention 4 compiles for a minute or more
        run 150 python3 scripts/bench/flash.py --out "$out/flash.json"
        run 150 python3 scripts/bench/flash.py --dtype float16 --out "$out/flash-fp16.json"
    fi
}
part2() {
    bench 150 attention attention --graph --lengths 2048 8192 32768 --only contraction LLaMA slack
    bench 120 decode decode --lengths 8192 32768 131072 --batches 1 8 32
    bench 100 prefill model --lengths 2048 8192 32768 --repeats 5
    bench 90 train train --lengths 2048 --repeats 10
    bench 60 prefill-350m model --shape 350m --lengths 32768 --repeats 3
    bench 90 fold attention --mode fold --lengths 2048 8192 32768 --repeats 20
    bench 90 decode-gqa decode --shape llama-3-8b --lengths 32768 --batches 1 8 32
    bench 200 tune decode --what tune --lengths 32768 --batches 1 8 32 --repeats 5
    bench 200 tune-gqa decode --what tune --shape llama-3-8b --lengths 32768 --batches 1 8 32 --repeats 5
}
part3() {
    bench 300 generate decode --what generate --lengths 32768 --layers 8 --repeats 2
    bench 100 evaluate evaluate --lengths 32768 2048 --batch 4 --repeats 2
    bench 130 scaling attention --mode forward --repeats 5 --warmup 2 --only sdpa contraction fused \
        --lengths 512 1024 2048 4096 8192 16384 32768 65536 131072
    bench 90 decode-step decode --what step --layers 8 --lengths 2048 8192 32768 --repeats 10
}
part4() {
    bench 180 plan plan
    bench 240 calibrate-memory calibrate_memory
    bench 120 train-stages train --lengths 2048 --batch 8 --checkpointing --train t qkv all --repeats 5
    if is_wanted train-stages && [[ -f $out/train-stages.json ]]; then
        run 30 bash -c 'python3 scripts/bench/projection.py "$0/train-stages.json" > "$0/projection.md"' "$out"
    fi
}

for part in 1 2 3 4; do
    "part$part"
done
python3 scripts/bench/floors.py --results "$out"
if ((${#failed[@]})); then
    printf 'failed: status %s\n' "${failed[@]}" >&2
    exit 1
fi

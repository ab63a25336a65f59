#!/usr/bin/env bash
# Every measurement that needs a GPU (but the training of scripts/smollm2.sh, up to an hour), in parts of less than ten minutes each on an H200: 25 minutes for the first three, and at
# most three for the fourth.
#
#   scripts/bench/gpu.sh [OUT] [PART…]     # OUT: docs/results; PART: 1, 2, 3 and 4 unless named
#
# Prints the tables and writes OUT/*.json. Needs torch, triton, transformers and what `import coca_hf` does; coca_hf
# itself need not be installed; part 4 needs what coca-train does. Wheels in .whl/ (of pydantic, say) are used from there.
# What fails is named at the end, and the rest goes on; what a benchmark measured before it failed is in its JSON.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-docs/results}
parts=${*:2}
mkdir -p "$out"

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
if compgen -G '.whl/*.whl' > /dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl
fi
if ! python3 -m pip show -q coca-hf 2> /dev/null; then # coca_hf asks for its version
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
    mkdir "$site/coca_hf-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: coca-hf\nVersion: %s\n' "$version" > "$site/coca_hf-$version.dist-info/METADATA"
fi
python3 -c 'import coca_hf, torch; assert torch.cuda.is_available(), "no GPU"' || exit 2

failed=()
run() { # LIMIT COMMAND…
    local began=$SECONDS
    echo "== ${*:2}"
    timeout "$1" "${@:2}" || failed+=("$? after $((SECONDS - began)) s: ${*:2}")
    echo "== $((SECONDS - began)) s"
}
bench() { # LIMIT RESULT SCRIPT OPTIONS…
    run "$1" python3 "scripts/bench/$3.py" --out "$out/$2.json" "${@:4}"
}

part1() { # right first; then attention
    run 240 python3 -m pytest -q -x -p no:cacheprovider tests/kernels
    run 60 python3 -m pytest -q -p no:cacheprovider tests/models/test_cache.py -k on_a_gpu
    bench 60 flash flash
    bench 120 attention attention --lengths 2048 8192 32768 --only contraction LLaMA slack
    bench 60 fold attention --mode fold --lengths 2048 8192 32768 --repeats 20
    bench 130 scaling attention --mode forward --repeats 5 --warmup 2 --only sdpa contraction fused \
        --lengths 512 1024 2048 4096 8192 16384 32768 65536 131072
}
part2() { # decoding, and what a model costs
    bench 150 decode decode --lengths 8192 32768 131072 --batches 1 8 32
    bench 90 decode-gqa decode --shape llama-3-8b --lengths 32768 --batches 1 8
    bench 100 tune decode --what tune --lengths 32768 --repeats 10
    bench 100 prefill model --lengths 2048 8192 32768 --repeats 5
    bench 90 decode-step decode --what step --layers 8 --lengths 2048 8192 32768 --repeats 10
    bench 60 prefill-350m model --shape 350m --lengths 32768 --repeats 3
}
part3() { # whole generations, training, evaluation
    bench 240 generate decode --what generate --lengths 32768 --repeats 3
    bench 90 train train --lengths 2048 --repeats 10
    bench 120 train-stages train --lengths 2048 --batch 8 --checkpointing --train t qkv all --repeats 5
    bench 100 evaluate evaluate --lengths 2048 8192 32768 --batch 4 --repeats 2
}
part4() { # what coca-train --plan predicts
    bench 180 plan plan
}

for part in ${parts:-1 2 3 4}; do
    "part$part"
done
if [[ -f $out/train-stages.json ]]; then
    run 30 python3 scripts/bench/projection.py "$out/train-stages.json"
fi
python3 scripts/bench/floors.py --results "$out"
if ((${#failed[@]})); then
    printf 'failed, with status %s\n' "${failed[@]}" >&2
    exit 1
fi

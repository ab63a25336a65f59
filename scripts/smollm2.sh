#!/usr/bin/env bash
# recipes/smollm2-135m/three-stage.yaml for real on one GPU, on books and code of your own: convert, prepare, train, and a
# page with the recovery curve. Meant for less than an hour on an 80 GB GPU; never run on one yet.
#
#   scripts/smollm2.sh [OUT [KEY=VALUE …]]    # OUT: runs/smollm2-135m; the others change the recipe
#
# MODEL: a directory or hub id. BOOKS: text for three quarters of the tokens, by default
# ../shared/data/books-train-*.parquet. CODE: a file for one quarter, made from this machine's Python sources if it does
# not exist. Run it again after an interruption: finished steps are kept, a killed one continues.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/smollm2-135m}
code=${CODE:-$out/python.jsonl}
recipe=(
    recipes/smollm2-135m/three-stage.yaml
    "model=$out/start"
    "data.sources=[{path: '${BOOKS:-../shared/data/books-train-*.parquet}', weight: 0.75}, {path: '$code', weight: 0.25}]"
    "data.prepared=$out/blocks"
    "${@:2}"
)
[ -d "$out/start" ] || coca-convert "${MODEL:-HuggingFaceTB/SmolLM2-135M}" "$out/start"
python scripts/paper/python_source.py "$code"
coca-train "${recipe[@]}" --prepare
coca-train "${recipe[@]}" --out "$out/train" --resume
coca-eval report "$out/train" --out "$out/page"

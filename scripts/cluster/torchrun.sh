#!/usr/bin/env bash
# A recipe on 4 machines of 8 GPUs without a scheduler. On every machine, in any order:
#   HOST=name-of-one-of-them scripts/cluster/torchrun.sh recipes/llama-7b/three-stage.yaml [KEY=VALUE ...]
# Machines that fail may come back: torchrun stops the others, waits for the full number, and starts all of them again
# from the last checkpoint, RESTARTS times at most. The number of machines stays, and with it the tokens of a step.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/cluster/layout.sh "${LAYOUT:-recipes/accelerate/4x8gpu.yaml}"
exec torchrun --nnodes="${NODES:-4}" --nproc-per-node="${GPUS:-8}" --max-restarts="${RESTARTS:-10}" \
    --rdzv-backend=c10d --rdzv-id="${JOB:-coca}" --rdzv-endpoint="${HOST:?name of a machine}:${PORT:-29400}" \
    -m coca_hf.train "$@" --resume

#!/usr/bin/env bash
# A recipe on 4 machines of 8 GPUs without a scheduler. On every machine, in any order:
#   HOST=name-of-one-of-them scripts/cluster/torchrun.sh recipes/llama-7b/three-stage.yaml [KEY=VALUE ...]
# Machines that fail may come back: torchrun stops the others, waits for the full number, and starts all of them again
# from the last checkpoint, RESTARTS times at most. The number of machines stays, and with it the tokens of a step.
# SIGTERM to this script stops all processes after a checkpoint; its exit code is torchrun's, which is 1 (see
# docs/training.md). GRACE: seconds until torchrun kills them; its own default is 30.
# NODES, GPUS: the machines, and the GPUs of each (4, 8). PORT: of HOST (29400). JOB: torchrun's --rdzv-id (coca).
# LAYOUT: another file than recipes/accelerate/8gpu.yaml.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${GRACE:-600}"
# Without it, restarted processes may read the addresses of those before them and wait for ever. It can go once torch no
# longer shares the launcher's store by default (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cd "$(dirname "$0")/../.."
. scripts/cluster/layout.sh "${LAYOUT:-recipes/accelerate/8gpu.yaml}"
exec torchrun --nnodes="${NODES:-4}" --nproc-per-node="${GPUS:-8}" --max-restarts="${RESTARTS:-10}" \
    --rdzv-backend=c10d --rdzv-id="${JOB:-coca}" --rdzv-endpoint="${HOST:?name of a machine}:${PORT:-29400}" \
    -m coca_hf.train "$@" --resume

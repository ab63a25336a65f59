#!/usr/bin/env bash
# A recipe on 4 machines of 8 GPUs under SLURM, through any number of time limits and pre-emptions:
#   sbatch scripts/cluster/slurm.sh recipes/llama-7b/three-stage.yaml [KEY=VALUE ...]
# Prepare the data first, on any machine with the same disk, or GPUs wait for it:
#   coca-train RECIPE --prepare --world-size 32
# SLURM starts the processes itself, so its signal reaches each of them and it sees their exit code: 75 means that
# coca-train was told to stop and has written a checkpoint, and the job is requeued.
# Options of sbatch replace those below, such as --nodes=2; LAYOUT: another file than recipes/accelerate/8gpu.yaml.
#SBATCH --job-name=coca
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# USR1 comes 600 s before the limit, which is enough for a step and a checkpoint.
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f scripts/cluster/layout.sh ] || { echo "$PWD: not the repository; submit the job from there" >&2; exit 2; }
. scripts/cluster/layout.sh "${LAYOUT:-recipes/accelerate/8gpu.yaml}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) WORLD_SIZE=$SLURM_NTASKS
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

trap : TERM USR1 # if the script gets them, too, it waits for the tasks
# A signal that comes before coca-train listens must not end the job: SLURM would treat it as failed. After a
# pre-emption SLURM requeues it by itself. srun does not pass on --cpus-per-task since SLURM 22.05.
# shellcheck disable=SC2016  # the ranks are those of each task
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'trap "" TERM USR1
    RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE exec python -m coca_hf.train "$@"' \
    coca-train "$@" --resume
code=$?
# After scancel the job is no longer running and must not be requeued.
if [ "$code" -eq 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    echo "stopped by the cluster with a checkpoint: requeueing"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

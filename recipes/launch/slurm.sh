#!/bin/bash
# Two machines with four GPUs each under Slurm. 120 s before the time limit, and at a preemption, the
# job receives SIGTERM, saves a checkpoint, and is queued again; it then continues.
#
#   sbatch slurm.sh recipe.yaml /shared/runs/demo
#
#SBATCH --job-name=peftkit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -u
RECIPE=$1 OUT=$2
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Slurm sends --signal to the tasks, not to this script; a preemption may reach both.
trap '' TERM
srun --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 4 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HOST:29500" \
    -m peftkit_cli train "$RECIPE" --out "$OUT" --resume auto
code=$?

# The run is finished if it left its record. Wrong input (exit code 2) is not retried.
if [ ! -f "$OUT/finished.json" ] && [ "$code" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 50 ]; then
    echo "not finished (exit code $code); queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

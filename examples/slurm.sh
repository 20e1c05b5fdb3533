#!/bin/bash
# A job under Slurm without MPI: torchrun on each host. docs/hosts.md has one with MPI and restarts.
#     sbatch --nodes=2 --cpus-per-task=16 examples/slurm.sh train.py --its --arguments
# A host has as many ranks as it has GPUs in this job, or RANKS_PER_HOST, or two.
#SBATCH --job-name=burst-rt
#SBATCH --ntasks-per-node=1
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS_PER_HOST:-${SLURM_GPUS_ON_NODE:-2}}
threads=$((${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE} / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Without -K1 the other hosts would wait for one that has failed.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --mpi=none --kill-on-bad-exit=1 \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" --rdzv-id="$SLURM_JOB_ID" "$@"

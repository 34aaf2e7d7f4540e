#!/usr/bin/env bash
# A run on Slurm: sbatch examples/launch/slurm.sh run.toml
# One agent of torchrun on each node starts a rank for each GPU. If a node is lost, the run goes on
# with those that are left, from its last checkpoint in run.folder, which all nodes must share.
#SBATCH --job-name=shardwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail

config=${1:?"usage: sbatch examples/launch/slurm.sh run.toml"}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A host that joins later is told where the ranks meet (PyTorch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=0 torchrun \
  --nnodes "1:$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 10 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29400" \
  -m shardwise train "$config" --resume auto

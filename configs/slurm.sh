#!/bin/bash
# LongCE on two nodes of eight GPUs, requeued by SLURM until it is done: RUN=pg19 sbatch configs/slurm.sh [OPTIONS of fit]
#SBATCH --job-name=longce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one torchrun per node, which starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600       # ten minutes before the time limit all processes save, and the job is requeued
#SBATCH --requeue
#SBATCH --open-mode=append
# `scancel` waits for the cluster's KillWait before it kills, so KillWait should be at least --shutdown_timeout.

export MAIN_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HF_HUB_OFFLINE=1         # compute nodes often have no network: `hf download` models and data beforehand
GPUS=${SLURM_GPUS_ON_NODE:-8}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.13: restarted processes would read addresses of the crashed ones
# After the first node ends, the others have five minutes: a crash must not keep the job, nor a stop cut short a save.
srun --wait=300 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" --max_restarts 2 --shutdown_timeout 540 \
    --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 \
    --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$MAIN_NODE:29500" --no_python longce \
    fit -c configs/base.yaml -c configs/strategies/fsdp.yaml -c configs/experiments/longce_pg19.yaml \
    --trainer.devices "$GPUS" --trainer.num_nodes "$SLURM_NNODES" \
    --trainer.logger.init_args.version "${RUN:-pg19}" --ckpt_path last "$@"

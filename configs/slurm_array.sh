#!/bin/bash
# One run per task of an array, each on one node, requeued by SLURM until it is done: sbatch configs/slurm_array.sh
# On a cluster that refuses to requeue, `sbatch --array=1-10%1 configs/slurm.sh` continues one run in up to ten jobs.
#SBATCH --job-name=longce
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1     # one torchrun, which starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600       # ten minutes before the time limit all processes save, and the task is requeued
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out

RUNS=("LongCE 0" "LongCE 1" "CrossEntropy 0" "CrossEntropy 1") # objective and seed of each task
read -r OBJECTIVE SEED <<< "${RUNS[$SLURM_ARRAY_TASK_ID]}"
export HF_HUB_OFFLINE=1         # compute nodes often have no network: `hf download` models and data beforehand
GPUS=${SLURM_GPUS_ON_NODE:-8}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.13: restarted processes would read addresses of the crashed ones
srun --kill-on-bad-exit=1 torchrun \
    --standalone --nproc_per_node "$GPUS" --max_restarts 2 --shutdown_timeout 540 \
    --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --no_python longce \
    fit -c configs/base.yaml -c configs/strategies/fsdp.yaml -c configs/experiments/longce_pg19.yaml \
    --trainer.devices "$GPUS" --model.objective "$OBJECTIVE" --seed_everything "$SEED" \
    --trainer.logger.init_args.version "$OBJECTIVE-$SEED" --ckpt_path last "$@"

#!/bin/bash
# LongCE with torchrun, restarted from the newest checkpoint after a crash.
# One node: bash configs/torchrun.sh [OPTIONS of fit]
# Several, on each of them: NODES=2 MAIN_NODE=node1 bash configs/torchrun.sh [OPTIONS of fit]
NODES=${NODES:-1} GPUS=${GPUS:-8} RUN=${RUN:-pg19}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.13: restarted processes would read addresses of the crashed ones
torchrun --nnodes "$NODES" --nproc_per_node "$GPUS" --max_restarts 2 --shutdown_timeout 300 \
    --rdzv_backend c10d --rdzv_id "$RUN" --rdzv_endpoint "${MAIN_NODE:-localhost}:29500" --no_python longce \
    fit -c configs/base.yaml -c configs/strategies/fsdp.yaml -c configs/experiments/longce_pg19.yaml \
    --trainer.devices "$GPUS" --trainer.num_nodes "$NODES" \
    --trainer.logger.init_args.version "$RUN" --ckpt_path last "$@"

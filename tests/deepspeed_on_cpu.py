"""DeepSpeed without GPUs, which Lightning refuses and DeepSpeed does not."""

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """With every parameter divided in stage 3, however small."""

    def __init__(self, stage, **settings):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"zero_allow_untested_optimizer": True, "zero_optimization": zero}
        super().__init__(config=config, process_group_backend="gloo", **settings)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        import deepspeed

        # It would be compiled first, and wait for ever where a killed process has left a lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self):
        return torch.device("cpu", 0)  # DeepSpeed wants a number

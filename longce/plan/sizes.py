"""Build the sizes of a model once for all settings that are tried."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from longce.plan.activations import ActivationBytes
from longce.plan.memory import Memory, Training, training_memory
from longce.plan.shapes import ModelShape, has_experts


class ModelSizes:
    """Shapes and activations of a model, built when they are needed and then kept.

    Building a model of 7B parameters on the meta device takes seconds, and most settings do not change its shape.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self._shapes: dict[str, ModelShape] = {}
        self._activations: dict[tuple[torch.dtype, torch.dtype | None, bool, str], ActivationBytes] = {}

    def shape(self, lora: dict[str, Any] | None) -> ModelShape:
        """Return the shape of the model with these adapters."""
        key = repr(lora)
        if key not in self._shapes:
            self._shapes[key] = ModelShape.of(self.config, lora)
        return self._shapes[key]

    def training_memory(self, training: Training, lora: dict[str, Any] | None) -> Memory:
        """Return the memory of a training step."""
        is_gathered = training.sharded and training.autocast == torch.bfloat16  # in bfloat16, by FSDP2
        dtype = training.dtype
        if is_gathered and has_experts(self.config):
            dtype = torch.bfloat16
        numerics = (dtype, training.autocast, training.bfloat16_residual)
        key = (*numerics, repr(lora))
        if key not in self._activations:
            self._activations[key] = ActivationBytes(self.config, *numerics, lora)
        return training_memory(self.shape(lora), self._activations[key], training)

"""Settings that take less memory than those of a run that does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_modules.commands.plan.hardware import GPU, GPUS
from lightning_modules.commands.plan.memory import FULLY_SHARDED, QUANTIZED_BYTES, Training

LORA = {"r": 8, "target_modules": "all-linear"}


class Change(NamedTuple):
    """Another setting of a run.

    Attributes:
        kind: What it is about; of several that are enough, the smallest of each kind is worth telling.
        text: For people.
        training: Attributes of `Training` with it.
        lora: The adapters with it, if it is about them.
        gpu: The card with it, if it is about the card.
    """

    kind: str
    text: str
    training: dict[str, Any]
    lora: dict[str, Any] | None = None
    gpu: GPU | None = None

    def goes_with(self, other: "Change") -> bool:
        """Whether both can be made."""
        return self.kind != other.kind and not self.training.keys() & other.training.keys()


def possible_changes(training: Training, lora: dict[str, Any] | None, gpu: GPU) -> Iterator[Change]:
    """What could be tried, those first that change least."""
    yield from _free_changes(training)
    yield from _sharding_changes(training)
    if lora is None:
        yield Change("lora", "model.lora: {r: 8, target_modules: all-linear}", {}, lora=LORA)
    # Weights that are trained stay in float32: in bfloat16 the small steps of fine-tuning round to nothing.
    if lora is not None and training.dtype.itemsize > 2:
        yield Change("dtype", "model.dtype: bfloat16 (of the frozen weights)", {"dtype": torch.bfloat16})
    if lora is not None and training.quantized is None and not training.sharding.weights:
        text = "model.quantization: {load_in_4bit: true} (of the frozen weights)"
        yield Change("quantization", text, {"quantized": QUANTIZED_BYTES[4]})
    yield from _shorter_rows(training)
    for larger in sorted(GPUS.values(), key=lambda card: card.memory):
        if larger.memory > gpu.memory:
            yield Change("gpu", f"a card with {larger.memory:g} GiB: {larger.name}", {}, gpu=larger)


def _free_changes(training: Training) -> Iterator[Change]:
    """Changes that cost time at most, and train the same."""
    if training.step_copy:
        yield Change("optimizer", "model.optimizer.init_args.foreach: false", {"step_copy": False})
    if training.sharding.gradient_copy:
        text = "trainer.strategy: DDPStrategy with gradient_as_bucket_view: true"
        yield Change("buckets", text, {"sharding": replace(training.sharding, gradient_copy=False)})
    if training.rows > 1:
        yield Change("rows", "data.batch_size: 1, with more accumulate_grad_batches", {"rows": 1})
    if training.checkpointing != "full":
        yield Change("checkpointing", "model.gradient_checkpointing: true", {"checkpointing": "full"})


def _sharding_changes(training: Training) -> Iterator[Change]:
    """Weights, gradients and optimizer divided, among more GPUs if need be."""
    for gpus in (training.gpus, 2 * training.gpus, 4 * training.gpus):
        if gpus > (training.gpus if training.sharding.weights else 1):
            text = f"configs/strategies/fsdp.yaml: FSDP2 over {gpus} GPUs"
            yield Change("sharding", text, {"sharding": FULLY_SHARDED, "gpus": gpus})


def _shorter_rows(training: Training) -> Iterator[Change]:
    for tokens in (training.tokens // 2, training.tokens // 4):
        if not training.short_pass or training.context_length + training.stride < tokens:
            yield Change("tokens", f"data.sequence_length: {tokens}", {"tokens": tokens})

"""Settings that take less memory, for a run that does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_modules.commands.plan.hardware import GPU, GPUS
from lightning_modules.commands.plan.memory import GIB, QUANTIZED_BYTES, Training

LORA = {"r": 8, "target_modules": "all-linear"}


class Change(NamedTuple):
    """Another setting of a run.

    Attributes:
        kind: What it is about; of several that are enough, the smallest of each kind is reported.
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


def find_remedies(
    training: Training,
    lora: dict[str, Any] | None,
    gpu: GPU,
    needed_bytes: Callable[[Training, dict[str, Any] | None], float],
) -> list[dict[str, Any]]:
    """Find the smallest single change of each kind that makes a run fit.

    Args:
        training: The run that does not fit.
        lora: Its adapters.
        gpu: The card.
        needed_bytes: Memory of a run and its adapters.
    """
    fitting: dict[str, dict[str, Any]] = {}
    for change in possible_changes(training, lora, gpu):
        needed = needed_bytes(replace(training, **change.training), change.lora or lora) / GIB
        if needed <= (change.gpu or gpu).memory:
            fitting.setdefault(change.kind, {"change": change.text, "needed": needed})
    return list(fitting.values())


def possible_changes(training: Training, lora: dict[str, Any] | None, gpu: GPU) -> list[Change]:
    """Return what could be tried: first what trains the same, a larger card last."""
    view = "trainer.strategy: DDPStrategy with gradient_as_bucket_view: true"
    # Trained weights stay in float32: in bfloat16 the small steps of fine-tuning round to nothing.
    frozen = lora is not None
    quantization = "model.quantization: {load_in_4bit: true} (of the frozen weights)"
    candidates = [
        (training.step_copy, Change("optimizer", "model.optimizer.init_args.foreach: false", {"step_copy": False})),
        (training.gradient_copy, Change("buckets", view, {"gradient_copy": False})),
        (training.rows > 1, Change("rows", "data.batch_size: 1, with more accumulate_grad_batches", {"rows": 1})),
        (
            training.checkpointing != "full",
            Change("checkpointing", "model.gradient_checkpointing: true", {"checkpointing": "full"}),
        ),
        *((gpus > (training.gpus if training.sharded else 1), _sharded(gpus)) for gpus in _gpu_counts(training)),
        (not frozen, Change("lora", "model.lora: {r: 8, target_modules: all-linear}", {}, lora=LORA)),
        (
            frozen and training.dtype.itemsize > 2,
            Change("dtype", "model.dtype: bfloat16 (of the frozen weights)", {"dtype": torch.bfloat16}),
        ),
        (
            frozen and training.quantized is None and not training.sharded,
            Change("quantization", quantization, {"quantized": QUANTIZED_BYTES[4]}),
        ),
        *(
            (
                not training.short_pass or training.context_length + training.stride < tokens,
                Change("tokens", f"data.sequence_length: {tokens}", {"tokens": tokens}),
            )
            for tokens in (training.tokens // 2, training.tokens // 4)
        ),
        *(
            (card.memory > gpu.memory, Change("gpu", f"a card with {card.memory:g} GiB: {card.name}", {}, gpu=card))
            for card in sorted(GPUS.values(), key=lambda card: card.memory)
        ),
    ]
    return [change for possible, change in candidates if possible]


def _gpu_counts(training: Training) -> list[int]:
    return [factor * training.gpus for factor in (1, 2, 4)]


def _sharded(gpus: int) -> Change:
    settings = {"sharded": True, "gradient_copy": False, "gpus": gpus}
    return Change("sharding", f"configs/strategies/fsdp.yaml: FSDP2 over {gpus} GPUs", settings)

"""Settings that take less memory, for a run that does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_modules.commands.plan.hardware import GPU, GPUS
from lightning_modules.commands.plan.memory import GIB, QUANTIZED_BYTES, Training

LORA = {"r": 8, "target_modules": "all-linear"}
FSDP = "configs/strategies/fsdp.yaml: FSDP2"


class Change(NamedTuple):
    """Another setting of a run."""

    kind: str  # of several that are enough, the smallest of each kind is reported
    text: str
    training: dict[str, Any]  # attributes of `Training` with it
    lora: dict[str, Any] | None = None
    gpu: GPU | None = None


def find_remedies(
    training: Training,
    lora: dict[str, Any] | None,
    gpu: GPU,
    needed_bytes: Callable[[Training, dict[str, Any] | None], float],
) -> list[dict[str, Any]]:
    """Find the smallest single change of each kind that makes a run fit; ``needed_bytes`` measures a changed run."""
    fitting: dict[str, dict[str, Any]] = {}
    for change in possible_changes(training, lora, gpu):
        needed = needed_bytes(replace(training, **change.training), change.lora or lora) / GIB
        if needed <= (change.gpu or gpu).memory:
            fitting.setdefault(change.kind, {"change": change.text, "needed": needed})
    return list(fitting.values())


def possible_changes(training: Training, lora: dict[str, Any] | None, gpu: GPU) -> list[Change]:
    """Return what could be tried: first what trains the same, a larger card last."""
    frozen, view = lora is not None, "trainer.strategy: DDPStrategy with gradient_as_bucket_view: true"
    full, quantizable = training.checkpointing == "full", frozen and not (training.quantized or training.sharded)
    half = "model.dtype: bfloat16 (of the frozen weights)"
    quantization = "model.quantization: {load_in_4bit: true} (of the frozen weights)"
    sharded = {"sharded": True, "gradient_copy": False}
    shards = training.gpus if training.sharded else 1
    tokens = (training.tokens // 2, training.tokens // 4)
    shortest = training.context_length + training.stride if training.short_pass else 0
    candidates: list[tuple[Any, ...]] = [
        (training.step_copy, "optimizer", "model.optimizer.init_args.foreach: false", {"step_copy": False}),
        (training.gradient_copy, "buckets", view, {"gradient_copy": False}),
        (training.rows > 1, "rows", "data.batch_size: 1, with more accumulate_grad_batches", {"rows": 1}),
        (not full, "checkpointing", "model.gradient_checkpointing: true", {"checkpointing": "full"}),
        *(
            (n > shards, "sharding", f"{FSDP} over {n} GPUs", {**sharded, "gpus": n})
            for n in (training.gpus, 2 * training.gpus, 4 * training.gpus)
        ),
        # Trained weights stay in float32: in bfloat16 the small steps of fine-tuning round to nothing.
        (not frozen, "lora", "model.lora: {r: 8, target_modules: all-linear}", {}, LORA),
        (frozen and training.dtype.itemsize > 2, "dtype", half, {"dtype": torch.bfloat16}),
        (quantizable, "quantization", quantization, {"quantized": QUANTIZED_BYTES[4]}),
        *((shortest < count, "tokens", f"data.sequence_length: {count}", {"tokens": count}) for count in tokens),
        *(
            (card.memory > gpu.memory, "gpu", f"a card with {card.memory:g} GiB: {card.name}", {}, None, card)
            for card in sorted(GPUS.values(), key=lambda card: card.memory)
        ),
    ]
    return [Change(*change) for possible, *change in candidates if possible]

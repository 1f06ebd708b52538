"""Estimate the time to score a corpus."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from lightning_modules.commands.plan.flops import Flops, scoring_flops
from lightning_modules.commands.plan.hardware import find_rates, recognize_gpu
from lightning_modules.commands.plan.report import format_cost, format_duration
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.load import load_config


def describe_scoring_time(
    model: LongContextLM, trainer: Trainer, lengths: Sequence[int], tokens: float, *, price: float | None = None
) -> str:
    """Describe the time to score a corpus, or why it is unknown.

    ``lengths`` are those of some documents, ``tokens`` is the length of all, and ``price`` is that of a GPU hour. A
    context ladder is not included.
    """
    device, count = trainer.strategy.root_device, trainer.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    gpu = recognize_gpu(name) if device.type == "cuda" else None
    later = "the progress bar estimates it from the first documents"
    if gpu is None:
        return f"unknown, because `longce plan` has no rates of {name}; {later}"
    if not lengths:
        return f"unknown, because no document was sampled; {later}"
    try:
        shape = ModelShape.of(load_config(model.loading))
    except ValueError as error:
        return f"unknown ({error}); {later}"
    # Each document is scored alone.
    pair = (model.context_length, model.stride)
    each = (scoring_flops(shape, shape, length, *pair, shared_pass=True) for length in lengths)
    rates = find_rates(gpu, autocast=False)
    seconds = rates.seconds(sum(each, Flops()), gpu).times(tokens / sum(lengths))
    ladder = ", without the context ladder" if model.ladder is not None else ""
    known = f"measured rates ({rates.source})" if rates.measured else "assumed rates"
    cost = format_cost(hours := seconds.times(1 / 3600), price and hours.times(price))
    return f"{format_duration(seconds.times(1 / count))} on {count} x {gpu.name}, {cost}; {known}{ladder}"

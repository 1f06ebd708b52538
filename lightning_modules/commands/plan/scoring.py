"""Estimate the time to score a corpus."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from lightning_modules.commands.plan.flops import Flops, scoring_flops
from lightning_modules.commands.plan.hardware import GPU, Range, Rates, find_rates, recognize_gpu
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading import load_config

_MIN_HOURS = 0.1  # less is printed in seconds


def scoring_seconds(
    shape: ModelShape, lengths: Sequence[int], context_length: int, stride: int, rates: Rates, gpu: GPU
) -> Range:
    """Return the time to score documents of these lengths (tokens) on one GPU, each alone."""
    flops = sum(
        (scoring_flops(shape, shape, length, context_length, stride, shared_pass=True) for length in lengths), Flops()
    )
    return rates.seconds(flops, gpu)


def describe_scoring_time(model: LongContextLM, trainer: Trainer, lengths: Sequence[int], tokens: float) -> str:
    """Describe the time to score a corpus, or why it is unknown.

    ``lengths`` are those of some documents, and ``tokens`` is the length of all. A context ladder is not included.
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
    rates = find_rates(gpu, autocast=False)
    sampled = scoring_seconds(shape, lengths, model.context_length, model.stride, rates, gpu)
    hours = sampled.times(tokens / sum(lengths) / 3600)
    ladder = ", without the context ladder" if model.ladder is not None else ""
    known = f"measured rates ({rates.source})" if rates.measured else "assumed rates"
    return (
        f"{_format_range(hours.times(1 / count))} on {count} x {gpu.name}, {hours.low:.3g} to {hours.high:.3g} GPU"
        f" hours to multiply by your price; {known}{ladder}"
    )


def _format_range(hours: Range) -> str:
    unit, factor = ("hours", 1) if hours.high >= _MIN_HOURS else ("seconds", 3600)
    return f"{hours.low * factor:.2g} to {hours.high * factor:.2g} {unit}"

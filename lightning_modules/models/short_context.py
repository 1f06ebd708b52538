"""The short context of every token: sliding windows over a batch, scored in eval mode and without gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortContext, token_log_likelihood
from lightning_modules.functional.windows import Window, batch_windows, draw_windows, trim_windows, window_batch
from lightning_modules.models.backbone import Backbone, HeadFunction
from lightning_modules.models.context_extension.rotary_checks import check_static
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode

WINDOW_TOKENS_PER_PASS = 32_768
"""Tokens of short windows that share a forward pass on an accelerator; on CPU each window has its own."""


@torch.no_grad()
def short_log_likelihood(
    backbone: Backbone,
    batch: PackedBatch,
    *,
    context_length: int,
    stride: int,
    wanted: Tensor | None = None,
    window_fraction: float = 1.0,
    seed: int = 0,
    shared_by: dist.ProcessGroup | None = None,
) -> ShortContext:
    """Score each token in its short context.

    Args:
        backbone: The model.
        batch: ``[B, T]`` packed sequences.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        wanted: ``[B, T]`` bool, the tokens to be scored; windows without any are skipped. All by default.
        window_fraction: Fraction of the windows to be scored, drawn at random without replacement.
        seed: Seed of that draw.
        shared_by: Processes that all have this batch and split its windows among them.

    Raises:
        ValueError: If the rotation of a position depends on the length of the text.
    """
    # By such RoPE types the same window rotates differently alone and in its text.
    check_static(backbone.base_model.config, compares=True)
    short = torch.zeros_like(batch["labels"], dtype=torch.promote_types(backbone.base_model.dtype, torch.float32))
    has_short_context = torch.zeros_like(batch["labels"], dtype=torch.bool)
    windows = batch_windows(batch["document_boundaries"], context_length=context_length, stride=stride)
    windows, drawn = draw_windows(windows, window_fraction, seed=seed)
    if wanted is not None:
        windows = trim_windows(windows, wanted)
        batch = batch.copy()
        batch["labels"] = batch["labels"].masked_fill(~wanted, IGNORE_INDEX)
    for row, (_, scored, stop) in windows:
        has_short_context[row, scored:stop] = True
    if shared_by is not None:
        windows = windows[shared_by.rank() :: shared_by.size()]
    for group, log_likelihood in score_windows(backbone, batch, windows):
        short = short.to(log_likelihood.dtype)
        for scores, (row, (start, scored, stop)) in zip(log_likelihood, group, strict=True):
            short[row, scored:stop] = scores[scored - start : stop - start]
    if shared_by is not None:  # each token has one summand that is not 0
        dist.all_reduce(short, group=shared_by)
    return ShortContext(short, has_short_context & batch["labels"].ne(IGNORE_INDEX), drawn)


@torch.no_grad()
def score_windows(
    backbone: Backbone,
    batch: PackedBatch,
    windows: Sequence[tuple[int, Window]],
    *,
    head_fn: HeadFunction[Any] = token_log_likelihood,
) -> Iterator[tuple[Sequence[tuple[int, Window]], Any]]:
    """Score tokens that see their window only, in eval mode. All ranks must exhaust the iterator.

    The windows, each with the index of its sequence, are all of about one length.

    Yields:
        Windows that shared a forward pass, and the ``[W, longest window]`` log-likelihoods of their tokens in nats, 0
        for tokens that are not scored; or what ``head_fn`` returns.
    """
    size = windows_per_pass(backbone.device, max((window.stop - window.start for _, window in windows), default=1))
    with eval_mode(backbone), lockstep(backbone) as run:
        for first in range(0, len(windows), size):
            group = windows[first : first + size]
            unread = min(window.scored - window.start for _, window in group)
            yield group, run(backbone, window_batch(batch, group), first_scored=unread, head_fn=head_fn)


def windows_per_pass(device: torch.device, window_length: int) -> int:
    """Return how many windows share a forward pass."""
    return 1 if device.type == "cpu" else max(1, WINDOW_TOKENS_PER_PASS // window_length)


@torch.no_grad()
def long_and_short(
    backbone: Backbone, batch: PackedBatch, *, context_length: int, stride: int, beta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Score each token in both contexts: the pair that everything else is a function of.

    ``context_length`` and ``stride`` are K and d. With ``beta``, in nats, the short pass skips tokens that are not
    likelier than this in the long context: they cannot be key tokens for this threshold, and their short
    log-likelihood is NaN.

    Returns:
        ``[B, T]`` long and ``[B, T]`` short log-likelihoods in nats, equal where a token has no short context.
    """
    sizes: dict[str, Any] = {"context_length": context_length, "stride": stride}
    with lockstep(backbone) as run:
        if beta is None:
            # The short pass first: its buffers never meet the results of the long one.
            short = short_log_likelihood(backbone, batch, **sizes)
            long = run(backbone, batch)
            return long, short.fill_missing(long)
        long = run(backbone, batch)
        short = short_log_likelihood(backbone, batch, **sizes, wanted=long > beta)
        skipped = (long <= beta) & (batch["position_ids"] >= context_length + stride)
        return long, short.fill_missing(long).masked_fill(skipped, torch.nan)

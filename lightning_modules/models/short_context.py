"""Short log-likelihoods: windows of a batch, or one pass with a limited attention; in eval mode, without gradient."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, known_scored
from lightning_modules.functional import ShortContext
from lightning_modules.functional.windows import Window, batch_windows, draw_windows, trim_windows, window_batch
from lightning_modules.models.attention import AttentionWindow
from lightning_modules.models.backbone import Backbone, HeadFunction
from lightning_modules.models.context_extension.rotary_checks import check_static
from lightning_modules.models.lockstep import Scorer, lockstep
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.served.scorer import RemoteScorer

ShortPass = Literal["windows", "sliding_window"]
"""How short contexts are computed: exactly, or approximately by `sliding_window_log_likelihood`."""

WINDOW_TOKENS_PER_PASS = 32_768
"""Tokens of the windows in one forward pass on an accelerator; on CPU each pass has one window."""

SERVED_WINDOWS = 1024
"""Windows that are sent to servers together; they wait for each other before the next ones are sent."""


@torch.no_grad()
def short_log_likelihood(
    backbone: Scorer,
    batch: PackedBatch,
    *,
    context_length: int,
    stride: int,
    wanted: Tensor | None = None,
    window_fraction: float = 1.0,
    seed: int = 0,
    shared_by: dist.ProcessGroup | None = None,
) -> ShortContext:
    """Compute the log-likelihood of each token in its short context (Appendix A.1).

    Args:
        backbone: The model.
        batch: ``[B, T]`` packed sequences.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        wanted: ``[B, T]`` bool, the tokens to score; windows without any are skipped. All by default.
        window_fraction: Fraction of the windows to score, drawn at random without replacement.
        seed: Seed for drawing the windows.
        shared_by: Processes that have the same batch and divide its windows among themselves.
    """
    # 1. Place the windows of all sequences, and leave out those that are not needed.
    short = torch.zeros_like(batch["labels"], dtype=_find_dtype(backbone))
    has_short_context = torch.zeros_like(batch["labels"], dtype=torch.bool)
    windows = batch_windows(batch["document_boundaries"], context_length=context_length, stride=stride)
    windows, drawn = draw_windows(windows, window_fraction, seed=seed)
    if wanted is not None:
        on_cpu = wanted.cpu()  # one transfer for all windows
        windows = trim_windows(windows, on_cpu)
        known, batch = known_scored(batch), batch.copy()
        batch["labels"] = batch["labels"].masked_fill(~wanted, IGNORE_INDEX)
        batch.pop("scored", None)
        if known is not None:
            batch["scored"] = known & on_cpu.numpy()
    for row, (_, scored, stop) in windows:
        has_short_context[row, scored:stop] = True
    # 2. Score this process's windows, and copy the scores of each to the positions of its tokens.
    if shared_by is not None:
        windows = windows[shared_by.rank() :: shared_by.size()]
    for group, log_likelihood in score_windows(backbone, batch, windows):
        short = short.to(log_likelihood.dtype)
        for scores, (row, (start, scored, stop)) in zip(log_likelihood, group, strict=True):
            short[row, scored:stop] = scores[scored - start : stop - start]
    # 3. Collect the windows of the other processes. Each token is scored by one of them and 0 elsewhere.
    if shared_by is not None:
        dist.all_reduce(short, group=shared_by)
    return ShortContext(short, has_short_context & batch["labels"].ne(IGNORE_INDEX), drawn)


def _find_dtype(backbone: Scorer) -> torch.dtype:
    """Return the dtype of log-likelihoods; raise a ``ValueError`` if those of two contexts cannot be compared."""
    if isinstance(backbone, RemoteScorer):
        return torch.float32
    check_static(backbone.base_model.config, compares=True)
    return torch.promote_types(backbone.base_model.dtype, torch.float32)


@torch.no_grad()
def sliding_window_log_likelihood(
    backbone: Backbone,
    batch: PackedBatch,
    *,
    context_length: int,
    sinks: int = 0,
    score: Callable[..., Tensor] | None = None,
) -> ShortContext:
    """Approximate short contexts by one pass in which each layer attends to the last K tokens only.

    A token's own short context has exactly K tokens. But those carry what they saw before it: through L layers, a
    token can depend on the L * K tokens before it. Positions are those of the long pass.

    Args:
        backbone: The model.
        batch: ``[B, T]`` packed sequences.
        context_length: Length K of the short context, in tokens.
        sinks: First tokens of each document that every token attends to as well. Models that were pretrained with full
            attention often need a few.
        score: Scores a batch within ``window``, by default with the backbone in this process.
    """
    check_static(backbone.base_model.config, compares=True)
    with eval_mode(backbone), lockstep(backbone) as run:
        scored = run(score or backbone, batch, window=AttentionWindow(context_length, sinks))
    return ShortContext(scored, (batch["position_ids"] > context_length) & batch["labels"].ne(IGNORE_INDEX))


@torch.no_grad()
def score_windows(
    backbone: Scorer,
    batch: PackedBatch,
    windows: Sequence[tuple[int, Window]],
    *,
    head_fn: HeadFunction[Any] | None = None,
) -> Iterator[tuple[Sequence[tuple[int, Window]], Any]]:
    """Score windows of similar length, each with the row index of its sequence. All ranks must exhaust the iterator.

    Yields:
        The windows of a forward pass, and the ``[W, longest window]`` log-likelihoods of their tokens in nats, 0 for
        tokens that are not scored; or the result of ``head_fn``.
    """
    if isinstance(backbone, RemoteScorer):
        size = SERVED_WINDOWS
    else:
        size = windows_per_pass(backbone.device, max((window.stop - window.start for _, window in windows), default=1))
    options = {} if head_fn is None else {"head_fn": head_fn}
    with eval_mode(backbone), lockstep(backbone) as run:
        for first in range(0, len(windows), size):
            group = windows[first : first + size]
            first_scored = min(window.scored - window.start for _, window in group)
            yield group, run(backbone, window_batch(batch, group), first_scored=first_scored, **options)


def windows_per_pass(device: torch.device, window_length: int) -> int:
    """Return the number of windows in one forward pass."""
    return 1 if device.type == "cpu" else max(1, WINDOW_TOKENS_PER_PASS // window_length)


@torch.no_grad()
def long_and_short(
    backbone: Scorer, batch: PackedBatch, *, context_length: int, stride: int, beta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Score each token in its long and short context; key tokens, weights and metrics are functions of this pair.

    ``context_length`` and ``stride`` are K and d. With ``beta``, in nats, the short pass skips tokens whose long
    log-likelihood is ``beta`` or less. They cannot be key tokens, and their short log-likelihood is NaN.

    Returns:
        ``[B, T]`` long and ``[B, T]`` short log-likelihoods in nats, equal where a token has no short context.
    """
    sizes: dict[str, Any] = {"context_length": context_length, "stride": stride}
    with lockstep(backbone) as run:
        if beta is None:
            # The short pass comes first, so that its buffers are free again in the long pass.
            short = short_log_likelihood(backbone, batch, **sizes)
            long = run(backbone, batch)
            return long, short.fill_missing(long)
        long = run(backbone, batch)
        short = short_log_likelihood(backbone, batch, **sizes, wanted=long > beta)
        skipped = (long <= beta) & (batch["position_ids"] >= context_length + stride)
        return long, short.fill_missing(long).masked_fill(skipped, torch.nan)

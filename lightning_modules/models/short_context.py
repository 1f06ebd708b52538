"""Short log-likelihoods: windows of a batch, or one pass with a limited attention; in eval mode, without gradient."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, ensure_scored, send, token_indices
from lightning_modules.functional import ShortScores
from lightning_modules.functional.windows import ShortContext, Window, batch_windows, trim_windows, window_batch
from lightning_modules.models.backbone import Backbone, HeadFunction
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.sequence_group import SequenceGroup

ShortMethod = Literal["windows", "sliding_window"]
"""Method to compute short contexts: exact, or approximate by `sliding_window_log_likelihood`."""


@dataclass(frozen=True)
class ShortContextConfig(ShortContext):
    """Settings of the short contexts in which training scores a batch.

    Attributes:
        method: Exact short windows, or an approximation by one pass with a limited attention.
    """

    method: ShortMethod = "windows"

    def score(self, backbone: Backbone, batch: PackedBatch, group: SequenceGroup | None = None) -> ShortScores:
        """Score each token of ``[B, T]`` sequences in its short context, without gradient.

        Args:
            backbone: The model in training.
            batch: ``[B, T]`` packed sequences.
            group: Processes that share the sequences.
        """
        if self.method == "sliding_window":
            return sliding_window_log_likelihood(backbone, batch, context_length=self.context_length, group=group)
        processes = None if group is None else group.processes
        return short_log_likelihood(backbone, batch, self, shared_by=processes)


@torch.no_grad()
def short_log_likelihood(
    backbone: Scorer,
    batch: PackedBatch,
    short_context: ShortContext,
    *,
    wanted: Tensor | None = None,
    shared_by: dist.ProcessGroup | None = None,
) -> ShortScores:
    """Compute the log-likelihood of each token in its short context (Appendix A.1).

    Args:
        backbone: The model.
        batch: ``[B, T]`` packed sequences.
        short_context: K and d.
        wanted: ``[B, T]`` bool, the tokens to score; windows without any are skipped. All by default.
        shared_by: Processes that have the same batch and divide its windows among themselves.
    """
    if backbone.rotates_by_length:
        backbone.check_compares_contexts()
    batch = ensure_scored(batch)
    # 1. Place the windows of all sequences, and leave out those that are not needed.
    # The dtype is known before a window is scored: a process without windows must have the same one in step 3.
    short = torch.zeros_like(batch["labels"], dtype=backbone.log_likelihood_dtype)
    windows = batch_windows(batch["document_boundaries"], short_context)
    if wanted is not None:
        on_cpu = wanted.cpu()  # one transfer for all windows
        # A window ends at its last requested token, because later tokens cannot change its score.
        windows = trim_windows(windows, on_cpu)
        batch = batch.copy()
        batch["labels"] = batch["labels"].masked_fill(~wanted, IGNORE_INDEX)
        batch["scored"] = batch["scored"] & on_cpu.numpy()
    is_in_window = np.zeros_like(batch["scored"])
    for row, (_, scored, stop) in windows:
        is_in_window[row, scored:stop] = True
    # 2. Score this process's windows, and copy the scores of each to the positions of its tokens.
    if shared_by is not None:
        # Every P-th window: neighbors have similar lengths, so that processes finish together.
        windows = windows[shared_by.rank() :: shared_by.size()]
    for group, log_likelihood in score_windows(backbone, batch, windows):
        for scores, (row, (start, scored, stop)) in zip(log_likelihood, group, strict=True):
            # Scores are indexed from the start of the window, the sequence from its own start.
            short[row, scored:stop] = scores[scored - start : stop - start]
    # 3. Collect the windows of the other processes. Each token is scored by one of them and 0 elsewhere.
    if shared_by is not None:
        dist.all_reduce(short, group=shared_by)
    return ShortScores(short, send(torch.from_numpy(is_in_window & batch["scored"]), short.device))


@torch.no_grad()
def sliding_window_log_likelihood(
    backbone: Backbone,
    batch: PackedBatch,
    *,
    context_length: int,
    group: SequenceGroup | None = None,
) -> ShortScores:
    """Approximate short contexts by one pass in which each layer attends to the last K tokens only.

    A token's own short context has exactly K tokens. But those carry what they saw before it: through L layers, a
    token can depend on the L * K tokens before it. Positions are those of the long pass.

    Args:
        backbone: The model.
        batch: ``[B, T]`` packed sequences.
        context_length: Length K of the short context, in tokens.
        group: Processes that share the sequences.
    """
    if backbone.rotates_by_length:
        backbone.check_compares_contexts()
    batch = ensure_scored(batch)
    # A group's processes hold a shard each, so their passes are one pass of the group.
    score = backbone if group is None else partial(group.sharded_log_likelihood, backbone)
    with eval_mode(backbone), lockstep(backbone) as run:
        scored = run(score, batch, window=context_length)
    # Up to token K of a document, the window has hidden nothing: the short context is the long one.
    hides = token_indices(batch) > context_length
    return ShortScores(scored, hides & send(torch.from_numpy(batch["scored"]), hides.device))


@torch.no_grad()
def score_windows(
    backbone: Scorer,
    batch: PackedBatch,
    windows: Sequence[tuple[int, Window]],
    *,
    head_fn: HeadFunction[Any] | None = None,
) -> Iterator[tuple[Sequence[tuple[int, Window]], Any]]:
    """Score windows, each with the row index of its sequence. All ranks must exhaust the iterator.

    Yields:
        The windows of a forward pass, longest windows first, and the ``[W, longest window]`` log-likelihoods of their
        tokens in nats, 0 for tokens that are not scored; or the result of ``head_fn``.
    """
    options = {} if head_fn is None else {"head_fn": head_fn}
    with eval_mode(backbone), lockstep(backbone) as run:
        for group in _group_windows(windows, backbone):
            yield group, run(backbone, window_batch(batch, group), **options)


def _group_windows(windows: Sequence[tuple[int, Window]], backbone: Scorer) -> Iterator[list[tuple[int, Window]]]:
    """Yield the windows of each forward pass: of similar length, and about the same number in all passes."""
    if not windows:
        return
    # Windows are padded to the longest one of a pass, so that the cut windows of all documents go together.
    by_length = sorted(windows, key=_window_length, reverse=True)
    size = backbone.windows_per_pass(_window_length(by_length[0]))
    passes = math.ceil(len(by_length) / size)
    # 27 windows, of which 8 fit, make passes of 6, 7, 7 and 7, and not of 8, 8, 8 and 3: a small pass is slow.
    for index in range(passes):
        first = len(by_length) * index // passes
        stop = len(by_length) * (index + 1) // passes
        yield by_length[first:stop]


def _window_length(place: tuple[int, Window]) -> int:
    _, window = place
    return window.stop - window.start


@torch.no_grad()
def long_and_short(
    backbone: Scorer, batch: PackedBatch, short_context: ShortContext, *, beta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Score each token in its long and short context; key tokens, weights and metrics are functions of this pair.

    With ``beta``, in nats, the short pass skips tokens whose long log-likelihood is ``beta`` or less. They cannot be
    key tokens, and their short log-likelihood is NaN.

    Returns:
        ``[B, T]`` long and ``[B, T]`` short log-likelihoods in nats, equal where a token has no short context.
    """
    with lockstep(backbone) as run:
        # Two orders: with `beta`, the short pass must know the long scores to skip tokens.
        if beta is None:
            # The short pass comes first, so that its buffers are free again in the long pass.
            short = short_log_likelihood(backbone, batch, short_context)
            long = run(backbone, batch)
            return long, short.fill_missing(long)
        long = run(backbone, batch)
        short = short_log_likelihood(backbone, batch, short_context, wanted=long > beta)
        # The first K + d tokens of a document are in window 0, whose scores are the long ones.
        skipped = (long <= beta) & (token_indices(batch) >= short_context.window_length)
        return long, short.fill_missing(long).masked_fill(skipped, torch.nan)

"""What a model would have put in each token's place, given the long and the short context."""

from functools import partial
from typing import NamedTuple

import torch

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import LikeliestTokens, likeliest_tokens
from lightning_modules.functional.windows import row_windows
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations.modes import eval_mode


class Alternatives(NamedTuple):
    """The likeliest tokens at each position given everything before it, and given the short context.

    Where a token has no short context, or is not scored, both are equal.
    """

    long: LikeliestTokens
    short: LikeliestTokens


@torch.no_grad()
def long_and_short_alternatives(
    backbone: Backbone, batch: PackedBatch, *, count: int = 5, context_length: int, stride: int
) -> Alternatives:
    """The likeliest tokens in both contexts, by the passes that score the tokens (`Backbone.long_and_short`).

    Args:
        backbone: The model, where it shall run.
        batch: ``[B, T]`` packed rows, in the same place.
        count: How many at each position, k.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.

    Returns:
        ``[B, T, k]`` token ids and log-likelihoods in nats for each context, in main memory.

    Raises:
        ValueError: If ``count`` is not from 1 to the size of the vocabulary, or a length is below 1.
    """
    windows = row_windows(batch["document_borders"], context_length=context_length, stride=stride)
    reading = partial(likeliest_tokens, count=count)
    with eval_mode(backbone):
        long = LikeliestTokens(*(part.cpu() for part in backbone(batch, reading=reading)))
    short = LikeliestTokens(*(part.clone() for part in long))
    for group, found in backbone.score_windows(batch, backbone.window_groups(windows), reading=reading):
        for target, source in zip(short, found, strict=True):
            rows = source.cpu()
            for window, (row, (start, scored, stop)) in zip(rows, group, strict=True):
                target[row, scored:stop] = window[scored - start : stop - start]
    return Alternatives(long, short)

"""Likeliest candidates for each token in the long and the short context."""

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.functional.top_tokens import LikeliestTokens, likeliest_tokens
from lightning_modules.functional.windows import ShortContext, batch_windows
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.short_context import score_windows
from lightning_modules.scoring.scored_model import ScoredModel


class Alternatives(NamedTuple):
    """Likeliest candidates for each token given the long and the short context.

    Both are equal for a token that has no short context or is not scored.
    """

    long: LikeliestTokens
    short: LikeliestTokens

    def all_token_ids(self) -> Tensor:
        """Return the ids of all candidates in both contexts."""
        return torch.cat([self.long.token_ids.flatten(), self.short.token_ids.flatten()])


@torch.no_grad()
def long_and_short_alternatives(
    backbone: Backbone, batch: PackedBatch, short_context: ShortContext, *, count: int = 5
) -> Alternatives:
    """Find the likeliest candidates for each token in both contexts, with the forward passes of `long_and_short`.

    Returns:
        ``[B, T, count]`` token ids and log-likelihoods in nats for each context, in main memory.
    """
    windows = batch_windows(batch["document_boundaries"], short_context)
    head_fn = partial(likeliest_tokens, count=count)
    with eval_mode(backbone):
        long = LikeliestTokens(*map(Tensor.cpu, backbone(batch, head_fn=head_fn)))
    short = LikeliestTokens(*map(Tensor.clone, long))
    for group, likeliest in score_windows(backbone, batch, windows, head_fn=head_fn):
        for target, source in zip(short, likeliest, strict=True):
            rows = source.cpu()
            for window, (row, (start, scored, stop)) in zip(rows, group, strict=True):
                target[row, scored:stop] = window[scored - start : stop - start]
    return Alternatives(long, short)


def find_alternatives(evaluator: ScoredModel, text: str, *, count: int = 5, name: str = "document") -> Alternatives:
    """Find an evaluator's ``count`` likeliest candidates for each of the ``[N]`` tokens of a text; they are not stored.

    A served evaluator does not rank other tokens, which `InspectConfig` refuses.

    Raises:
        ValueError: If a token id is beyond the evaluator's embedding.
    """
    batch = evaluator.encode(text, name=name)
    backbone = cast(Backbone, evaluator.backbone())
    backbone.check_batch(batch)
    on_device = batch_to(batch, backbone.device)
    both = long_and_short_alternatives(backbone, on_device, evaluator.short_context, count=count)
    # The batch has one sequence.
    long = LikeliestTokens(*(tensor[0] for tensor in both.long))
    short = LikeliestTokens(*(tensor[0] for tensor in both.short))
    return Alternatives(long, short)

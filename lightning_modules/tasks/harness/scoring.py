"""Log-likelihoods of continuations, and whether greedy decoding would have chosen them."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_modules.functional import greedy_targets
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, last_layer_reads_from, no_autocast_cache
from lightning_modules.tasks.teacher_forcing import group_rows, padded_rows

Answer = TypeVar("Answer")


class Continuation(NamedTuple):
    """Token ids to be scored, and the ids that precede them, at least one."""

    context: Sequence[int]
    tokens: Sequence[int]


class Score(NamedTuple):
    """Log-likelihood of all tokens of a continuation, in nats, and whether each is the likeliest one."""

    log_likelihood: float
    is_greedy: bool


def score_continuations(
    backbone: Backbone, continuations: Sequence[Continuation], *, batch_tokens: int = 16_384
) -> list[Score]:
    """Score continuations; logits exist at the positions that predict them, for a chunk at a time.

    Continuations that differ in their last token only (the choices of a question) share a row. Processes share the
    passes, and each returns all scores: all must ask for the same ones.

    A pass has at most ``batch_tokens`` tokens, padding included; a longer text has one to itself. A continuation
    without tokens has log-likelihood 0 and is greedy.

    Raises:
        ValueError: If a context is empty, or a token is beyond the embedding.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, tokens) in enumerate(continuations):
        if len(context) == 0:
            raise ValueError(f"Continuation {index} has no context to be scored in: give it a token.")
        if len(tokens):
            rows.setdefault((*context, *tokens[:-1]), []).append(index)  # the last token is only predicted
    texts = list(rows)
    found: dict[int, Score] = {}
    with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), lockstep(backbone) as run:
        for group in group_rows(list(map(len, texts)), batch_tokens)[share()]:
            indices = [index for row in group for index in rows[texts[row]]]
            asked = [(place, continuations[index]) for place, row in enumerate(group) for index in rows[texts[row]]]
            scores = run(backbone.unsharded, partial(_pass, backbone, [texts[row] for row in group], asked))
            parts = zip(*(part.cpu().split([len(one.tokens) for _, one in asked]) for part in scores), strict=True)
            for index, (log_likelihood, likeliest) in zip(indices, parts, strict=True):
                found[index] = Score(math.fsum(log_likelihood.tolist()), bool(likeliest.all()))
    found = shared(found)
    return [found.get(index, Score(0.0, True)) for index in range(len(continuations))]


def shared(found: dict[int, Answer]) -> dict[int, Answer]:
    """Return what all processes have found; each of them must call it."""
    if not dist.is_initialized():
        return found
    parts: list[dict[int, Answer]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, found)
    return {index: answer for part in parts for index, answer in part.items()}


def share() -> slice:
    """Return this process's part of work that all processes know."""
    return slice(dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else slice(None)


def _pass(
    backbone: Backbone, texts: Sequence[Sequence[int]], asked: Sequence[tuple[int, Continuation]]
) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` log-likelihoods of the tokens of continuations, and whether each is the largest.

    Each continuation comes with the number of its text.
    """
    batch = padded_rows(texts, backbone.device)
    backbone.check_token_ids(batch)
    # The preceding position predicts a token.
    start = min(len(continuation.context) for _, continuation in asked) - 1
    with last_layer_reads_from(backbone.decoder, start if backbone.trims_last_layer else 0):
        hidden_states = backbone.hidden_states(batch)
    predictors = [hidden_states[row, len(c.context) - 1 :][: len(c.tokens)] for row, c in asked]
    targets = torch.tensor([token for _, continuation in asked for token in continuation.tokens])
    return greedy_targets(torch.cat(predictors), backbone.head, targets.to(backbone.device))

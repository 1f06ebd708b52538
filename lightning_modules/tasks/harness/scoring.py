"""Log-likelihoods of continuations, and whether greedy decoding would have chosen them."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import greedy_targets
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, last_layer_reads_from, no_autocast_cache

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

    Continuations that differ in their last token only (the choices of a question) share a pass. Processes share the
    passes, and each returns all scores: all must ask for the same ones.

    Args:
        backbone: The model.
        continuations: The continuations, in any order.
        batch_tokens: Tokens of a pass, padding included; a longer text has a pass to itself.

    Returns:
        Scores in order. A continuation without tokens has log-likelihood 0 and is greedy.

    Raises:
        ValueError: If a context is empty, a token is beyond the embedding, or ``batch_tokens`` is below 1.
    """
    if batch_tokens < 1:
        raise ValueError(f"`batch_tokens` must be 1 or more, got {batch_tokens}.")
    for number, (context, tokens) in enumerate(continuations):
        if len(context) == 0:
            raise ValueError(
                f"Continuation {number} has no context: its first token cannot be scored. Give it a token."
            )
        if (largest := max(max(context), max(tokens, default=0))) >= backbone.vocabulary_size:
            raise ValueError(
                f"Continuation {number} has token {largest}, beyond the embedding of {backbone.vocabulary_size} tokens"
                f" of `{type(backbone.base_model).__name__}`: the tokenizer is not the one of this model."
            )
    found: dict[int, Score] = {}
    with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), lockstep(backbone) as run:
        for batch in list(_batches(continuations, batch_tokens))[share()]:
            asked = [continuations[index] for row in batch for index in row]
            scores = run(backbone.unsharded, partial(_pass, backbone, continuations, batch))
            sizes = [len(continuation.tokens) for continuation in asked]
            parts = zip(*(part.cpu().split(sizes) for part in scores), strict=True)
            indices = (index for row in batch for index in row)
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


def _batches(continuations: Sequence[Continuation], batch_tokens: int) -> Iterator[list[list[int]]]:
    """Yield groups of rows, each the numbers of the continuations that share it, the longest first."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, continuation in enumerate(continuations):
        if len(continuation.tokens):
            rows.setdefault(_read(continuation), []).append(index)
    batch: list[list[int]] = []
    longest = 0
    for tokens in sorted(rows, key=len, reverse=True):  # sorting is stable: the same in all processes
        longest = longest if batch else len(tokens)
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], len(tokens)
        batch.append(rows[tokens])
    if batch:
        yield batch


def _read(continuation: Continuation) -> tuple[int, ...]:
    """Return what the model reads: the last token is only predicted."""
    return (*continuation.context, *continuation.tokens[:-1])


def _pass(backbone: Backbone, continuations: Sequence[Continuation], batch: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` log-likelihoods of the tokens of all continuations, and whether each is the largest."""
    texts = [torch.tensor(_read(continuations[row[0]])) for row in batch]
    longest = max(map(len, texts))
    # Padding on the right, without a mask: causal attention never looks there.
    tokens = torch.stack([F.pad(text, (0, longest - len(text))) for text in texts]).to(backbone.device)
    positions = torch.arange(longest, device=backbone.device).repeat(len(texts), 1)
    asked = [(number, continuations[index]) for number, row in enumerate(batch) for index in row]
    # The preceding position predicts a token.
    read = torch.cat([number * longest + len(c.context) - 1 + torch.arange(len(c.tokens)) for number, c in asked])
    targets = torch.tensor([token for _, continuation in asked for token in continuation.tokens])
    start = min(len(continuation.context) for _, continuation in asked) - 1
    borders = [[0, len(text)] for text in texts]
    rows = PackedBatch(input_ids=tokens, labels=tokens, position_ids=positions, document_borders=borders)
    with last_layer_reads_from(backbone.decoder, start if backbone.trims_last_layer else 0):
        hidden_states = backbone.hidden_states(rows)
    predictors = hidden_states.flatten(0, 1).index_select(0, read.to(backbone.device))
    return greedy_targets(predictors, backbone.head, targets.to(backbone.device))

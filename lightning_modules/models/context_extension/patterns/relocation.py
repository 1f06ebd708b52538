"""Patterns that rotate some pairs of query and key as if they were closer to each other.

Each consists of sets of pairs with different positions of query and key, under one softmax. No distance exceeds the
original length, however long the text is, so they work without training, and can be trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.models.context_extension.patterns.blocks import (
    Blocks,
    Rotary,
    Take,
    attention_logits,
    block_size,
)

Positions = Callable[[Tensor], Tensor]


def _keep_position(position: Tensor) -> Tensor:
    return position


@dataclass(frozen=True)
class Branch:
    """A set of pairs of a query ``i`` and a key ``j <= i``, and their positions."""

    # From a range of queries to a range with all keys that they see.
    keys: Callable[[int, int], tuple[int, int]]
    # Whether query ``i`` sees key ``j`` in this branch, for tensors that broadcast.
    pairs: Callable[[Tensor, Tensor], Tensor]
    query_position: Positions = _keep_position  # position that query i is rotated to
    key_position: Positions = _keep_position  # position that key j is rotated to


@dataclass(frozen=True)
class Relocation:
    """A pattern with relocated positions."""

    branches: tuple[Branch, ...]  # disjoint sets; one of them has the pair of each token with itself
    plain_length: int  # longest document for which the pattern is plain causal attention


def streaming_llm(parameters: Mapping[str, Any]) -> Relocation:
    """Return StreamingLLM: attention sinks and the last ``window`` tokens, with positions in the cache.

    Xiao et al. (2024, https://arxiv.org/abs/2309.17453): the cache has ``sinks + window`` tokens: the sinks, then the
    window, which ends with the query.
    """
    sinks = parameters["sinks"]
    window = parameters["window"]
    band = Branch(lambda start, stop: (max(sinks, start - window + 1), stop), lambda i, j: i - j < window)
    first = Branch(
        lambda _, stop: (0, min(sinks, stop)),
        lambda i, j: j < sinks,
        query_position=lambda i: i.clamp(max=sinks + window - 1),
    )
    return Relocation((first, band), plain_length=sinks + window)


def lm_infinite(parameters: Mapping[str, Any]) -> Relocation:
    """Return LM-Infinite: the last ``L`` tokens and the first ``sinks``, at distances up to the original length L.

    Han et al. (2024, https://arxiv.org/abs/2308.16137). Mask and distances are those of the paper and of the
    authors' code, which also has the default of 10 sinks. The paper's optional attention to a few tokens in the middle
    is left out.
    """
    # The band has distances 0 to L - 1; sinks beyond it are all at distance L.
    sinks = parameters["sinks"]
    limit = parameters["original_max_position_embeddings"]
    band = Branch(lambda start, stop: (max(0, start - limit + 1), stop), lambda i, j: i - j < limit)
    first = Branch(
        lambda _, stop: (0, max(0, min(sinks, stop - limit))),
        lambda i, j: i - j >= limit,
        query_position=lambda i: torch.full_like(i, limit),
        key_position=torch.zeros_like,
    )
    return Relocation((first, band), plain_length=limit + 1)


def rerope(parameters: Mapping[str, Any]) -> Relocation:
    """Return ReRoPE: all tokens, at distances ``min(i - j, window)``.

    Su (2023, https://github.com/bojone/rerope), without the scaled distances of Leaky ReRoPE.
    """
    window = parameters["window"]
    return _split_by_distance(
        window,
        plain_length=window + 1,
        query_position=lambda i: torch.full_like(i, window),
        key_position=torch.zeros_like,
    )


def self_extend(parameters: Mapping[str, Any]) -> Relocation:
    """Return Self-Extend: all tokens; distances beyond ``window`` count groups of tokens.

    Jin et al. (2024, https://arxiv.org/abs/2401.01325): ``i // group - j // group + window - window // group``.
    """
    window = parameters["window"]
    group = parameters["group"]
    # Without the shift, distances would jump back at the edge of the window.
    shift = window - window // group
    return _split_by_distance(
        window,
        plain_length=window,
        query_position=lambda i: i // group + shift,
        key_position=lambda j: j // group,
    )


def _split_by_distance(
    window: int, *, plain_length: int, query_position: Positions, key_position: Positions
) -> Relocation:
    near = Branch(lambda start, stop: (max(0, start - window + 1), stop), lambda i, j: i - j < window)
    far = Branch(lambda _, stop: (0, max(0, stop - window)), lambda i, j: i - j >= window, query_position, key_position)
    return Relocation((far, near), plain_length)


def dual_chunk(parameters: Mapping[str, Any]) -> Relocation:
    """Return Dual Chunk Attention: all tokens; distances depend on the chunks of query and key.

    An et al. (2024, https://arxiv.org/abs/2402.17463), whose ``c`` is the original length. The position of a key is its
    index in its chunk. That of a query is the same inside its chunk, one ``chunk`` more, up to ``c - 1``, for the
    previous chunk, and ``c - 1`` for earlier ones. Unlike the paper, the released code has shorter chunks, and its
    largest position is 3/4 of ``c``.
    """
    chunk = parameters["chunk"]
    last = parameters["original_max_position_embeddings"] - 1

    def index_in_chunk(j: Tensor) -> Tensor:
        return j % chunk

    return Relocation(
        (
            Branch(
                lambda _, stop: (0, max(0, (stop - 1) // chunk - 1) * chunk),
                lambda i, j: i // chunk - j // chunk > 1,
                lambda i: torch.full_like(i, last),
                index_in_chunk,
            ),
            Branch(
                lambda start, stop: (max(0, start // chunk - 1) * chunk, (stop - 1) // chunk * chunk),
                lambda i, j: i // chunk - j // chunk == 1,
                lambda i: (i % chunk + chunk).clamp(max=last),
                index_in_chunk,
            ),
            Branch(
                lambda start, stop: (start // chunk * chunk, stop),
                lambda i, j: i // chunk == j // chunk,
                index_in_chunk,
                index_in_chunk,
            ),
        ),
        plain_length=min(last + 1, 2 * chunk),
    )


def relocated_attention(pattern: Relocation, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    """Compute attention of the last tokens of one document with relocated positions, in the shapes of `Pattern`."""
    length = key.shape[2]
    first = key.shape[2] - query.shape[2]
    positions = torch.arange(length, device=query.device)
    # Exact, and faster: no distance is changed in a short document.
    if first == 0 and length <= pattern.plain_length:
        query, key = (rotary.rotate_keys(states, positions) for states in (query, key))
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rotary.scaling, dropout_p=rotary.dropout, enable_gqa=True
        )
    # Branches with the same positions share their rotated queries or keys.
    queries = list(dict.fromkeys(branch.query_position for branch in pattern.branches))
    keys = list(dict.fromkeys(branch.key_position for branch in pattern.branches))
    states = [rotary.rotate_queries(query, move(positions[first:])) for move in queries]
    states += [rotary.rotate_keys(key, move(positions)) for move in keys]

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        logits = []
        values = []
        i = positions[start:stop, None]
        for branch in pattern.branches:
            low, high = branch.keys(start, stop)
            if high <= low:
                continue
            j = positions[low:high]
            # ``[N, M]``: causal, and a pair of this branch.
            visible = (j <= i) & branch.pairs(i, j)
            # Queries are indexed from the first one, keys from the start of the document.
            q = take(queries.index(branch.query_position), start - first, stop - first)
            k = take(len(queries) + keys.index(branch.key_position), low, high)
            logits.append(attention_logits(q, k, visible))
            values.append(take(len(queries) + len(keys), low, high))
        return logits, values

    size = block_size(query.shape[1], length)
    return Blocks(score, first, length, size, dropout=rotary.dropout).attend(*states, value)

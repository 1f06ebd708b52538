"""Patterns that rotate some pairs of a query and a key as if they were closer to each other.

All of them are sets of pairs, each with its own positions of query and key, under one softmax. However long the text,
no distance is above the original length: they are meant to work without training, and can be trained.
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
    rotate,
)

Positions = Callable[[Tensor], Tensor]


def _own(position: Tensor) -> Tensor:
    return position


@dataclass(frozen=True)
class Branch:
    """A set of pairs of a query ``i`` and a key ``j <= i``, and their positions."""

    # From a range of queries to a range of keys that holds all that they see.
    keys: Callable[[int, int], tuple[int, int]]
    # Whether query ``i`` sees key ``j`` in this branch, for tensors that broadcast.
    pairs: Callable[[Tensor, Tensor], Tensor]
    query_position: Positions = _own  # position that query i is rotated to; its own by default
    key_position: Positions = _own  # position that key j is rotated to


@dataclass(frozen=True)
class Relocation:
    """A pattern."""

    branches: tuple[Branch, ...]  # disjoint; together they hold the pair of each token with itself
    plain_length: int  # up to this length of a document, it is causal attention with plain RoPE


def streaming_llm(parameters: Mapping[str, Any]) -> Relocation:
    """Attention sinks and the last ``window`` tokens, the token itself among them, at their positions in the cache.

    Xiao et al. (2024, https://arxiv.org/abs/2309.17453): the cache holds ``sinks + window`` tokens; a query is its last
    one, and the sinks are right before the window.
    """
    sinks, window = parameters["sinks"], parameters["window"]
    band = Branch(lambda start, stop: (max(sinks, start - window + 1), stop), lambda i, j: i - j < window)
    first = Branch(
        lambda _, stop: (0, min(sinks, stop)),
        lambda i, j: j < sinks,
        query_position=lambda i: i.clamp(max=sinks + window - 1),
    )
    return Relocation((first, band), plain_length=sinks + window)


def lm_infinite(parameters: Mapping[str, Any]) -> Relocation:
    """The last ``L`` tokens and the first ``sinks``, to which no distance is above ``L``, the original length.

    Han et al. (2024, https://arxiv.org/abs/2308.16137): mask and distances are the paper's, and what the authors' code
    computes. From their code is the number of first tokens, 10, which its README finds as good as 100. The paper's
    optional attention to a few tokens in between, chosen by their logits, is left out.
    """
    sinks, limit = parameters["sinks"], parameters["original_max_position_embeddings"]
    band = Branch(lambda start, stop: (max(0, start - limit + 1), stop), lambda i, j: i - j < limit)
    first = Branch(
        lambda _, stop: (0, max(0, min(sinks, stop - limit))),
        lambda i, j: i - j >= limit,
        query_position=lambda i: torch.full_like(i, limit),
        key_position=torch.zeros_like,
    )
    return Relocation((first, band), plain_length=limit + 1)


def rerope(parameters: Mapping[str, Any]) -> Relocation:
    """All tokens, none of them further away than ``window``: distance ``min(i - j, window)``.

    Su (2023, https://github.com/bojone/rerope), without the scaled distances of its variant Leaky ReRoPE.
    """
    window = parameters["window"]
    return _near_and_far(
        window,
        plain_length=window + 1,
        query_position=lambda i: torch.full_like(i, window),
        key_position=torch.zeros_like,
    )


def self_extend(parameters: Mapping[str, Any]) -> Relocation:
    """All tokens; the distance of those beyond ``window`` counts groups of tokens.

    Jin et al. (2024, https://arxiv.org/abs/2401.01325): ``i // group - j // group + window - window // group``.
    """
    window, group = parameters["window"], parameters["group"]
    shift = window - window // group
    return _near_and_far(
        window,
        plain_length=window,
        query_position=lambda i: i // group + shift,
        key_position=lambda j: j // group,
    )


def _near_and_far(window: int, *, plain_length: int, query_position: Positions, key_position: Positions) -> Relocation:
    near = Branch(lambda start, stop: (max(0, start - window + 1), stop), lambda i, j: i - j < window)
    far = Branch(lambda _, stop: (0, max(0, stop - window)), lambda i, j: i - j >= window, query_position, key_position)
    return Relocation((far, near), plain_length)


def dual_chunk(parameters: Mapping[str, Any]) -> Relocation:
    """All tokens; distances within a chunk, to the chunk before, and to those before that one.

    An et al. (2024, https://arxiv.org/abs/2402.17463), whose `c` is the original length: a key is at its place in
    its chunk; a query at its own place, one ``chunk`` further but not beyond ``c - 1``, or at ``c - 1``. This is
    the paper's: the released code has a shorter chunk, and its largest position is three quarters of ``c``.
    """
    chunk, last = parameters["chunk"], parameters["original_max_position_embeddings"] - 1

    def place(j: Tensor) -> Tensor:
        return j % chunk

    return Relocation(
        (
            Branch(
                lambda _, stop: (0, max(0, (stop - 1) // chunk - 1) * chunk),
                lambda i, j: i // chunk - j // chunk > 1,
                lambda i: torch.full_like(i, last),
                place,
            ),
            Branch(
                lambda start, stop: (max(0, start // chunk - 1) * chunk, (stop - 1) // chunk * chunk),
                lambda i, j: i // chunk - j // chunk == 1,
                lambda i: (i % chunk + chunk).clamp(max=last),
                place,
            ),
            Branch(
                lambda start, stop: (start // chunk * chunk, stop), lambda i, j: i // chunk == j // chunk, place, place
            ),
        ),
        plain_length=min(last + 1, 2 * chunk),
    )


def relocated_attention(pattern: Relocation, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    """Return attention of the last tokens of one document with relocated positions, in the shapes of `Pattern`."""
    length, first = key.shape[2], key.shape[2] - query.shape[2]
    positions = torch.arange(length, device=query.device)
    if first == 0 and length <= pattern.plain_length:
        query, key = (rotate(part, positions, rotary.frequencies) for part in (query, key))
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rotary.scaling, dropout_p=rotary.dropout, enable_gqa=True
        )
    # Branches whose queries, or keys, are at the same positions share them.
    queries = list(dict.fromkeys(branch.query_position for branch in pattern.branches))
    keys = list(dict.fromkeys(branch.key_position for branch in pattern.branches))
    states = [rotate(query, place(positions[first:]), rotary.frequencies, scale=rotary.scaling) for place in queries]
    states += [rotate(key, place(positions), rotary.frequencies) for place in keys]

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        logits, values = [], []
        i = positions[start:stop, None]
        for branch in pattern.branches:
            low, high = branch.keys(start, stop)
            if high <= low:
                continue
            j = positions[low:high]
            visible = (j <= i) & branch.pairs(i, j)
            q = take(queries.index(branch.query_position), start - first, stop - first)
            k = take(len(queries) + keys.index(branch.key_position), low, high)
            logits.append(attention_logits(q, k, visible))
            values.append(take(len(queries) + len(keys), low, high))
        return logits, values

    size = block_size(query.shape[1], length)
    return Blocks(score, first, length, size, dropout=rotary.dropout).attend(*states, value)

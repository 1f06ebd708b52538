"""Dilated attention of LongNet."""

from itertools import pairwise

import torch
from torch import Tensor

from lightning_modules.models.context_extension.patterns.blocks import (
    Blocks,
    Rotary,
    Take,
    attention_logits,
    block_size,
    rotate,
)


def longnet(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""Segments of several lengths, in each of which every r-th token sees every r-th token before it.

    Ding et al. (2023, https://arxiv.org/abs/2307.02486). The k-th branch cuts the text into segments of
    ``segment_lengths[k]`` and takes every ``dilation_rates[k]``-th token of each, head h from the ``h mod r``-th on, as
    the paper says (the released code shifts by groups of neighbouring heads). The paper weighs the outputs of the
    branches by their softmax denominators, which is one softmax in which a key counts once for each branch that holds
    the pair; its gradient is taken in full, where the released code detaches the weights. The first rate is 1, so
    that each token sees at least itself; a token that a branch leaves out has nothing from that branch.

    Logits are formed for all queries of a block, also those that a branch leaves out:
    :math:`w_0 + \sum_{k > 0} w_k / r_k` for each token, linear in the length of the text.

    Args:
        query: ``[B, H, T, D]`` of the last T of S tokens, not rotated.
        key: ``[B, H_kv, S, D]``, not rotated.
        value: ``[B, H_kv, S, D]``.
        rotary: Of the model; the segment lengths are multiples of each other.

    Returns:
        ``[B, H, T, D]``.
    """
    stop, first = key.shape[2], key.shape[2] - query.shape[2]
    positions = torch.arange(stop, device=query.device)
    query = rotate(query, positions[first:], rotary.frequencies, scale=rotary.scaling)
    key = rotate(key, positions, rotary.frequencies)
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    lengths, rates = rotary.parameters["segment_lengths"], rotary.parameters["dilation_rates"]
    sharing = torch.arange(heads, device=query.device)[:, None] // groups

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        part, i = take(0, start - first, stop - first), positions[start:stop]
        logits, values = [], []
        for length, rate in zip(lengths, rates, strict=True):
            segment = start // length * length  # the block's only one
            # Of each head, as places in the segment.
            chosen = torch.arange(heads, device=i.device)[:, None] % rate + torch.arange(0, stop - segment, rate).to(i)
            on_grid = (i - segment) % rate == chosen[:, :1]
            visible = on_grid[..., None] & (segment + chosen[:, None] <= i[:, None])
            chosen = chosen.clamp(max=stop - segment - 1)
            logits.append(attention_logits(part, take(1, segment, stop)[:, sharing, chosen], visible))
            values.append(take(2, segment, stop)[:, sharing, chosen])
        return logits, values

    size = block_size(heads, min(stop, longnet_keys(lengths, rates)))
    blocks = Blocks(score, first, stop, size, align=lengths[0], dropout=rotary.dropout)
    return blocks.attend(query, key, value)


def longnet_keys(segment_lengths: list[int], dilation_rates: list[int]) -> int:
    """Keys for which a query's logits are formed, at most."""
    return sum(-(-length // rate) for length, rate in zip(segment_lengths, dilation_rates, strict=True))


def check_dilation(segment_lengths: list[int], dilation_rates: list[int]) -> None:
    """Raise a ``ValueError`` for segments and rates that are no dilated attention."""
    if not 0 < len(segment_lengths) == len(dilation_rates):
        raise ValueError(
            f"`segment_lengths` and `dilation_rates` must have a number for each branch, got {len(segment_lengths)}"
            f" and {len(dilation_rates)}."
        )
    if dilation_rates[0] != 1:
        raise ValueError(f"The first of `dilation_rates` must be 1, or tokens would see nothing; got {dilation_rates}.")
    if any(longer <= shorter or longer % shorter for shorter, longer in pairwise(segment_lengths)):
        raise ValueError(f"Each of `segment_lengths` must be a multiple of the one before, got {segment_lengths}.")
    if any(rate > length for length, rate in zip(segment_lengths, dilation_rates, strict=True)):
        raise ValueError(f"No rate can be above its segment's length, got {dilation_rates} for {segment_lengths}.")

"""Patterns for models that are trained with them: ALiBi, xPos and LongNet.

They need training, because their logits differ from plain RoPE at all distances.
"""

from itertools import pairwise

import torch
from torch import Tensor

from lightning_modules.models.context_extension.patterns.blocks import (
    Blocks,
    Rotary,
    Take,
    attention_logits,
    block_size,
)

XPOS_GAMMA, XPOS_SCALE_BASE = 0.4, 512
"""Constants of the xPos paper."""


def alibi_slopes(heads: int) -> Tensor:
    """Return ``[heads]`` float32 slopes, :math:`2^{-8 h / H}` for head h from 1 on.

    If the number of heads is not a power of two, as in the authors' code, the slopes of the largest power of two below
    it are followed by every second slope of twice that power.

    Example:
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])
    """
    # The largest power of two up to the number of heads.
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:heads])


def alibi(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""Subtract :math:`m_h (i - j)` from logits, without rotation: Press et al. (2022, https://arxiv.org/abs/2108.12409).

    The bias is added to a block's logits in float32, so that it is exact for every dtype of the model.
    """
    length = key.shape[2]
    first = key.shape[2] - query.shape[2]
    positions = torch.arange(length, device=query.device)
    slopes = alibi_slopes(query.shape[1]).to(query.device)[:, None, None]

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        distance = positions[start:stop, None] - positions[:stop]
        logits = attention_logits(take(0, start - first, stop - first), take(1, 0, stop), distance >= 0)
        # In place, because no other tensor of this size should exist; hidden logits stay ``-inf``.
        return [logits.sub_(slopes * distance)], [take(2, 0, stop)]

    blocks = Blocks(score, first, length, block_size(query.shape[1], length), dropout=rotary.dropout)
    return blocks.attend(query * rotary.scaling, key, value)


def xpos(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""Multiply the pair of components d of RoPE by :math:`\zeta_d^{(i - j) / 512}`.

    Sun et al. (2022, https://arxiv.org/abs/2212.10554), :math:`\zeta_d = (2 d / R + 0.4) / 1.4` for R rotated
    components, without the blockwise attention that the paper uses beyond the length of training. The two factors, of
    query and key, are relative to the first query of each block: the query's stay within ``[0.53, 1]`` and the key's
    below 2, where the published code overflows for long texts.
    """
    length = key.shape[2]
    first = key.shape[2] - query.shape[2]
    dtype = query.dtype
    positions = torch.arange(length, device=query.device)
    # Logarithms, because powers over 100,000 tokens would overflow.
    decay = xpos_log_decay(rotary.frequencies, query.shape[-1])
    # Rounded only after the decay.
    queries = rotary.rotate_queries(query.float(), positions[first:])
    keys = rotary.rotate_keys(key.float(), positions)

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        i = positions[start:stop, None]
        j = positions[:stop, None]
        # Both factors are relative to `start`; their product depends on i - j only.
        decayed = (take(0, start - first, stop - first) * (decay * (i - start)).exp()).to(dtype)
        shrunk = (take(1, 0, stop) * (decay * (start - j)).exp()).to(dtype)
        return [attention_logits(decayed, shrunk, i >= positions[:stop])], [take(2, 0, stop)]

    blocks = Blocks(score, first, length, block_size(query.shape[1], length), dropout=rotary.dropout)
    return blocks.attend(queries, keys, value)


def xpos_log_decay(frequencies: Tensor, width: int) -> Tensor:
    r"""Return ``[width]`` float32 :math:`\log(\zeta_d) / 512` of the components of a head, 0 for those not rotated."""
    half = len(frequencies)
    zeta = (torch.arange(half, device=frequencies.device) / half + XPOS_GAMMA) / (1 + XPOS_GAMMA)
    rate = zeta.log() / XPOS_SCALE_BASE
    return torch.cat([rate, rate, rate.new_zeros(width - 2 * half)])


def longnet(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""Attend in segments of several lengths, in which every r-th token sees every r-th token before it.

    Ding et al. (2023, https://arxiv.org/abs/2307.02486). The k-th branch cuts the text into segments of
    ``segment_lengths[k]`` and takes every ``dilation_rates[k]``-th token of each, head h from the ``h mod r``-th on, as
    in the paper (the released code shifts by groups of neighboring heads). The paper weights the branches by their
    softmax denominators, which equals one softmax in which a key counts once for each branch with the pair. Gradients
    flow through these weights, which the released code detaches. The first rate is 1, so each token sees at least
    itself.

    Logits are computed for all queries of a block, including those that a branch leaves out:
    :math:`w_0 + \sum_{k > 0} w_k / r_k` for each token, linear in the length of the text.
    """
    stop = key.shape[2]
    first = key.shape[2] - query.shape[2]
    positions = torch.arange(stop, device=query.device)
    query = rotary.rotate_queries(query, positions[first:])
    key = rotary.rotate_keys(key, positions)
    heads = query.shape[1]
    groups = query.shape[1] // key.shape[1]
    lengths = rotary.parameters["segment_lengths"]
    rates = rotary.parameters["dilation_rates"]
    sharing = torch.arange(heads, device=query.device)[:, None] // groups

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        queries = take(0, start - first, stop - first)
        i = positions[start:stop]
        logits = []
        values = []
        for length, rate in zip(lengths, rates, strict=True):
            segment = start // length * length  # a block is in one segment only
            # Indices in the segment, for each head.
            chosen = torch.arange(heads, device=i.device)[:, None] % rate + torch.arange(0, stop - segment, rate).to(i)
            # ``[H, N]``: head h keeps the tokens whose index in the segment is h mod r.
            on_grid = (i - segment) % rate == chosen[:, :1]
            visible = on_grid[..., None] & (segment + chosen[:, None] <= i[:, None])
            # Heads with a later start have fewer tokens; `visible` already hides what the clamp repeats.
            chosen = chosen.clamp(max=stop - segment - 1)
            logits.append(attention_logits(queries, take(1, segment, stop)[:, sharing, chosen], visible))
            values.append(take(2, segment, stop)[:, sharing, chosen])
        return logits, values

    size = block_size(heads, min(stop, longnet_keys(lengths, rates)))
    blocks = Blocks(score, first, stop, size, align=lengths[0], dropout=rotary.dropout)
    return blocks.attend(query, key, value)


def longnet_keys(segment_lengths: list[int], dilation_rates: list[int]) -> int:
    """Return the largest number of keys for which a query's logits are formed."""
    return sum(-(-length // rate) for length, rate in zip(segment_lengths, dilation_rates, strict=True))


def check_dilation(segment_lengths: list[int], dilation_rates: list[int]) -> None:
    """Raise a ``ValueError`` for segments and rates that do not make dilated attention."""
    multiples = all(longer > shorter and longer % shorter == 0 for shorter, longer in pairwise(segment_lengths))
    # If the first rate is not 1, some tokens attend to nothing.
    if not multiples or len(segment_lengths) != len(dilation_rates) or dilation_rates[:1] != [1]:
        raise ValueError(
            "Each of `segment_lengths` must be a multiple of the previous one and have a number in `dilation_rates`,"
            f" of which the first must be 1: got {segment_lengths} and {dilation_rates}."
        )

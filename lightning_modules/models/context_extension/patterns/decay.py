"""Patterns by which attention decays with the distance: ALiBi and xPos.

They are for models that are trained with them, and not training-free: a model that was pre-trained with plain RoPE has
never seen such logits, at no distance.
"""

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

XPOS_GAMMA, XPOS_SCALE_BASE = 0.4, 512
"""Those of the xPos paper."""


def alibi_slopes(heads: int) -> Tensor:
    """``[heads]`` float32 slopes, :math:`2^{-8 h / H}` for head h from 1 on.

    For a number of heads that is no power of two they are, as in the authors' code, those of the largest power of two
    below it, and then every second one of those of twice as many heads.

    Example:
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:heads])


def alibi(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""Logits less :math:`m_h (i - j)`, and no rotation: Press et al. (2022, https://arxiv.org/abs/2108.12409).

    The bias is added to a block's logits in float32, so that it is exact whatever the type of the model.

    Args:
        query: ``[B, H, T, D]`` of the last T of S tokens, not rotated.
        key: ``[B, H_kv, S, D]``, not rotated.
        value: ``[B, H_kv, S, D]``.
        rotary: Of the model.

    Returns:
        ``[B, H, T, D]``.
    """
    length, first = key.shape[2], key.shape[2] - query.shape[2]
    positions = torch.arange(length, device=query.device)
    slopes = alibi_slopes(query.shape[1]).to(query.device)[:, None, None]

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        distance = positions[start:stop, None] - positions[:stop]
        logits = attention_logits(take(0, start - first, stop - first), take(1, 0, stop), distance >= 0)
        return [logits.sub_(slopes * distance)], [take(2, 0, stop)]

    blocks = Blocks(score, first, length, block_size(query.shape[1], length), dropout=rotary.dropout)
    return blocks.attend(query * rotary.scaling, key, value)


def xpos(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    r"""RoPE whose pair of components d is multiplied by :math:`\zeta_d^{(i - j) / 512}` as well.

    Sun et al. (2022, https://arxiv.org/abs/2212.10554), :math:`\zeta_d = (2 d / R + 0.4) / 1.4` for R rotated
    components, without the blockwise attention that the paper uses beyond the length of training. The two factors, of
    query and key, are relative to the first query of each block: the query's stay within ``[0.53, 1]`` and the key's
    below 2, where the published code overflows for long texts.

    Args:
        query: ``[B, H, T, D]`` of the last T of S tokens, not rotated.
        key: ``[B, H_kv, S, D]``, not rotated.
        value: ``[B, H_kv, S, D]``.
        rotary: Of the model.

    Returns:
        ``[B, H, T, D]``.
    """
    length, first, dtype = key.shape[2], key.shape[2] - query.shape[2], query.dtype
    positions = torch.arange(length, device=query.device)
    decay = xpos_log_decay(rotary.frequencies, query.shape[-1])
    # In float32 until the decay is in.
    queries = rotate(query.float(), positions[first:], rotary.frequencies, scale=rotary.scaling)
    keys = rotate(key.float(), positions, rotary.frequencies)

    def score(take: Take, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        i, j = positions[start:stop, None], positions[:stop, None]
        decayed = (take(0, start - first, stop - first) * (decay * (i - start)).exp()).to(dtype)
        shrunk = (take(1, 0, stop) * (decay * (start - j)).exp()).to(dtype)
        return [attention_logits(decayed, shrunk, i >= positions[:stop])], [take(2, 0, stop)]

    blocks = Blocks(score, first, length, block_size(query.shape[1], length), dropout=rotary.dropout)
    return blocks.attend(queries, keys, value)


def xpos_log_decay(frequencies: Tensor, width: int) -> Tensor:
    r"""``[width]`` float32 :math:`\log(\zeta_d) / 512` of the components of a head, 0 for those not rotated."""
    half = len(frequencies)
    zeta = (torch.arange(half, device=frequencies.device) / half + XPOS_GAMMA) / (1 + XPOS_GAMMA)
    rate = zeta.log() / XPOS_SCALE_BASE
    return torch.cat([rate, rate, rate.new_zeros(width - 2 * half)])

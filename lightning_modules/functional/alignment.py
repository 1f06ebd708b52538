"""From tokens of one tokenizer to tokens of another, by way of the characters of the text."""

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def merge_spans(spans: Tensor) -> Tensor:
    """Join character spans that touch or overlap.

    Args:
        spans: ``[N, 2]`` integer spans ``[start, end)`` in ascending order of their starts; empty ones are
            dropped.

    Returns:
        ``[M, 2]`` disjoint ascending spans with at least one character between them.

    Raises:
        ValueError: If ``spans`` is not ``[N, 2]`` of integers, not ascending, or an end is before its start.

    Example:
        >>> merge_spans(torch.tensor([[0, 3], [3, 7], [8, 9]])).tolist()
        [[0, 7], [8, 9]]
    """
    if spans.ndim == 2 and spans.shape[1] == 2:  # special tokens have [0, 0] at any place
        spans = spans[spans[:, 1] != spans[:, 0]]
    _check_spans(spans)
    if len(spans) == 0:
        return spans
    reach = spans[:, 1].cummax(0).values
    apart = spans[1:, 0] > reach[:-1]
    edge = apart.new_ones(1)
    return torch.stack([spans[torch.cat([edge, apart]), 0], reach[torch.cat([apart, edge])]], dim=1)


def character_units(offsets: Tensor) -> Tensor:
    """Return the unit of each token: tokens that share a character are one unit.

    Byte-level vocabularies and byte fallback split a letter into several tokens, and normalizers split a ligature. No
    span of characters holds one part of a letter without the others, so such tokens are key together or not at all.

    Args:
        offsets: ``[N, 2]`` integer character span of each token, in any order.

    Returns:
        ``[N]`` int64 unit numbers, ascending with the characters. A token without characters is a separate unit,
        after all others.

    Raises:
        ValueError: If ``offsets`` is not ``[N, 2]`` of integers.

    Example:
        >>> character_units(torch.tensor([[0, 3], [3, 4], [3, 4], [4, 9], [0, 0]])).tolist()
        [0, 1, 1, 2, 3]
    """
    _check_offsets("offsets", offsets)
    start, end = offsets.unbind(-1)
    covering = (end > start).nonzero().squeeze(-1)
    covering = covering[start[covering].argsort()]
    # A token begins a unit where no earlier token reaches beyond its first character.
    reach = end[covering].cummax(0).values
    begins = torch.ones_like(covering, dtype=torch.bool)
    begins[1:] = start[covering][1:] >= reach[:-1]
    units = torch.empty_like(start, dtype=torch.int64)
    units[covering] = begins.long().cumsum(0) - 1
    empty = (end <= start).nonzero().squeeze(-1)
    units[empty] = begins.sum() + torch.arange(len(empty), device=offsets.device)
    return units


def unit_spans(offsets: Tensor, units: Tensor) -> Tensor:
    """Return the ``[M, 2]`` character span of each unit, from its first character to its last.

    Args:
        offsets: ``[N, 2]`` integer character span of each token.
        units: ``[N]`` as `character_units` returns them.

    Example:
        >>> unit_spans(torch.tensor([[0, 3], [3, 5], [4, 6]]), torch.tensor([0, 1, 1])).tolist()
        [[0, 3], [3, 6]]
    """
    count = int(units.max()) + 1 if len(units) else 0
    spans = offsets.new_empty(count, 2)
    spans[:, 0] = spans[:, 0].scatter_reduce(0, units, offsets[:, 0], "amin", include_self=False)
    spans[:, 1] = spans[:, 1].scatter_reduce(0, units, offsets[:, 1], "amax", include_self=False)
    return spans


def span_token_mask(offsets: Tensor, spans: Tensor) -> Tensor:
    """Return which tokens lie wholly inside one span.

    Equation 9 of Fang et al. (2025), https://arxiv.org/abs/2410.23771: the key tokens of the evaluated model are
    those whose characters all belong to key tokens of the evaluator. Tokens that share a character are inside together
    or not at all.

    Args:
        offsets: ``[N, 2]`` character span of each token; a token without characters (a special token) is never inside.
        spans: ``[M, 2]`` ascending disjoint spans, as `merge_spans` returns them.

    Returns:
        ``[N]`` bool.

    Raises:
        ValueError: If ``spans`` is not ``[M, 2]`` of integers, not ascending, not disjoint, or an end is before its
            start; or if ``offsets`` is not ``[N, 2]`` of integers.

    Example:
        >>> span_token_mask(torch.tensor([[0, 3], [3, 7], [8, 9]]), torch.tensor([[2, 7]])).tolist()
        [False, True, False]
    """
    _check_spans(spans)
    if (spans[1:, 0] < spans[:-1, 1]).any():
        raise ValueError("Spans must be disjoint: join those that overlap by `merge_spans`.")
    units = character_units(offsets)
    if len(spans) == 0 or len(units) == 0:
        return torch.zeros_like(units, dtype=torch.bool)
    start, end = unit_spans(offsets, units).to(spans.dtype).unbind(-1)
    span = torch.searchsorted(spans[:, 0].contiguous(), start.contiguous(), right=True) - 1
    inside = (span >= 0) & (end <= spans[span.clamp(min=0), 1])
    return (inside & (end > start))[units]


def transfer_influence(influence: Tensor, offsets: Tensor, target_offsets: Tensor) -> Tensor:
    r"""Soft influence of tokens of another tokenizer: the average over their characters.

    .. math:: w'_i = \frac{1}{|x'_i|} \sum_{t_j \in x'_i} w(t_j)

    Equation 10 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, where :math:`w(t_j)` is the influence of the
    token that character :math:`t_j` belongs to. Tokens that share a character (bytes of one letter) share its
    influence equally; a character that belongs to none has influence 1, as a token without a long context has.

    Args:
        influence: ``[N]`` influence of the evaluator's tokens.
        offsets: ``[N, 2]`` character span of each of them.
        target_offsets: ``[M, 2]`` character span of each token of the evaluated model, in the same text.

    Returns:
        ``[M]`` float64 influence; 0 for a token without characters.

    Raises:
        ValueError: If ``influence`` and ``offsets`` disagree in length, an influence is not finite, or a span does not
            run forward from a character of the text.

    Example:
        >>> transfer_influence(torch.tensor([1.0, 4.0]), torch.tensor([[0, 2], [2, 4]]), torch.tensor([[0, 4], [3, 5]]))
        tensor([2.5000, 2.5000], dtype=torch.float64)
    """
    if influence.ndim != 1 or offsets.shape != (*influence.shape, 2):
        raise ValueError(
            f"`offsets` must be [N, 2] for `influence` [N], got {list(offsets.shape)} and {list(influence.shape)}."
        )
    for name, spans in (("offsets", offsets), ("target_offsets", target_offsets)):
        _check_offsets(name, spans)
        if (spans[..., 0] < 0).any() or (spans[..., 1] < spans[..., 0]).any():
            raise ValueError(f"`{name}` must be spans of characters, counted from 0, whose ends are not before starts.")
    if not influence.isfinite().all():  # in running sums NaN would spread to every later token
        token = int(influence.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"`influence` must be finite, got {influence[token].item()} for token {token}.")
    offsets, target_offsets = offsets.long(), target_offsets.long()
    ends = [part.max() for part in (offsets, target_offsets) if part.numel()]
    length = int(max(ends, default=torch.zeros(()))) + 1
    # Each token is added at its first character and subtracted after its last: a running sum covers each character.
    # Two more running sums turn "per character" into "per token" without a loop.
    owners = _coverage(torch.ones_like(influence), offsets, length)
    total = _coverage(influence, offsets, length)
    per_character = torch.where(owners.round() > 0, total / owners.round().clamp(min=1), 1.0)
    prefix = torch.cat([per_character.new_zeros(1), per_character.cumsum(0)])
    start, end = target_offsets[..., 0], target_offsets[..., 1]
    characters = end - start
    return (prefix[end] - prefix[start]) / characters.clamp(min=1)


def _coverage(weight: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Sum of the weights of the tokens that cover each character, ``[length]`` float64."""
    change = torch.zeros(length, dtype=torch.float64, device=weight.device)
    change.index_add_(0, offsets[:, 0], weight.double())
    change.index_add_(0, offsets[:, 1], -weight.double())
    return change.cumsum(0)


def _check_offsets(name: str, offsets: Tensor) -> None:
    if offsets.ndim != 2 or offsets.shape[-1] != 2 or offsets.dtype not in _INTEGERS:
        raise ValueError(f"`{name}` must be integers [N, 2], got {offsets.dtype} {list(offsets.shape)}.")


def _check_spans(spans: Tensor) -> None:
    if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype not in _INTEGERS:
        raise ValueError(f"Spans must be integers [M, 2], got {spans.dtype} {list(spans.shape)}.")
    if (spans[:, 1] < spans[:, 0]).any() or (spans[1:, 0] < spans[:-1, 0]).any():
        raise ValueError("Spans must be in ascending order, and no end may be before its start.")

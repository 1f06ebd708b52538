"""Transfer of key tokens and weights between tokenizers, through the characters of the text (Equations 9 and 10)."""

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def merge_spans(spans: Tensor) -> Tensor:
    """Merge character spans that touch or overlap.

    Args:
        spans: ``[N, 2]`` integer spans ``[start, end)`` in ascending order of their starts; empty spans are dropped.

    Returns:
        ``[M, 2]`` disjoint ascending spans with at least one character between them.

    Raises:
        ValueError: If ``spans`` is not ``[N, 2]`` of integers, not ascending, or an end is before its start.

    Example:
        >>> merge_spans(torch.tensor([[0, 3], [3, 7], [8, 9]])).tolist()
        [[0, 7], [8, 9]]
    """
    # 1. Drop empty spans. Special tokens have the span [0, 0] wherever they are, which is out of order.
    if spans.ndim == 2 and spans.shape[1] == 2:
        spans = spans[spans[:, 1] != spans[:, 0]]
    _check_spans(spans)
    if len(spans) == 0:
        return spans
    # 2. There is a gap after a span if the next one starts after everything so far has ended.
    furthest_end = spans[:, 1].cummax(0).values
    gap = spans[1:, 0] > furthest_end[:-1]
    edge = gap.new_ones(1)
    # 3. A merged span starts after a gap and ends before the next one.
    return torch.stack([spans[torch.cat([edge, gap]), 0], furthest_end[torch.cat([gap, edge])]], dim=1)


def character_units(offsets: Tensor) -> Tensor:
    """Return the unit of each token: tokens that share a character form one unit.

    Byte-level vocabularies and byte fallback split a letter into several tokens, and normalizers split a ligature. A
    character span cannot contain part of a letter, so the tokens of a letter are key tokens together or not at all.

    Args:
        offsets: ``[N, 2]`` integer character span of each token, in any order.

    Returns:
        ``[N]`` int64 unit numbers in the order of the text. Each token without characters is a unit by itself,
        numbered after all others.

    Raises:
        ValueError: If ``offsets`` is not ``[N, 2]`` of integers.

    Example:
        >>> character_units(torch.tensor([[0, 3], [3, 4], [3, 4], [4, 9], [0, 0]])).tolist()
        [0, 1, 1, 2, 3]
    """
    _check_offsets("offsets", offsets)
    start, end = offsets.unbind(-1)
    # 1. Sort the tokens that have characters by where they start.
    covering = (end > start).nonzero().squeeze(-1)
    covering = covering[start[covering].argsort()]
    # 2. A token starts a new unit if no earlier token extends past its first character.
    furthest_end = end[covering].cummax(0).values
    starts_unit = torch.ones_like(covering, dtype=torch.bool)
    starts_unit[1:] = start[covering][1:] >= furthest_end[:-1]
    units = torch.empty_like(start, dtype=torch.int64)
    units[covering] = starts_unit.long().cumsum(0) - 1
    # 3. Number the tokens without characters after all others.
    empty = (end <= start).nonzero().squeeze(-1)
    units[empty] = starts_unit.sum() + torch.arange(len(empty), device=offsets.device)
    return units


def unit_spans(offsets: Tensor, units: Tensor) -> Tensor:
    """Return the ``[M, 2]`` character span of each unit, from its first character to its last.

    Args:
        offsets: ``[N, 2]`` integer character span of each token.
        units: ``[N]`` unit numbers from `character_units`.

    Example:
        >>> unit_spans(torch.tensor([[0, 3], [3, 5], [4, 6]]), torch.tensor([0, 1, 1])).tolist()
        [[0, 3], [3, 6]]
    """
    count = int(units.max()) + 1 if len(units) else 0
    spans = offsets.new_empty(count, 2)
    # The tokens of a unit may come in any order: byte fallback gives them equal spans, a normalizer may nest them.
    spans[:, 0] = spans[:, 0].scatter_reduce(0, units, offsets[:, 0], "amin", include_self=False)
    spans[:, 1] = spans[:, 1].scatter_reduce(0, units, offsets[:, 1], "amax", include_self=False)
    return spans


def span_token_mask(offsets: Tensor, spans: Tensor) -> Tensor:
    """Return which tokens lie entirely inside one span.

    Equation 9 of Fang et al. (2025), https://arxiv.org/abs/2410.23771: the key tokens of the evaluated model are
    those whose characters all belong to key tokens of the evaluator. Tokens that share a character are inside together
    or not at all.

    Args:
        offsets: ``[N, 2]`` character span of each token; a token without characters (a special token) is never inside.
        spans: ``[M, 2]`` ascending disjoint spans from `merge_spans`.

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
        raise ValueError("Spans must be disjoint: merge overlapping spans with `merge_spans`.")
    # 1. Test units instead of tokens, so that tokens that share a character get one answer.
    units = character_units(offsets)
    if len(spans) == 0 or len(units) == 0:
        return torch.zeros_like(units, dtype=torch.bool)
    start, end = unit_spans(offsets, units).to(spans.dtype).unbind(-1)
    # 2. Spans are sorted and disjoint: only the last one that starts at or before a unit can contain it.
    span = torch.searchsorted(spans[:, 0].contiguous(), start.contiguous(), right=True) - 1
    inside = (span >= 0) & (end <= spans[span.clamp(min=0), 1])
    # 3. Give each token the answer of its unit; a unit without characters is not inside.
    return (inside & (end > start))[units]


def transfer_influence(influence: Tensor, offsets: Tensor, target_offsets: Tensor) -> Tensor:
    r"""Transfer soft influence to the tokens of another tokenizer: average it over their characters.

    .. math:: w'_i = \frac{1}{|x'_i|} \sum_{t_j \in x'_i} w(t_j)

    Equation 10 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, where :math:`w(t_j)` is the influence of the
    token that contains character :math:`t_j`. A character that several tokens share (the bytes of one letter) has their
    mean influence. A character outside of all tokens has influence 1, like a token without a long context.

    Args:
        influence: ``[N]`` influence of the evaluator's tokens.
        offsets: ``[N, 2]`` character span of each of these tokens.
        target_offsets: ``[M, 2]`` character span of each token of the evaluated model, in the same text.

    Returns:
        ``[M]`` float64 influence; 0 for a token without characters.

    Raises:
        ValueError: If ``influence`` and ``offsets`` disagree in length, an influence is not finite, or a span starts
            before character 0 or ends before it starts.

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
            raise ValueError(f"`{name}` must be character spans [start, end) with 0 <= start <= end.")
    if not influence.isfinite().all():  # the cumulative sums below would spread NaN to every later token
        token = int(influence.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"`influence` must be finite, got {influence[token].item()} for token {token}.")
    offsets = offsets.long()
    target_offsets = target_offsets.long()
    # Either side may have more of the text: a tokenizer may drop characters at its end.
    ends = [spans.max() for spans in (offsets, target_offsets) if spans.numel()]
    length = int(max(ends, default=torch.zeros(()))) + 1
    # 1. Compute the influence of each character: the mean over the tokens that contain it.
    #    Counts are rounded, because differences of sums in float64 are not exactly whole.
    token_count = _sum_per_character(torch.ones_like(influence), offsets, length).round()
    total = _sum_per_character(influence, offsets, length)
    per_character = torch.where(token_count > 0, total / token_count.clamp(min=1), 1.0)
    # 2. Average over the characters of each target token. Differences of a cumulative sum need no loop over tokens.
    prefix = torch.cat([per_character.new_zeros(1), per_character.cumsum(0)])
    start = target_offsets[..., 0]
    end = target_offsets[..., 1]
    return (prefix[end] - prefix[start]) / (end - start).clamp(min=1)


def _sum_per_character(weight: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return ``[length]`` float64 sums of the weights of the tokens that contain each character.

    A token's weight is added at its first character and subtracted after its last; a cumulative sum does the rest.
    """
    change = torch.zeros(length, dtype=torch.float64, device=weight.device)
    change.index_add_(0, offsets[:, 0], weight.double())
    change.index_add_(0, offsets[:, 1], -weight.double())
    return change.cumsum(0)


def _check_offsets(name: str, offsets: Tensor) -> None:
    if offsets.ndim != 2 or offsets.shape[-1] != 2 or offsets.dtype not in _INTEGERS:
        raise ValueError(f"`{name}` must be integers [N, 2], got {offsets.dtype} {list(offsets.shape)}.")


def _check_spans(spans: Tensor) -> None:
    pairs = spans.ndim == 2 and spans.shape[1] == 2 and spans.dtype in _INTEGERS
    if not pairs or (spans[:, 1] < spans[:, 0]).any() or (spans[1:, 0] < spans[:-1, 0]).any():
        raise ValueError(
            "Spans must be in ascending order, integers [M, 2], and no end may be before its start, got"
            f" {spans.dtype} {list(spans.shape)}."
        )

"""From tokens of one tokenizer to tokens of another, by way of the characters of the text."""

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def merge_spans(spans: Tensor) -> Tensor:
    """Join character spans that touch or overlap.

    Args:
        spans: ``[N, 2]`` integer spans ``[start, end)`` in ascending order of their starts; empty ones, wherever they
            stand, are dropped.

    Returns:
        ``[M, 2]`` disjoint ascending spans with at least one character between them.

    Raises:
        ValueError: If ``spans`` is not ``[N, 2]`` of integers, not ascending, or an end stands before its start.

    Example:
        >>> merge_spans(torch.tensor([[0, 3], [3, 7], [8, 9]])).tolist()
        [[0, 7], [8, 9]]
    """
    if spans.ndim == 2 and spans.shape[1] == 2:  # special tokens have [0, 0], wherever they stand
        spans = spans[spans[:, 1] != spans[:, 0]]
    _check_spans(spans)
    if len(spans) == 0:
        return spans
    reach = spans[:, 1].cummax(0).values
    apart = spans[1:, 0] > reach[:-1]
    edge = apart.new_ones(1)
    return torch.stack([spans[torch.cat([edge, apart]), 0], reach[torch.cat([apart, edge])]], dim=1)


def span_token_mask(offsets: Tensor, spans: Tensor) -> Tensor:
    """Tokens that lie wholly inside one span.

    Equation 9 of Fang et al. (2025), https://arxiv.org/abs/2410.23771: the key tokens of the evaluated model are
    those whose characters all belong to key tokens of the evaluator.

    Args:
        offsets: ``[.., 2]`` character span of each token; a token without characters (a special token) lies nowhere.
        spans: ``[M, 2]`` ascending disjoint spans, as `merge_spans` returns them.

    Returns:
        ``[..]`` bool.

    Raises:
        ValueError: If ``spans`` is not ``[M, 2]`` of integers, not ascending, not disjoint, or an end stands before its
            start; or if ``offsets`` is not ``[.., 2]`` of integers.

    Example:
        >>> span_token_mask(torch.tensor([[0, 3], [3, 7], [8, 9]]), torch.tensor([[2, 7]])).tolist()
        [False, True, False]
    """
    _check_spans(spans)
    if (spans[1:, 0] < spans[:-1, 1]).any():
        raise ValueError("Spans must be disjoint: join those that overlap by `merge_spans`.")
    _check_offsets("offsets", offsets)
    start, end = offsets[..., 0].contiguous().to(spans.dtype), offsets[..., 1]
    if len(spans) == 0:
        return torch.zeros_like(start, dtype=torch.bool)
    span = torch.searchsorted(spans[:, 0].contiguous(), start, right=True) - 1
    inside = (span >= 0) & (end <= spans[span.clamp(min=0), 1])
    return inside & (end > start)


def transfer_influence(influence: Tensor, offsets: Tensor, target_offsets: Tensor) -> Tensor:
    r"""Soft influence of tokens of another tokenizer: the average over their characters.

    .. math:: w'_i = \frac{1}{|x'_i|} \sum_{t_j \in x'_i} w(t_j)

    Equation 10 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, where :math:`w(t_j)` is the influence of the
    token that character :math:`t_j` belongs to. Tokens that share a character (bytes of one letter) share its
    influence equally; a character that belongs to none has influence 1, as a token without a long context has.

    Args:
        influence: ``[N]`` influence of the evaluator's tokens.
        offsets: ``[N, 2]`` character span of each of them.
        target_offsets: ``[.., 2]`` character span of each token of the evaluated model, in the same text.

    Returns:
        ``[..]`` float64 influence; 0 for a token without characters.

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
    # Each token adds itself at its first character and takes itself away behind its last: a running sum is what covers
    # a character. Two more running sums turn "per character" into "per token" without a loop.
    owners = _coverage(torch.ones_like(influence), offsets, length)
    total = _coverage(influence, offsets, length)
    per_character = torch.where(owners.round() > 0, total / owners.round().clamp(min=1), 1.0)
    prefix = torch.cat([per_character.new_zeros(1), per_character.cumsum(0)])
    start, end = target_offsets[..., 0], target_offsets[..., 1]
    characters = end - start
    return torch.where(characters > 0, (prefix[end] - prefix[start]) / characters.clamp(min=1), 0.0)


def _coverage(weight: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Sum of the weights of the tokens that cover each character, ``[length]`` float64."""
    change = torch.zeros(length, dtype=torch.float64, device=weight.device)
    change.index_add_(0, offsets[:, 0], weight.double())
    change.index_add_(0, offsets[:, 1], -weight.double())
    return change.cumsum(0)


def _check_offsets(name: str, offsets: Tensor) -> None:
    if offsets.ndim < 1 or offsets.shape[-1] != 2 or offsets.dtype not in _INTEGERS:
        raise ValueError(f"`{name}` must be integers [.., 2], got {offsets.dtype} {list(offsets.shape)}.")


def _check_spans(spans: Tensor) -> None:
    if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype not in _INTEGERS:
        raise ValueError(f"Spans must be integers [M, 2], got {spans.dtype} {list(spans.shape)}.")
    if (spans[:, 1] < spans[:, 0]).any() or (spans[1:, 0] < spans[:-1, 0]).any():
        raise ValueError("Spans must be in ascending order, and no end may stand before its start.")

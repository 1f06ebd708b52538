"""From an evaluator's tokens to those of another model exactly as the package `longppl` 0.3.0 does it.

Its differences from the paper's Equation 9, kept so that published numbers can be compared: only spans that touch
exactly are joined, so that equal or overlapping ones (tokens that share a character) stay apart, and the scan below can
pass over a span for good.
"""

import torch
from torch import Tensor


def merge_touching_spans(spans: Tensor) -> Tensor:
    """Join each character span to the next one where it ends exactly where that one starts.

    Args:
        spans: ``[N, 2]`` integer spans in the order of their tokens, empty ones among them.

    Returns:
        ``[M, 2]`` spans, which may be empty, equal or overlapping. ``merge_intervals`` of the package.

    Example:
        >>> merge_touching_spans(torch.tensor([[0, 3], [3, 4], [3, 4], [4, 9]])).tolist()
        [[0, 4], [3, 9]]
    """
    apart = spans[1:, 0] != spans[:-1, 1]
    edge = apart.new_ones(min(len(spans), 1))
    return torch.stack([spans[torch.cat([edge, apart]), 0], spans[torch.cat([apart, edge]), 1]], dim=1)


def scan_token_mask(offsets: Tensor, spans: Tensor) -> Tensor:
    """Return which tokens a single scan over tokens and spans finds inside a span.

    Args:
        offsets: ``[N, 2]`` character span of each token; one without characters counts where its place is in a span.
        spans: ``[M, 2]`` as `merge_touching_spans` returns them.

    Returns:
        ``[N]`` bool. ``cal_overlap`` of the package.

    Example:
        >>> scan_token_mask(torch.tensor([[0, 3], [3, 3], [3, 7], [8, 9]]), torch.tensor([[2, 7]])).tolist()
        [False, True, True, False]
    """
    mask = torch.zeros(len(offsets), dtype=torch.bool)
    tokens, bounds = offsets.tolist(), spans.tolist()
    token = span = 0
    while token < len(tokens) and span < len(bounds):
        (start, end), (first, last) = tokens[token], bounds[span]
        if start >= first and end <= last:
            mask[token] = True
            token += 1
        elif start < first:
            token += 1
        else:
            span += 1
    return mask.to(offsets.device)

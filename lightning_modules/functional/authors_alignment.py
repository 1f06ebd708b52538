"""Transfer of key tokens between tokenizers exactly as the authors' package `longppl` 0.3.0 does it.

It differs from the paper's Equation 9, and is kept for comparisons with published numbers: only exactly adjacent spans
are merged, so equal and overlapping spans (tokens that share a character) stay separate, and `scan_token_mask` never
returns to a span that it has passed.
"""

import torch
from torch import Tensor


def merge_touching_spans(spans: Tensor) -> Tensor:
    """Merge each character span with the next one if it ends exactly where the next one starts.

    Args:
        spans: ``[N, 2]`` integer spans in the order of their tokens, including empty ones.

    Returns:
        ``[M, 2]`` spans, which may be empty, equal or overlapping, as ``merge_intervals`` of the package returns them.

    Example:
        >>> merge_touching_spans(torch.tensor([[0, 3], [3, 4], [3, 4], [4, 9]])).tolist()
        [[0, 4], [3, 9]]
    """
    gap = spans[1:, 0] != spans[:-1, 1]
    edge = gap.new_ones(min(len(spans), 1))
    return torch.stack([spans[torch.cat([edge, gap]), 0], spans[torch.cat([gap, edge]), 1]], dim=1)


def scan_token_mask(offsets: Tensor, spans: Tensor) -> Tensor:
    """Return which tokens lie inside a span, as found by one simultaneous scan over tokens and spans.

    Args:
        offsets: ``[N, 2]`` character span of each token; an empty span counts if its position is inside a span.
        spans: ``[M, 2]`` spans from `merge_touching_spans`.

    Returns:
        ``[N]`` bool, as ``cal_overlap`` of the package returns it.

    Example:
        >>> scan_token_mask(torch.tensor([[0, 3], [3, 3], [3, 7], [8, 9]]), torch.tensor([[2, 7]])).tolist()
        [False, True, True, False]
    """
    mask = torch.zeros(len(offsets), dtype=torch.bool)
    tokens = offsets.tolist()
    bounds = spans.tolist()
    token = span = 0
    while token < len(tokens) and span < len(bounds):
        start, end = tokens[token]
        first, last = bounds[span]
        if start >= first and end <= last:  # the token is inside; the next one may be in the same span
            mask[token] = True
            token += 1
        elif start < first:  # it begins before the span, so no later span contains it
            token += 1
        else:  # it reaches beyond the span, which is never tried again, even for a token that overlaps this one
            span += 1
    return mask.to(offsets.device)

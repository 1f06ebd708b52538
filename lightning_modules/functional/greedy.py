"""Log-likelihoods of given tokens, and whether greedy decoding would have chosen them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.functional.linear_head import wide_logits
from lightning_modules.functional.log_likelihood import (
    Head,
    check_chunk_size,
    check_targets,
    default_chunk_size,
)


def greedy_targets(
    predictors: Tensor, head: Head, targets: Tensor, *, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each target, and whether no other token is likelier.

    Equal to `token_log_likelihood` where both are asked for the same tokens, but one hidden state may predict several
    targets (the choices of a question), and none of it carries a gradient.

    Args:
        predictors: ``[N, D]`` hidden states.
        head: Maps ``[n, D]`` hidden states to ``[n, V]`` logits.
        targets: ``[N]`` int64 token ids, entry ``i`` of which hidden state ``i`` predicts.
        chunk_size: Targets whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[N]`` log-likelihoods in nats, float32 or float64 for float64 logits, and ``[N]`` bool. Of several tokens that
        are equally likely the one with the smallest id counts as the likeliest.

    Raises:
        ValueError: If shapes or types disagree, or ``chunk_size`` is no integer of 1 or more. On a CPU also if a target
            is beyond the head's logits.

    Example:
        >>> head = torch.nn.Linear(1, 3, bias=False)
        >>> head.weight.data = torch.tensor([[0.0], [1.0], [0.0]])
        >>> greedy_targets(torch.zeros(2, 1), head, torch.tensor([0, 1]))[1]
        tensor([ True, False])
    """
    check_chunk_size(chunk_size)
    if predictors.ndim != 2 or targets.shape != predictors.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            "`predictors` must be [N, D] and `targets` [N] of int64,"
            f" got {list(predictors.shape)}, {list(targets.shape)} and {targets.dtype}."
        )
    size = chunk_size or default_chunk_size(predictors)
    log_likelihood, likeliest = [], []
    with torch.no_grad():
        for rows, tokens in zip(predictors.split(size), targets.split(size), strict=True):
            logits = wide_logits(rows, head)
            check_targets(tokens, logits.shape[-1])
            likeliest.append(logits.argmax(-1) == tokens)
            log_likelihood.append(-F.cross_entropy(logits, tokens, reduction="none"))
    return torch.cat(log_likelihood), torch.cat(likeliest)

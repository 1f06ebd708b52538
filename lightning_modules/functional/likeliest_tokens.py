"""What a model would have put in a token's place, without ever holding the logits of a sequence."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.functional.checks import check_count
from lightning_modules.functional.linear_head import LinearHead, logits_buffer, wide_linear
from lightning_modules.functional.log_likelihood import Head, check_chunk_size, default_chunk_size, scored_tokens


class LikeliestTokens(NamedTuple):
    """The likeliest tokens at each position, best first.

    Attributes:
        token_ids: ``[B, T, k]`` int64.
        log_likelihood: ``[B, T, k]`` in nats, of each of them in the place of token ``t``.
    """

    token_ids: Tensor
    log_likelihood: Tensor


@torch.no_grad()
def likeliest_tokens(
    hidden_states: Tensor, head: Head, labels: Tensor, *, count: int = 5, chunk_size: int | None = None
) -> LikeliestTokens:
    """The tokens that are likeliest in the place of each scored token, given the tokens before it.

    Equal to ``head(hidden_states).log_softmax(-1).topk(count)``, moved by one token, but logits exist for
    ``chunk_size`` tokens at a time and only for scored ones.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        count: How many, k.
        chunk_size: Scored tokens whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[B, T, count]`` token ids and log-likelihoods in nats, float32, or float64 for float64 logits; both are 0
        where a token is not scored. It carries no gradient.

    Raises:
        ValueError: If ``count`` is not from 1 to the number of logits, and as `token_log_likelihood` does.

    Example:
        >>> hidden_states, head = torch.zeros(1, 2, 4), torch.nn.Linear(4, 3)
        >>> head.bias.data = torch.tensor([0.5, 0.25, 0.25]).log()
        >>> token_ids, log_likelihood = likeliest_tokens(hidden_states, head, torch.tensor([[-100, 2]]), count=1)
        >>> token_ids[0, 1], log_likelihood[0, 1].exp()
        (tensor([0]), tensor([0.5000]))
    """
    check_chunk_size(chunk_size)
    check_count("`count`", count)
    predictors, _, scored = scored_tokens(hidden_states, labels)
    chunks = predictors.split(chunk_size or default_chunk_size(hidden_states))
    token_ids, log_likelihood = map(torch.cat, zip(*(_likeliest(chunk, head, count) for chunk in chunks), strict=True))
    where = scored.unsqueeze(-1).expand(*scored.shape, count)
    return LikeliestTokens(
        token_ids.new_zeros(where.shape).masked_scatter(where, token_ids),
        log_likelihood.new_zeros(where.shape).masked_scatter(where, log_likelihood),
    )


def _likeliest(predictors: Tensor, head: Head, count: int) -> tuple[Tensor, Tensor]:
    """``[n, count]`` token ids and log-likelihoods that follow ``[n, D]`` hidden states."""
    logits = _logits(predictors, head)
    check_count("`count`", count, most=logits.shape[-1])
    largest, token_ids = logits.topk(count)
    return token_ids, largest - logits.logsumexp(-1, keepdim=True)


def _logits(predictors: Tensor, head: Head) -> Tensor:
    """``[n, V]`` logits, float32 or wider; of a linear head as exact as those that tokens are scored by."""
    if isinstance(head, LinearHead):
        rows, weight, bias = head.operands(predictors)
        logits = wide_linear(rows, weight, bias, logits_buffer(rows, len(rows), len(weight)))
        logits = logits if head.soft_cap is None else logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    else:
        logits = head(predictors)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

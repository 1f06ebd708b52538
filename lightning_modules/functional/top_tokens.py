"""Likeliest tokens and greedy predictions, without ever holding the logits of a whole sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.batch import BoolArray
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.linear_head import wide_logits
from lightning_modules.functional.log_likelihood import (
    Head,
    check_targets,
    choose_chunk_size,
    select_scored,
    token_log_likelihood,
)


class LikeliestTokens(NamedTuple):
    """The likeliest tokens at each position, best first."""

    token_ids: Tensor  # [B, T, k] int64
    log_likelihood: Tensor  # [B, T, k] in nats, of each of them as token t


@torch.no_grad()
def likeliest_tokens(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    *,
    scored: BoolArray | None = None,
    count: int = 5,
    chunk_size: int | None = None,
) -> LikeliestTokens:
    """Return the likeliest candidates for each scored token, given the tokens before it.

    Equal to ``head(hidden_states).log_softmax(-1).topk(count)`` shifted by one token, but logits exist for
    ``chunk_size`` tokens at a time and only for scored ones.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states; entry ``t`` has seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        scored: As for `token_log_likelihood`.
        count: Number k of candidates.
        chunk_size: Scored tokens whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[B, T, count]`` token ids and log-likelihoods in nats, float32, or float64 for float64 logits; both are 0
        where a token is not scored. The result carries no gradient.

    Raises:
        ValueError: If ``count`` is not from 1 to the vocabulary size, or as `token_log_likelihood` does.

    Example:
        >>> hidden_states, head = torch.zeros(1, 2, 4), torch.nn.Linear(4, 3)
        >>> head.bias.data = torch.tensor([0.5, 0.25, 0.25]).log()
        >>> token_ids, log_likelihood = likeliest_tokens(hidden_states, head, torch.tensor([[-100, 2]]), count=1)
        >>> token_ids[0, 1], log_likelihood[0, 1].exp()
        (tensor([0]), tensor([0.5000]))
    """
    check_count("`count`", count)
    # 1. Select the hidden states that predict a scored token; they are already shifted by one.
    predicting, _, index = select_scored(hidden_states, labels, scored)
    # 2. Take the candidates of each chunk. Only the chosen logits are normalized: log softmax(z)[i] = z[i] - lse(z).
    token_ids = []
    log_likelihood = []
    for chunk in predicting.split(choose_chunk_size(hidden_states, chunk_size)):
        logits = wide_logits(chunk, head)
        check_count("`count`", count, maximum=logits.shape[-1])
        largest, tokens = logits.topk(count)
        token_ids.append(tokens)
        log_likelihood.append(largest - logits.logsumexp(-1, keepdim=True))

    # 3. Put the results where the tokens are.
    def put_in_place(results: list[Tensor]) -> Tensor:
        """Return ``[B, T, count]`` results, 0 where a token is not scored."""
        of_scored = torch.cat(results)
        everywhere = of_scored.new_zeros(labels.numel(), count).index_copy(0, index, of_scored)
        return everywhere.view(*labels.shape, count)

    return LikeliestTokens(put_in_place(token_ids), put_in_place(log_likelihood))


@torch.no_grad()
def greedy_targets(
    hidden_states: Tensor, head: Head, targets: Tensor, *, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each target, and whether no other token is likelier.

    The log-likelihoods equal those of `token_log_likelihood`, but the caller pairs hidden states with targets, so that
    one state may predict several (the choices of a question). The results carry no gradient.

    Args:
        hidden_states: ``[N, D]`` hidden states, already shifted: state ``i`` predicts target ``i``.
        head: Maps ``[n, D]`` hidden states to ``[n, V]`` logits.
        targets: ``[N]`` int64 token ids.
        chunk_size: Targets whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[N]`` log-likelihoods in nats, float32 or float64 for float64 logits, and ``[N]`` bool. If several tokens are
        equally likely, the one with the smallest id counts as the likeliest.

    Raises:
        ValueError: If shapes or dtypes are wrong, or on CPU if a target has no logit.

    Example:
        >>> head = torch.nn.Linear(1, 3, bias=False)
        >>> head.weight.data = torch.tensor([[0.0], [1.0], [0.0]])
        >>> greedy_targets(torch.zeros(2, 1), head, torch.tensor([0, 1]))[1]
        tensor([ True, False])
    """
    if hidden_states.ndim != 2 or targets.shape != hidden_states.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            "`hidden_states` must be [N, D] and `targets` [N] of int64,"
            f" got {list(hidden_states.shape)}, {list(targets.shape)} and {targets.dtype}."
        )
    size = choose_chunk_size(hidden_states, chunk_size)
    log_likelihood = []
    likeliest = []
    for chunk, tokens in zip(hidden_states.split(size), targets.split(size), strict=True):
        logits = wide_logits(chunk, head)
        check_targets(tokens, logits.shape[-1])
        likeliest.append(logits.argmax(-1) == tokens)  # `argmax` returns the smallest of equal ids
        log_likelihood.append(-F.cross_entropy(logits, tokens, reduction="none"))
    return torch.cat(log_likelihood), torch.cat(likeliest)


@torch.no_grad()
def with_greedy(
    hidden_states: Tensor, head: Head, labels: Tensor, *, places: Sequence[slice], scored: BoolArray | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each scored token, and the likeliest tokens in some places.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states; entry ``t`` has seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        places: For each sequence the tokens, from index 1 on, in whose places the likeliest are wanted.
        scored: As for `token_log_likelihood`.

    Returns:
        ``[B, T]`` as of `token_log_likelihood`, and ``[B, T]`` int64, 0 outside of ``places``. If several tokens are
        equally likely, the one with the smallest id counts as the likeliest. The results carry no gradient.
    """
    log_likelihood = token_log_likelihood(hidden_states, head, labels, scored=scored)
    greedy = torch.zeros_like(labels)
    size = choose_chunk_size(hidden_states)
    for row, place in enumerate(places):
        for first in range(place.start, place.stop, size):
            stop = min(first + size, place.stop)
            # The hidden state at t - 1 predicts token t.
            greedy[row, first:stop] = wide_logits(hidden_states[row, first - 1 : stop - 1], head).argmax(-1)
    return log_likelihood, greedy

"""From hidden states to the log-likelihood of each token, without ever holding the logits of a sequence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.linear_head import LinearHead, differentiate_softmax_, linear_log_likelihood

Head = Callable[[Tensor], Tensor] | LinearHead
"""Maps ``[N, D]`` hidden states to ``[N, V]`` logits. A module or function, not a weight: a LoRA adapter, a bias, a
soft cap or a logit scale belong to it. A `LinearHead` is the fastest and needs the least memory."""


def token_log_likelihood(hidden_states: Tensor, head: Head, labels: Tensor, *, chunk_size: int | None = None) -> Tensor:
    r"""Log-likelihood of each scored token given the tokens before it.

    .. math:: \ell_t = \log P(x_t \mid x_{<t})

    Equal to ``-F.cross_entropy(head(hidden_states)[:, :-1], labels[:, 1:])`` per token, but logits exist for
    ``chunk_size`` tokens at a time and only for scored ones; the backward pass recomputes them chunk by chunk.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        chunk_size: Scored tokens whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[B, T]`` log-likelihoods in nats, 0 where a token is not scored; float32, or float64 for float64 logits.
        Gradients flow to the hidden states and to what ``head`` holds.

    Raises:
        ValueError: If shapes or types disagree, ``chunk_size`` is not 1 or more, or column 0 is scored. On a
            CPU also if a label is beyond the head's logits; an accelerator would have to be waited for.

    Example:
        >>> hidden_states, head = torch.zeros(1, 3, 4), torch.nn.Linear(4, 2, bias=False)
        >>> token_log_likelihood(hidden_states, head, torch.tensor([[IGNORE_INDEX, 0, 1]])).exp()
        tensor([[1.0000, 0.5000, 0.5000]], grad_fn=<ExpBackward0>)
    """
    check_chunk_size(chunk_size)
    rows, targets, scored = scored_tokens(hidden_states, labels)
    chunk_size = chunk_size or default_chunk_size(hidden_states)
    if isinstance(head, LinearHead):
        check_targets(targets, len(head.weight))
        found = linear_log_likelihood(rows, head, targets, chunk_size=chunk_size)
    else:
        # `split`, not slices: the gradient of each slice would be as long as the whole.
        size = min(chunk_size, max(1, len(targets)))
        chunks = zip(rows.split(size), targets.split(size), strict=True)
        found = torch.cat([_chunk_log_likelihood(*chunk, head) for chunk in chunks])
    return found.new_zeros(labels.shape).masked_scatter(scored, found)


def _chunk_log_likelihood(rows: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Score a chunk by a head that may be anything; with gradient, its logits are recomputed in the backward pass."""

    def forward(rows: Tensor) -> Tensor:
        logits = head(rows)
        check_targets(targets, logits.shape[-1])
        result: Tensor = _TargetLogLikelihood.apply(logits, targets)
        return result

    # `checkpoint` restores the random state, for heads with dropout in their adapters.
    return checkpoint(forward, rows, use_reentrant=False) if torch.is_grad_enabled() else forward(rows)


class _TargetLogLikelihood(torch.autograd.Function):
    """``[n]`` log-likelihoods of targets from ``[n, V]`` logits; `F.cross_entropy` holds a second chunk of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = wide.logsumexp(-1)
        ctx.save_for_backward(logits, targets, total)
        return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, targets, total = ctx.saved_tensors
        grad = logits.to(total.dtype, copy=True)
        index = targets.unsqueeze(-1)
        differentiate_softmax_(grad, index, torch.ones_like(index, dtype=torch.bool), total, upstream)
        return grad.to(logits.dtype), None


def default_chunk_size(hidden_states: Tensor) -> int:
    """Return enough rows for fast matrix products, few enough that their logits take little memory."""
    return 512 if hidden_states.device.type == "cpu" else 2048


def scored_tokens(hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``[N, D]`` hidden states that predict scored tokens, their ``[N]`` ids and ``[B, T]`` where they are.

    Raises:
        ValueError: If shapes or types disagree, or column 0 is scored.
    """
    if hidden_states.ndim != 3 or hidden_states.shape[:2] != labels.shape:
        raise ValueError(
            "`hidden_states` must be [B, T, D] and `labels` [B, T],"
            f" got {list(hidden_states.shape)} and {list(labels.shape)}."
        )
    if labels.dtype != torch.int64 or not hidden_states.is_floating_point():
        raise ValueError(
            "`hidden_states` must be of floating point and `labels` int64,"
            f" got {hidden_states.dtype} and {labels.dtype}."
        )
    scored = labels.ne(IGNORE_INDEX)
    if scored[:, :1].any():
        row = int(scored[:, 0].nonzero()[0])
        raise ValueError(
            f"Token 0 has no context to be scored in: set `labels[:, 0]` to {IGNORE_INDEX}"
            f" (row {row} has {int(labels[row, 0])})."
        )
    # One synchronization with the accelerator for all tokens: their number.
    index = scored.flatten().nonzero().squeeze(-1)
    # The one-token shift of the whole project: position t - 1 predicts token t.
    return hidden_states.flatten(0, 1).index_select(0, index - 1), labels.flatten().index_select(0, index), scored


def check_targets(targets: Tensor, logits: int) -> None:
    """Raise a ``ValueError`` for tokens without a logit, where the check need not wait for an accelerator."""
    if targets.device.type != "cpu" or len(targets) == 0:
        return
    smallest, largest = targets.min(), targets.max()
    if smallest < 0 or largest >= logits:
        wrong = int(smallest if smallest < 0 else largest)
        raise ValueError(
            f"Label {wrong} is none of the {logits} tokens that the head knows (0 to {logits - 1}), nor {IGNORE_INDEX},"
            " which says that a token is not scored."
        )


def check_chunk_size(chunk_size: int | None) -> None:
    """Raise a ``ValueError`` for a chunk without tokens."""
    if chunk_size is not None:
        check_count("`chunk_size`", chunk_size)

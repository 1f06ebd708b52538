"""Log-likelihood of each token from hidden states, without ever holding the logits of a whole sequence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lightning_modules.batch import IGNORE_INDEX, BoolArray, send
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.linear_head import LinearHead, differentiate_softmax_, linear_log_likelihood

Head = Callable[[Tensor], Tensor] | LinearHead
"""Maps ``[N, D]`` hidden states to ``[N, V]`` logits. It is a module or function, not a weight, because it includes any
LoRA adapter, bias, soft cap or logit scale. A `LinearHead` is the fastest and needs the least memory."""


def token_log_likelihood(
    hidden_states: Tensor, head: Head, labels: Tensor, *, scored: BoolArray | None = None, chunk_size: int | None = None
) -> Tensor:
    r"""Compute the log-likelihood of each scored token given the tokens before it.

    .. math:: \ell_t = \log P(x_t \mid x_{<t})

    Equal to ``-F.cross_entropy(head(hidden_states)[:, :-1], labels[:, 1:])`` per token, but logits exist for
    ``chunk_size`` tokens at a time and only for scored ones; the backward pass recomputes them chunk by chunk.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states; entry ``t`` has seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        scored: ``[B, T]``, whether ``labels`` are scored; without it, the CPU waits for labels on an accelerator.
        chunk_size: Scored tokens whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        ``[B, T]`` log-likelihoods in nats, 0 where a token is not scored; float32, or float64 for float64 logits.
        Gradients flow to the hidden states and to the parameters of ``head``.

    Raises:
        ValueError: If shapes or dtypes are wrong, ``chunk_size`` is below 1, or column 0 is scored. On CPU also if a
            label has no logit; on an accelerator, where this check would have to wait, its log-likelihood is NaN, or
            torch stops the process.

    Example:
        >>> hidden_states, head = torch.zeros(1, 3, 4), torch.nn.Linear(4, 2, bias=False)
        >>> token_log_likelihood(hidden_states, head, torch.tensor([[IGNORE_INDEX, 0, 1]])).exp()
        tensor([[1.0000, 0.5000, 0.5000]], grad_fn=<ExpBackward0>)
    """
    # 1. Select the hidden states that predict a scored token.
    predicting, targets, index = select_scored(hidden_states, labels, scored)
    # 2. Score their targets chunk by chunk.
    chunk_size = choose_chunk_size(hidden_states, chunk_size)
    if isinstance(head, LinearHead):
        check_targets(targets, len(head.weight))
        of_scored = linear_log_likelihood(predicting, head, targets, chunk_size=chunk_size)
    else:
        # `split`, not slices: the gradient of each slice would be as large as the whole tensor.
        size = min(chunk_size, max(1, len(targets)))
        chunks = zip(predicting.split(size), targets.split(size), strict=True)
        of_scored = torch.cat([_score_chunk(*chunk, head) for chunk in chunks])
    # 3. Put the results where the tokens are; the other entries are 0.
    result = of_scored.new_zeros(labels.numel()).index_copy(0, index, of_scored)
    return result.view(labels.shape).clone()  # FSDP2 warns of a module that returns a view


def _score_chunk(hidden_states: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Score a chunk with any kind of head; the backward pass recomputes its logits."""

    def forward(hidden_states: Tensor) -> Tensor:
        logits = head(hidden_states)
        check_targets(targets, logits.shape[-1])
        result: Tensor = _TargetLogLikelihood.apply(logits, targets)
        return result

    if not torch.is_grad_enabled():
        return forward(hidden_states)
    # Without this, the logits of all chunks would be kept. It restores the random state, for heads with dropout.
    return checkpoint(forward, hidden_states, use_reentrant=False)


class _TargetLogLikelihood(torch.autograd.Function):
    """``[n]`` log-likelihoods of targets from ``[n, V]`` logits; `F.cross_entropy` would keep two copies of these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        # log softmax(z)[target] = z[target] - log sum exp z, in float32: in bfloat16 a logit of 20 is off by 0.06.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_sum_exp = wide.logsumexp(-1)
        ctx.save_for_backward(logits, targets, log_sum_exp)
        return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_sum_exp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sum_exp = ctx.saved_tensors
        grad_logits = logits.to(log_sum_exp.dtype, copy=True)  # a copy, because it becomes its gradient in place
        index = targets.unsqueeze(-1)
        differentiate_softmax_(grad_logits, index, torch.ones_like(index, dtype=torch.bool), log_sum_exp, grad_output)
        return grad_logits.to(logits.dtype), None


def choose_chunk_size(hidden_states: Tensor, chunk_size: int | None = None) -> int:
    """Return the given chunk size, or one with fast matrix products and logits that take little memory."""
    if chunk_size is not None:
        check_count("`chunk_size`", chunk_size)
        return chunk_size
    # With a vocabulary of 128k tokens, 2048 float32 rows of logits would take 1 GiB; `LinearHead` has a tile of them.
    return 512 if hidden_states.device.type == "cpu" else 2048


def select_scored(hidden_states: Tensor, labels: Tensor, scored: BoolArray | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``[N, D]`` hidden states that predict scored tokens, their ``[N]`` token ids and indices in ``B * T``.

    Raises:
        ValueError: If shapes or dtypes are wrong, or column 0 is scored.
    """
    shapes = [list(values.shape) for values in (hidden_states, labels, scored) if values is not None]
    if hidden_states.ndim != 3 or any(shape != shapes[0][:2] for shape in shapes[1:]):
        raise ValueError(
            f"`hidden_states` must be [B, T, D], `labels` and `scored` [B, T], got {' and '.join(map(str, shapes))}."
            " Call `with_scored` on a batch that you change."
        )
    if labels.dtype != torch.int64 or not hidden_states.is_floating_point():
        raise ValueError(
            f"`hidden_states` must be floating point and `labels` int64, got {hidden_states.dtype} and {labels.dtype}."
        )
    # Their number decides the shapes, so the CPU must know it: from the caller, or by waiting for the labels.
    if scored is None:
        is_scored = labels.ne(IGNORE_INDEX).cpu()
    else:
        is_scored = torch.from_numpy(scored)
        agrees = labels.ne(IGNORE_INDEX).eq(send(is_scored, labels.device)).all()
        # An accelerator checks it later, so that the CPU does not wait.
        torch._assert_async(agrees, "`scored` does not agree with `labels`: call `with_scored` after changing labels.")
    if is_scored[:, :1].any():
        row = int(is_scored[:, 0].nonzero()[0])
        raise ValueError(
            f"The first token has no context and cannot be scored: set `labels[:, 0]` to {IGNORE_INDEX}"
            f" (row {row} has {int(labels[row, 0])})."
        )
    index = send(is_scored.flatten().nonzero().squeeze(-1), labels.device)
    # The only one-token shift in the project: the hidden state at t - 1 predicts token t.
    return hidden_states.flatten(0, 1).index_select(0, index - 1), labels.flatten().index_select(0, index), index


def check_targets(targets: Tensor, vocabulary_size: int) -> None:
    """Raise a ``ValueError`` for targets without a logit. Only on CPU: the check would wait for an accelerator."""
    if targets.device.type != "cpu" or len(targets) == 0:
        return
    smallest = targets.min()
    largest = targets.max()
    if smallest < 0 or largest >= vocabulary_size:
        wrong = int(smallest if smallest < 0 else largest)
        raise ValueError(
            f"Label {wrong} is out of range: it must be a token id from 0 to {vocabulary_size - 1}, or {IGNORE_INDEX}"
            " for a token that is not scored."
        )

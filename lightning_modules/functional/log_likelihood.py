"""From hidden states to the log-likelihood of each token, without ever holding the logits of a sequence."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.linear_head import LinearHead, log_sum_exp_and_softmax, tiled_log_likelihood

Head = Callable[[Tensor], Tensor] | LinearHead
"""Maps ``[N, D]`` hidden states to ``[N, V]`` logits. A module or function, not a weight: a LoRA adapter, a bias, a
soft cap or a logit scale belong to it. Its last operation must not need its own result for its gradient (as tanh and
softmax do): in training the logits are overwritten. A `LinearHead` is the fastest."""


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
        ValueError: If shapes or types disagree, ``chunk_size`` is no integer of 1 or more, or column 0 is scored. On a
            CPU also if a label is beyond the head's logits; an accelerator would have to be waited for.

    Example:
        >>> hidden_states, head = torch.zeros(1, 3, 4), torch.nn.Linear(4, 2, bias=False)
        >>> token_log_likelihood(hidden_states, head, torch.tensor([[IGNORE_INDEX, 0, 1]])).exp()
        tensor([[1.0000, 0.5000, 0.5000]], grad_fn=<ExpBackward0>)
    """
    check_chunk_size(chunk_size)
    predictors, targets, scored = scored_tokens(hidden_states, labels)
    chunk_size = chunk_size or default_chunk_size(hidden_states)
    chunks = [
        _chunk_log_likelihood(predictors[start : start + chunk_size], head, targets[start : start + chunk_size])
        for start in range(0, max(targets.numel(), 1), chunk_size)
    ]
    scored_log_likelihood = torch.cat(chunks)
    log_likelihood = scored_log_likelihood.new_zeros(labels.shape)
    return log_likelihood.masked_scatter(scored, scored_log_likelihood)


def _chunk_log_likelihood(predictors: Tensor, head: Head, targets: Tensor) -> Tensor:
    def forward(predictors: Tensor) -> Tensor:
        logits = head(predictors)
        check_targets(targets, logits.shape[-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -F.cross_entropy(logits, targets, reduction="none")

    if torch.is_grad_enabled():
        return checkpoint(forward, predictors, use_reentrant=False)
    if isinstance(head, LinearHead) and len(targets):
        check_targets(targets, len(head.weight))
        return tiled_log_likelihood(predictors, head, targets)
    logits = head(predictors)
    blocks = [log_likelihood for _, _, log_likelihood in softmax_blocks(logits, targets)]
    return torch.cat(blocks) if blocks else logits.new_zeros(0, dtype=torch.promote_types(logits.dtype, torch.float32))


def softmax_blocks(logits: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Softmax of a few rows at a time: few enough to stay in a processor's cache, and no second chunk of logits.

    Args:
        logits: ``[n, V]``, without gradient, of which nobody needs the values any more.
        targets: ``[n]`` int64.

    Yields:
        Which rows, their ``[rows, V]`` probabilities and ``[rows]`` log-likelihoods in nats; float32, or float64 for
        float64 logits.
    """
    check_targets(targets, logits.shape[-1])
    elements = 2**21 if logits.device.type == "cpu" else 2**26
    size = max(1, elements // logits.shape[-1])
    for start in range(0, len(logits), size):
        rows = slice(start, min(start + size, len(logits)))
        block = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
        target = block.gather(-1, targets[rows, None])
        total = log_sum_exp_and_softmax(block)
        yield rows, block, (target - total).squeeze(-1)


def default_chunk_size(hidden_states: Tensor) -> int:
    """Enough rows for fast matrix products, few enough that their logits take little memory."""
    return 512 if hidden_states.device.type == "cpu" else 2048


def scored_tokens(hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What predicts each scored token, and where these tokens are.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.

    Returns:
        ``[N, D]`` hidden states, ``[N]`` token ids, and ``[B, T]`` bool with N times True.

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
    # One look at the accelerator for all tokens: how many there are.
    index = scored.flatten().nonzero().squeeze(-1)
    # The one-token shift of the whole project: what stands at t - 1 predicts token t.
    return hidden_states.flatten(0, 1).index_select(0, index - 1), labels.flatten().index_select(0, index), scored


def check_targets(targets: Tensor, logits: int) -> None:
    """Raise a ``ValueError`` for tokens that have no logit, where one need not wait for an accelerator to know."""
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

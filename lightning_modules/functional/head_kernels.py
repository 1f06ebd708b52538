"""The log-likelihoods of a linear head by kernels of torch, Liger or Cut Cross Entropy, instead of our own.

Our own chunks (`token_log_likelihood`, `fused_long_cross_entropy`) compute every head, on every device. These take
over the part of a training step that forms gradients, if a user asks for them and `check_kernel` finds them right.
"""

import importlib.metadata
import re
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.fused_long_cross_entropy import Weighing, WeightedLoss, token_weights
from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.functional.log_likelihood import default_chunk_size, scored_tokens
from lightning_modules.functional.long_cross_entropy import long_cross_entropy

HeadKernel = Literal["chunked", "torch", "liger", "cce"]
"""``chunked`` is our own; ``torch`` is `torch.nn.functional.linear_cross_entropy`, ``liger`` the fused linear cross
entropy of liger-kernel and ``cce`` that of cut-cross-entropy (https://arxiv.org/abs/2411.09009), both in Triton."""

REQUIREMENTS = {"torch": ("torch", "2.13"), "liger": ("liger-kernel", "0.8.5"), "cce": ("cut-cross-entropy", "25")}
"""Package and oldest version that was tried, by kernel. Liger up to 0.8.1 multiplies the gradient of every token by the
first token's upstream gradient."""

LARGEST_ERROR = 0.03
"""Of a kernel's results, relative to exact ones: bfloat16 rounds by 0.01, and a wrong formula is off by far more."""


def kernel_log_likelihood(kernel: HeadKernel, predictors: Tensor, head: LinearHead, targets: Tensor) -> Tensor:
    r"""Log-likelihood of each target, by a kernel that never holds all logits.

    .. math:: \ell_i = \log \mathrm{softmax}\big(\mathrm{cap}(s (W h_i + b))\big)_{y_i}

    Under autocast the operands are cast as `F.linear` casts them, for the kernels are no operations it knows.

    Args:
        kernel: Any but ``chunked``, which computes heads that are not linear, too.
        predictors: ``[N, D]`` hidden states; N may be 0.
        head: What makes logits of them.
        targets: ``[N]`` int64, all of them scored.

    Returns:
        ``[N]`` log-likelihoods in nats, differentiable once in ``predictors`` and in what ``head`` holds; float32, or
        float64 for float64 operands under ``torch``. With operands in half precision the logits are rounded to it by
        ``liger``, and the log-likelihoods by ``torch``.

    Raises:
        ValueError: If the kernel cannot compute this head.
    """
    _check_head(kernel, head)
    operands = head.operands(predictors)
    if targets.numel() == 0:  # which some kernels divide by; the gradients are zeros, not None
        loss = F.linear(*operands).sum(-1)
    else:
        with torch.autocast(predictors.device.type, enabled=False):  # or it rounds what a kernel keeps in float32
            loss = _KERNELS[kernel](*operands, head.soft_cap, targets)
    return -loss.to(torch.promote_types(loss.dtype, torch.float32))


def kernel_token_log_likelihood(kernel: HeadKernel, hidden_states: Tensor, head: LinearHead, labels: Tensor) -> Tensor:
    """The same as `token_log_likelihood`, by a kernel.

    Args:
        kernel: Any but ``chunked``.
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        head: What makes logits of them.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.

    Returns:
        ``[B, T]`` log-likelihoods in nats, 0 where a token is not scored; of the type of `kernel_log_likelihood`.

    Raises:
        ValueError: If shapes disagree, column 0 is scored, or the kernel cannot compute this head.
    """
    predictors, targets, scored = scored_tokens(hidden_states, labels)
    log_likelihood = kernel_log_likelihood(kernel, predictors, head, targets)
    return log_likelihood.new_zeros(labels.shape).masked_scatter(scored, log_likelihood)


def kernel_long_cross_entropy(
    kernel: HeadKernel, hidden_states: Tensor, head: LinearHead, labels: Tensor, weighing: Weighing
) -> WeightedLoss:
    """The same as `fused_long_cross_entropy`, by a kernel, which computes the logits again in the backward pass.

    Args:
        kernel: Any but ``chunked``.
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        head: What makes logits of them.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        weighing: How a token's weight follows from its log-likelihoods.

    Returns:
        The loss, and what it was made of.

    Raises:
        ValueError: If shapes disagree, column 0 is scored, or the kernel cannot compute this head.
    """
    log_likelihood = kernel_token_log_likelihood(kernel, hidden_states, head, labels)
    known = log_likelihood.detach()
    scored = labels.ne(IGNORE_INDEX)
    with torch.no_grad():
        weight = torch.zeros_like(known).masked_scatter(
            scored, token_weights(known[scored], weighing, scored).to(known)
        )
    return WeightedLoss(long_cross_entropy(log_likelihood, weight, labels), known, weight)


def check_installed(kernel: HeadKernel) -> None:
    """Raise a ``ValueError`` for a kernel that is unknown, or whose package is missing or too old."""
    if kernel not in get_args(HeadKernel):
        raise ValueError(f"`head_kernel` must be one of {', '.join(get_args(HeadKernel))}, got '{kernel}'.")
    if kernel == "chunked":
        return
    package, oldest = REQUIREMENTS[kernel]
    found = _version(package)
    if found is None or _numbers(found) < _numbers(oldest) or (kernel == "torch" and not _torch_has_it()):
        raise ValueError(
            f"`head_kernel: {kernel}` needs {package} >= {oldest} and finds {found or 'none'}:"
            f" `pip install '{package}>={oldest}'`, or set `head_kernel: chunked`."
        )


def check_kernel(kernel: HeadKernel, head: LinearHead) -> None:
    """Try a kernel on a small random problem and compare with float64, gradients of weighted tokens included.

    The problem has the device, the type and the transforms of ``head``, more rows than a chunk, and another upstream
    gradient for each token: a kernel that takes the tokens of a batch for equals trains plain cross entropy or worse,
    and says nothing.

    Args:
        kernel: The one to be used.
        head: The one it is to be used for; its values are not looked at.

    Raises:
        ValueError: If the package is missing or too old, if the kernel cannot compute this head or does not run here,
            or if its log-likelihoods or gradients are wrong.
    """
    check_installed(kernel)
    if kernel == "chunked":
        return
    _check_head(kernel, head)
    package = REQUIREMENTS[kernel][0]
    place = f"`head_kernel: {kernel}` ({package} {_version(package)}) on {head.weight.device.type}, {head.weight.dtype}"
    try:
        errors = _errors(kernel, head)
    except Exception as error:
        raise ValueError(f"{place}, fails: {error!r}. Set `head_kernel: chunked`.") from error
    if wrong := {name: error for name, error in errors.items() if not error <= LARGEST_ERROR}:
        parts = ", ".join(f"{name} by {error:.0%}" for name, error in wrong.items())
        raise ValueError(
            f"{place}, is wrong on a small problem whose tokens have weights: {parts}, where {LARGEST_ERROR:.0%} would"
            " be rounding. Set `head_kernel: chunked`, which is exact."
        )


def _check_head(kernel: HeadKernel, head: LinearHead) -> None:
    unfit = {"torch": ("soft cap", head.soft_cap), "cce": ("bias", head.bias)}
    name, part = unfit.get(kernel, ("", None))
    if part is not None:
        raise ValueError(f"`head_kernel: {kernel}` knows no {name}, which this model's head has: set it to `chunked`.")


def _torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, targets: Tensor) -> Tensor:
    # Without options all logits are held, and the size it chooses by itself is a few rows for small hidden states.
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=default_chunk_size(hidden))
    return F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction="none", options=options)


def _liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    # By default the weight's gradient is summed over chunks in the weight's type, so that in bfloat16 it stops growing.
    return liger_fused_linear_cross_entropy(
        hidden, weight, targets, bias=bias, softcap=soft_cap, reduction="none", accum_dtype=torch.float32
    )


def _cce(hidden: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    # By default it leaves small gradients out.
    return linear_cross_entropy(hidden, weight, targets, softcap=soft_cap, reduction="none", filter_eps=None)


_KERNELS: dict[str, Callable[..., Tensor]] = {"torch": _torch, "liger": _liger, "cce": _cce}


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _torch_has_it() -> bool:
    return callable(getattr(F, "linear_cross_entropy", None))


def _errors(kernel: HeadKernel, head: LinearHead) -> dict[str, float]:
    """Relative errors, by Euclidean norm, of what a kernel makes of a random problem."""
    names = ["log-likelihoods", "gradient of the hidden states", "gradient of the weight", "gradient of the bias"]
    soft_cap = None if head.soft_cap is None else 2.0  # a large one hardly changes the logits of a small problem
    with torch.inference_mode(False):  # a check at the start of validation finds itself inside one
        operands, targets, upstream = _problem(head)

        def by_kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            kernel_head = LinearHead(weight, bias, head.scale, soft_cap)
            return kernel_log_likelihood(kernel, hidden, kernel_head, targets.to(hidden.device))

        def plainly(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            logits = head.scale * F.linear(hidden, weight, bias)
            logits = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
            return -F.cross_entropy(logits, targets, reduction="none")

        actual = _solve(by_kernel, operands, upstream)
        expected = _solve(plainly, [operand.cpu().double() for operand in operands], upstream)
        pairs = zip(names, actual, expected, strict=False)
        return {name: float((a.cpu().double() - e).norm() / e.norm()) for name, a, e in pairs}


def _problem(head: LinearHead) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states, weight and maybe bias as ``head`` has them, targets and upstream gradients; logits vary by 2."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = default_chunk_size(head.weight) + 65, 64, 500
    hidden = torch.randn(rows, width, generator=generator) * 2 / head.scale
    operands = [hidden, torch.randn(vocabulary, width, generator=generator) / width**0.5]
    if head.bias is not None:
        operands.append(torch.randn(vocabulary, generator=generator) / head.scale)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    upstream = 5 * torch.rand(rows, generator=generator)
    device, dtype = head.weight.device, head.weight.dtype
    return [operand.to(device, dtype) for operand in operands], targets, upstream


def _solve(function: Callable[..., Tensor], operands: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Values of a function and gradients of its operands."""
    operands = [operand.detach().requires_grad_() for operand in operands]
    with torch.enable_grad():
        values = function(*operands)
        gradients = torch.autograd.grad(values, operands, upstream.to(values))
    return [values.detach(), *gradients]

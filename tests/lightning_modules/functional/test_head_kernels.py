import importlib.metadata
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import Weighing, fused_long_cross_entropy, soft_influence, token_log_likelihood
from lightning_modules.functional import head_kernels as module
from lightning_modules.functional.head_kernels import (
    LinearHead,
    check_kernel,
    kernel_log_likelihood,
    kernel_long_cross_entropy,
    kernel_token_log_likelihood,
)

ROWS, WIDTH, VOCABULARY = 37, 8, 29

has_torch_kernel = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch < 2.13")


def problem(rows=ROWS, *, bias=False, scale=1.0, soft_cap=None, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in [(rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    )
    targets = torch.randint(VOCABULARY, (rows,), generator=generator).to(device)
    upstream = 5 * torch.rand(rows, generator=generator).to(device)
    return hidden, LinearHead(weight, offset if bias else None, scale, soft_cap), targets, upstream


def exactly(hidden, head, targets):
    """Full logits in float64."""
    weight, bias = head.weight.double(), None if head.bias is None else head.bias.double()
    logits = head.scale * F.linear(hidden.double(), weight, bias)
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)


def gradients(log_likelihood, upstream, hidden, head):
    operands = [hidden, head.weight] + [head.bias] * (head.bias is not None)
    return torch.autograd.grad(log_likelihood, operands, upstream.to(log_likelihood))


def assert_right(kernel, hidden, head, targets, upstream, **tolerance):
    actual, expected = kernel_log_likelihood(kernel, hidden, head, targets), exactly(hidden, head, targets)
    assert actual.dtype == torch.promote_types(hidden.dtype, torch.float32)
    torch.testing.assert_close(actual, expected.to(actual.dtype), **tolerance)
    pairs = zip(*(gradients(values, upstream, hidden, head) for values in (actual, expected)), strict=True)
    for one, other in pairs:
        assert one.dtype == hidden.dtype
        torch.testing.assert_close(one, other, **tolerance)


# --------------------------------------------------------------------------------------------------- the torch kernel


@has_torch_kernel
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"scale": 0.25}, {"bias": True, "scale": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_matches_full_logits_in_float64(chunk, options, dtype, monkeypatch):
    monkeypatch.setattr(module, "default_chunk_size", lambda _: chunk)
    # Gradients are sums of up to 37 terms of about 10: float32 rounds these by 1e-5 or so, as the CPU adds them up.
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {}
    assert_right("torch", *problem(**options, dtype=dtype), **tolerance)


@has_torch_kernel
def test_torch_in_bfloat16():
    assert_right("torch", *problem(bias=True, scale=0.5, dtype=torch.bfloat16), atol=0.05, rtol=0.02)


@has_torch_kernel
def test_torch_casts_under_autocast_as_a_linear_layer_does():
    hidden, head, targets, upstream = problem(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = kernel_log_likelihood("torch", hidden.bfloat16(), head, targets)  # as it comes out of a decoder
        logits = F.linear(hidden, head.weight, head.bias)
    expected = logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(actual, expected, atol=0.04, rtol=0.01)
    for one, other in zip(*(gradients(v, upstream, hidden, head) for v in (actual, expected)), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.02 * other.abs().max().item(), rtol=0.02)


@has_torch_kernel
def test_torch_holds_a_chunk_of_logits_at_most(monkeypatch):
    monkeypatch.setattr(module, "default_chunk_size", lambda _: 4)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in (out if isinstance(out, tuple) else [out]) if torch.is_tensor(part))
            return out

    hidden, head, targets, upstream = problem(200)
    with Watch():
        gradients(kernel_log_likelihood("torch", hidden, head, targets), upstream, hidden, head)
    assert 0 < max(sizes) < 200 * VOCABULARY / 3


@pytest.mark.parametrize("kernel", ["torch", "liger", "cce"])
def test_no_rows_give_no_values_and_gradients_of_zero(kernel):
    hidden, head, targets, upstream = problem(0, bias=kernel != "cce")
    log_likelihood = kernel_log_likelihood(kernel, hidden, head, targets)
    assert log_likelihood.shape == (0,)
    for gradient in gradients(log_likelihood, upstream, hidden, head):
        assert (gradient == 0).all()


@has_torch_kernel
@pytest.mark.parametrize("with_short", [True, False])
def test_rows_of_tokens_and_their_loss_equal_our_own(with_short):
    hidden, head, targets, _ = problem(2 * 18, scale=0.5)
    rows, labels = hidden.view(2, 18, WIDTH), targets.view(2, 18).clone()
    labels[:, 0] = labels[0, 5] = IGNORE_INDEX
    labels[1, 9:] = IGNORE_INDEX
    weighing = Weighing(soft_influence, -4 * torch.rand(2, 18), torch.rand(2, 18) > 0.4)
    weighing = weighing if with_short else Weighing(lambda long, short: torch.exp(long + short))

    def own(hidden):
        return 0.5 * F.linear(hidden, head.weight)

    torch.testing.assert_close(
        kernel_token_log_likelihood("torch", rows, head, labels), token_log_likelihood(rows, own, labels)
    )
    actual = kernel_long_cross_entropy("torch", rows, head, labels, weighing)
    expected = fused_long_cross_entropy(rows, own, [head.weight], labels, weighing)
    torch.testing.assert_close(actual, expected)
    assert not actual.log_likelihood.requires_grad
    assert not actual.influence.requires_grad
    torch.testing.assert_close(*(torch.autograd.grad(r.loss, [hidden, head.weight]) for r in (actual, expected)))


# --------------------------------------------------------------------------------------- the packages, by stand-ins


def stand_in(monkeypatch, kernel, function, version):
    """A package whose one function records what it is given."""
    path, name, package = {
        "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy", "liger-kernel"),
        "cce": ("cut_cross_entropy", "linear_cross_entropy", "cut-cross-entropy"),
    }[kernel]
    calls = []

    def recorded(*args, **kwargs):
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    parts = path.split(".")
    for depth in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: depth + 1]), ModuleType(parts[depth]))
    setattr(sys.modules[path], name, recorded)
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else original(name))
    return calls


def right_loss(hidden, weight, targets, bias=None, softcap=None, **_):
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.float(), targets, reduction="none")


class FirstTokenCounts(torch.autograd.Function):
    """Right values; in the backward pass the first token's upstream gradient stands for all, as in Liger 0.8.1."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream[0].expand_as(upstream)


ACCEPTED = {
    "liger": {"bias", "softcap", "reduction", "accum_dtype"},
    "cce": {"softcap", "reduction", "filter_eps"},
}


@pytest.mark.parametrize(
    ("kernel", "options", "passed"),
    [
        ("liger", {"bias": True, "soft_cap": 30.0}, {"softcap": 30.0, "accum_dtype": torch.float32}),
        ("liger", {}, {"bias": None, "softcap": None, "accum_dtype": torch.float32}),
        ("cce", {"soft_cap": 30.0}, {"softcap": 30.0, "filter_eps": None}),
        ("cce", {"scale": 0.125}, {"softcap": None, "filter_eps": None}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_package_passes_and_gets_what_it_wants(kernel, options, passed, dtype, monkeypatch):
    calls = stand_in(monkeypatch, kernel, right_loss, "0.8.10" if kernel == "liger" else "25.1.1")
    hidden, head, targets, upstream = problem(**options, dtype=dtype)
    check_kernel(kernel, head)
    assert calls
    calls.clear()
    tolerance = {} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    assert_right(kernel, hidden, head, targets, upstream, **tolerance)
    (arguments, keywords) = calls[0]
    for actual, expected in zip(arguments, (hidden * head.scale, head.weight, targets), strict=True):
        assert torch.equal(actual, expected)
    assert set(keywords) == ACCEPTED[kernel]
    assert keywords["reduction"] == "none"
    assert {name: keywords[name] for name in passed} == passed
    if kernel == "liger":
        assert keywords["bias"] is head.bias


def test_a_package_gets_operands_of_one_type_under_autocast_and_is_left_alone_by_it(monkeypatch):
    def loss_without_autocast(*args, **kwargs):
        assert not torch.is_autocast_enabled("cpu")
        return right_loss(*args, **kwargs)

    calls = stand_in(monkeypatch, "liger", loss_without_autocast, "0.8.5")
    hidden, head, targets, upstream = problem(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        log_likelihood = kernel_log_likelihood("liger", hidden, head, targets)
    ((hidden_given, weight_given, _), keywords) = calls[0]
    assert {part.dtype for part in (hidden_given, weight_given, keywords["bias"])} == {torch.bfloat16}
    for gradient in gradients(log_likelihood, upstream, hidden, head):
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize(("kernel", "bias"), [("liger", True), ("liger", False), ("cce", False)])
def test_a_package_that_takes_tokens_for_equals_is_refused(kernel, bias, monkeypatch):
    stand_in(monkeypatch, kernel, lambda *args, **kwargs: FirstTokenCounts.apply(right_loss(*args, **kwargs)), "25.1.1")
    _, head, *_ = problem(bias=bias)
    with pytest.raises(ValueError, match=r"hidden states by \d\d%, gradient of the weight by \d\d%.*exact") as caught:
        check_kernel(kernel, head)
    assert "log-likelihoods by" not in str(caught.value)


def wrong_values(*args, **kwargs):
    return right_loss(*args, **kwargs) * 1.1


def no_cap(*args, softcap=None, **kwargs):
    return right_loss(*args, **kwargs)


def no_bias(*args, bias=None, **kwargs):
    return right_loss(*args, bias=0 * bias, **kwargs)


def not_a_number(*args, **kwargs):
    return right_loss(*args, **kwargs) * float("nan")


@pytest.mark.parametrize("function", [wrong_values, no_cap, no_bias, not_a_number])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_mistakes_are_noticed(function, dtype, monkeypatch):
    stand_in(monkeypatch, "liger", function, "0.8.5")
    _, head, *_ = problem(bias=True, soft_cap=50.0, dtype=dtype)
    with pytest.raises(ValueError, match="log-likelihoods by"):
        check_kernel("liger", head)


def test_a_package_that_fails_here_is_refused(monkeypatch):
    def crash(*args, **kwargs):
        raise AssertionError("Backwards requires embeddings to be bf16 or fp16")

    stand_in(monkeypatch, "cce", crash, "25.1.1")
    with pytest.raises(ValueError, match=r"cut-cross-entropy 25\.1\.1\) on cpu, torch\.float32, fails.*bf16"):
        check_kernel("cce", problem()[1])


@pytest.mark.parametrize("version", ["0.8.4", "0.5.10"])
def test_a_package_that_is_too_old_is_refused_without_being_imported(version, monkeypatch):
    calls = stand_in(monkeypatch, "liger", right_loss, version)
    with pytest.raises(ValueError, match=rf"liger-kernel >= 0\.8\.5 and finds {version}: `pip install"):
        check_kernel("liger", problem()[1])
    assert not calls


@pytest.mark.parametrize(("kernel", "package"), [("liger", "liger-kernel"), ("cce", "cut-cross-entropy")])
def test_a_missing_package_is_named(kernel, package, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=rf"needs {package} >= .* finds none: `pip install '{package}>=.*chunked"):
        check_kernel(kernel, problem()[1])


def test_a_torch_without_the_function_is_refused(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(ValueError, match=r"torch >= 2\.13 and finds 2\.12\.1\+cu130: `pip install 'torch>=2\.13'`"):
        check_kernel("torch", problem()[1])


def test_unknown_kernels_and_unfit_heads_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="one of chunked, torch, liger, cce, got 'quack'"):
        check_kernel("quack", problem()[1])
    hidden, capped, targets, _ = problem(soft_cap=30.0)
    with pytest.raises(ValueError, match="`head_kernel: torch` knows no soft cap"):
        kernel_log_likelihood("torch", hidden, capped, targets)
    stand_in(monkeypatch, "cce", right_loss, "25.1.1")
    with pytest.raises(ValueError, match="`head_kernel: cce` knows no bias"):
        check_kernel("cce", problem(bias=True)[1])


@has_torch_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torch_passes_the_check_even_where_autograd_is_off(dtype):
    _, head, *_ = problem(bias=True, scale=0.0625, dtype=dtype)
    before = torch.get_rng_state()
    with torch.inference_mode():
        check_kernel("torch", head)
        check_kernel("chunked", head)
    with torch.autocast("cpu", torch.bfloat16):
        check_kernel("torch", head)
    assert torch.equal(torch.get_rng_state(), before)


# -------------------------------------------------------------------------------------------------- the real packages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("torch", {"bias": True, "scale": 0.5}),
        ("liger", {"bias": True, "soft_cap": 30.0}),
        ("liger", {"scale": 0.5}),
        ("cce", {"scale": 0.5, "soft_cap": 30.0}),
    ],
)
def test_on_a_gpu(kernel, options, dtype):
    if kernel != "torch":
        pytest.importorskip({"liger": "liger_kernel", "cce": "cut_cross_entropy"}[kernel])
    hidden, head, targets, upstream = problem(3000, **options, dtype=dtype, device="cuda")
    if kernel == "cce" and dtype == torch.float32:
        with pytest.raises(ValueError, match="fails"):
            check_kernel(kernel, head)
        return
    check_kernel(kernel, head)
    scale = max(1.0, *(g.abs().max().item() for g in gradients(exactly(hidden, head, targets), upstream, hidden, head)))
    tolerance = {"atol": 0.02 * scale, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-3, "rtol": 1e-3}
    assert_right(kernel, hidden, head, targets, upstream, **tolerance)

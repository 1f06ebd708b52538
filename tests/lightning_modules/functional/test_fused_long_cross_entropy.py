import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import (
    Weighing,
    fused_long_cross_entropy,
    long_cross_entropy,
    soft_influence,
    token_log_likelihood,
)
from lightning_modules.functional.linear_head import LinearHead

VOCABULARY = 29


class Capped(nn.Module):
    """A head with a bias, a soft cap and a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, VOCABULARY)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, hidden):
        return 4 * torch.tanh((self.linear(hidden) + self.up(self.down(hidden))) / 4)


class Named(nn.Linear):
    """A linear layer that is known to be one: the fused loss is given its `LinearHead`."""

    def __init__(self, bias=False, scale=1.0, soft_cap=None):
        super().__init__(8, VOCABULARY, bias=bias)
        self.scale, self.soft_cap = scale, soft_cap

    def forward(self, hidden):
        return self.linear_head()(hidden)

    def linear_head(self):
        return LinearHead(self.weight, self.bias, self.scale, self.soft_cap)


HEADS = {
    "linear": lambda: nn.Linear(8, VOCABULARY, bias=False),
    "capped": Capped,
    "frozen": lambda: nn.Linear(8, VOCABULARY, bias=False).requires_grad_(False),
    "named": Named,
    "named frozen": lambda: Named(bias=True).requires_grad_(False),
    "named scaled": lambda: Named(bias=True, scale=0.3),
    "named capped": lambda: Named(soft_cap=2.0, scale=3.0),
}


@pytest.fixture(params=HEADS)
def problem(request):
    torch.manual_seed(0)
    hidden = torch.randn(2, 17, 8, dtype=torch.float64, requires_grad=True)
    head = HEADS[request.param]().double()
    labels = torch.randint(VOCABULARY, (2, 17))
    labels[:, 0] = labels[0, 5] = IGNORE_INDEX
    labels[1, 9:] = IGNORE_INDEX
    short, differs = -4 * torch.rand(2, 17, dtype=torch.float64), torch.rand(2, 17) > 0.4
    return hidden, head, labels, Weighing(soft_influence, short, differs)


def fuse(hidden, head, *rest, **options):
    known = head.linear_head() if isinstance(head, Named) else head
    return fused_long_cross_entropy(hidden, known, head.parameters(), *rest, **options)


def unfused(hidden, head, labels, weighing):
    log_likelihood = token_log_likelihood(hidden, head, labels)
    short = torch.where(weighing.differs, weighing.short, log_likelihood.detach())
    influence = weighing.influence(log_likelihood, short)
    return long_cross_entropy(log_likelihood, influence, labels), log_likelihood, influence


def gradients(loss, hidden, head):
    return torch.autograd.grad(3 * loss, [hidden, *(p for p in head.parameters() if p.requires_grad)])


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 1000, None])
def test_equals_loss_of_log_likelihoods_in_value_and_gradient(problem, chunk_size):
    hidden, head, labels, weighing = problem
    fused = fuse(hidden, head, labels, weighing, chunk_size=chunk_size)
    loss, log_likelihood, influence = unfused(*problem)
    torch.testing.assert_close(fused.loss, loss)
    torch.testing.assert_close(fused.log_likelihood, log_likelihood.detach())
    torch.testing.assert_close(fused.influence, influence * labels.ne(IGNORE_INDEX))
    assert not fused.log_likelihood.requires_grad
    torch.testing.assert_close(gradients(fused.loss, hidden, head), gradients(loss, hidden, head))


def test_without_a_short_context(problem):
    hidden, head, labels, _ = problem
    fused = fuse(hidden, head, labels, Weighing(lambda long, _: long.exp()))
    log_likelihood = token_log_likelihood(hidden, head, labels)
    loss = long_cross_entropy(log_likelihood, log_likelihood.detach().exp(), labels)
    torch.testing.assert_close(gradients(fused.loss, hidden, head), gradients(loss, hidden, head))


def test_half_precision_sums_gradients_of_many_chunks_in_float32(problem):
    hidden, head, labels, weighing = problem
    expected = gradients(unfused(*problem)[0], hidden, head)
    half, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    fused = fuse(half, head, labels, weighing, chunk_size=1)
    assert fused.log_likelihood.dtype == torch.float32
    for actual, wanted in zip(gradients(fused.loss, half, head), expected, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), wanted, atol=0.03 * wanted.abs().max().item(), rtol=0.05)


def test_under_autocast(problem):
    hidden, head, labels, weighing = problem
    hidden, head = hidden.detach().float().requires_grad_(), head.float()
    with torch.autocast("cpu", torch.bfloat16):
        fused = fuse(hidden, head, labels, weighing, chunk_size=4)
        loss, *_ = unfused(hidden, head, labels, weighing)
        torch.testing.assert_close(fused.loss, loss.float(), atol=1e-3, rtol=1e-3)
        for actual, wanted in zip(gradients(fused.loss, hidden, head), gradients(loss, hidden, head), strict=True):
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual, wanted, atol=0.02 * wanted.abs().max().item(), rtol=0.02)


def test_nothing_scored(problem):
    hidden, head, labels, weighing = problem
    fused = fuse(hidden, head, torch.full_like(labels, IGNORE_INDEX), weighing)
    assert fused.loss == 0
    for gradient in gradients(fused.loss, hidden, head):
        assert (gradient == 0).all()


def test_logits_exist_once_and_a_chunk_at_a_time(problem):
    hidden, head, labels, weighing = problem
    products, sizes = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
                if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                    products.append(out.numel())
            return out

    with Watch():
        fused = fuse(hidden, head, labels, weighing, chunk_size=2)
        fused.loss.backward()
    assert max(sizes) < labels.numel() * VOCABULARY / 2
    if isinstance(head, nn.Linear):
        chunks = -(-int(labels.ne(IGNORE_INDEX).sum()) // 2)
        assert len(products) == chunks * (3 if head.weight.requires_grad else 2)


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_weights_of_drawn_windows_are_scaled_up_around_those_without_a_short_context(problem, share):
    hidden, head, labels, weighing = problem
    fused = fuse(hidden, head, labels, weighing._replace(share=share), chunk_size=4)
    loss, log_likelihood, influence = unfused(*problem)
    expected = torch.where(weighing.differs, 1 + (influence - 1) / share, 1.0) * labels.ne(IGNORE_INDEX)
    torch.testing.assert_close(fused.influence, expected)
    assert (expected < 0).any(), "an unhelpful context can cost more than a token's weight"
    loss = long_cross_entropy(log_likelihood, expected, labels)
    torch.testing.assert_close(gradients(fused.loss, hidden, head), gradients(loss, hidden, head))


def test_gradients_are_given_once(problem):
    hidden, head, labels, weighing = problem
    loss = fuse(hidden, head, labels, weighing).loss
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize("known", [True, False])
def test_float16_with_a_scaled_loss_loses_no_small_gradients(known):
    torch.manual_seed(0)
    vocabulary, tokens, scale = 2000, 6000, 2.0**16
    hidden, weight = torch.randn(1, tokens, 16), nn.Parameter(torch.randn(vocabulary, 16) * 0.2)
    labels = torch.randint(vocabulary, (1, tokens))
    labels[:, 0] = IGNORE_INDEX

    def solve(dtype, scale):
        inputs = hidden.to(dtype or torch.float32).requires_grad_()
        head = LinearHead(weight) if known else lambda rows: nn.functional.linear(rows, weight)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = fused_long_cross_entropy(inputs, head, [weight], labels, Weighing(soft_influence)).loss
        return [part.float() / scale for part in torch.autograd.grad(loss * scale, [inputs, weight])]

    for actual, expected in zip(solve(torch.float16, scale), solve(None, 1.0), strict=True):
        assert torch.isfinite(actual).all()
        assert (actual - expected).norm() / expected.norm() < 0.005


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(8, 4) * 0.1).bfloat16())
    hidden = (torch.ones(1, 4001, 4) + 0.1 * torch.randn(1, 4001, 4)).bfloat16()
    labels = torch.zeros(1, 4001, dtype=torch.int64)
    labels[:, 0] = IGNORE_INDEX
    exact = weight.detach().double().requires_grad_()
    reference = nn.functional.cross_entropy(hidden[0, :-1].double() @ exact.T, labels[0, 1:])
    (expected,) = torch.autograd.grad(reference, exact)
    for head in (LinearHead(weight), lambda rows: rows @ weight.T):
        fused = fused_long_cross_entropy(hidden, head, [weight], labels, Weighing(soft_influence), chunk_size=2)
        (actual,) = torch.autograd.grad(fused.loss, weight)
        assert (actual.double() - expected).norm() / expected.norm() < 0.01


def test_the_upstream_gradient_is_not_rounded_to_half_precision():
    hidden = torch.randn(1, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, 4, dtype=torch.bfloat16))
    labels = torch.tensor([[IGNORE_INDEX, 1, 2]])
    factor = 1.0 + 2.0**-9 + 2.0**-12  # bfloat16 makes it 1

    def solve(factor):
        loss = fused_long_cross_entropy(hidden, LinearHead(weight), [weight], labels, Weighing(soft_influence)).loss
        return torch.autograd.grad(loss * factor, [hidden, weight])

    for scaled, plain in zip(solve(256 * factor), solve(256.0), strict=True):
        assert not torch.equal(scaled, plain)

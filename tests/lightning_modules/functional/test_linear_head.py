import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import linear_head, token_log_likelihood
from lightning_modules.functional.linear_head import LinearHead, linear_log_likelihood
from tests.support import reference

pytestmark = pytest.mark.core

VOCABULARY = 57


def problem(dtype=torch.float64, bias=True, **transform):
    torch.manual_seed(0)
    hidden = torch.randn(2, 17, 8, dtype=dtype)
    layer = nn.Linear(8, VOCABULARY, bias=bias, dtype=dtype).requires_grad_(False)
    labels = torch.randint(VOCABULARY, (2, 17))
    labels[:, 0] = labels[1, 9:] = IGNORE_INDEX
    return hidden, LinearHead(layer.weight, layer.bias, **transform), labels


@pytest.fixture(params=[1, 7, 57, 10_000])
def tile(request, monkeypatch):
    """Tokens of the vocabulary in a tile, for chunks of 4 rows."""
    monkeypatch.setattr(linear_head, "TILE_ELEMENTS_CPU", 4 * request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", [{}, {"scale": 0.25}, {"soft_cap": 2.0}, {"scale": 3.0, "soft_cap": 2.0}])
def test_tiles_of_the_vocabulary_match_one_token_at_a_time(tile, bias, transform):
    hidden, head, labels = problem(bias=bias, **transform)
    with torch.no_grad():
        actual = token_log_likelihood(hidden, head, labels, chunk_size=4)
    torch.testing.assert_close(actual, reference.token_log_likelihood(hidden, head, labels))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", [{}, {"scale": 0.25}, {"scale": 3.0, "soft_cap": 2.0}])
@pytest.mark.parametrize("trained", [True, False])
def test_gradients_match_one_token_at_a_time(tile, bias, transform, trained):
    hidden, head, labels = problem(bias=bias, **transform)
    wanted = [hidden, *(part for part in (head.weight, head.bias) if trained and part is not None)]
    for part in wanted:
        part.requires_grad_()
    upstream = torch.randn(2, 17, dtype=torch.float64)
    log_likelihoods = (
        token_log_likelihood(hidden, head, labels, chunk_size=4),
        reference.token_log_likelihood(hidden, head, labels),
    )
    torch.testing.assert_close(*(torch.autograd.grad((each * upstream).sum(), wanted) for each in log_likelihoods))


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(8, 4) * 0.1).bfloat16())
    hidden = (torch.ones(1, 1001, 4) + 0.1 * torch.randn(1, 1001, 4)).bfloat16()
    labels = torch.zeros(1, 1001, dtype=torch.int64)
    labels[:, 0] = IGNORE_INDEX
    exact = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference.token_log_likelihood(hidden.double(), LinearHead(exact), labels).sum(), exact
    )
    (actual,) = torch.autograd.grad(
        token_log_likelihood(hidden, LinearHead(weight), labels, chunk_size=2).sum(), weight
    )
    assert actual.dtype == torch.bfloat16
    assert (actual.double() - expected).norm() / expected.norm() < 0.01


def test_float16_with_a_scaled_loss_loses_no_small_gradients():
    torch.manual_seed(0)
    hidden, weight, scale = torch.randn(1, 3000, 16), nn.Parameter(torch.randn(2000, 16) * 0.2), 2.0**16
    labels = torch.randint(2000, (1, 3000))
    labels[:, 0] = IGNORE_INDEX

    def solve(dtype, scale):
        inputs = hidden.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
            loss = token_log_likelihood(inputs, LinearHead(weight), labels).sum() / 2**15
        return [part.float() / scale for part in torch.autograd.grad(loss * scale, [inputs, weight])]

    for actual, expected in zip(solve(torch.float16, scale), solve(torch.float32, 1.0), strict=True):
        assert (actual - expected).norm() / expected.norm() < 0.005


def test_tokens_that_do_not_exist_have_no_likelihood(tile):
    hidden, head, labels = problem()
    head.bias[:40] = -torch.inf  # whole tiles of them
    labels = labels.clamp(min=40).masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
    with torch.no_grad():
        actual = token_log_likelihood(hidden, head, labels, chunk_size=4)
    torch.testing.assert_close(actual, reference.token_log_likelihood(hidden, head, labels))


def test_a_target_without_a_logit_has_no_log_likelihood():
    """An embedding may have more rows than the head, and an accelerator does not wait for the check of the ids."""
    head = LinearHead(torch.randn(5, 3))
    first, second = linear_log_likelihood(torch.randn(2, 3), head, torch.tensor([4, 5]), chunk_size=2)
    assert first < 0
    assert second.isnan()


def test_large_logits_neither_overflow_nor_drown(tile):
    hidden, head, labels = problem(torch.float32, bias=False, scale=300.0)
    expected = reference.token_log_likelihood(hidden.double(), head._replace(weight=head.weight.double()), labels)
    actual = token_log_likelihood(hidden, head, labels, chunk_size=4)
    assert expected.min() < -500
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=1e-5)


def test_half_precision_and_autocast_give_float32():
    hidden, head, labels = problem(torch.float32, scale=0.5)
    expected = reference.token_log_likelihood(hidden, head, labels)
    half = LinearHead(head.weight.bfloat16(), head.bias.bfloat16(), 0.5)
    with torch.no_grad():
        plain = token_log_likelihood(hidden.bfloat16(), half, labels)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = token_log_likelihood(hidden, head, labels)
    for actual in (plain, mixed):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, atol=0.05, rtol=0.02)
    assert not torch.equal(mixed, token_log_likelihood(hidden, head, labels)), "autocast rounds"


class Watch(TorchDispatchMode):
    """Records every tensor that an operation gives, and how many matrix products there are."""

    def __init__(self):
        super().__init__()
        self.tensors, self.products = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket is torch.ops.aten.mm
        self.tensors += [out] if isinstance(out, torch.Tensor) else []
        return out


@pytest.mark.parametrize(("width", "products"), [(0.5, 57), (1, 57), (7, 9), (57, 1), (10_000, 1)])
def test_a_tile_is_as_wide_as_its_elements_allow_and_one_token_at_least(monkeypatch, width, products):
    monkeypatch.setattr(linear_head, "TILE_ELEMENTS_CPU", int(16 * width))
    hidden, head, labels = problem()
    rows = hidden[labels != IGNORE_INDEX][:16]
    with Watch() as watch, torch.no_grad():
        linear_head.linear_log_likelihood(rows, head, torch.zeros(16, dtype=torch.int64), chunk_size=16)
    assert watch.products == products


def test_log_sum_exp_allocates_no_second_tile():
    logits = torch.randn(5, 9, dtype=torch.float64)
    expected = logits.logsumexp(-1, keepdim=True)
    place = logits.data_ptr()
    with Watch() as watch:
        total = linear_head.log_sum_exp_(logits)
    torch.testing.assert_close(total, expected)
    assert {tensor.data_ptr() for tensor in watch.tensors if tensor.numel() == logits.numel()} == {place}


@pytest.mark.filterwarnings("error")  # torch resizes a result of the wrong shape, and warns
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", [{}, {"scale": 3.0}, {"soft_cap": 2.0}, {"scale": 3.0, "soft_cap": 2.0}])
def test_wide_logits_are_those_of_the_head(bias, transform):
    hidden, head, _ = problem(bias=bias, **transform)
    expected = head(hidden[0])
    for form in (head, lambda rows: head(rows)):  # a head that is not known to be linear, too
        torch.testing.assert_close(linear_head.wide_logits(hidden[0], form), expected)


def test_wide_logits_of_half_precision_are_float32():
    hidden, head, _ = problem(torch.bfloat16)
    for form in (head, lambda rows: head(rows)):
        logits = linear_head.wide_logits(hidden[0], form)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, head(hidden[0]).float(), atol=0.02, rtol=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bias", [True, False])
def test_the_sum_over_the_vocabulary_is_wider_than_half_precision_logits(bias):
    hidden, head, _ = problem(torch.bfloat16, bias=bias)
    targets = torch.arange(17)
    with torch.no_grad():
        actual = linear_head.linear_log_likelihood(hidden[0], head, targets, chunk_size=4)
        logits = torch.mm(hidden[0], head.weight.T)
        logits = logits if head.bias is None else logits + head.bias
    expected = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def wide_products(monkeypatch):
    """As on a GPU, whose product of half-precision operands is float32."""
    monkeypatch.setattr(linear_head, "_multiplies_into_float32", lambda operand: operand.dtype == torch.bfloat16)
    monkeypatch.setattr(linear_head, "_multiply_into_float32", lambda left, right: left.float() @ right.float())


def test_where_a_device_widens_the_product_only_the_gradient_of_logits_is_rounded(tile, wide_products):
    hidden, head, labels = problem(torch.float32, bias=False)
    wanted = [hidden.requires_grad_(), head.weight.requires_grad_()]
    upstream = torch.randn(labels.shape)
    with torch.autocast("cpu", torch.bfloat16):
        log_likelihood = token_log_likelihood(hidden, head, labels, chunk_size=4)
        actual = torch.autograd.grad((log_likelihood * upstream).sum(), wanted)
    # In float64, from operands in bfloat16 to a gradient of the logits in bfloat16.
    rows, weight = hidden.detach().bfloat16().double(), head.weight.detach().bfloat16().double()
    probability = (rows[:, :-1] @ weight.T).softmax(-1)
    scored = labels[:, 1:] != IGNORE_INDEX
    target = torch.nn.functional.one_hot(labels[:, 1:].clamp(min=0), VOCABULARY)
    grad_logits = ((target - probability) * (upstream[:, 1:] * scored)[..., None]).bfloat16().double()
    grad_hidden = torch.nn.functional.pad(grad_logits @ weight, (0, 0, 0, 1))
    grad_weight = grad_logits.flatten(0, 1).T @ rows[:, :-1].flatten(0, 1)
    for found, expected in zip(actual, (grad_hidden, grad_weight), strict=True):
        # One that lies between two numbers of bfloat16 may be rounded to the other one.
        error = (found - expected).norm() / expected.norm()
        assert error < 3e-4, error


@pytest.mark.parametrize("bias", [True, False])
def test_where_a_device_widens_the_product_nothing_is_rounded(tile, wide_products, bias):
    hidden, head, _ = problem(torch.bfloat16, bias=bias, soft_cap=2.0)
    exact = LinearHead(head.weight.double(), None if head.bias is None else head.bias.double(), soft_cap=2.0)
    targets = torch.arange(17)
    expected = exact(hidden[0].double()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        actual = linear_head.linear_log_likelihood(hidden[0], head, targets, chunk_size=4)
    torch.testing.assert_close(actual, expected.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_half_precision_operands_give_logits_of_float32(dtype):
    hidden, head, labels = problem(torch.float32, scale=8.0)
    hidden, head = hidden.to("cuda", dtype), LinearHead(head.weight.to("cuda", dtype), head.bias.to("cuda", dtype), 8.0)
    exact = LinearHead(head.weight.double().cpu(), head.bias.double().cpu(), 8.0)
    expected = reference.token_log_likelihood((hidden * 8.0).double().cpu() / 8.0, exact, labels)
    actual = token_log_likelihood(hidden, head, labels.cuda()).double().cpu()
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)

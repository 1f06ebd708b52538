import math

import pytest
import torch

from lightning_modules.models.context_extension.patterns import PATTERNS, Rotary, blocks
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS
from lightning_modules.models.context_extension.patterns.trained import alibi_slopes
from lightning_modules.models.context_extension.rope_types import by_document
from tests.lightning_modules.models.context_extension.patterns import dense

THETA = 100.0
CASES = {
    "streaming_llm": [{"sinks": 3, "window": 9}, {"sinks": 1, "window": 1}],
    "lm_infinite": [
        {"sinks": 3, "original_max_position_embeddings": 10},
        {"sinks": 12, "original_max_position_embeddings": 8},
    ],
    "rerope": [{"window": 8}, {"window": 1}],
    "self_extend": [{"window": 7, "group": 3}, {"window": 8, "group": 4}],
    "dual_chunk": [
        {"chunk": 9, "original_max_position_embeddings": 12},
        {"chunk": 5, "original_max_position_embeddings": 30},
    ],
    "alibi": [{}],
    "xpos": [{}],
    "longnet": [
        {"segment_lengths": [8, 16, 32], "dilation_rates": [1, 2, 4]},
        {"segment_lengths": [4, 16], "dilation_rates": [1, 3]},
    ],
}
EVERY = [(name, parameters) for name, cases in CASES.items() for parameters in cases]
SHAPES = {"batch of two": (2, 4, 4, 12, 12), "grouped": (1, 6, 2, 10, 10), "partly rotated": (1, 4, 2, 12, 6)}
LENGTH = 43


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BLOCK", 7)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 7)


def problem(shape, length=LENGTH, dtype=torch.float32):
    batch, heads, kv_heads, width, rotated = SHAPES[shape]
    generator = torch.Generator().manual_seed(length)
    sizes = ((heads, 2.0), (kv_heads, 2.0), (kv_heads, 1.0))  # logits with a spread, or any weights would do
    states = [torch.randn(batch, h, length, width, generator=generator) * s for h, s in sizes]
    frequencies = torch.tensor([THETA ** (-2 * c / rotated) for c in range(rotated // 2)])
    return [state.to(dtype).requires_grad_() for state in states], frequencies, rotated


def expected_output(name, parameters, states, rotated):
    states = [state.detach().double().requires_grad_() for state in states]
    groups = states[0].shape[1] // states[1].shape[1]
    rows = [
        dense.attention(name, parameters, q, *(x.repeat_interleave(groups, 0) for x in (k, v)), THETA, rotated)
        for q, k, v in zip(*states, strict=True)
    ]
    return torch.stack(rows), states


def check(actual, expected, states, references):
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).double()
    pairs = [(actual, expected)]
    pairs += zip(
        torch.autograd.grad((actual.double() * weight).sum(), states),
        torch.autograd.grad((expected * weight).sum(), references),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "parameters"), EVERY)
def test_outputs_and_gradients_equal_the_formula(name, parameters, shape):
    states, frequencies, rotated = problem(shape)
    rotary = Rotary(parameters, frequencies, scaling=1 / math.sqrt(states[0].shape[-1]))
    actual = PATTERNS[name](*states, rotary)
    expected, references = expected_output(name, parameters, states, rotated)
    check(actual, expected, states, references)
    with torch.no_grad():
        torch.testing.assert_close(PATTERNS[name](*states, rotary), actual, rtol=0, atol=0)
        plain, _ = expected_output("plain", {}, states, rotated)
    assert (plain - expected).abs().max() > 1e-3, "the pattern does nothing here"


@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize(("name", "parameters"), EVERY)
def test_the_last_queries_only(name, parameters, queries):
    """As with a cache."""
    states, frequencies, _ = problem("grouped")
    rotary = Rotary(parameters, frequencies, scaling=0.3)
    with torch.no_grad():
        whole = PATTERNS[name](*states, rotary)
        last = PATTERNS[name](states[0][:, :, -queries:], *states[1:], rotary)
    torch.testing.assert_close(last, whole[:, :, -queries:], rtol=1e-5, atol=1e-5)


PLAIN_UP_TO = {"streaming_llm": 12, "lm_infinite": 11, "rerope": 9, "self_extend": 8, "dual_chunk": 12}


@pytest.mark.parametrize("name", PLAIN_UP_TO)
def test_short_documents_have_plain_attention(name):
    for length, same in ((PLAIN_UP_TO[name], True), (PLAIN_UP_TO[name] + 1, False)):
        states, frequencies, rotated = problem("grouped", length)
        expected, _ = expected_output("plain", {}, states, rotated)
        rotary = Rotary(CASES[name][0], frequencies, scaling=1 / math.sqrt(10))
        actual = PATTERNS[name](*states, rotary)
        assert ((actual - expected).abs().max() < 1e-5) == same


def test_a_position_far_out_in_bf16():
    """128k tokens before: rotations, decay and bias are formed in float32, and nothing overflows."""
    length, generator = 131_072, torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 1, length, 16, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(1, 1, 3, 16, generator=generator).bfloat16()
    frequencies = torch.tensor([10000 ** (-c / 8) for c in range(8)])
    rotary = Rotary({}, frequencies, scaling=0.25)
    decay = ((torch.arange(8).double() / 8 + 0.4) / 1.4).repeat(2)
    for name in ("alibi", "xpos"):
        actual = PATTERNS[name](query, key, value, rotary)[0, 0, -1].double()
        distance = torch.arange(length - 1, -1, -1, dtype=torch.float64)[:, None]
        if name == "alibi":
            logits = key[0, 0].double() @ query[0, 0, -1].double() * 0.25 - 2.0**-8 * distance[:, 0]
        else:
            angle = torch.cat([distance * frequencies.double()] * 2, -1)
            q = query[0, 0, -1].double()
            turned = q * angle.cos() + torch.cat([-q[8:], q[:8]]) * angle.sin()
            logits = (turned * decay ** (distance / 512) * key[0, 0].double()).sum(-1) * 0.25
        expected = logits.softmax(0) @ value[0, 0].double()
        assert (actual - expected).abs().max() < 0.01 * value.double().std()


def test_dropout_drops_the_same_weights_in_the_backward_pass():
    states, frequencies, _ = problem("grouped")
    rotary = Rotary({"sinks": 3, "window": 9}, frequencies, scaling=0.3, dropout=0.5)

    def run(*inputs):
        torch.manual_seed(0)
        return PATTERNS["streaming_llm"](*inputs, rotary)

    assert not torch.equal(run(*states), PATTERNS["streaming_llm"](*states, rotary))
    value = states[2].detach().double().requires_grad_()  # the output is linear in it
    inputs = [states[0].detach().double(), states[1].detach().double(), value]
    output = run(*inputs)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_the_same_in_the_backward_pass(enabled):
    seen = []

    def score(take, start, stop):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        query, key = take(0, start, stop), take(0, 0, stop)
        return [(query @ key.mT).float()], [key]

    state = torch.randn(1, 1, 4, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        output = blocks.Blocks(score, 0, 4, 2).attend(state)
    with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
        output.sum().backward()
    assert seen == [(enabled, False)] * 2 + [(enabled, True)] * 2


def test_slopes_are_those_of_the_paper():
    for heads, expected in dense.PRESS_SLOPES.items():
        assert alibi_slopes(heads).tolist() == expected


def test_memory_does_not_grow_with_the_square_of_the_length(monkeypatch):
    """The largest tensor of a lambda-shaped pattern: as long as the text, times no more than window and block."""
    monkeypatch.undo()
    sizes = {}
    for length in (1024, 4096):
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                for tensor in torch.utils._pytree.tree_leaves(result):
                    if isinstance(tensor, torch.Tensor):
                        largest = max(largest, tensor.numel())
                return result

        states = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
        rotary = Rotary({"sinks": 4, "window": 124}, torch.ones(2), scaling=0.5)
        with Watch():
            PATTERNS["streaming_llm"](*states, rotary).sum().backward()
        sizes[length] = largest
    assert sizes[1024] == sizes[4096] == 256 * (4 + 124 - 1 + 256)


# ------------------------------------------------------------------------------------------------------------- rows


def reach(query, key, value):
    """A stand-in that says which tokens a query saw: the sum of the values up to its own."""
    return value.cumsum(2)[:, :, -query.shape[2] :]


def test_documents_and_padding_are_cut_off():
    tokens = torch.arange(1.0, 25.0).reshape(2, 1, 12, 1)
    packed = by_document(reach, tokens, tokens, tokens, None, [[0, 5, 12], [0, 12]])
    assert torch.equal(packed[0, 0, :, 0], torch.cat([tokens[0, 0, :5, 0].cumsum(0), tokens[0, 0, 5:, 0].cumsum(0)]))
    assert torch.equal(packed[1, 0, :, 0], tokens[1, 0, :, 0].cumsum(0))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, :4], real[1, 9:] = False, False  # on the left, on the right
    mask = (torch.ones(12, 12, dtype=torch.bool).tril() & real[:, None])[:, None]
    padded = by_document(reach, tokens, tokens, tokens, mask, None)
    assert torch.equal(padded[0, 0, 4:, 0], tokens[0, 0, 4:, 0].cumsum(0))
    assert torch.equal(padded[1, 0, :9, 0], tokens[1, 0, :9, 0].cumsum(0))
    assert (padded[0, 0, :4] == 0).all()
    assert (padded[1, 0, 9:] == 0).all()
    last = by_document(reach, tokens[:, :, -2:], tokens, tokens, mask[:1, :, -2:], None)  # with a cache
    assert torch.equal(last[:, 0, :, 0], tokens[:, 0, 4:, 0].cumsum(-1)[:, -2:])
    empty = by_document(reach, tokens[:, :, :3], tokens, tokens, None, None)
    assert torch.equal(empty, tokens[:, :, :3].cumsum(2))  # a static cache that is still empty


@pytest.mark.parametrize("kind", ["window", "packed", "nothing", "float", "both ways"])
def test_other_masks_are_refused(kind):
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    masks = {
        "window": causal.triu(-4),
        "packed": causal & ((torch.arange(12) < 5)[:, None] == (torch.arange(12) < 5)),
        "nothing": torch.zeros(12, 12, dtype=torch.bool),
        "float": torch.zeros(12, 12).masked_fill(~causal, -math.inf),
        "both ways": torch.ones(12, 12, dtype=torch.bool),
    }
    tokens = torch.zeros(1, 1, 12, 1)
    with pytest.raises(ValueError, match=r"supports padding masks only.*full_attention: true"):
        by_document(reach, tokens, tokens, tokens, masks[kind][None, None], None)


# --------------------------------------------------------------------------------------------------------- settings


def parameters_of(name, original=4096, target=32768, **options):
    settings = PATTERN_SETTINGS[name]
    return settings.parameters(original, target, **{option: options.get(option) for option in settings.options})


def test_defaults():
    assert parameters_of("streaming_llm") == {"sinks": 4, "window": 4092}
    assert parameters_of("lm_infinite") == {"sinks": 10, "original_max_position_embeddings": 4096}
    assert parameters_of("rerope") == {"window": 2048}
    assert parameters_of("self_extend") == {"window": 1024, "group": 11}
    assert 32767 // 11 + 1024 - 1024 // 11 < 4096 <= 32767 // 10 + 1024 - 1024 // 10
    assert parameters_of("dual_chunk") == {"chunk": 3072, "original_max_position_embeddings": 4096}
    assert parameters_of("longnet") == {
        "segment_lengths": [2048, 4096, 8192, 16384, 32768],
        "dilation_rates": [1, 2, 4, 6, 12],
    }

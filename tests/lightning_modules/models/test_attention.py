"""Layers with a window of their own, whose hidden products are not computed, against attention with the whole mask."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lightning_modules.batch import pack_sequence
from lightning_modules.models import attention
from lightning_modules.models.attention import (
    DOCUMENT_SDPA,
    document_attention,
    document_mask,
    documents_by_boundaries,
    register_document_attention,
)
from lightning_modules.models.backbone import Backbone
from tests.support.packing import assume_isolation

GROUPS = SimpleNamespace(num_key_value_groups=2, is_causal=True)


@pytest.fixture
def products(monkeypatch):
    """Numbers of queries and keys of each attention call."""
    calls = []
    whole = attention.sdpa_attention_forward

    def record(module, query, key, *arguments, **options):
        calls.append((query.shape[2], key.shape[2]))
        return whole(module, query, key, *arguments, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    return calls


def band(tokens, window, *ends):
    """Return the ``[1, 1, T, T]`` mask of a window in documents that end at these tokens."""
    index = torch.arange(tokens)
    document = torch.bucketize(index, torch.tensor(ends or (tokens,)), right=True)
    distance = index[:, None] - index
    return ((distance >= 0) & (distance < window) & (document[:, None] == document))[None, None]


def attend(function, states, mask):
    """Return outputs and gradients."""
    states = [each.clone().requires_grad_() for each in states]
    output = function(*states, mask)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return output, *torch.autograd.grad((output * weights).sum(), states)


@pytest.mark.parametrize(
    ("tokens", "window", "ends"),
    [
        (400, 128, ()),
        (401, 128, ()),
        (129, 128, ()),
        (333, 100, (70, 71, 190, 333)),  # borders inside of windows and of blocks
        (300, 1, ()),
        (200, 9, (150, 200)),
    ],
)
def test_values_and_gradients_are_those_of_the_whole_mask(products, tokens, window, ends):
    generator = torch.Generator().manual_seed(tokens)
    states = [torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    boundaries = [[0, *ends]] * 2 if ends else None

    def ours(query, key, value, mask):
        mark = mask.new_empty(1, 1, 0, window)
        return document_attention(GROUPS, query, key, value, mark, boundaries)[0]

    def dense(query, key, value, mask):
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    mask = band(tokens, window, *ends)
    for actual, expected in zip(attend(ours, states, mask), attend(dense, states, mask), strict=True):
        torch.testing.assert_close(actual, expected)
    size = max(window // 2, 64)
    assert all(queries <= max(size, window) and keys < size + window for queries, keys in products)
    # Sequences that are one document go together.
    assert sum(queries for queries, _ in products) == tokens * (2 if ends else 1)


@pytest.mark.parametrize("lengths", [(333,), (150, 183), (20, 1, 312)])
@pytest.mark.parametrize("limit", [None, 50])
def test_a_model_with_windows_scores_and_learns_as_with_whole_masks(products, monkeypatch, lengths, limit):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 100, "initializer_range": 0.2}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, layer_types=layers, pad_token_id=0))
    model.set_attn_implementation(register_document_attention())
    backbone, batch = (
        assume_isolation(Backbone(model)),
        pack_sequence([torch.randint(50, (length,)) for length in lengths]),
    )

    def run():
        products.clear()
        backbone.zero_grad()
        scored = backbone(batch, window=limit)
        scored.sum().backward()
        return [scored.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    masks = []
    monkeypatch.setattr(attention, "sdpa_mask", lambda **settings: masks.append(sdpa_mask(**settings)) or masks[-1])
    actual = run()
    assert all(queries <= 100 and keys < 164 for queries, keys in products) or limit is None
    assert [mask for mask in masks if mask is not None] == []
    monkeypatch.setattr(attention, "_mark_window", attention._window_function)
    for ours, whole in zip(actual, run(), strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
    assert [mask.shape[-2:] for mask in masks if mask is not None] == [(333, 333)]


def test_only_the_window_itself_is_passed_without_a_mask():
    """Not with overlays, padding, or a mask that the model uses itself."""
    positions = torch.arange(9)[None]
    sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9, "local_size": 3}
    with documents_by_boundaries(DOCUMENT_SDPA, positions):
        window = masking_utils.sliding_window_causal_mask_function(3)
        assert document_mask(mask_function=window, allow_is_causal_skip=True, **sizes).shape == (1, 1, 0, 3)
        others = (
            {"mask_function": window, "allow_is_causal_skip": False},
            {"mask_function": window, "allow_is_causal_skip": True, "attention_mask": positions > 1},
            {"mask_function": masking_utils.and_masks(window, causal_mask_function), "allow_is_causal_skip": False},
        )
        for settings in others:
            assert document_mask(**sizes, **settings).shape == (1, 1, 9, 9)
    assert document_mask(mask_function=window, allow_is_causal_skip=True, **sizes).shape == (1, 1, 9, 9)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_masks_of_packed_documents_count_from_the_first_token_of_each(kind):
    """A chunk of Llama 4 begins with the document, not with the sequence."""
    size = 3
    lengths = [4, 7, 1]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total = sum(lengths)

    def is_visible(row, head, query, key):
        near = (query - key < size) if kind == "sliding" else (query // size == key // size)
        return near & (key <= query)

    with documents_by_boundaries(DOCUMENT_SDPA, positions):
        mask = document_mask(
            batch_size=1, q_length=total, kv_length=total, mask_function=is_visible, allow_is_causal_skip=False
        )
    for query in range(total):
        for key in range(total):
            i = int(positions[0, query])
            j = int(positions[0, key])
            near = i - j < size if kind == "sliding" else i // size == j // size
            expected = documents[query] == documents[key] and j <= i and near
            assert bool(mask[0, 0, query, key]) == bool(expected), (query, key)

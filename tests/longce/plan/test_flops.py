"""Against torch's counter of operations while real tiny models run, and the figures of the project's own study."""

import collections

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import enable_checkpointing
from lightning_modules.models.short_context import long_and_short, short_log_likelihood, sliding_window_log_likelihood
from longce.plan.flops import (
    ATTENTION_BACKWARD,
    attention_pairs,
    ce_step_flops,
    forward_flops,
    scoring_flops,
    short_pass_flops,
    sliding_pass_flops,
)
from longce.plan.shapes import ModelShape
from tests.conftest import tiny_config
from tests.support.packing import assume_isolation

aten = torch.ops.aten
TOKENS = 96
MOE = {"num_experts_per_tok": 2, "head_dim": 8}
ARCHITECTURES = {
    "llama": tiny_config(),
    "qwen2": tiny_config("qwen2"),
    "mixtral": tiny_config("mixtral", num_local_experts=4, **MOE),
    "qwen3_moe": tiny_config("qwen3_moe", num_experts=4, moe_intermediate_size=16, **MOE),
    "gemma2": tiny_config("gemma2", head_dim=16, sliding_window=1024),
    "gpt2": AutoConfig.for_model("gpt2", vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


def backbone(config, lora=None, checkpointing=False, attention="eager"):
    """With attention as two plain products, which the counter sees; they cover all pairs of tokens."""
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    model.get_input_embeddings().weight.requires_grad_()
    return assume_isolation(Backbone(model)).train()


def row(tokens=TOKENS):
    ids = torch.randint(400, (1, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    positions = torch.arange(tokens)[None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_boundaries": [[0, tokens]]}
    return with_scored(batch)


class Counter(TorchDispatchMode):
    """torch's formulas without its tracking of modules, which cannot follow a gradient inside a forward pass."""

    def __init__(self):
        super().__init__()
        self.operations = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # In place it is not in the registry.
        packet = aten.addmm if func._overloadpacket is aten.addmm_ else func._overloadpacket
        if packet in flop_registry:
            self.operations[packet] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


def counted(run):
    """Operations in products with weights and in those of attention."""
    with Counter() as counter:
        run()
    attention = counter.operations.pop(aten.bmm, 0)
    return counter.operations.total(), attention


def step(model, batch):
    model(batch).sum().backward()


def all_pairs(attention, tokens):
    """Operations of attention that looks at all pairs, from those of causal attention."""
    return attention * 2 * tokens / (tokens + 1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forward_pass(name):
    config = ARCHITECTURES[name]
    with torch.no_grad():
        gemm, attention = counted(lambda: backbone(config)(row()))
    planned = forward_flops(ModelShape.of(config), TOKENS, TOKENS - 1)
    assert planned.gemm == gemm
    # The rest are rotary angles.
    assert all_pairs(planned.attention, TOKENS) == pytest.approx(attention, rel=0.02)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_step(name, checkpointing):
    config = ARCHITECTURES[name]
    model = backbone(config, checkpointing=checkpointing == "full")
    with set_checkpoint_early_stop(False):
        gemm, attention = counted(lambda: step(model, row()))
    planned = ce_step_flops(ModelShape.of(config), TOKENS, checkpointing)
    # Plain attention takes twice its forward pass in the backward pass.
    plain = planned.attention + planned.attention_backward * 2 / ATTENTION_BACKWARD
    assert planned.gemm == gemm
    assert all_pairs(plain, TOKENS) == pytest.approx(attention, rel=0.02)


def test_only_layers_that_are_checkpointed_are_counted_twice():
    config = ARCHITECTURES["gemma2"]
    model = backbone(config)
    enable_checkpointing(model.base_model, True, layers=1)
    with set_checkpoint_early_stop(False):
        gemm, attention = counted(lambda: step(model, row()))
    planned = ce_step_flops(ModelShape.of(config), TOKENS, "full", 1)
    plain = planned.attention + planned.attention_backward * 2 / ATTENTION_BACKWARD
    assert planned.gemm == gemm
    assert all_pairs(plain, TOKENS) == pytest.approx(attention, rel=0.02)


def test_lora_step_has_no_weight_gradients_but_its_own():
    lora = {"r": 4, "target_modules": "all-linear"}
    gemm, _ = counted(lambda: step(backbone(tiny_config(), lora), row()))
    assert ce_step_flops(ModelShape.of(tiny_config(), lora), TOKENS, "none").gemm == gemm


def test_selective_checkpointing_saves_one_attention_pass():
    shape = ModelShape.of(tiny_config())
    none, full, selective = (ce_step_flops(shape, TOKENS, kind) for kind in ("none", "full", "selective"))
    assert selective.gemm == full.gemm
    assert selective.attention == none.attention == full.attention / 2


@pytest.mark.parametrize(("context_length", "stride"), [(16, 8), (20, 7), (8, 40), (64, 64)])
def test_short_pass_is_what_the_backbone_does(context_length, stride, monkeypatch):
    monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 1)  # no padding
    model, shape = backbone(tiny_config()), ModelShape.of(tiny_config())
    run = ShortContext(context_length, stride)
    gemm, _ = counted(lambda: short_log_likelihood(model, row(), run))
    planned = short_pass_flops(shape, TOKENS, run)
    assert planned.gemm == gemm


def test_a_sliding_pass_is_a_forward_pass_with_fewer_pairs():
    config = tiny_config("gemma2", head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
    shape = ModelShape.of(config)
    planned, whole = sliding_pass_flops(shape, TOKENS, 20), forward_flops(shape, TOKENS, TOKENS - 1)
    assert planned.gemm == whole.gemm
    pairs = sum(attention_pairs(TOKENS, window) for window in (12, 20))
    assert planned.attention == shape.pair_flops * pairs < whole.attention
    model = backbone(tiny_config(), attention=register_document_attention())
    with Counter() as counter:
        sliding_window_log_likelihood(model, row(), context_length=20)
    gemm = counter.operations[aten.mm] + counter.operations[aten.addmm]
    assert gemm == sliding_pass_flops(ModelShape.of(tiny_config()), TOKENS, 20).gemm


def test_scoring_is_what_the_backbone_does(monkeypatch):
    monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 1)  # no padding
    model, shape = backbone(tiny_config()), ModelShape.of(tiny_config())
    gemm, _ = counted(lambda: long_and_short(model, row(), ShortContext(16, 8)))
    shared = scoring_flops(shape, shape, TOKENS, ShortContext(16, 8), shared_pass=True)
    assert shared.gemm == gemm
    other = scoring_flops(shape, shape, TOKENS, ShortContext(16, 8))
    assert other.total == pytest.approx(shared.total + forward_flops(shape, TOKENS, TOKENS - 1).total)


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_attention_pairs(window):
    position = torch.arange(12)
    back = position[:, None] - position[None, :]
    assert attention_pairs(12, window) == int(((back >= 0) & (back < (window or 12))).sum())


def test_latent_attention_counts_both_widths():
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    )
    with torch.no_grad():
        gemm, attention = counted(lambda: backbone(config)(row()))
    planned = forward_flops(ModelShape.of(config), TOKENS, TOKENS - 1)
    assert planned.gemm == gemm
    assert all_pairs(planned.attention, TOKENS) == pytest.approx(attention, rel=0.02)


# TFLOP: cross entropy without and with checkpointing, which computes logits once, by a study; then the short pass by
# (K, d), all layers of which work on all tokens.
STUDY = {
    ("llama-2-7b", 32768): (2284, 2990, {(4096, 512): 3596, (4096, 1024): 1983, (4096, 4096): 749}),
    ("llama-3.1-8b", 32768): (2461, 3200, {(4096, 512): 3873, (4096, 1024): 2144, (4096, 4096): 817}),
    ("llama-2-7b", 131072): (20959, 27160, {(4096, 512): 16150, (4096, 1024): 9035}),
    ("llama-3.1-8b", 131072): (21665, 27998, {(4096, 512): 17395, (4096, 1024): 9768}),
}


@pytest.mark.parametrize(("name", "tokens"), STUDY)
def test_figures_of_the_study(llamas, name, tokens):
    shape = ModelShape.of(llamas[name])
    none, full, pairs = STUDY[name, tokens]
    logits = 2 * tokens * shape.head_weights / 1e12  # the backward pass computes them again
    assert ce_step_flops(shape, tokens, "none").total / 1e12 - logits == pytest.approx(none, rel=0.001)
    assert ce_step_flops(shape, tokens, "full").total / 1e12 - logits == pytest.approx(full, rel=0.001)
    for pair, expected in pairs.items():
        assert short_pass_flops(shape, tokens, ShortContext(*pair)).total / 1e12 == pytest.approx(expected, rel=0.003)

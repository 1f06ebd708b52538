"""Compiled layers compute what the plain ones do, and are compiled a bounded number of times."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.optimizations import compile_layers, enable_checkpointing, is_compiled
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.tasks.generation import generate
from tests.conftest import tiny_model
from tests.support.operators import ATTENTION, OperatorCounts
from tests.support.packing import assume_isolation, documents, packed

# torch.compile looks at all attributes of a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def build(checkpointing=False, lora=False, layers=3):
    register_document_attention()
    model = tiny_model("llama", attn_implementation="document_sdpa", num_hidden_layers=layers).train()
    enable_checkpointing(model, checkpointing)
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return assume_isolation(Backbone(model))


class Graphs:
    """A backend that counts how often compiled graphs run."""

    def __init__(self, error=0.0):
        self.runs, self.error = 0, error

    def __call__(self, graph, _):
        def run(*inputs):
            self.runs += 1
            values = graph.forward(*inputs)  # also sizes
            return [value + self.error if self.error and torch.is_tensor(value) else value for value in values]

        return run


def train(backbone, batch):
    backbone.zero_grad()
    log_likelihood = backbone(batch)
    log_likelihood.mean().backward()
    return log_likelihood.detach(), {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}


def score_windows(backbone, batch):
    return short_log_likelihood(backbone, batch, ShortContext(8, 4))[0]


@pytest.fixture
def graphs(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 3)  # as on a GPU
    yield Graphs()
    torch._dynamo.reset()


def check_equal(compiled, plain, *batches, **tolerances):
    for batch in batches:
        torch.testing.assert_close(train(compiled, batch), train(plain, batch), **tolerances)
        torch.testing.assert_close(score_windows(compiled, batch), score_windows(plain, batch), **tolerances)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "lora"), [(False, False), (True, False), ("selective", False), (False, True)]
)
def test_scores_and_gradients_are_those_of_the_plain_layers(graphs, checkpointing, lora):
    plain, compiled = build(checkpointing, lora), build(checkpointing, lora)
    compile_layers(compiled.decoder, backend=graphs)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    with OperatorCounts() as counts:
        train(compiled, packed(documents(20, 18)))
    # Three compiled layers: norm, projections before and after attention, norm and MLP; again in the backward pass.
    assert graphs.runs == 3 * 5 * (2 if checkpointing else 1)
    assert counts.calls[ATTENTION] == 3 * 2 * (2 if checkpointing is True else 1)
    check_equal(compiled, plain, packed(documents(40)), packed(documents(20, 18)), packed(documents(33)))


@pytest.mark.slow
def test_generated_kernels_compute_the_same(graphs):
    plain, compiled = build(checkpointing="selective"), build(checkpointing="selective")
    compile_layers(compiled.decoder)
    # Sums in another order
    check_equal(compiled, plain, packed(documents(20, 18)), packed(documents(33)), atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_new_lengths_and_numbers_of_documents_are_not_compiled_again(graphs):
    backbone = build(checkpointing=True)
    compile_layers(backbone.decoder, backend=graphs)
    counters.clear()
    compiled = []
    # torch compiles passes of one window apart: here, that of the document of 13 tokens.
    for lengths in ([40], [13], [20, 18], [37], [9, 8, 7], [31], [14, 13, 12, 11, 10], [45, 2], [12], [13]):
        batch = packed(documents(*lengths))
        train(backbone, batch)
        score_windows(backbone, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            score_windows(backbone, batch)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[-1] == compiled[3], compiled


def test_the_parts_of_all_layers_are_compiled(tmp_path):
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    backbone = load_backbone(ModelConfig(str(tmp_path), compile=True))
    compiled = [name for name, module in backbone.decoder.named_modules() if module._compiled_call_impl is not None]
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    assert sorted(compiled) == sorted(f"layers.{layer}.{part}" for layer in (0, 1, 2) for part in parts)


def test_nothing_is_compiled_while_text_is_generated(graphs):
    plain, compiled = build(), build()
    compile_layers(compiled.decoder, backend=graphs)
    prompts = [[5, 6, 7, 8], [9, 10]]
    assert generate(compiled, prompts, 3) == generate(plain, prompts, 3)
    assert graphs.runs == 0
    batch = packed(documents(20))
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), plain(batch))
    assert graphs.runs == 3 * 5


def fail_to_compile(*_):
    raise RuntimeError("no compiler\nin many lines")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (Graphs(error=1.0), r"compiled layers are wrong on this machine \(log-likelihoods differ"),
        (fail_to_compile, r"torch cannot compile the layers on this machine \(.*no compiler\)"),
    ],
)
def test_layers_that_are_compiled_wrongly_or_not_at_all_are_refused_or_run_as_written(graphs, backend, problem, caplog):
    right, wrong = build(layers=2), build(layers=2)
    compile_layers(right.decoder, backend=graphs)
    check_scoring(right)
    assert graphs.runs > 0
    compile_layers(wrong.decoder, backend=backend)
    with pytest.raises(ValueError, match=f"{problem}.*: update torch, or remove `compile: true`"):
        check_scoring(wrong)
    wrong.needs_compiled = False  # as for `compile: auto`
    with caplog.at_level("WARNING"):
        check_scoring(wrong)
    assert re.search(f"{problem}.*, so they are not compiled", caplog.text)
    batch = packed(documents(20))
    assert torch.equal(wrong(batch), build(layers=2)(batch))


@pytest.mark.parametrize(
    ("setting", "device", "architecture", "expected"),
    [
        ("auto", "cpu", "llama", False),
        ("auto", "cuda", "llama", True),
        ("auto", "cuda", "gpt2", False),  # has no `layers`
        (True, "cpu", "llama", True),
    ],
)
def test_auto_compiles_on_a_gpu_what_can_be_compiled(setting, device, architecture, expected, tmp_path):
    tiny_model(architecture, num_hidden_layers=2).save_pretrained(tmp_path)
    backbone = load_backbone(ModelConfig(str(tmp_path), compile=setting), device=device)  # still in main memory
    assert is_compiled(backbone) is expected
    assert backbone.needs_compiled is (setting is True)


def test_a_decoder_without_layers_is_refused():
    with pytest.raises(ValueError, match="`compile: true` does not support `GPT2Model`"):
        compile_layers(tiny_model("gpt2").get_decoder())

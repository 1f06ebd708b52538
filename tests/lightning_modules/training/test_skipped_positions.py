"""Training on positions that skip (PoSE), against dense attention in float64."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from transformers import AutoModelForCausalLM

from datamodules.packing.positions import PoSE
from lightning_modules.batch import pack_sequence, stack_sequences
from lightning_modules.functional.windows import ShortContext, Window, window_batch
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.short_context import long_and_short, sliding_window_log_likelihood
from lightning_modules.objectives import LongCE
from lightning_modules.training.preflight import check_skipped_positions
from tests.conftest import tiny_config, tiny_model
from tests.lightning_modules.test_training_step import FullRecorder
from tests.support import reference
from tests.support.packing import VOCABULARY, documents
from tests.support.tiny_training import loader, trainer

K, D, GAMMA = 8, 4, 2.0
TARGET = 400
EABF = {"method": "eabf", "original_length": 32, "target_length": TARGET}
MODELS = {
    "llama": ("llama", None),
    "PI": ("llama", {"method": "pi", "original_length": 100, "target_length": TARGET}),
    "EABF": ("llama", EABF),
    "GLM-4": ("glm4", None),
    "GPT-NeoX": ("gpt_neox", None),
}


def skipping_batch():
    """Two sequences, one of them with two documents, whose positions skip up to the target length."""
    sequences = []
    for number, lengths in enumerate([(23, 41), (60,)]):
        sequence = pack_sequence(documents(*lengths, seed=number))
        positions = PoSE(TARGET, chunks=3).positions(np.cumsum(lengths), [number])
        sequence["position_ids"] = torch.from_numpy(positions)[None]
        sequences.append(sequence)
    batch = stack_sequences(sequences)
    assert batch["position_ids"].max() > 300
    return batch


def split(batch):
    """Ids, positions and place of each document."""
    for row, boundaries in enumerate(batch["document_boundaries"]):
        for start, stop in pairwise(boundaries):
            yield batch["input_ids"][row, start:stop], batch["position_ids"][row, start:stop], (row, slice(start, stop))


def scale_queries(model):
    """Make a dense model one with EABF: log(position) of each query in all layers but the first two."""

    def scale(projection, inputs, output):
        factors = [max(1.0, math.log(p + 1) / math.log(EABF["original_length"])) for p in model.positions.tolist()]
        return output * torch.tensor(factors, dtype=output.dtype)[:, None]

    for layer in model.model.layers[2:]:
        layer.self_attn.q_proj.register_forward_hook(scale)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A module that trains a model, and the same model in float64 with dense attention."""
    architecture, extension = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    tiny_model(architecture, VOCABULARY, seed=2, num_hidden_layers=3).save_pretrained(folder)
    module = LongContextLM(
        str(folder),
        objective=LongCE(GAMMA),
        context_length=K,
        stride=D,
        dtype="float64",
        context_extension=extension,
        optimizer=lambda parameters: FullRecorder(parameters, lr=1.0),
    )
    module.configure_model()
    return module, dense_model(module.backbone.base_model, with_eabf=request.param == "EABF")


def dense_model(model, *, with_eabf=False):
    """The same model without our attention."""
    settings = model.config.to_dict()
    if with_eabf:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    config = type(model.config)(**settings)
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    dense.load_state_dict(model.state_dict())
    if with_eabf:
        scale_queries(dense)
    return dense.eval()


def fit(module, batch, root):
    """Train one step; return the gradients, and the loss per token."""
    FullRecorder.seen, logged = [], []
    module.log_dict = lambda values, **_: logged.append(float(values["train/loss"]))
    module.log = lambda *_, **__: None
    trainer(root, max_steps=1, use_distributed_sampler=False).fit(module, loader(batch))
    names = [name.removeprefix("backbone.model.") for name, _ in module.named_parameters()]
    return dict(zip(names, FullRecorder.seen[0], strict=True)), logged[0]


def test_scores_and_gradient_are_those_of_dense_attention(pair, tmp_path):
    module, dense = pair
    batch = skipping_batch()
    gradients, loss = fit(module, batch, tmp_path)  # also measures how documents can be packed
    backbone = module.backbone.eval()
    assert backbone.isolates_documents
    with torch.no_grad():
        long, short = long_and_short(backbone, batch, ShortContext(K, D))
        long_too, certain = long_and_short(backbone, batch, ShortContext(K, D), beta=-4.0)
        sliding = sliding_window_log_likelihood(backbone, batch, context_length=K)
    total, tokens = 0.0, 0
    for ids, positions, place in split(batch):
        # 1. Both scores of each token.
        with torch.no_grad():
            expected_long, expected_short = reference.long_and_short(dense, ids, K, D, positions)
            in_window = torch.ones(len(ids), len(ids), dtype=torch.bool).tril().triu(1 - K)
            expected_sliding = reference.document_log_likelihood(dense, ids, positions, in_window)
        torch.testing.assert_close(long[place], expected_long, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(short[place], expected_short, rtol=1e-6, atol=1e-6)
        # 2. Tokens that cannot be key tokens are skipped, from the K + d-th of a document on.
        skipped = (long_too[place] <= -4) & (torch.arange(len(ids)) >= K + D)
        assert torch.equal(certain[place].isnan(), skipped)
        # 3. The approximation by one pass.
        if module.loading.context_extension != EABF:  # EABF scales its queries as in a document of K tokens
            hidden = torch.arange(len(ids)) > K
            assert torch.equal(sliding.has_short_context[place], hidden)
            actual = sliding.log_likelihood[place][hidden]
            torch.testing.assert_close(actual, expected_sliding[hidden], rtol=1e-6, atol=1e-6)
        count = len(ids) - 1
        total = total + count * reference.longce(dense, ids, K, D, GAMMA, positions)
        tokens += count
    assert (long - short).abs().max() > 0.1
    # 4. The gradient of the loss.
    total = total / tokens
    assert loss == pytest.approx(total.item(), rel=1e-6)
    dense.zero_grad()
    total.backward()
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_documents_in_passes_of_their_own_keep_their_positions(pair):
    module, dense = pair
    batch = skipping_batch()
    module.backbone.isolates_documents = False
    with torch.no_grad():
        actual = module.backbone.eval()(batch)
        for ids, positions, place in split(batch):
            expected = reference.document_log_likelihood(dense, ids, positions)
            torch.testing.assert_close(actual[place], expected, rtol=1e-6, atol=1e-6)


def test_a_model_that_needs_the_masks_of_transformers_is_refused(tmp_path):
    tiny_model("nemotron", VOCABULARY).save_pretrained(tmp_path)
    module = LongContextLM(str(tmp_path), context_length=K, stride=D)
    data = LightningDataModule.from_datasets(skipping_batch())
    data.pose = PoSE(TARGET)
    with pytest.raises(ValueError, match=r"`data.pose` needs .*, got 'sdpa' of 'nemotron'"):
        trainer(tmp_path).fit(module, datamodule=data)


def test_windows_keep_skips_and_have_no_negative_positions():
    batch = pack_sequence(documents(14, 9))
    batch["position_ids"][0, 7:14] += 100
    windows = [(0, Window(4, 10, 14)), (0, Window(10, 12, 14))]
    positions = window_batch(batch, windows)["position_ids"].tolist()
    assert positions[0] == [0, 1, 2, 103, 104, 105, 106, 107, 108, 109]
    assert positions[1] == [100, 101, 102, 103, 4, 5, 6, 7, 8, 9]  # the padding is from the next document


@pytest.mark.parametrize(
    ("settings", "attention", "named"),
    [
        ({}, "eager", "`model.attn_implementation: sdpa`"),
        ({}, "sdpa", "`model.attn_implementation: sdpa`"),
        ({}, "flash_attention_2", "`model.attn_implementation: sdpa`"),
        ({"max_position_embeddings": 399}, DOCUMENT_SDPA, "`data.pose.target_length` = 400 exceeds the 399 positions"),
        ({"architecture": "gpt2"}, DOCUMENT_SDPA, "(RoPE), which 'gpt2' lacks"),
        ({"architecture": "mistral", "sliding_window": 64}, DOCUMENT_SDPA, "sliding window of 64"),
        ({"architecture": "gemma3_text"}, DOCUMENT_SDPA, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "rerope", "rope_theta": 1e4}}, DOCUMENT_SDPA, "'rerope'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, DOCUMENT_SDPA, "'dynamic'"),
    ],
)
def test_models_that_cannot_skip(settings, attention, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        check_skipped_positions(tiny_config(**settings), attention, TARGET)

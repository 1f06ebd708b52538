import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.reproduction.miniature.measure import Examination, Tokens, token_metrics
from benchmarks.reproduction.miniature.recall_corpus import RecallCorpus
from lightning_modules.models.backbone import Backbone


@pytest.fixture
def examination(settings):
    return Examination(RecallCorpus(), settings)


@pytest.fixture
def backbone(examination):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(examination.tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    return Backbone(AutoModelForCausalLM.from_config(config).double())


def log_likelihoods(backbone, ids):
    """``[T]`` of one document, from full logits."""
    logits = backbone.base_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [0.0, *(float(logits[t - 1, ids[t]]) for t in range(1, len(ids)))]


@torch.no_grad()
def test_likelihoods_are_those_of_full_and_short_contexts(examination, backbone, settings):
    tokens = examination.tokens(backbone)
    context, stride = settings.context_length, settings.stride
    assert tokens.long.shape == tokens.short.shape == (16, 64)
    for row, text in enumerate(examination.texts):
        ids = examination.tokenizer(text).input_ids
        assert tokens.long[row].tolist() == pytest.approx(log_likelihoods(backbone, ids), abs=1e-4)
        for start in range(stride, 64 - context, stride):
            short = log_likelihoods(backbone, ids[start : start + context + stride])[context:]
            assert tokens.short[row, start + context : start + context + stride].tolist() == pytest.approx(
                short, abs=1e-4
            )


@torch.no_grad()
def test_right_answers_are_the_likeliest_words(examination, backbone):
    shares = examination.right_answers(backbone, 64)
    assert [len(batch["input_ids"]) for batch in examination.questions(64)] == [2, 3]
    for share, batch in zip(shares, examination.questions(64), strict=True):
        best = backbone.base_model(batch["input_ids"][:, :-1]).logits[:, -1].argmax(-1)
        assert share == pytest.approx(float((best == batch["input_ids"][:, -1]).double().mean()))
    batch = examination.questions(64)[1]
    answers = batch["input_ids"][:, -1]
    examination.questions(64)[1]["input_ids"][:, -1] = backbone.base_model(batch["input_ids"]).logits[:, -2].argmax(-1)
    assert examination.right_answers(backbone, 64)[1] == 1.0
    batch["input_ids"][:, -1] = answers


@torch.no_grad()
def test_loss_by_context_is_of_the_same_last_tokens(examination, backbone, settings):
    losses = examination.loss_by_context(backbone)
    for context, loss in zip(settings.evaluation.contexts, losses, strict=True):
        expected = []
        for text in examination.texts:
            ids = examination.tokenizer(text).input_ids[-(48 + context) :]
            expected += log_likelihoods(backbone, ids)[-48:]
        assert loss == pytest.approx(-sum(expected) / len(expected), abs=1e-4)


def test_masks_divide_the_scored_tokens_by_what_they_are(examination):
    masks = examination.masks
    assert masks.scored.sum() == 16 * 63
    for row, text in enumerate(examination.texts):
        words = ["<bos>", *text.split(" ")]
        for t in range(1, 64):
            answer = t >= 2 and words[t - 2] == "recall"
            said = [s for s in range(1, t) if words[s] == words[t]]
            assert bool(masks.far[row, t]) == (answer and t - said[-1] > 24)
            assert bool(masks.near[row, t]) == (answer and t - said[-1] <= 24)
            assert bool(masks.covered[row, t]) == (t >= 24)
    assert masks.far.any()
    assert masks.near.any()
    assert not (masks.local & (masks.far | masks.near)).any()


def test_metrics_are_means_over_the_tokens_that_count(examination, settings):
    generator = torch.Generator().manual_seed(3)
    evaluator, model = (Tokens(*(-4 * torch.rand(2, 16, 64, generator=generator))) for _ in range(2))
    found = token_metrics(model, evaluator, examination.masks, settings)

    def expected(weight):
        pairs = [
            (weight(row, t), float(model.long[row, t]))
            for row in range(16)
            for t in range(64)
            if examination.masks.scored[row, t]
        ]
        total = math.fsum(w for w, _ in pairs)
        return math.exp(-math.fsum(w * value for w, value in pairs) / total)

    def lsd(tokens, row, t):
        return float(tokens.long[row, t]) - float(tokens.short[row, t])

    def key(tokens, row, t):
        return lsd(tokens, row, t) > 2 and float(tokens.long[row, t]) > -2

    assert found["perplexity"] == pytest.approx(expected(lambda row, t: 1))
    assert found["longppl"] == pytest.approx(expected(lambda row, t: key(evaluator, row, t)))
    assert found["longppl_self"] == pytest.approx(expected(lambda row, t: key(model, row, t)))
    assert found["longppl_without_lcl"] == pytest.approx(expected(lambda row, t: lsd(evaluator, row, t) > 2))
    assert found["longppl_soft"] == pytest.approx(expected(lambda row, t: min(math.exp(lsd(evaluator, row, t)), 5)))
    assert found["perplexity_answers"] == pytest.approx(expected(lambda row, t: int(examination.masks.far[row, t])))
    assert found["perplexity_others"] == pytest.approx(expected(lambda row, t: 1 - int(examination.masks.far[row, t])))

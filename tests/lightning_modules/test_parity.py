"""The numbers of the paper's authors: their package `longppl` 0.3.0 on the same models, texts and settings."""

import pytest
import torch
from longppl.longppl import compute_longppl

from lightning_modules.backbone import Backbone
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.evaluator import score_text
from lightning_modules.functional import long_perplexity, span_token_mask
from lightning_modules.token_scores import read_key_spans
from lightning_modules.tokenization import encode_document
from tests.conftest import make_text, tiny_model


@pytest.mark.parametrize("same_tokenizer", [True, False])
@pytest.mark.parametrize(("context_length", "stride"), [(64, 32), (100, 37), (48, 48), (32, 100)])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2"])
def test_spans_longppl_and_perplexity(
    architecture, context_length, stride, same_tokenizer, tokenizer, other_tokenizer, tmp_path
):
    text = make_text(250, seed=11)
    judge_tokenizer = tokenizer if same_tokenizer else other_tokenizer
    model = tiny_model(architecture, len(tokenizer), seed=3)
    judge = tiny_model(architecture, len(judge_tokenizer), seed=4)
    alpha, beta = 0.5, -6.0  # random models: nothing passes the paper's thresholds

    theirs = compute_longppl(
        text, model, judge, tokenizer, judge_tokenizer, str(tmp_path / "spans.txt"), context_length, stride, alpha, beta
    )
    scores = score_text(text, Backbone(judge), judge_tokenizer, context_length=context_length, stride=stride)
    document = encode_document(text, tokenizer)
    with torch.no_grad():
        log_likelihood = Backbone(model)(document)
    spans = scores.key_spans(alpha=alpha, beta=beta)
    key = span_token_mask(document["offsets"], spans)

    assert (len(scores.long) - context_length) % stride, "the last window must not be full"
    assert theirs["n_key_token"] > 5
    assert spans.tolist() == read_key_spans(tmp_path / "spans.txt").tolist()
    assert int(key.sum()) == theirs["n_key_token"]
    assert document["input_ids"].numel() == theirs["n_token"]
    assert float(long_perplexity(log_likelihood, key)) == pytest.approx(float(theirs["longppl"]), rel=1e-5)
    everything = document["labels"].ne(IGNORE_INDEX)
    assert float(long_perplexity(log_likelihood, everything)) == pytest.approx(float(theirs["ppl"]), rel=1e-5)

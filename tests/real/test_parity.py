"""The numbers of the paper's authors on real models: their package `longppl` 0.3.0, and slow versions of both rules.

In float32 on a CPU, torch adds up the softmax of a large vocabulary with an error that does not cancel: the package's
log-likelihoods are too large by 9e-6 with the 49,152 tokens of SmolLM2 and by 2e-5 with the 262,144 of Gemma, ours by
1e-6 at most. So the package is also run with the same logits as float64 numbers.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from longppl.longppl import compute_longppl
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from tests.real.conftest import THRESHOLDS, WINDOWS
from tests.support import reference

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAIRS = [
    ("smollm2", "smollm2"),
    *(
        pytest.param(*pair, marks=pytest.mark.long)
        for pair in (("gemma", "gemma"), ("smollm2", "gemma"), ("qwen", "qwen"), ("smollm2", "qwen"), ("gemma", "qwen"))
    ),
]
"""Model and evaluator."""


@pytest.fixture(scope="module")
def plain(real_model):
    """A function that loads a model and its tokenizer in float32 by transformers alone; it keeps the last two."""

    @functools.lru_cache(2)
    def load(name):
        network = AutoModelForCausalLM.from_pretrained(real_model(name), dtype=torch.float32).eval()
        return network, AutoTokenizer.from_pretrained(real_model(name))

    return load


class InFloat64:
    """A model whose logits are converted after they were computed."""

    def __init__(self, network):
        self.network, self.device = network, network.device

    def __call__(self, input_ids):
        return SimpleNamespace(logits=self.network(input_ids).logits.double())


@pytest.mark.parametrize(("model", "evaluator"), PAIRS)
def test_the_rule_of_the_authors_gives_the_output_of_their_package(
    model, evaluator, measure, plain, mixed_text, tmp_path, record_property
):
    found, _ = measure(mixed_text, model, evaluator, "authors")
    (network, tokenizer), (judge, judge_tokenizer) = plain(model), plain(evaluator)
    text, spans = mixed_text.read_text("utf-8"), str(tmp_path / "spans.txt")
    settings = (spans, *WINDOWS.values(), *THRESHOLDS.values())
    raw = compute_longppl(text, network, judge, tokenizer, judge_tokenizer, *settings)
    exact = compute_longppl(text, InFloat64(network), None, tokenizer, None, *settings)  # by the spans of the first

    assert found.sums.key_tokens == raw["n_key_token"] == exact["n_key_token"] > 40
    assert found.sums.tokens + found.sums.unscored == raw["n_token"]
    for ours, theirs in (("longppl", "longppl"), ("perplexity", "ppl")):
        for name, output, tolerance in (("raw", raw, 5e-5), ("exact", exact, 1e-5)):
            error = abs(getattr(found.sums, ours) / float(output[theirs]) - 1)
            record_property(f"{ours} {name}", f"{error:.1e}")
            assert error < tolerance, (ours, name)


@pytest.mark.parametrize(("model", "evaluator"), PAIRS)
def test_the_rule_of_the_paper_is_its_slow_definition(model, evaluator, measure, plain, real_model, mixed_text):
    """Key tokens by the real log-likelihoods of the evaluator, numbers by the full logits of the model."""
    found, scores = measure(mixed_text, model, evaluator)
    document = encode_document(mixed_text.read_text("utf-8"), load_tokenizer(str(real_model(model))))
    ids, offsets = document["input_ids"][0], document["offsets"][0]
    values = (scores.token_ids, scores.offsets, scores.long, scores.short, ids, offsets)
    key = reference.key_tokens(*(each.tolist() for each in values), *THRESHOLDS.values())
    with torch.no_grad():
        log_likelihood = reference.document_log_likelihood(plain(model)[0], ids)
    assert found.alignment == ("tokens" if model == evaluator else "characters")
    assert found.sums.key_tokens == sum(key) > 40
    longppl = reference.long_perplexity(log_likelihood, torch.tensor(key))
    assert found.sums.longppl == pytest.approx(longppl, rel=1e-5)
    everything = reference.long_perplexity(log_likelihood[1:], torch.ones(len(ids) - 1))
    assert found.sums.perplexity == pytest.approx(everything, rel=1e-5)

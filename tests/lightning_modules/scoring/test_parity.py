"""The numbers of the paper's authors: their package `longppl` 0.3.0 on the same models, texts and settings."""

import pytest
import torch
from longppl.longppl import compute_longppl

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import long_perplexity
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens, key_spans
from lightning_modules.scoring.scored_model import score_text
from lightning_modules.scoring.token_scores import read_key_spans
from tests.conftest import make_text, tiny_model
from tests.support import reference
from tests.support.texts import LANGUAGES, TOKENIZERS, text_of

THRESHOLDS = {"alpha": 0.5, "beta": -6.0}
"""Random models: nothing passes the paper's thresholds."""


@pytest.mark.parametrize("same_tokenizer", [True, False])
@pytest.mark.parametrize(
    ("architecture", "context_length", "stride"),
    [("llama", 64, 32), ("mistral", 100, 37), ("qwen2", 48, 48), ("llama", 32, 100)],
)
def test_spans_longppl_and_perplexity(
    architecture, context_length, stride, same_tokenizer, tokenizer, other_tokenizer, tmp_path
):
    """On text of ASCII, tokens share no character, and both rules are the authors'."""
    text = make_text(250, seed=11)
    judge_tokenizer = tokenizer if same_tokenizer else other_tokenizer
    model = tiny_model(architecture, len(tokenizer), seed=3)
    judge = tiny_model(architecture, len(judge_tokenizer), seed=4)

    windows = (context_length, stride, *THRESHOLDS.values())
    theirs = compute_longppl(text, model, judge, tokenizer, judge_tokenizer, str(tmp_path / "spans.txt"), *windows)
    scores = score_text(text, Backbone(judge), judge_tokenizer, ShortContext(context_length, stride))
    document = encode_document(text, tokenizer)
    with torch.no_grad():
        log_likelihood = Backbone(model)(document)[0]

    assert (len(scores.long) - context_length) % stride, "the last window must not be full"
    assert theirs["n_key_token"] > 5
    assert key_spans(scores, **THRESHOLDS).tolist() == read_key_spans(tmp_path / "spans.txt").tolist()
    for rule in ("paper", "authors"):
        key = find_key_tokens(scores, document_tokens(document), **THRESHOLDS, rule=rule).mask
        assert int(key.sum()) == theirs["n_key_token"]
        assert float(long_perplexity(log_likelihood, key)) == pytest.approx(float(theirs["longppl"]), rel=1e-5)
    assert document["input_ids"].numel() == theirs["n_token"]
    everything = document["labels"][0].ne(IGNORE_INDEX)
    assert float(long_perplexity(log_likelihood, everything)) == pytest.approx(float(theirs["ppl"]), rel=1e-5)


ARCHITECTURES = [
    ("llama", {}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 8}),
    ("phi", {"partial_rotary_factor": 0.5}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("cohere", {"logit_scale": 2.0}),
    ("granite", {"logits_scaling": 3.0}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 512}),
    ("olmo2", {}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    ("stablelm", {}),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Each tokenizer as it is loaded for either rule."""
    found = {}
    for name, make in TOKENIZERS.items():
        folder = str(tmp_path_factory.mktemp(name))
        make().save_pretrained(folder)
        found[name] = {rule: load_tokenizer(folder, trimmed_offsets=rule == "authors") for rule in ("paper", "authors")}
    return found


def pair_of_tokenizers(number, language, different):
    """Each tokenizer as the evaluator's, beside itself or another one, which changes from language to language."""
    names = [*TOKENIZERS]
    step = 1 + LANGUAGES.index(language) % (len(names) - 1)
    return names[number], names[(number + step * different) % len(names)]


def text_for(tokenizer, language, seed, *, context_length, stride):
    """A text of several windows; their code fails where the last one scores a single token."""
    for words in range(18, 99):
        text = text_of(language, words=words, seed=seed)
        windows, rest = divmod(len(tokenizer(text)["input_ids"]) - context_length, stride)
        if windows > 2 and rest != 1:
            return text
    raise AssertionError(language)


@pytest.mark.slow
@pytest.mark.parametrize("different", [False, True], ids=["same", "different"])
@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES, ids=[name for name, _ in ARCHITECTURES])
@pytest.mark.filterwarnings("ignore:.*are unknown to the tokenizer")
def test_every_kind_of_tokenizer_and_text(architecture, overrides, different, stored):
    """The rule `authors` equals the raw output of their package, the paper's rule its slow definition."""
    windows = {"context_length": 24, "stride": 16}
    judge = tiny_model(architecture, 600, seed=4, **overrides)
    model = tiny_model("llama", 600, seed=3)
    seen, counted = set(), 0
    for number, language in ((number, language) for number in range(len(TOKENIZERS)) for language in LANGUAGES):
        evaluator_name, model_name = pair_of_tokenizers(number, language, different)
        text = text_for(stored[evaluator_name]["paper"], language, number, **windows)
        for rule in ("paper", "authors"):
            judge_tokenizer, tokenizer = stored[evaluator_name][rule], stored[model_name][rule]
            scores = score_text(text, Backbone(judge), judge_tokenizer, ShortContext(**windows))
            document = encode_document(text, tokenizer)
            key, _, alignment = find_key_tokens(scores, document_tokens(document), **THRESHOLDS, rule=rule)
            seen.add(alignment)
            if rule == "paper":
                values = (scores.token_ids, scores.offsets, scores.long, scores.short, *document_tokens(document))
                assert key.tolist() == reference.key_tokens(*(v.tolist() for v in values), *THRESHOLDS.values())
                continue
            theirs = compute_longppl(
                text, model, judge, tokenizer, judge_tokenizer, None, *windows.values(), *THRESHOLDS.values()
            )
            case = f"{evaluator_name} -> {model_name}, {language}"
            assert int(key.sum()) == (theirs["n_key_token"] or 0), case
            counted += int(key.sum())
            with torch.no_grad():
                log_likelihood = Backbone(model)(document)[0]
            if theirs["longppl"] is not None:
                ours = float(long_perplexity(log_likelihood, key))
                assert ours == pytest.approx(float(theirs["longppl"]), rel=1e-5), case
            ours = float(long_perplexity(log_likelihood[1:], key.new_ones(len(key) - 1)))
            assert ours == pytest.approx(float(theirs["ppl"]), rel=1e-5), case
    # Trimmed or not, a tokenizer is the same under the paper's rule.
    assert seen == {"authors", "tokens"} | ({"characters"} if different else set())
    assert counted > 20

"""Special tokens that a tokenizer adds are context: `score`, validation, documents of a corpus and the page agree."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import ExternalEvaluator
from lightning_modules.functional import key_token_mask
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.corpus.columns import document_scores
from lightning_modules.scoring.records import summarize
from lightning_modules.scoring.score import score
from lightning_modules.visualization.page import inspect_document
from tests.conftest import make_text
from tests.support.reference import long_and_short
from tests.support.special_tokens import STARTS, load_reference, plain_ids, write_models
from tests.support.trainers import quiet_trainer

SETTINGS = {"context_length": 24, "stride": 8, "alpha": 0.5, "beta": -6.0}
WINDOWS = {"context_length": 24, "stride": 8}
TEXT = make_text(60, seed=3) + " é"


@pytest.fixture(scope="module")
def folders(model_dir, tokenizer, tmp_path_factory):
    return write_models(model_dir, tokenizer, tmp_path_factory.mktemp("models"))


def compute_expected(folder, start):
    """The numbers of the text from plain logits: of its own tokens, with the special tokens before it as context."""
    model, tokenizer = load_reference(folder)
    ids = plain_ids(tokenizer, TEXT)
    long, short = long_and_short(model, torch.tensor(start + ids), *WINDOWS.values())
    scored = torch.arange(len(long)) >= max(len(start), 1)
    key = key_token_mask(long, short, alpha=0.5, beta=-6.0) & scored
    unread = 0 if start else len(tokenizer.decode(ids[:1]))
    return {
        "key_tokens": int(key.sum()),
        "longppl": float((-long[key].mean()).exp()),
        "perplexity": float((-long[scored].mean()).exp()),
        "bits_per_byte": float(-long[scored].sum()) / math.log(2) / (len(TEXT.encode()) - unread),
        "scored_tokens": int(scored.sum()),
    }


def validate(document, folder):
    callback = ExternalEvaluator(folder, **SETTINGS)
    (logged,) = quiet_trainer(None, callback).validate(
        LongContextLM(folder, **WINDOWS), DataLoader([document], batch_size=None), verbose=False
    )
    return {name.removeprefix("val/"): value for name, value in logged.items()}


def predict(document, folder):
    module = LongContextLM(folder, **WINDOWS)
    module.configure_model()
    with torch.no_grad():
        (scores,) = module.eval().predict_step(document, 0)
    return document_scores(scores, alpha=0.5, beta=-6.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(STARTS))
def test_commands_score_the_text_alone(name, folders, tmp_path):
    folder = str(folders / name)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    document = encode_document(TEXT, load_tokenizer(folder), add_special_tokens=True)
    expected = compute_expected(folder, STARTS[name])
    found = {
        "score": summarize(
            score(str(tmp_path / "text.txt"), folder, folder, add_special_tokens=True, **SETTINGS)
        ).numbers(),
        "validate": validate(document, folder),
        "predict": predict(document, folder),
    }
    assert expected["key_tokens"] > 3
    for command, numbers in found.items():
        own = {key: numbers[key] for key in expected if key in numbers}
        assert own == pytest.approx({key: expected[key] for key in own}, rel=1e-4), command
        assert {"longppl", "key_tokens"} <= set(own)
    page = inspect_document(TEXT, folder, model=folder, alternatives=0, add_special_tokens=True, **SETTINGS)
    both = (expected["longppl"], expected["perplexity"])
    assert page.models[0].perplexities() == pytest.approx(both, rel=1e-4)
    shown = f"LongPPL {both[0]:.4g}"[:11]
    assert page.summary().count(shown) == 2


@pytest.mark.slow
def test_an_end_token_of_the_evaluator_is_no_key_token(folders, model_dir, tmp_path):
    """Of a model with another tokenizer and of one with the same."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    results = [
        score(str(tmp_path / "text.txt"), str(model_dir), str(folders / name), **SETTINGS) for name in ("start", "both")
    ]
    for key in ("longppl", "key_tokens", "bits_per_byte", "evaluator_key_tokens", "perplexity"):
        assert getattr(summarize(results[0]), key) == getattr(summarize(results[1]), key)

"""Log-likelihoods that no model can give never reach a cache, a metric or a page."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from callbacks import ExternalEvaluator
from datamodules import TextDataModule
from lightning_modules.functional.checks import find_impossible
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.score import score
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.page.document import inspect_document
from tests.conftest import make_text
from tests.support.trainers import quiet_trainer

SETTINGS = {"context_length": 48, "stride": 16, "alpha": 0.5, "beta": -6.0}
TEXT = make_text(90)
NAN, INF = float("nan"), float("inf")


def break_model(folder, target, change):
    """A copy of a model that is wrong for one token of the text, far from its start."""
    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(target)
    token = load_tokenizer(str(folder)).encode(TEXT)[150]
    with torch.no_grad():
        change(model, token)
    model.save_pretrained(target)
    return str(target)


def set_nan(model, token):
    model.get_input_embeddings().weight[token] = NAN


def set_huge(model, token):
    model.get_input_embeddings().weight[token] = 1e5  # float16 ends at 65,504


def set_zero(model, token):
    for weight in model.parameters():
        weight.zero_()


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    return str(tmp_path / "book.txt")


def test_impossible_values():
    values = torch.tensor([NAN, INF, -INF, 0.2, 0.05, 0.0, -3.0, -1e30])
    assert find_impossible(values).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("change", "dtype", "part"), [(set_nan, "float32", "evaluator"), (set_huge, "float16", "model")]
)
def test_score_and_inspect_name_document_token_and_dtype(part, change, dtype, model_dir, tmp_path, text_file):
    broken = break_model(model_dir, tmp_path / "broken", change)
    models = {"model": str(model_dir), "evaluator": str(model_dir)} | {part: broken}
    cache = tmp_path / "cache"
    says = rf"broken' gives \d+ of \d+ tokens of '.*book.txt' an impossible .* token \d+ \('.*'\): nan.*\({dtype}\)"
    with pytest.raises(ValueError, match=says):
        score(text_file, **models, dtype=dtype, cache_dir=str(cache), **SETTINGS)
    with pytest.raises(ValueError, match=says):
        inspect_document(
            TEXT, models["evaluator"], name=text_file, model=broken, dtype=dtype, cache_dir=str(cache), **SETTINGS
        )
    assert len(list(cache.rglob("*.safetensors"))) == (part == "model")


def test_a_callback_does_not_log_longppl_of_a_broken_evaluator(model_dir, tmp_path, text_file, run_validation):
    broken = break_model(model_dir, tmp_path / "broken", set_nan)
    with pytest.raises(ValueError, match="broken' gives"):
        run_validation(str(model_dir), broken)


def test_a_trained_model_that_has_diverged_has_no_longppl(model_dir, tmp_path, text_file, run_validation):
    broken = break_model(model_dir, tmp_path / "broken", set_nan)
    with pytest.warns(UserWarning, match=r"gives tokens of '.*' log-likelihoods that are not finite"):
        logged = run_validation(broken, str(model_dir))
    assert torch.tensor([logged["val/longppl"], logged["val/perplexity"]]).isnan().all()


@pytest.fixture
def run_validation(tmp_path, text_file):
    def run(model, evaluator):
        data = TextDataModule(
            model,
            train=text_file,
            validation=text_file,
            sequence_length=64,
            validation_length="whole",
            cache_dir=str(tmp_path / "data"),
        )
        callback = ExternalEvaluator(evaluator, cache_dir=str(tmp_path / "cache"), **SETTINGS)
        trainer = quiet_trainer(tmp_path, callback)
        lengths = {name: SETTINGS[name] for name in ("context_length", "stride")}
        return trainer.validate(LongContextLM(model, **lengths), data, verbose=False)[0]

    return run


def test_token_scores_with_impossible_values_are_neither_written_nor_read(tmp_path, monkeypatch):
    scores = TokenScores("0" * 64, "m", 4, 2, torch.arange(3), torch.zeros(3, 2, dtype=torch.int64), *-torch.ones(2, 3))
    scores.save(tmp_path / "good")
    scores.long[1] = NAN
    with pytest.raises(ValueError, match="1 of 3 tokens have impossible"):
        scores.save(tmp_path / "bad")
    monkeypatch.setattr(TokenScores, "_check", lambda *_: None)
    scores.save(tmp_path / "bad")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="1 of 3 tokens have impossible"):
        TokenScores.load(tmp_path / "bad")


@pytest.mark.parametrize("part", ["evaluator", "model"])
def test_weights_that_are_all_zero_are_warned_of(part, model_dir, tmp_path, text_file, caplog):
    zero = break_model(model_dir, tmp_path / "zero", set_zero)
    models = {"model": str(model_dir), "evaluator": str(model_dir)} | {part: zero}
    score(text_file, **models, cache_dir=str(tmp_path / "cache"), **SETTINGS)
    assert "predicts every token with the same probability" in caplog.text
    assert f"'{models[part]}'" in caplog.text

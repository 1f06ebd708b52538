import math

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from callbacks import ExternalEvaluator
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import long_perplexity, span_token_mask, transfer_influence
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring import scored_model as scored_model_module
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.key_tokens import key_spans
from lightning_modules.scoring.scored_model import open_evaluator, score_text
from lightning_modules.scoring.token_scores import text_sha256
from tests.conftest import make_text
from tests.support.texts import write_key_spans
from tests.support.trainers import quiet_trainer

# One of the texts is too short for a key token.
pytestmark = pytest.mark.filterwarnings(r"ignore:\d of \d val documents have no key token")

SETTINGS = {"context_length": 48, "stride": 16, "alpha": 0.5, "beta": -6.0}
TEXTS = [make_text(70, seed=1), make_text(90, seed=2), "too short", make_text(80, seed=3)]


@pytest.fixture
def documents(tokenizer):
    return [encode_document(text, tokenizer, name=f"doc{number}") for number, text in enumerate(TEXTS)]


def run(model_dir, callback, documents, tmp_path, stage="validate"):
    trainer = quiet_trainer(tmp_path, callback)
    loader = DataLoader(documents, batch_size=None)
    module = LongContextLM(str(model_dir), context_length=48, stride=16)
    (result,) = getattr(trainer, stage)(module, loader, verbose=False)
    return result


def expected(model_dir, evaluator_dir, documents):
    """The same numbers from the functions alone."""
    model = load_backbone(ModelConfig(str(model_dir)))
    judge, tokenizer = load_backbone(ModelConfig(str(evaluator_dir))), load_tokenizer(str(evaluator_dir))
    parts = []
    for document in documents:
        scores = score_text(document["text"][0], judge, tokenizer, ShortContext(48, 16))
        scored = document["labels"].ne(IGNORE_INDEX)
        hard = span_token_mask(document["offsets"][0], key_spans(scores, alpha=0.5, beta=-6.0)) & scored
        soft = transfer_influence(scores.soft_influence(), scores.offsets, document["offsets"][0]) * scored
        with torch.no_grad():
            parts.append([part[0] for part in (model(document), hard, soft, scored)])
    return [torch.cat(part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_logs_what_the_functions_give(model_dir, evaluator_dir, documents, tmp_path, stage):
    prefix = {"validate": "val", "test": "test"}[stage]
    with pytest.warns(UserWarning, match="1 of 4 "):
        result = run(model_dir, ExternalEvaluator(str(evaluator_dir), **SETTINGS), documents, tmp_path, stage)
    log_likelihood, hard, soft, scored = expected(model_dir, evaluator_dir, documents)
    assert hard.sum() > 5
    assert result[f"{prefix}/longppl"] == pytest.approx(float(long_perplexity(log_likelihood, hard)), rel=1e-5)
    assert result[f"{prefix}/longppl_soft"] == pytest.approx(float(long_perplexity(log_likelihood, soft)), rel=1e-5)
    assert result[f"{prefix}/perplexity"] == pytest.approx(float(long_perplexity(log_likelihood, scored)), rel=1e-5)
    assert result[f"{prefix}/key_tokens"] == hard.sum()
    assert result[f"{prefix}/key_token_share"] == pytest.approx(float(hard.sum() / scored.sum()))
    assert result[f"{prefix}/documents_without_key_tokens"] == 1


def test_no_key_token_at_all_is_nan_and_a_counted_warning(model_dir, evaluator_dir, documents, tmp_path):
    callback = ExternalEvaluator(str(evaluator_dir), **{**SETTINGS, "alpha": 1000.0})
    with pytest.warns(UserWarning, match="4 of 4 "):
        result = run(model_dir, callback, documents, tmp_path)
    assert math.isnan(result["val/longppl"])
    assert math.isfinite(result["val/perplexity"])
    assert result["val/key_tokens"] == 0


def test_the_evaluator_scores_once_and_is_freed(model_dir, evaluator_dir, documents, tmp_path, monkeypatch):
    calls = []
    original = scored_model_module.score_text
    monkeypatch.setattr(scored_model_module, "score_text", lambda *a, **k: calls.append(a[0]) or original(*a, **k))
    callback = ExternalEvaluator(str(evaluator_dir), **SETTINGS)
    first = run(model_dir, callback, documents, tmp_path)
    assert callback.evaluator._backbone is None
    assert run(model_dir, callback, documents, tmp_path) == first
    again = ExternalEvaluator(str(evaluator_dir), **{**SETTINGS, "alpha": 1.0})
    assert run(model_dir, again, documents, tmp_path)["val/key_tokens"] < first["val/key_tokens"]
    assert calls == TEXTS, "other thresholds, other epochs and other processes need no second pass"


def test_the_evaluator_is_neither_optimised_nor_checkpointed(model_dir, evaluator_dir, documents, tmp_path):
    module = LongContextLM(str(model_dir), context_length=48, stride=16)
    trainer = quiet_trainer(tmp_path, ExternalEvaluator(str(evaluator_dir), **SETTINGS), max_steps=2)
    trainer.fit(module, DataLoader(documents[:2], batch_size=None), DataLoader(documents, batch_size=None))
    assert math.isfinite(trainer.callback_metrics["val/longppl"])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    keys = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert set(keys) == {f"backbone.{name}" for name in load_backbone(ModelConfig(str(model_dir))).state_dict()}


def test_precomputed_spans_of_the_authors(model_dir, evaluator_dir, documents, tmp_path):
    judge = open_evaluator(EvaluatorConfig(str(evaluator_dir), context_length=48, stride=16))
    folder = tmp_path / "spans"
    for number, text in enumerate(TEXTS):
        write_key_spans(folder / f"doc{number}.txt", key_spans(judge.scores(text), alpha=0.5, beta=-6.0))
    result = run(model_dir, ExternalEvaluator(key_spans=str(folder)), documents, tmp_path)
    online = run(model_dir, ExternalEvaluator(str(evaluator_dir), **SETTINGS), documents, tmp_path)
    assert result["val/longppl"] == online["val/longppl"]
    assert "val/longppl_soft" not in result
    (folder / "doc1.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"doc1\.txt.*[0-9a-f]{64}\.txt"):
        run(model_dir, ExternalEvaluator(key_spans=str(folder)), documents, tmp_path)


def test_a_file_of_spans_is_not_used_for_two_texts(model_dir, documents, tmp_path):
    """As of documents of one name in two validation sets."""
    folder = tmp_path / "spans"
    same = [documents[0], {**documents[1], "names": ["doc0"]}]
    write_key_spans(folder / "doc0.txt", torch.tensor([[200, 220]]))
    with pytest.raises(ValueError, match=r"doc0\.txt.* two texts.*SHA-256"):
        run(model_dir, ExternalEvaluator(key_spans=str(folder)), same, tmp_path)
    write_key_spans(folder / f"{text_sha256(TEXTS[1])}.txt", torch.tensor([[100, 103], [200, 220]]))
    result = run(model_dir, ExternalEvaluator(key_spans=str(folder)), same, tmp_path)
    assert result["val/key_bits_per_byte"] > 0
    spans = [torch.tensor([[200, 220]]), torch.tensor([[100, 103], [200, 220]])]
    pairs = zip((documents[0], documents[1]), spans, strict=True)
    assert result["val/key_tokens"] == sum(int(span_token_mask(each["offsets"][0], own).sum()) for each, own in pairs)


def test_rows_without_text_only_keep_processes_in_step(model_dir, evaluator_dir, documents, tmp_path):
    filler = {**documents[2], "text": [""], "names": [""], "labels": torch.full_like(documents[2]["labels"], -100)}
    plain = run(model_dir, ExternalEvaluator(str(evaluator_dir), **SETTINGS), documents, tmp_path)
    filled = run(model_dir, ExternalEvaluator(str(evaluator_dir), **SETTINGS), [filler, *documents], tmp_path)
    assert filled == plain


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "`evaluator` or `key_spans`"),
        ({"evaluator": "./nowhere"}, "nowhere"),
        ({"key_spans": "./nowhere"}, "nowhere"),
        ({"evaluator": "x", "alpha": -1.0}, "alpha"),
        ({"evaluator": "x", "beta": 1.0}, "beta"),
        ({"evaluator": "x", "gamma": 0.5}, "gamma"),
        ({"evaluator": "x", "stride": 0}, "stride"),
    ],
)
def test_bad_settings_are_refused_at_once(settings, match):
    with pytest.raises(ValueError, match=match):
        ExternalEvaluator(**settings)


def test_runs_without_training_have_the_layout_of_custom_scalars_once(model_dir, evaluator_dir, documents, tmp_path):
    evaluators = [ExternalEvaluator(str(evaluator_dir), **SETTINGS, name=name) for name in ("a", "b")]
    logger = TensorBoardLogger(tmp_path, name="", version="logs")
    trainer = quiet_trainer(tmp_path, *evaluators, logger=logger)
    module = LongContextLM(str(model_dir), context_length=48, stride=16)
    for _ in range(2):
        trainer.validate(module, DataLoader(documents[:2], batch_size=None), verbose=False)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert len(events.Tensors("custom_scalars__config__")) == 1

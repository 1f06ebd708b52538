"""Systems and question sheets of the study of correlations, on tiny models."""

import math

import pytest
import torch

from benchmarks.real_models import study
from benchmarks.real_models import systems as module
from benchmarks.real_models.anatomy import (
    compare_evaluators,
    describe_key_tokens,
    describe_texts,
)
from benchmarks.real_models.correlate import EvaluatorScores, measure_system
from benchmarks.real_models.questions import ANSWERS, make_sheets
from benchmarks.real_models.study import Study
from benchmarks.real_models.systems import System, read_scores, reuse_scores, round_weights, score_system
from benchmarks.real_models.texts import Text
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_frozen
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.records import summarize
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator

SIZES = {"context_length": 16, "stride": 8}


@pytest.fixture
def sheets(tmp_path):
    (tmp_path / "essays.txt").write_text("A man is what he thinks all day long. " * 1000)
    return make_sheets(tmp_path / "essays.txt", characters=2000, sheets=2)


def test_each_question_is_answered_by_its_document(sheets):
    assert len(sheets) == 8
    for sheet in sheets:
        lines = f"{sheet.first_prefix}{sheet.target}".strip().split("\n")
        assert len(lines) == len(sheet.answers) == ANSWERS
        for line, answer in zip(lines, sheet.answers, strict=True):
            assert answer in line
            if sheet.name.startswith("variables"):
                name = line.split()[4]
                (source,) = [
                    s.rpartition(" ")[2] for s in sheet.document.split(". ") if s.startswith(f"VAR {name} = VAR")
                ]
                assert f"VAR {source} = {answer}" in sheet.document
                assert sheet.document.index(f"VAR {source} =") < sheet.document.index(f"VAR {name} =")
            elif sheet.name.startswith("lines"):
                assert f"line {line.split()[4]}: REGISTER_CONTENT is <{answer}>" in sheet.document.split("\n")
            else:
                assert sheet.document.count(line.rstrip(".")) == 1  # the fact has the words of the question
    assert sheets[0].answers != sheets[1].answers


def test_rounded_weights_have_few_values_and_stay_in_their_range(model_dir):
    backbone = load_frozen(ModelConfig(str(model_dir), dtype="float32"), "cpu")
    before = {name: weight.clone() for name, weight in backbone.named_parameters()}
    round_weights(backbone, 2)
    for name, weight in backbone.named_parameters():
        if "proj" in name:
            assert all(len(row.unique()) <= 4 * math.ceil(row.numel() / 64) for row in weight)
            assert not torch.equal(weight, before[name])
            assert (weight - before[name]).abs().max() <= (before[name].max() - before[name].min()) / 2
        else:
            assert torch.equal(weight, before[name])


def test_an_evaluators_scores_are_those_of_the_same_model_as_a_system(tmp_path, tiny_systems, corpus, model_dir):
    text = Text("report 0", "reports", corpus[0])
    system = System("tiny", "as it is")
    score_system(system, tmp_path, [text], [], tmp_path / "own")
    scores = open_evaluator(EvaluatorConfig(str(model_dir), dtype="float32", **SIZES)).scores(text.text)
    reuse_scores(system, [text], {text.name: scores}, tmp_path / "reused")
    own, reused = (read_scores(system, text, tmp_path / folder) for folder in ("own", "reused"))
    assert own.keys() == reused.keys()
    assert torch.allclose(own["log_likelihood"][1:], reused["log_likelihood"][1:], atol=1e-5)
    assert torch.equal(own["offsets"], reused["offsets"])
    assert torch.equal(own["token_ids"], reused["token_ids"])


def test_a_study_measures_what_the_command_measures(
    tmp_path, monkeypatch, tiny_systems, corpus, model_dir, evaluator_dir, sheets
):
    """The same question asked of `longce score` has the same answer."""
    texts = [Text("report 0", "reports", corpus[0]), Text("book 1", "books", corpus[1])]
    system = System("tiny", "as it is")
    score_system(system, tmp_path, texts, sheets[:1], tmp_path)
    evaluator = open_evaluator(EvaluatorConfig(str(evaluator_dir), **SIZES))
    scores = {text.name: evaluator.scores(text.text) for text in texts}
    found = measure_system(system, texts, sheets[:1], [EvaluatorScores("evaluator", scores)], tmp_path)["metrics"]
    files = [tmp_path / f"{text.name}.txt" for text in texts]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text.text)
    records = score(list(map(str, files)), str(model_dir), str(evaluator_dir), add_special_tokens=True, **SIZES)
    asked = summarize(records).numbers()
    assert found["evaluator"]["key_tokens"] == asked["key_tokens"]
    for name in ("longppl", "longppl_per_evaluator_token", "key_bits_per_byte"):
        assert found["evaluator"][name] == pytest.approx(asked[name], nan_ok=True)
    for name in ("perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(asked[name])
    # What is stored is not scored again.
    monkeypatch.setattr(module, "load_frozen", None)
    score_system(system, tmp_path, texts, sheets[:1], tmp_path)
    # An evaluator agrees with itself.
    table = describe_texts(texts, scores)
    described = describe_key_tokens(table)
    assert sum(kind["all"] for kind in described["kinds"].values()) == pytest.approx(1)
    assert compare_evaluators(texts, scores, scores)["mean"] in (1.0, pytest.approx(math.nan, nan_ok=True))


def test_what_is_kept_is_not_computed_again(tmp_path, monkeypatch, corpus, evaluator_dir):
    folder = tmp_path / "models"
    monkeypatch.setattr(
        Study, "evaluator", lambda *_, **options: open_evaluator(EvaluatorConfig(str(evaluator_dir), **SIZES))
    )
    monkeypatch.setattr(study, "CONTEXT_LENGTH", SIZES["context_length"])
    monkeypatch.setattr(study, "STRIDE", SIZES["stride"])
    texts = [Text("report 0", "reports", corpus[0]), Text("book 1", "books", corpus[1])]
    expected = {
        text.name: open_evaluator(EvaluatorConfig(str(evaluator_dir), **SIZES)).scores(text.text) for text in texts
    }
    own = Study(folder, tmp_path, tmp_path, kept=tmp_path / "kept")
    own.kept_scores("judge", texts[:1])
    assert own.kept_scores("judge", texts).keys() == expected.keys()
    monkeypatch.setattr(ScoredModel, "scores", None)
    for name, scores in own.kept_scores("judge", texts).items():
        for field in ("token_ids", "offsets", "long", "short"):
            assert torch.equal(getattr(scores, field), getattr(expected[name], field))
    systems = (System("tiny", "a"), System("tiny", "b"))
    own._measure_each("s", systems[:1], lambda system: {"name": system.name})

    def measure(system):  # while another process measures and keeps a third one
        if system.name == "b":
            own._measure_each("s", (System("tiny", "c"),), measure)
        return {"name": f"again {system.name}"}

    found = own._measure_each("s", systems, measure)
    assert {path: each["name"] for path, each in found.items()} == {
        "tiny/a": "a",
        "tiny/b": "again b",
        "tiny/c": "again c",
    }
    assert all(each["commit"] and each["machine"] for each in found.values())

"""Texts of the studies: the same number of tokens of each."""

import json

from benchmarks.real_models import texts as module
from benchmarks.real_models.texts import BOOKS, REPORTS, read_exam_texts
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator


def test_reports_that_are_too_short_are_passed_over(tmp_path, monkeypatch, corpus, evaluator_dir):
    monkeypatch.setattr(module, "BOOK_NUMBERS", (7,))
    monkeypatch.setattr(module, "BOOK_START", 5)
    for file in (tmp_path / REPORTS, tmp_path / BOOKS / "7.txt"):
        file.parent.mkdir(parents=True)
    reports = [corpus[0], "short", *corpus[1:3]]
    (tmp_path / REPORTS).write_text("\n".join(json.dumps({"input": text}) for text in reports))
    (tmp_path / BOOKS / "7.txt").write_text(corpus[0])
    evaluator = open_evaluator(EvaluatorConfig(str(evaluator_dir), context_length=16, stride=16))
    found = read_exam_texts(tmp_path, evaluator, 20)
    assert [text.name for text in found] == ["report 0", "report 2", "report 3", "book 7"]
    assert all(evaluator.encode(text.text, name=text.name)["input_ids"].shape[1] == 20 for text in found)
    assert found[-1].text == corpus[0][5 : 5 + len(found[-1].text)]

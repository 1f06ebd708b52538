import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.functional import key_token_mask
from lightning_modules.models.backbone import Backbone
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.visualization.page import inspect_document
from longce.cli.main import main
from tests.conftest import make_text
from tests.lightning_modules.visualization.page.conftest import as_json, unpacked

SETTINGS = {"context_length": 48, "stride": 16, "alpha": 0.5, "beta": -6.0}
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / "a report.txt"
    path.write_text(f"<script>alert(1)</script>\n{make_text(110)} 🙂\n", encoding="utf-8")
    return str(path)


def test_command_writes_the_page_of_the_evaluators_scores(file, model_dir, evaluator_dir, capsys):
    models = ["--model", str(model_dir), "--model", str(evaluator_dir)]
    main(["inspect", file, "--evaluator", str(evaluator_dir), *models, *OPTIONS])
    out = capsys.readouterr().out.splitlines()
    page = Path("a report.txt.html").read_text(encoding="utf-8")
    assert out[1] == f"a report.txt.html ({len(page.encode()) / 1e6:.1f} MB)"
    text = Path(file).read_text(encoding="utf-8")
    scores = open_evaluator(EvaluatorConfig(str(evaluator_dir), context_length=48, stride=16)).scores(text)
    arrays = unpacked(page, "scores")
    assert np.array_equal(arrays["long"], scores.long.numpy())
    assert np.array_equal(arrays["short"], scores.short.numpy())
    assert arrays["text"].tobytes().decode() == text
    key = key_token_mask(scores.long, scores.short, alpha=0.5, beta=-6.0)
    assert key.sum() > 3
    (judged,) = score(file, str(model_dir), str(evaluator_dir), **SETTINGS)
    assert out[0].startswith(f"a report.txt: {len(key)} tokens, {int(key.sum())} key tokens")
    assert f"LongPPL {judged.sums.longppl:.1f}, perplexity {judged.sums.perplexity:.1f}" in out[0]
    assert str(model_dir) in out[0]
    own = as_json(arrays["facts"])["models"]
    assert [model["name"] for model in own] == [model_dir.name, evaluator_dir.name]
    assert np.array_equal(arrays["model_1_long"], scores.long.numpy())


def test_stored_scores_need_no_model_and_alternatives_one_pass_more(file, evaluator_dir, monkeypatch):
    passes = []
    original = Backbone.forward
    monkeypatch.setattr(
        Backbone,
        "forward",
        lambda self, batch, *a, **k: passes.append(len(batch["labels"])) or original(self, batch, *a, **k),
    )
    text = Path(file).read_text(encoding="utf-8")
    first = inspect_document(text, str(evaluator_dir), alternatives=0, **SETTINGS)
    once = len(passes)
    assert first.alternatives is None
    passes.clear()
    second = inspect_document(text, str(evaluator_dir), alternatives=2, **SETTINGS)
    assert 0 < len(passes) <= once
    assert torch.equal(first.scores.long, second.scores.long)
    monkeypatch.setattr("lightning_modules.scoring.scored_model.load_scorer", None)
    third = inspect_document(text, str(evaluator_dir), alternatives=0, **{**SETTINGS, "alpha": 1.0})
    assert torch.equal(first.scores.short, third.scores.short)


BAD_INPUT = {
    "nowhere.txt": ["nowhere.txt"],
    "line 2: byte 0xef": ["latin.txt"],
    "empty.txt": ["empty.txt"],
    "/no/such/judge": ["--evaluator", "/no/such/judge"],
    "/no/such/model": ["--model", "/no/such/model"],
    "`stride`": ["--stride", "0"],
    "`alternatives`": ["--alternatives", "21"],
    "no/folder/out.html": ["--output", "no/folder/out.html"],
    "is the document itself": ["--output", "texts/../texts/a report.txt"],
}


@pytest.mark.parametrize("named", BAD_INPUT)
def test_bad_input_is_named_before_any_model_is_loaded(named, file, evaluator_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_modules.scoring.scored_model.load_scorer", None)
    monkeypatch.setattr("lightning_modules.scoring.scored_model.load_scorer", None)
    (tmp_path / "latin.txt").write_bytes(b"first line\nna\xefve")
    (tmp_path / "empty.txt").write_text(" \n")
    document = [] if BAD_INPUT[named][0].endswith(".txt") else [file]
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "--evaluator", str(evaluator_dir), *document, *BAD_INPUT[named]])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_a_short_document_has_a_page_without_key_tokens(evaluator_dir):
    inspection = inspect_document("ba ce di.", str(evaluator_dir), **SETTINGS)
    assert re.search(r"0 key tokens \(0\.00%\), LongPPL —", inspection.summary())
    assert as_json(unpacked(inspection.html(), "scores")["facts"])["first_short"] == len(inspection.scores.token_ids)
    assert unpacked(inspection.html(), "alternatives")["short_token"].shape == (0, 5)

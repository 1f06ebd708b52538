"""Evaluators in two processes with different numbers of documents: none waits, and the numbers are those of one."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from callbacks import ExternalEvaluator
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.scoring.token_scores import text_sha256
from tests.conftest import make_text
from tests.support.distributed import run_distributed
from tests.support.runs import make_data, make_module, make_trainer
from tests.support.texts import write_books

SETTINGS = {"context_length": 16, "stride": 16}
PAIRS = {"low": {"alpha": 0.5, "beta": -6.0}, "high": {"alpha": 1.0, "beta": -4.0}, "all": {"alpha": 0, "beta": -20}}
DOCUMENTS = (1, 3, 5)


def evaluate(setup, root, processes, strategy, documents):
    """Numbers of two evaluators, of which one is sharded; the first document is in its cache, the second is damaged."""
    folder = root / f"{processes} {strategy} {documents} {os.environ['LOCAL_RANK']}"
    shutil.copytree(setup.known, folder)
    options = {"thresholds": PAIRS, "cache_dir": str(folder), **SETTINGS}
    sharded = ExternalEvaluator(setup.evaluator, name="sharded", sharded=True, **options)
    whole = ExternalEvaluator(setup.model, name="whole", **options)
    trainer = make_trainer(root, processes, strategy, callbacks=[sharded, whole])
    (logged,) = trainer.test(make_module(setup), make_data(setup, test_documents=documents), verbose=False)
    return logged


def _run(rank, processes, setup, root):
    os.environ["LOCAL_RANK"] = str(rank)
    results = {number: evaluate(setup, root, processes, "ddp", number) for number in DOCUMENTS}
    results["fsdp"] = evaluate(setup, root, processes, "fsdp", 3)
    torch.save(results, root / f"rank {rank}.pt")


@pytest.fixture(scope="module")
def setup(model_dir, evaluator_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded evaluators")
    texts = [make_text(40 + 10 * number, seed=number) for number in range(5)]
    write_books(root, train=texts, validation=texts, test=texts)
    judge = open_evaluator(EvaluatorConfig(str(evaluator_dir), cache_dir=str(root / "known"), **SETTINGS))
    for text in texts[:2]:
        judge.scores(text)
    file = judge.path(text_sha256(texts[1]))
    file.write_bytes(file.read_bytes()[:-8])
    paths = {"model": str(model_dir), "evaluator": str(evaluator_dir), "books": str(root), "cache": str(root / "cache")}
    return SimpleNamespace(known=root / "known", **paths)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*have no key token", "ignore:.*share a character")
def test_processes_with_several_thresholds_find_the_numbers_of_one(setup, tmp_path, monkeypatch):
    run_distributed(_run, setup, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    expected = {number: evaluate(setup, tmp_path, 1, "auto", number) for number in DOCUMENTS}
    expected["fsdp"] = expected[3]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank {rank}.pt")
        for name, numbers in expected.items():
            assert found[name] == pytest.approx(numbers, rel=1e-5, nan_ok=True)
            assert numbers["test/sharded/all/key_tokens"] > numbers["test/sharded/low/key_tokens"] > 0

"""The recipes of docs/curate.md: an engine distributes the rows, and has the scores of the local command."""

import contextlib
import os
import re
import runpy
import shutil
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from tests.conftest import make_text
from tests.support import forks
from tests.support.pages import ROOT

SETTINGS = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6.0, "dtype": "float32", "device": "cpu"}
WORDS = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
SMALL = {
    '"meta-llama/Llama-3.2-1B"': '"model"',
    '{"context_length": 4096, "max_tokens": 131072}': repr(SETTINGS),
    "context_length=4096, max_tokens=131072": WORDS,
    "num_gpus=1": "num_cpus=1",
    "(1, 64)": "(1, 1)",
    "tasks=64": "tasks=2",
}
NAMES = ("ray_data", "datatrove_step")


def recipe(name):
    return (ROOT / "docs" / "recipes" / f"{name}.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_has_the_scores_of_the_local_command(name, model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "model")
    texts = [make_text(20 + 7 * number, number) for number in range(12)]
    (tmp_path / "corpus").mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[part::2]}), tmp_path / "corpus" / f"{part}.parquet")
    code = recipe(name)
    for old, new in SMALL.items():
        code = code.replace(old, new)
    assert re.search(r"llama|4096|131072|64", code) is None
    (tmp_path / "recipe.py").write_text(code)
    environment = {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}
    with mock.patch.dict(os.environ, environment), contextlib.chdir(tmp_path):
        process = forks.start(runpy.run_path, "recipe.py", None, "__main__", out=tmp_path / "printed")
    process.join()
    assert process.exitcode == 0, (tmp_path / "printed").read_text()
    config = CorpusConfig(model=str(tmp_path / "model"), output=str(tmp_path / "local"), **SETTINGS)
    score_corpus([str(tmp_path / "corpus")], config)
    expected = pyarrow.parquet.read_table(tmp_path / "local").drop_columns(["key", "file", "row"])
    found = pyarrow.parquet.read_table(tmp_path / "scores").select(expected.column_names)
    by_hash = {row["text_hash"]: row for row in expected.to_pylist()}
    assert len(found) == len(by_hash) == 12
    assert all(row == by_hash[row["text_hash"]] for row in found.to_pylist())
    assert found["error"].null_count == 12

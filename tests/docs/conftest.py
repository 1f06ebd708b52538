import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.pages import ROOT
from tests.support.readers import EXPERIMENT, write_corpus, write_results
from tests.support.texts import write_books


@pytest.fixture
def reader(tmp_path, monkeypatch, corpus, model_dir, evaluator_dir):
    """The folder of a reader who has done what the commands take for granted."""
    for name, target in (("configs", ROOT / "configs"), ("model", model_dir), ("evaluator", evaluator_dir)):
        (tmp_path / name).symlink_to(target)
    for name, text in (("report", corpus[0]), ("report1", "\n".join(corpus[:5])), ("report2", corpus[1])):
        (tmp_path / f"{name}.txt").write_text(text)
    write_books(tmp_path / "pg19", train=corpus[:2], validation=corpus[2:3], test=corpus[3:4])
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    write_corpus(tmp_path / "corpus", corpus)
    chosen = {"text": corpus, "source": ["books"] * len(corpus), "tokens": [*range(len(corpus))]}
    pq.write_table(pa.table(chosen), tmp_path / "chosen.parquet")
    write_results(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path

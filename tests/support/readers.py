"""A reader of the pages: with the models, texts and results that the commands of the pages take for granted."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_modules.scoring.records import write_records
from tests.support.experiments import book_data, component, evaluator, experiment
from tests.support.records import MODEL, make_record

EXPERIMENT = experiment(  # laid over the shipped ones it makes them small
    "model",
    book_data("model", "pg19"),
    strategy="auto",
    max_steps=1,
    accumulate_grad_batches=1,
    val_check_interval=1,
    callbacks=[component("callbacks.StepCheckpoint", save_last=True), evaluator("evaluator")],
)


LONGER_THAN_THE_MODEL = pytest.mark.filterwarnings("ignore:A document of .* tokens is longer than the 4096 positions")


def write_corpus(folder, texts):
    folder.mkdir()
    pq.write_table(pa.table({"text": texts, "source": ["books"] * len(texts)}), folder / "0.parquet")


def write_results(folder):
    """Of `longce score --output` for three models, and their scores."""
    records = [
        make_record("report.txt", longppl, 20 - longppl, model=MODEL._replace(name=name, identity=name))
        for name, longppl in (("a", 2.0), ("b", 3.0), ("c", 5.0))
    ]
    write_records(folder / "scores.parquet", records)
    (folder / "scores.csv").write_text("model,LongBench\na,40\nb,35\nc,20\n")

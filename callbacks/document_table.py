"""The numbers of each document of an evaluation: a parquet file beside the checkpoints, and a table in TensorBoard."""

import importlib.util
import io
import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.evaluation_numbers import Influence, ScoredDocument, Thresholds
from lightning_modules.functional import long_perplexity
from lightning_modules.training.checkpoints.resume import is_remote, run_folder
from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.report import Table, as_markdown_table

_SHOWN = 50  # rows in TensorBoard


class DocumentTable:
    """One row per document and thresholds, collected in each process and written by the first.

    Args:
        stage: ``val`` or ``test``.
        evaluator: Name of the evaluator, in the table and its file.
    """

    def __init__(self, stage: str, evaluator: str) -> None:
        self._stage, self._evaluator = stage, evaluator
        self._rows: list[dict[str, Any]] = []

    def add(self, document: ScoredDocument, influence: Influence, thresholds: Mapping[str, Thresholds]) -> None:
        """Add a document's rows, one for each of the named thresholds."""
        log_likelihood, scored = document.log_likelihood.cpu(), document.scored
        perplexity = float(long_perplexity(log_likelihood, scored))
        for name, values in thresholds.items():
            key = influence.key[name]
            row: dict[str, Any] = {"evaluator": self._evaluator, "set": document.set, "document": document.name}
            row |= {"thresholds": name, **values._asdict(), "tokens": int(scored.sum()), "perplexity": perplexity}
            longppl = float(long_perplexity(log_likelihood, key)) if key.any() else math.nan
            self._rows.append({**row, "key_tokens": int(key.sum()), "longppl": longppl})

    def write(self, trainer: Trainer) -> None:
        """Write the rows of all processes to the run's folder, ``documents/STAGE-EVALUATOR-step-N.parquet``."""
        parts = gathered(self._rows)
        # Processes take turns with the documents.
        rows = sorted((row for part in parts for row in part), key=lambda row: (row["set"], row["document"]))
        dry_run = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
        if not trainer.is_global_zero or dry_run or not rows or not trainer.loggers:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                name = f"{self._stage}/documents/{self._evaluator}"
                cells = [[_format_cell(value) for value in row.values()] for row in rows[:_SHOWN]]
                logger.experiment.add_text(name, as_markdown_table(Table([*rows[0]], cells)), trainer.global_step)
        folder, named = run_folder(trainer), None not in (trainer.loggers[0].name, trainer.loggers[0].version)
        if not named or is_remote(folder) or importlib.util.find_spec("pyarrow") is None:
            return
        import pyarrow
        from pyarrow import parquet

        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        (folder / "documents").mkdir(parents=True, exist_ok=True)
        name = f"{self._stage}-{self._evaluator}-step-{trainer.global_step}.parquet"
        write_atomically(folder / "documents" / name, buffer.getvalue())


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Metrics of a resumed run in CSV files."""

import csv
import warnings
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_modules.utilities.files import write_atomically


def keep_metrics(loggers: Iterable[Logger]) -> None:
    """Let CSV loggers append to the metrics of a run that is resumed in its folder: Lightning deletes them."""
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        file = Path(logger.log_dir) / "metrics.csv"
        complete = []
        if file.is_file():
            lines = file.read_bytes().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith(b"\n")]  # a killed run may end within a line
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory")
            writer = logger.experiment
        if complete:
            write_atomically(file, b"".join(complete))
            writer.metrics_keys = next(csv.reader([complete[0].decode()]))

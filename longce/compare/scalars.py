"""Read the scalars that a run has logged, from files of TensorBoard and CSV files."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

_log = logging.getLogger(__name__)


def read_scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield name, logged step and value of the scalars of TensorBoard and of CSV files, oldest first."""
    for file in sorted(folder.glob("events.out.tfevents.*"), key=split_numbers):
        size = file.stat().st_size  # before reading: a run in training writes on
        intact = 0
        # Not `EventAccumulator`, which removes the steps before a resumption, and sorts files by name.
        for content in RawEventFileLoader(str(file)).Load():
            intact += 16 + len(content)
            event = Event.FromString(content)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
        if intact < size:
            _log.warning("'%s' ends in an unfinished or damaged event: only the values before it are compared.", file)
    table = folder / "metrics.csv"
    if table.is_file():
        logged = pd.read_csv(table).drop(columns="epoch", errors="ignore").melt("step").dropna(subset="value")
        yield from zip(logged["variable"], logged["step"], logged["value"], strict=True)


def split_numbers(file: Path) -> list[int | str]:
    """Return the parts of a file's name, numbers as such: 9 comes before 10, and step 500 before step 1000."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.name)]

"""What evaluators take for a document (Table 12), as files beside the results."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduction.tables.results import file_name
from lightning_modules.utilities.files import write_atomically


class EvaluatorTimes:
    """Seconds that an evaluator took for each document, long and short passes.

    Args:
        evaluator: Its name in tables.
        settings: Of the measurement.
    """

    def __init__(self, evaluator: str, settings: dict[str, Any]) -> None:
        self.evaluator = evaluator
        self.settings = settings
        self.seconds: list[float | None] = []

    def add(self, seconds: float | None) -> None:
        """The next document; None if its scores were on disk."""
        self.seconds.append(seconds)

    def save(self, folder: Path) -> None:
        """Write them, unless nothing was measured."""
        if not math.isnan(mean_seconds(self.seconds)):
            content = {"evaluator": self.evaluator, "settings": self.settings, "seconds": self.seconds}
            write_atomically(_path(folder, self.evaluator), (json.dumps(content, indent=1) + "\n").encode())


def read_times(folders: Iterable[Path], evaluator: str) -> float:
    """Mean seconds for a document of an evaluator, from the first folder that has them; NaN if none does."""
    for path in (_path(folder, evaluator) for folder in folders):
        if path.is_file():
            return mean_seconds(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    return math.nan


def mean_seconds(seconds: Sequence[float | None]) -> float:
    """Mean without the first time that was measured, which contains the loading of the model; NaN without another."""
    measured = [value for value in seconds if value is not None][1:]
    return math.fsum(measured) / len(measured) if measured else math.nan


def _path(folder: Path, evaluator: str) -> Path:
    return folder / "evaluators" / f"{file_name(evaluator)}.json"

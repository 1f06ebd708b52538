"""Store one result file per model and evaluator, and read results from any number of folders."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.statistics import Interval, weighted_mean_interval

FORMAT = "longce-reproduce-1"
ITSELF = "itself"
"""Name of the evaluator that is the model in question (Table 6)."""


@dataclass
class DocumentResult:
    """Scores of one document under one model.

    Attributes:
        name: Name of the document.
        tokens: Number of tokens of the model, with the first.
        seconds: Time of the model's pass over it.
        sums: For each measure the sum of influence times log-likelihood, in nats, and the sum of the influence.
    """

    name: str
    tokens: int
    seconds: float
    sums: dict[str, tuple[float, float]]


@dataclass
class Result:
    """Scores of all documents under one model with the key tokens of one evaluator, or the reason of a failure.

    Attributes:
        model: Name of the model in tables.
        evaluator: Name of the evaluator in tables, or `ITSELF`.
        settings: Everything else that numbers depend on; only results with equal settings are combined.
        made_by: Paths and identities of both, versions and device, to compare when numbers differ.
        documents: One entry per document.
        failure: Reason why documents are missing.
    """

    model: str
    evaluator: str
    settings: dict[str, Any]
    made_by: dict[str, Any] = field(default_factory=dict)
    documents: list[DocumentResult] = field(default_factory=list)
    failure: str | None = None

    def value(self, measure: str, average: Literal["documents", "tokens"]) -> float:
        """Return a perplexity of the corpus.

        Args:
            measure: Name of the influence.
            average: ``tokens`` takes the exponential of the mean over all tokens; ``documents`` the mean of each
                document's perplexity, weighted by its sum of influence, as the authors' code did before version 0.3.0.

        Returns:
            NaN if no token has influence.
        """
        sums = [entry.sums[measure] for entry in self.documents if measure in entry.sums]
        sums = [(total, weight) for total, weight in sums if weight > 0]
        if not sums:
            return math.nan
        weights = math.fsum(weight for _, weight in sums)
        if average == "tokens":
            return math.exp(-math.fsum(total for total, _ in sums) / weights)
        return math.fsum(weight * math.exp(-total / weight) for total, weight in sums) / weights

    def interval(self, measure: str, average: Literal["documents", "tokens"]) -> Interval | None:
        """Return the 95% interval of `value` over documents; None for fewer than 5."""
        sums = np.array([entry.sums[measure] for entry in self.documents if measure in entry.sums]).reshape(-1, 2)
        totals, weights = sums[sums[:, 1] > 0].T
        if average == "documents":
            return weighted_mean_interval(np.exp(-totals / weights), weights)
        interval = weighted_mean_interval(-totals / weights, weights)
        return interval and (math.exp(interval[0]), math.exp(interval[1]))

    def save(self, folder: Path) -> None:
        """Write the file atomically; a failure never replaces a result that another machine has measured meanwhile."""
        path = result_path(folder, self.model, self.evaluator)
        if self.failure is None or not path.exists() or read_result(path).failure is not None:
            content = {"format": FORMAT, **asdict(self)}
            write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def result_path(folder: Path, model: str, evaluator: str) -> Path:
    """Return the path of a result in a folder of results."""
    return folder / "results" / file_name(model) / f"{file_name(evaluator)}.json"


def file_name(name: str) -> str:
    """Return a name as a part of a path; different names stay different."""
    if re.fullmatch(r"[\w+-][\w.+-]*", name):
        return name
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.")
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_result(path: Path) -> Result:
    """Read one result.

    Raises:
        ValueError: If the file is not a result.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        content["documents"] = [DocumentResult(**entry) for entry in content["documents"]]
        return Result(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"'{path}' is not a result of `longce reproduce` ({error}). Delete it to measure again."
        ) from error


def read_results(folders: Iterable[Path], settings: dict[str, Any] | None = None) -> dict[tuple[str, str], Result]:
    """Read all results of some folders, by model and evaluator.

    If two folders have the same one, success is preferred to failure, then the folder named first.

    Args:
        folders: Folders of results, of this machine or of others.
        settings: Settings that all must have; by default those of the first.

    Raises:
        ValueError: If two were measured with different settings, or a file is not a result.
    """
    found: dict[tuple[str, str], Result] = {}
    origin = "this command"
    for folder in folders:
        for path in sorted((folder / "results").glob("*/*.json")):
            result = read_result(path)
            if settings is None:
                settings, origin = result.settings, f"'{path}'"
            names = sorted({*result.settings, *settings})
            if other := [name for name in names if result.settings.get(name) != settings.get(name)]:
                raise ValueError(
                    f"'{path}' was measured with `{other[0]}` = {result.settings.get(other[0])!r}, and {origin} has"
                    f" {settings.get(other[0])!r}: these numbers do not belong in one table. Use another `output`, or"
                    " the same settings."
                )
            key = (result.model, result.evaluator)
            if key not in found or (found[key].failure is not None and result.failure is None):
                found[key] = result
    return found


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def save_times(folder: Path, evaluator: str, settings: dict[str, Any], seconds: Sequence[float | None]) -> None:
    """Write the seconds that an evaluator took for each document, None where scores were on disk.

    Nothing is written if nothing was measured.
    """
    if not math.isnan(mean_seconds(seconds)):
        content = {"evaluator": evaluator, "settings": settings, "seconds": seconds}
        path = folder / "evaluators" / f"{file_name(evaluator)}.json"
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def read_times(folders: Iterable[Path], evaluator: str) -> list[float | None]:
    """Return the seconds of an evaluator for each document, from the first folder that has them, else none."""
    for path in (folder / "evaluators" / f"{file_name(evaluator)}.json" for folder in folders):
        if path.is_file():
            return list(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    return []


def mean_seconds(seconds: Sequence[float | None]) -> float:
    """Return the mean without the first time measured, which contains the loading of the model, else NaN."""
    measured = [value for value in seconds if value is not None][1:]
    return math.fsum(measured) / len(measured) if measured else math.nan


def seconds_interval(*seconds: Sequence[float | None]) -> Interval | None:
    """Return the 95% interval of the mean over documents of the sum of times; None for fewer than 5 documents.

    Long documents take long by every model, so times are added document by document.
    """
    if len({len(each) for each in seconds}) > 1:
        return None
    known = [row for row in zip(*seconds, strict=True) if None not in row][1:]
    sums = np.array(known, dtype=np.float64).reshape(-1, len(seconds)).sum(axis=1)
    return weighted_mean_interval(sums, np.ones(len(sums)))

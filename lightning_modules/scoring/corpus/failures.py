"""Documents of a corpus that have no scores, by source and reason, and whether there are too many of them."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow
import pyarrow.compute

from lightning_modules.scoring.corpus.shards import SUCCESS, Rows, ScoreShards
from lightning_modules.utilities.errors import IncompleteError

LEFT_OUT = "left out: "
"""Begins the reason of a document that the user asked to leave out, which is not a failure."""

_SOURCES, _REASONS, _WORDS = 20, 3, 300  # shown of each report; characters of a reason
_VARIABLE = re.compile(r"\[.*|\d+")  # lists of fields, and numbers of rows, bytes and tokens

_log = logging.getLogger(__name__)


def check_failures(
    shards: ScoreShards, rows: Rows, source: Callable[[str], str], *, allowed: float, complete: bool
) -> None:
    """Report the failed documents of this run and of earlier ones, by source and reason.

    Args:
        shards: The scores.
        rows: Rows that have been scored or have failed, by file.
        source: Source that a file belongs to.
        allowed: Share of the documents of a source that may fail.
        complete: Whether all documents are done. Too many failures of a trial are a warning.

    Raises:
        IncompleteError: If all are done, and more documents of a source failed: one of 20 is more than 1%.
    """
    failures = _find_failures(shards, rows, source)
    above = {name: one for name, one in failures.items() if one.failed / one.documents > allowed}
    if above and complete:
        raise IncompleteError(
            f"{len(above):,} source(s) have more failed documents than `data.allowed_failures` = {allowed:g} allows:\n"
            f"{_report(above)}\nAll scores are kept in {shards.folder}, without {SUCCESS}. Correct these documents and"
            " score them into another folder, or accept the failures: the same command with a larger"
            " `data.allowed_failures` scores nothing again."
        )
    if failures:
        amount = "more than" if above else "no more than"
        level = logging.WARNING if above else logging.INFO
        _log.log(level, "Failed documents, %s `data.allowed_failures` allows:\n%s", amount, _report(failures))


@dataclass
class _SourceFailures:
    """Failed documents of one source.

    Attributes:
        documents: All documents of the source, failed or not.
        reasons: Number of documents by kind of reason, and the first of each kind: its place and its whole reason.
    """

    documents: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Number of failed documents."""
        return sum(count for count, _ in self.reasons.values())

    def add(self, place: str, key: str, reason: str) -> None:
        """Count a failed document.

        Args:
            place: File and row.
            key: What the corpus calls the document.
            reason: Why it has no scores.
        """
        reason = re.sub(r"^\S.*?:\d+: ", "", reason)  # the place in front, which the report names in its own way
        kind = _VARIABLE.sub("", reason.replace(f"'{key}'", ""))
        count, first = self.reasons.get(kind, (0, f"{reason[:_WORDS]} ({place})"))
        self.reasons[kind] = (count + 1, first)

    def report(self, source: str) -> list[str]:
        """Return a line for the source, and one for each of its most frequent reasons."""
        share = self.failed / self.documents
        lines = [f"  {source}: {self.failed:,} of {self.documents:,} documents failed ({share:.1%})"]
        reasons = sorted(self.reasons.values(), reverse=True)
        lines += [f"    {count:,} x {first}" for count, first in reasons[:_REASONS]]
        return [*lines, f"    and {len(reasons) - _REASONS:,} other reasons"] if len(reasons) > _REASONS else lines


def _find_failures(shards: ScoreShards, rows: Rows, source: Callable[[str], str]) -> dict[str, _SourceFailures]:
    """Sources with a failed document, the one with the most first."""
    found: dict[str, _SourceFailures] = {}
    for file, numbers in rows.items():
        found.setdefault(source(file), _SourceFailures()).documents += len(numbers)
    for batch in shards.batches(["key", "file", "row", "error"]):
        for row in batch.filter(pyarrow.compute.is_valid(batch.column("error"))).to_pylist():
            if not row["error"].startswith(LEFT_OUT):
                found[source(row["file"])].add(f"row {row['row']} of '{row['file']}'", row["key"], row["error"])
    return dict(sorted(((name, one) for name, one in found.items() if one.failed), key=lambda pair: -pair[1].failed))


def _report(found: Mapping[str, _SourceFailures]) -> str:
    lines = [line for name, source in list(found.items())[:_SOURCES] for line in source.report(name)]
    return "\n".join([*lines, f"  and {len(found) - _SOURCES:,} other sources"] if len(found) > _SOURCES else lines)

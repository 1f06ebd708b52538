"""Documents of a corpus that have no scores, by source and reason, and whether there are too many of them."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

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

    Rows by file are those that have been scored or have failed; ``source`` is that of a file.

    Raises:
        IncompleteError: If all documents are ``complete``, and more than the ``allowed`` share of those of a source
            failed: one of 20 is more than 1%. Before that, too many failures are a warning.
    """
    documents: Counter[str] = Counter()
    for file, numbers in rows.items():
        documents[source(file)] += len(numbers)
    failures = _count_reasons(shards, source)
    above = {name: reasons for name, reasons in failures.items() if reasons.total() / documents[name] > allowed}
    if above and complete:
        raise IncompleteError(
            f"{len(above):,} source(s) have more failed documents than `data.allowed_failures` = {allowed:g} allows:\n"
            f"{_report(above, documents)}\nAll scores are kept in {shards.folder}, without {SUCCESS}. Correct these"
            " documents and score them into another folder, or accept the failures: the same command with a larger"
            " `data.allowed_failures` scores nothing again."
        )
    if failures:
        amount = "more than" if above else "no more than"
        level = logging.WARNING if above else logging.INFO
        report = _report(failures, documents)
        _log.log(level, "Failed documents, %s `data.allowed_failures` allows:\n%s", amount, report)


def _count_reasons(shards: ScoreShards, source: Callable[[str], str]) -> dict[str, Counter[str]]:
    """Count failed documents by source and kind of reason, named by its first document; most failures first."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], str] = {}
    for batch in shards.batches(["key", "file", "row", "error"]):
        for row in batch.filter(pyarrow.compute.is_valid(batch.column("error"))).to_pylist():
            if row["error"].startswith(LEFT_OUT):
                continue
            name = source(row["file"])
            reason = re.sub(r"^\S.*?:\d+: ", "", row["error"])  # the place in front, which the example has
            kind = _VARIABLE.sub("", reason.replace(f"'{row['key']}'", ""))
            example = f"{reason[:_WORDS]} (row {row['row']} of '{row['file']}')"
            found[name][examples.setdefault((name, kind), example)] += 1
    return dict(sorted(found.items(), key=lambda pair: -pair[1].total()))


def _report(failures: Mapping[str, Counter[str]], documents: Mapping[str, int]) -> str:
    lines = []
    for name, reasons in list(failures.items())[:_SOURCES]:
        failed = reasons.total()
        lines.append(f"  {name}: {failed:,} of {documents[name]:,} documents failed ({failed / documents[name]:.1%})")
        lines += [f"    {count:,} x {example}" for example, count in reasons.most_common(_REASONS)]
        if len(reasons) > _REASONS:
            lines.append(f"    and {len(reasons) - _REASONS:,} other reasons")
    if len(failures) > _SOURCES:
        lines.append(f"  and {len(failures) - _SOURCES:,} other sources")
    return "\n".join(lines)

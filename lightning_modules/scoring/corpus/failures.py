"""Report of the failed documents of a corpus, and the limit on their number."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import pyarrow
import pyarrow.compute

from lightning_modules.scoring.corpus.shards import SUCCESS, Rows, ScoreShards
from lightning_modules.utilities.errors import IncompleteError

LEFT_OUT = "left out: "
"""Prefix of the reason of a document that the user excluded, which is not a failure."""

_MAX_SOURCES, _MAX_REASONS, _MAX_CHARACTERS = 20, 3, 300  # in a report; characters are those of a reason
_VARYING_TEXT = re.compile(r"\[.*|\d+")  # lists of fields, and numbers of rows, bytes and tokens

_log = logging.getLogger(__name__)


def check_failures(
    shards: ScoreShards, rows: Rows, source: Callable[[str], str], *, allowed: float, complete: bool
) -> None:
    """Log the failed documents of this run and earlier ones, by source and reason.

    ``rows`` are all documents so far, scored or failed, and ``source`` returns the source of a file. Raises an
    `IncompleteError` if these are all documents (``complete``) and more than the ``allowed`` fraction of a source's
    documents failed; before that, it is a warning.
    """
    documents: Counter[str] = Counter()  # by source
    for file, numbers in rows.items():
        documents[source(file)] += len(numbers)
    failures, left_out = _count_reasons(shards, source)
    for example, count in left_out.most_common(_MAX_REASONS):
        _log.info("%s document(s) %s", f"{count:,}", example)
    too_many = {name: reasons for name, reasons in failures.items() if reasons.total() / documents[name] > allowed}
    if too_many and complete:
        raise IncompleteError(
            f"{len(too_many):,} source(s) have more failed documents than `data.allowed_failures` = {allowed:g} allows:"
            f"\n{_format_report(too_many, documents)}\nAll scores are kept in {shards.folder}, without {SUCCESS}."
            " Correct these documents and score them into another folder, or accept the failures: run the same"
            " command with a larger `data.allowed_failures`, which scores nothing again."
        )
    if failures:
        amount = "more than" if too_many else "no more than"
        level = logging.WARNING if too_many else logging.INFO
        report = _format_report(failures, documents)
        _log.log(level, "Failed documents, %s `data.allowed_failures` allows:\n%s", amount, report)


def _count_reasons(shards: ScoreShards, source: Callable[[str], str]) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Count failed documents by source and kind of reason, most first, and documents left out by kind of reason.

    The first document with a reason is its example.
    """
    failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
    left_out: Counter[str] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for batch in shards.batches(["key", "file", "row", "error"]):
        for row in batch.filter(pyarrow.compute.is_valid(batch.column("error"))).to_pylist():
            is_failure = not row["error"].startswith(LEFT_OUT)
            name = source(row["file"]) if is_failure else ""
            reason = re.sub(r"^\S.*?:\d+: ", "", row["error"])  # without the file and line, which the example has
            # Reasons that differ only in numbers or in the document's key count as one.
            kind = _VARYING_TEXT.sub("", reason.replace(f"'{row['key']}'", ""))
            example = f"{reason[:_MAX_CHARACTERS]} (row {row['row']} of '{row['file']}')"
            (failures[name] if is_failure else left_out)[examples.setdefault((name, kind), example)] += 1
    return dict(sorted(failures.items(), key=lambda pair: -pair[1].total())), left_out


def _format_report(failures: Mapping[str, Counter[str]], documents: Mapping[str, int]) -> str:
    lines = []
    for name, reasons in list(failures.items())[:_MAX_SOURCES]:
        failed = reasons.total()
        lines.append(f"  {name}: {failed:,} of {documents[name]:,} documents failed ({failed / documents[name]:.1%})")
        lines += [f"    {count:,} x {example}" for example, count in reasons.most_common(_MAX_REASONS)]
    return "\n".join(lines)

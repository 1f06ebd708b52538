"""Counts of the documents of a corpus, and the limit on those that failed."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pyarrow
import pyarrow.compute

LEFT_OUT = "left out: "
"""Prefix of the reason of a document that the user excluded, which is not a failure."""

_MAX_SOURCES, _MAX_CHARACTERS = 20, 300  # in a report; characters are those of a reason


def count_documents(scores: pyarrow.Table) -> dict[str, int]:
    """Count the documents and tokens of a table of scores."""
    compute = pyarrow.compute
    left_out = compute.sum(compute.starts_with(scores["error"], LEFT_OUT)).as_py() or 0
    return {
        "documents": len(scores),
        "failed": len(scores) - scores["error"].null_count - left_out,
        "left_out": left_out,
        "too_short": compute.sum(compute.equal(scores["compared_tokens"], 0)).as_py() or 0,
        **{name: compute.sum(scores[name]).as_py() or 0 for name in ("tokens", "compared_tokens", "key_tokens")},
    }


def report_failures(scores: pyarrow.Table, source: Callable[[str], str], *, allowed: float) -> str:
    """Describe the sources of which more than the ``allowed`` fraction of documents failed, each with an example.

    ``scores`` has the columns ``file``, ``row`` and ``error``, and ``source`` returns the source of a file. The text is
    empty if no source has too many failures.
    """
    documents: Counter[str] = Counter()
    for entry in scores["file"].value_counts().to_pylist():
        documents[source(entry["values"])] += entry["counts"]
    failures = defaultdict(list)
    broken = scores.filter(pyarrow.compute.is_valid(scores["error"])).select(["file", "row", "error"])
    for row in broken.to_pylist():
        if not row["error"].startswith(LEFT_OUT):
            failures[source(row["file"])].append(row)
    lines = []
    for name, rows in sorted(failures.items(), key=lambda pair: -len(pair[1])):
        fraction, first = len(rows) / documents[name], rows[0]
        if fraction > allowed:
            lines.append(
                f"  {name}: {len(rows):,} of {documents[name]:,} documents failed ({fraction:.1%}), such as row"
                f" {first['row']} of '{first['file']}': {first['error'][:_MAX_CHARACTERS]}"
            )
    return "\n".join(lines[:_MAX_SOURCES])

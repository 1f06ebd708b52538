"""What the first lines of JSON-lines files say of all: how long a line is, and whether lines are documents at all."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from datamodules.sources.locations import File
from datamodules.sources.records import lines_of, nested, opened, parsed_line

FILES = 32
"""Files that are read at a time, and about how many are read far enough to measure their lines."""

_LINES, _BYTES = 64, 1 << 18  # of each, about
_TRIED = 8  # lines, however long, before a file counts as one without documents
_FIELDS = 20  # named in an error


class _Sample(NamedTuple):
    """Of the first lines of a file: their number and bytes, which fields they have, and which of the required ones."""

    lines: int
    size: int
    fields: frozenset[str]
    present: frozenset[str]


def bytes_per_line(files: Sequence[File], required: Sequence[str], *, lenient: bool = False) -> float | None:
    """Return about how many bytes a line of JSON-lines files has, unpacked, once each file is known to have documents.

    Args:
        files: The files, of which the first lines are read.
        required: Fields without which a line is not a document; dots reach into nested ones.
        lenient: Accept files without documents as long as there are others.

    Returns:
        The mean over the first lines of some of the files; None if none can be read.

    Raises:
        ValueError: If none of the first lines of a file has one of the fields: all its documents would fail.
    """
    every = max(1, -(-len(files) // FILES))
    with ThreadPoolExecutor(FILES) as pool:
        samples = list(pool.map(lambda n: _sample(files[n], required, briefly=n % every > 0), range(len(files))))
    seen = [(file, sample) for file, sample in zip(files, samples, strict=True) if sample.lines]
    wrong = [(file, sample) for file, sample in seen if not sample.present.issuperset(required)]
    if wrong and (not lenient or len(wrong) == len(seen)):
        file, sample = wrong[0]
        others = f" (and of {len(wrong) - 1:,} other files)" if len(wrong) > 1 else ""
        raise ValueError(
            f"None of the first {sample.lines} lines of {file}{others} is a JSON object with a field"
            f" {min(set(required) - sample.present)!r}, only {sorted(sample.fields)[:_FIELDS]}: name the text's by"
            " `data.text_column`, that of the key by `data.key_column`, or leave such files out."
        )
    measured = samples[::every]
    lines = sum(sample.lines for sample in measured)
    return sum(sample.size for sample in measured) / lines if lines else None


def _sample(file: File, required: Sequence[str], *, briefly: bool) -> _Sample:
    """Read the first lines, or briefly no more than those up to the first that shows all required fields."""
    lines = size = 0
    fields: set[str] = set()
    present: set[str] = set()
    try:
        with opened(file) as stream:
            for line in lines_of(stream):
                size += len(line)
                if not line.isspace():
                    lines += 1
                    found, own = _fields(line, required)
                    fields, present = fields | found, present | own
                shown = present.issuperset(required)
                if lines == _LINES or (shown and briefly) or (size > _BYTES and (shown or lines >= _TRIED)):
                    break
    except (ValueError, OSError):
        pass  # who reads the documents says so, when all others are done
    return _Sample(lines, size, frozenset(fields), frozenset(present))


def _fields(line: bytes, required: Sequence[str]) -> tuple[set[str], set[str]]:
    """Which fields a line has, and which of the required ones have a value."""
    try:
        record = parsed_line(line, "")
    except ValueError:  # a line may be broken
        return set(), set()
    return set(record), {field for field in required if nested(record, field) is not None}

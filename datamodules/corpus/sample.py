"""Sample the first lines of JSON-lines files: how long a line is, and whether lines are documents at all."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from datamodules.sources.locations import File
from datamodules.sources.records import lines_of, nested, opened, parsed_line

_READERS = 32  # files at a time
_LINES, _BYTES = 64, 1 << 18  # of each file, about
_TRIED = 8  # lines, however long, before a file counts as one without documents
_FIELDS = 20  # named in an error


class _Sample(NamedTuple):
    """The first lines of a file: their number and bytes, the fields they have, and those with a value."""

    lines: int
    size: int
    fields: set[str]
    present: set[str]


def bytes_per_line(files: Sequence[File], required: Sequence[str], *, lenient: bool = False) -> float | None:
    """Estimate the mean bytes per line of JSON-lines files, unpacked, from their first lines; None if none can be read.

    Raises:
        ValueError: If none of the first lines of a file has one of the required fields, into which dots reach: all its
            documents would fail. ``lenient`` accepts such files as long as there are others.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        samples = list(pool.map(lambda file: _sample(file, required), files))
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
    lines = sum(sample.lines for sample in samples)
    return sum(sample.size for sample in samples) / lines if lines else None


def _sample(file: File, required: Sequence[str]) -> _Sample:
    """Read the first lines; more of them if they are long and none has shown all required fields."""
    lines = size = 0
    fields: set[str] = set()
    present: set[str] = set()
    # A file that cannot be read is reported when its documents are read, after all others.
    with suppress(ValueError, OSError), opened(file) as stream:
        for line in lines_of(stream):
            size += len(line)
            if line.isspace():
                continue
            lines += 1
            with suppress(ValueError):  # a line may be broken
                record = parsed_line(line, "")
                fields |= set(record)
                present |= {field for field in required if nested(record, field) is not None}
            if lines == _LINES or (size > _BYTES and (present.issuperset(required) or lines >= _TRIED)):
                break
    return _Sample(lines, size, fields, present)

"""What the first lines of JSON-lines files say of all: how long a line is, and whether lines are documents at all."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from datamodules.locations import File
from datamodules.sources import lines_of, nested, opened, parsed_line

FILES = 32
"""Files of which the first lines are read, at most: each costs a request where files are remote."""

_LINES, _BYTES = 64, 1 << 18  # of each, about


class _Sample(NamedTuple):
    """Of the first lines of a file: their number and bytes, which fields they have, and which of the required ones."""

    lines: int
    size: int
    fields: frozenset[str]
    present: frozenset[str]


def bytes_per_line(files: Sequence[File], required: Sequence[str]) -> float | None:
    """About how many bytes a line of JSON-lines files has, unpacked.

    Args:
        files: The files, of which some are opened.
        required: Fields without which a line is no document; dots reach into nested ones.

    Returns:
        The mean over the first lines of some of the files; None if there are none that can be read.

    Raises:
        ValueError: If none of these lines has one of the fields: all documents would fail for its name.
    """
    every = max(1, -(-len(files) // FILES))
    with ThreadPoolExecutor(FILES) as pool:
        samples = list(pool.map(lambda file: _sample(file, required), files[::every]))
    lines = sum(sample.lines for sample in samples)
    if not lines:
        return None
    present = frozenset().union(*(sample.present for sample in samples))
    if missing := [field for field in required if field not in present]:
        fields = sorted(frozenset().union(*(sample.fields for sample in samples)))
        raise ValueError(
            f"None of the first {lines} lines of {files[0]}{' and others' if len(samples) > 1 else ''} is a JSON object"
            f" with a field {missing[0]!r}, only {fields}: name the text's by `data.text_column`, that of the key by"
            " `data.key_column`."
        )
    return sum(sample.size for sample in samples) / lines


def _sample(file: File, required: Sequence[str]) -> _Sample:
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
                if lines == _LINES or size > _BYTES:
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

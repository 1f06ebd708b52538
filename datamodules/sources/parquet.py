"""Read rows of parquet files with bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from datamodules.sources.locations import File
from datamodules.sources.records import Parse

BATCH_ROWS = 16  # few, because a row may be a whole book


def parquet_rows(
    stream: BinaryIO,
    file: File,
    columns: Sequence[str],
    wanted: Callable[[int], bool],
    text_columns: Sequence[str],
    row_group: int | None,
    first: int,
) -> Iterator[tuple[int, Parse]]:
    """Yield the number of each wanted row, and a function that parses it, as `read_records` does."""
    # The file system reads ahead. By default pyarrow would also buffer whole column chunks in memory.
    with _damage_named(file):
        table = opened_table(stream, file)
        names = table.schema_arrow.names
        if text_columns and not set(text_columns) & set(names):
            missing = " or ".join(map(repr, text_columns))
            raise ValueError(f"{file}: no text column {missing}. Its columns are {sorted(names)}.")
        groups = None if row_group is None else [row_group]
        chosen = sorted(set(columns) & set(names))
        for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=chosen, use_threads=False):
            for index in range(batch.num_rows):
                if wanted(first + index):
                    yield first + index, partial(_parse_row, batch, index, f"{file}:{first + index}")
            first += batch.num_rows


def _parse_row(batch: pyarrow.RecordBatch, index: int, place: str) -> dict[str, Any]:
    with _damage_named(place):
        return {name: batch.column(name)[index].as_py() for name in batch.schema.names}


@contextmanager
def _damage_named(place: object) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: the parquet file is damaged ({error}). Download it again.") from error


def opened_table(stream: BinaryIO, file: File) -> pyarrow.parquet.ParquetFile:
    """Open a parquet file that is read a page at a time; its server must support range requests."""
    try:
        return pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowException:
        raise
    except ValueError as error:  # fsspec raises it if the server does not support range requests
        raise ValueError(
            f"{file}: parquet files need a server that supports range requests ({error}). Download the file first."
        ) from error

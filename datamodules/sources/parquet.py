"""Documents in parquet files, read a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from datamodules.sources.documents import (
    Document,
    NoDocumentError,
    checked_text,
    nested,
    no_document,
    opened,
    record_name,
)
from datamodules.sources.locations import File, files_fingerprint

BATCH_ROWS = 16  # whole books are rows, too


@dataclass(frozen=True)
class ParquetFiles:
    """Each row of parquet files is a document; only the columns that are asked for are read.

    Memory is that of a few rows and of one page of each column, which is what their writer made it.

    Args:
        files: The files, read in this order.
        text_column: Column of the text.
        name_columns: Columns that make up the document's name; without any of them it is ``"<file>:<row>"``.
        where: ``(column, value)``: only documents whose column holds that value; dots reach into nested columns.
    """

    files: tuple[File, ...]
    text_column: str = "text"
    name_columns: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        found = False
        for file in self.files:
            for number, record in enumerate(self._records(file)):
                if self.where and nested(record, self.where[0]) != self.where[1]:
                    continue
                found = True
                name = record_name(record, self.name_columns, f"{file.name}:{number}")
                yield Document(name, checked_text(record[self.text_column], f"{file}, row {number}"))
        if not found:
            raise NoDocumentError(no_document(self.where, self.files))

    def fingerprint(self) -> str:
        """Content and order of the files, and which documents are taken."""
        return f"parquet {files_fingerprint(self.files)} {self.text_column} {self.where}"

    def _records(self, file: File) -> Iterator[dict[str, Any]]:
        # The file system reads ahead; buffering whole column chunks, as pyarrow does by default, costs their size.
        with opened(file) as stream:
            try:
                table = opened_table(stream, file)
                columns = self._columns(table.schema_arrow.names, file)
                for batch in table.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                    yield from batch.to_pylist()
            except (pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise ValueError(f"{file}: the parquet file is damaged ({error}). Fetch it again.") from error

    def _columns(self, present: list[str], file: File) -> list[str]:
        """The columns that are read.

        Raises:
            ValueError: If the text is not among those that are present.
        """
        if self.text_column not in present:
            raise ValueError(
                f"{file}: no column {self.text_column!r} for the text, only {sorted(present)}."
                " Name the one that holds it."
            )
        wanted = {self.text_column, *self.name_columns, *([self.where[0].partition(".")[0]] if self.where else [])}
        return sorted(wanted & set(present))


def opened_table(stream: BinaryIO, file: File) -> pyarrow.parquet.ParquetFile:
    """A parquet file that is read a page at a time; a ``ValueError`` for a server that gives no parts of files."""
    try:
        return pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowException:
        raise
    except ValueError as error:  # fsspec, of web servers that know no range requests
        raise ValueError(
            f"{file}: its server gives no parts of files, and a parquet file is read from its end ({error})."
            " Download it first."
        ) from error


def is_null(metadata: pyarrow.parquet.FileMetaData, column: str) -> bool:
    """Return whether the statistics of a file tell that a column has no value in any row."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(each) for group in groups for each in range(group.num_columns)]
    statistics = [chunk.statistics for chunk in chunks if chunk.path_in_schema == column]
    return metadata.num_rows > 0 and sum(each.null_count or 0 for each in statistics if each) == metadata.num_rows

"""Rows of scores in parquet files, whichever program wrote them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from lightning_modules.scoring.corpus.shards import HEADER, PER_TOKEN

NUMBER = "number of the document"
"""Column with the index of a row among all rows; no file has a column of this name."""


class Shard(NamedTuple):
    """A parquet file, at a path of an fsspec file system."""

    name: str
    system: fsspec.AbstractFileSystem
    path: str


class ScoreRows:
    """Rows of parquet files; ``paths`` are files, folders (searched recursively) and patterns, or fsspec URLs of these.

    Shards may differ in the types of columns that are null throughout. A row that no other program has named gets
    ``file`` and ``row`` by the shard that it is in.

    Raises:
        ValueError: If a path has no parquet files, or their columns have different types.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.shards = [shard for path in paths for shard in find_shards(path)]
        schemas = []
        for shard in self.shards:
            with _open_shard(shard) as file:
                schemas.append(file.schema_arrow.remove_metadata())
        try:
            self.schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
        except pyarrow.ArrowException as error:
            raise ValueError(f"The columns of {', '.join(paths)} have different types: {error}.") from error
        self.columns = [name for name in self.schema.names if name not in PER_TOKEN]

    def header(self) -> dict[str, Any]:
        """Return what `longce` recorded in the first shard; empty if another program wrote it."""
        with _open_shard(self.shards[0]) as file:
            metadata = file.schema_arrow.metadata or {}
        content: dict[str, Any] = json.loads(metadata.get(HEADER, b"{}"))
        return content

    def read(self, columns: Sequence[str]) -> pyarrow.RecordBatchReader:
        """Return a reader of these columns, and of `NUMBER`, ``file`` and ``row``; pages are checked as they are read.

        Iterating over it raises a ``ValueError`` for a damaged shard.
        """
        wanted = [self.schema.field(name) for name in columns if name not in ("file", "row")]
        identity = [("file", pyarrow.string()), ("row", pyarrow.int64()), (NUMBER, pyarrow.int64())]
        schema = pyarrow.schema([*wanted, *identity])
        return pyarrow.RecordBatchReader.from_batches(schema, self._read_batches(schema))

    def _read_batches(self, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        number = 0
        for shard in self.shards:
            first = number
            with _open_shard(shard) as file:
                present = [name for name in schema.names if name in file.schema_arrow.names]
                # Without any column, a batch would not know its number of rows.
                for batch in file.iter_batches(columns=present or file.schema_arrow.names[:1], use_threads=False):
                    numbers = pyarrow.array(range(number, number + len(batch)))
                    columns = {name: batch.column(name) for name in present}
                    columns[NUMBER] = numbers
                    columns.setdefault("file", pyarrow.array([shard.name] * len(batch)))
                    columns.setdefault("row", pyarrow.compute.subtract(numbers, first))
                    arrays = []
                    for field in schema:
                        missing = pyarrow.nulls(len(batch), field.type)
                        arrays.append(columns.get(field.name, missing).cast(field.type))
                    yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
                    number += len(batch)


def find_shards(path: str) -> list[Shard]:
    """Return the parquet files at a path in order, without those whose name begins with a dot or underscore."""
    try:
        system, root = fsspec.url_to_fs(path)
        found = sorted(system.glob(f"{root}/**/*.parquet" if system.isdir(root) else root))
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"'{path}' cannot be read: {error}.") from error
    names = [name for name in found if not name.rpartition("/")[2].startswith((".", "_"))]
    if not names:
        raise ValueError(f"'{path}' contains no scores: name parquet files, such as those of `longce predict`.")
    return [Shard(system.unstrip_protocol(name).removeprefix("file://"), system, name) for name in names]


@contextmanager
def _open_shard(shard: Shard) -> Iterator[pyarrow.parquet.ParquetFile]:
    try:
        with shard.system.open(shard.path, "rb") as stream:
            yield pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
    except (pyarrow.ArrowException, EOFError, OSError) as error:
        raise ValueError(f"'{shard.name}' is not an undamaged parquet file ({error}).") from error

"""Load scores from parquet files of any program into a table of DuckDB."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import PurePosixPath
from typing import Any

import duckdb
import fsspec
import pyarrow
from fsspec.implementations.local import LocalFileSystem

from lightning_modules.scoring.corpus.shards import HEADER, PER_TOKEN, check_settings
from lightning_modules.visualization.corpus import METRICS
from longce.corpus.config import COLUMN_OPTIONS
from longce.corpus.select.choice import (
    NUMBER,
    evaluate_options,
    first_line,
    option_expressions,
    quote,
)
from longce.corpus.select.config import SelectConfig

MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_SHARD = "path of the shard"
_SETTINGS_OF_CORPORA = ("shard", "columns", *COLUMN_OPTIONS)
"""Settings of scores that do not change the numbers, and may differ between corpora."""


def find_files(database: duckdb.DuckDBPyConnection, paths: Sequence[str]) -> list[str]:
    """Return the parquet files at files, folders and patterns, or fsspec URLs of these, and let DuckDB read them.

    Files whose name begins with a dot or an underscore are skipped.
    """
    files = []
    for path in paths:
        try:
            system, root = fsspec.url_to_fs(path)
            pattern = f"{escape(root)}/**/*.parquet" if system.isdir(root) else root
            found = sorted(system.glob(pattern))
        except (ImportError, ValueError, OSError) as error:
            raise ValueError(f"'{path}' cannot be read: {error}.") from error
        names = [name for name in found if PurePosixPath(name).name[0] not in "._"]
        if not names:
            raise ValueError(f"'{path}' contains no scores: name parquet files, as `longce corpus score` writes.")
        if isinstance(system, LocalFileSystem):
            files += names
            continue
        protocol = system.protocol
        if not isinstance(protocol, str):
            protocol = protocol[0]
        if protocol not in database.list_filesystems():
            database.register_filesystem(system)
        files += map(system.unstrip_protocol, names)
    return files


@contextmanager
def name_damaged_file(database: duckdb.DuckDBPyConnection, files: Sequence[str]) -> Iterator[None]:
    """Replace an error of DuckDB by a ``ValueError`` that names the file."""
    try:
        yield
    except (duckdb.Error, OSError) as error:  # an OSError where pyarrow reads from DuckDB
        for file in files:
            try:
                database.read_parquet(escape(file)).aggregate("max(hash(COLUMNS(*)))").fetchall()
            except duckdb.Error as reason:
                raise ValueError(f"'{file}' cannot be read as a parquet file ({first_line(reason)}).") from reason
        if isinstance(error, OSError):
            raise
        raise ValueError(
            f"The {len(files)} files such as '{files[0]}' cannot be read together ({first_line(error)})."
        ) from error


def read_source(database: duckdb.DuckDBPyConnection, files: Sequence[str], *, need_texts: bool) -> dict[str, Any]:
    """Return where the texts of the documents are, as `longce` recorded it; empty if other programs wrote the scores.

    Raises:
        ValueError: If scores of different models or settings are mixed or, with ``need_texts``, of different columns
            or programs.
    """
    query = "SELECT file_name, decode(value) FROM parquet_kv_metadata(?) WHERE key = ? ORDER BY file_name"
    found = database.execute(query, [list(map(escape, files)), HEADER]).fetchall()
    headers = {file: json.loads(header) for file, header in found}
    source: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for file, header in headers.items():
        own = {name: value for name, value in header["settings"].items() if name not in _SETTINGS_OF_CORPORA}
        check_settings(settings or own, own, file)
        settings = own
        columns = {name: header["source"].get(name) for name in COLUMN_OPTIONS}
        paths = source.get("files", [])
        if need_texts and source and not columns.items() <= source.items():
            raise ValueError(f"'{file}' names texts by {columns}, unlike other scores: select from them one by one.")
        new = [path for path in header["source"]["files"] if path not in paths]
        source = {**columns, "files": [*paths, *new]}
    if need_texts and source and len(headers) < len(files):
        other = next(file for file in files if file not in headers)
        raise ValueError(f"'{other}' was written by another program: select from it alone, or write a .txt file.")
    if source:
        source["is_one_corpus"] = all(header["source"]["files"] == source["files"] for header in headers.values())
    return source


def check_repeated(database: duckdb.DuckDBPyConnection) -> None:
    """Raise a ``ValueError`` if the table ``documents``, of one corpus, has a document twice."""
    # A number for each document takes less memory than its name.
    suspects = "SELECT hash(file, row) FROM documents GROUP BY ALL HAVING count(*) > 1"
    found = database.execute(
        f"FROM documents SELECT file, row, count(*) WHERE hash(file, row) IN ({suspects}) GROUP BY ALL"
        " HAVING count(*) > 1 ORDER BY ALL LIMIT 1"
    ).fetchone()
    if found is not None:
        raise ValueError(
            f"Row {found[1]} of '{found[0]}' has {found[2]} scores: name each folder once, and delete files that no"
            " longer belong to its corpus."
        )


def count_rows(database: duckdb.DuckDBPyConnection, files: Sequence[str]) -> int:
    """Return the number of rows of all files, which their metadata records."""
    found = database.execute(
        "SELECT coalesce(sum(num_rows), 0)::BIGINT FROM parquet_file_metadata(?)", [list(map(escape, files))]
    ).fetchall()
    return found[0][0]


def read_rows(database: duckdb.DuckDBPyConnection, files: Sequence[str]) -> duckdb.DuckDBPyRelation:
    """Return all rows with their `NUMBER`, without per-token values, as a relation that is not read yet.

    A row that no other program has named gets ``file`` and ``row`` by the shard that it is in.
    """
    database.execute("SET VARIABLE files = ?", [list(map(escape, files))])
    rows = database.sql(
        "FROM read_parquet(getvariable('files'), union_by_name = true, hive_partitioning = false,"
        f" filename = '{_SHARD}', file_row_number = true)"
    )
    names = [name for name in rows.columns if name not in (*PER_TOKEN, _SHARD, "file_row_number")]
    values = {name: quote(name) for name in names}
    values["file"] = f'"{_SHARD}"'
    if "file" in names:
        values["file"] = f'coalesce(CAST(file AS VARCHAR), "{_SHARD}")'
    values["row"] = "file_row_number"
    if "row" in names:
        values["row"] = "coalesce(CAST(row AS BIGINT), file_row_number)"
    values.setdefault("key", f"{values['file']} || ':' || {values['row']}")
    values.setdefault("error", "CAST(NULL AS VARCHAR)")
    values[NUMBER] = "row_number() OVER () - 1"
    return rows.project(", ".join(f"{value} AS {quote(name)}" for name, value in values.items()))


def load_documents(database: duckdb.DuckDBPyConnection, rows: duckdb.DuckDBPyRelation, config: SelectConfig) -> None:
    """Create the table ``documents`` of all rows with the columns that are used, after all options are checked."""
    if config.figure is not None and not set(METRICS) & set(rows.columns):
        raise ValueError(f"`figure` needs one of the columns {', '.join(METRICS)}, which are all missing: remove it.")
    # On no rows, so that a wrong expression is refused before anything is read.
    database.register("scores", rows.limit(0).to_arrow_table())
    evaluate_options(database.table("scores"), config)
    sql = " ".join(option_expressions(config).values()).lower()  # SQL ignores case
    needed = {NUMBER, "file", "row", "error", "tokens", *MEANS, *METRICS, config.rank_by, config.by}
    used = [name for name in rows.columns if name in needed or name.lower() in sql or quote(name).lower() in sql]
    columns = ", ".join(map(quote, used))
    database.register("scores", pyarrow.RecordBatchReader.from_stream(rows.project(columns)))
    database.execute("CREATE TABLE documents AS FROM scores")
    database.unregister("scores")  # it can be read only once

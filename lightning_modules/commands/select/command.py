"""``longce select``: select documents of a corpus by their scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pyarrow

from lightning_modules.commands.select.choice import NUMBER, choose_documents, connect
from lightning_modules.commands.select.config import SelectConfig
from lightning_modules.commands.select.output import write_documents, write_keys
from lightning_modules.commands.select.report import report
from lightning_modules.commands.select.scores import (
    find_files,
    load_documents,
    name_damaged_file,
    read_header,
    read_rows,
)
from lightning_modules.scoring.corpus.shards import SUCCESS
from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.corpus import METRICS, draw_corpus


def select(scores: str | list[str], **options: object) -> str:
    """Select documents by scores in parquet files, and return tables by source, as text.

    ``scores`` are files, folders and patterns. Options are the fields of `SelectConfig`. Failed documents never pass.
    """
    config = SelectConfig(**options)  # type: ignore[arg-type]
    for output in (config.output, config.figure):
        if output is not None:
            writable_folder(Path(output).absolute().parent, remedy="Choose another file.")
    # The SQL of the user runs in `database` only, which cannot read files.
    with duckdb.connect() as reader, connect() as database:
        files = find_files(reader, [scores] if isinstance(scores, str) else scores)
        with name_damaged_file(reader, files):
            header = read_header(reader, files[0])
            rows = read_rows(reader, files)
            load_documents(database, rows, config)
        choose_documents(database, config)
        written = ""
        if config.output is not None:
            numbers = database.table("chosen").project(f'"{NUMBER}"').to_arrow_table()
            reader.register("chosen", numbers)
            chosen = rows.filter(f'"{NUMBER}" IN (FROM chosen)').project(f'* EXCLUDE ("{NUMBER}")')
            with name_damaged_file(reader, files):
                written += _write_output(Path(config.output), chosen, len(numbers), header, config.files)
        if config.figure is not None:
            passing = database.sql(f'FROM documents SEMI JOIN chosen USING ("{NUMBER}")')
            metrics = [f"TRY_CAST({name} AS DOUBLE) AS {name}" for name in METRICS if name in passing.columns]
            draw_corpus(passing.project(", ".join(metrics)).df(), Path(config.figure))
            written += f"Written: {config.figure}\n"
        tables = report(database, config)
    notes = _report_missing_success(files) if header else ""
    return "\n".join([notes, tables, written]).strip("\n") + "\n"


def _write_output(
    path: Path,
    chosen: duckdb.DuckDBPyRelation,
    count: int,
    header: Mapping[str, Any],
    files: str | list[str] | None,
) -> str:
    """Write the keys or the documents, and return a line about them."""
    if path.suffix == ".txt":
        keys = pyarrow.RecordBatchReader.from_stream(chosen.project("key, file, row"))
        return f"Written: {path} ({write_keys(path, keys):,} keys)\n"
    write_documents(path, pyarrow.RecordBatchReader.from_stream(chosen), header, files)
    return f"Written: {path} ({count:,} documents)\n"


def _report_missing_success(files: Sequence[str]) -> str:
    """Return a line about each folder of scores that are not complete."""
    lines = ""
    for folder in sorted({file.rpartition("/")[0] for file in files}):
        system, root = fsspec.url_to_fs(folder)
        if not system.exists(f"{root}/{SUCCESS}"):
            lines += f"{folder}/{SUCCESS} is missing: not all documents are scored, or too many failed.\n"
    return lines

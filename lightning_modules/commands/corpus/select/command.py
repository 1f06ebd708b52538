"""``longce corpus select``: select documents of a corpus by their scores."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import fsspec

from lightning_modules.commands.corpus.select.choice import NUMBER, choose_documents, connect
from lightning_modules.commands.corpus.select.config import SelectConfig
from lightning_modules.commands.corpus.select.output import write_documents, write_keys
from lightning_modules.commands.corpus.select.report import report
from lightning_modules.commands.corpus.select.scores import (
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
            path = Path(config.output)
            with name_damaged_file(reader, files):
                if path.suffix == ".txt":
                    content = f"{write_keys(path, chosen):,} keys"
                else:
                    write_documents(path, chosen, header, config.files)
                    content = f"{len(numbers):,} documents"
            written += f"Written: {config.output} ({content})\n"
        if config.figure is not None:
            passing = database.sql(f'FROM documents SEMI JOIN chosen USING ("{NUMBER}")')
            metrics = [f"TRY_CAST({name} AS DOUBLE) AS {name}" for name in METRICS if name in passing.columns]
            draw_corpus(passing.project(", ".join(metrics)).df(), Path(config.figure))
            written += f"Written: {config.figure}\n"
        tables = report(database, config)
    notes = _report_missing_success(files) if header else ""
    return "\n".join([notes, tables, written]).strip("\n") + "\n"


def _report_missing_success(files: Sequence[str]) -> str:
    """Return a line about each folder of scores that are not complete."""
    lines = ""
    for folder in sorted({file.rpartition("/")[0] for file in files}):
        system, root = fsspec.url_to_fs(folder)
        if not system.exists(f"{root}/{SUCCESS}"):
            lines += f"{folder}/{SUCCESS} is missing: not all documents are scored, or too many failed.\n"
    return lines

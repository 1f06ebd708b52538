"""``longce corpus select``: select documents of a corpus by their scores."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import fsspec

from lightning_modules.scoring.corpus.shards import SUCCESS
from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.corpus import METRICS, draw_corpus
from longce.corpus.config import shard_name
from longce.corpus.select.choice import NUMBER, choose_documents, connect
from longce.corpus.select.config import SelectConfig
from longce.corpus.select.output import write_documents, write_keys
from longce.corpus.select.report import report
from longce.corpus.select.scores import (
    check_repeated,
    count_rows,
    find_files,
    load_documents,
    name_damaged_file,
    read_rows,
    read_source,
)


def select(scores: str | list[str], **options: object) -> str:
    """Select documents by scores in parquet files, and return tables by source, as text.

    ``scores`` are files, folders and patterns. Options are the fields of `SelectConfig`. Failed documents never pass.
    """
    config = SelectConfig(**options)  # type: ignore[arg-type]
    for output in (config.output, config.figure):
        if output is not None:
            writable_folder(Path(output).absolute().parent, remedy="Choose another file.")
    paths = [scores] if isinstance(scores, str) else scores
    _check_output(config.output, paths)
    with duckdb.connect() as reader:
        files = find_files(reader, paths)
        with name_damaged_file(reader, files):
            texts = config.output is not None and not config.output.endswith(".txt")
            source = read_source(reader, files, need_texts=texts)
            rows = read_rows(reader, files)
            count = count_rows(reader, files)
        # The SQL of the user runs in `database` only, which cannot read files.
        with connect(count) as database:
            with name_damaged_file(reader, files):
                load_documents(database, rows, config)
            if source.get("is_one_corpus"):
                check_repeated(database)
            choose_documents(database, config)
            written = ""
            if config.output is not None:
                reader.register("chosen", database.table("chosen").project(f'"{NUMBER}"').to_arrow_table())
                chosen = rows.filter(f'"{NUMBER}" IN (FROM chosen)').project(f'* EXCLUDE ("{NUMBER}")')
                with name_damaged_file(reader, files):
                    content = _write_chosen(Path(config.output), chosen, source, config)
                written += f"Written: {config.output} ({content})\n"
            if config.figure is not None:
                passing = database.sql(f'FROM documents SEMI JOIN chosen USING ("{NUMBER}")')
                metrics = [f"TRY_CAST({name} AS DOUBLE) AS {name}" for name in METRICS if name in passing.columns]
                draw_corpus(passing.project(", ".join(metrics)).df(), Path(config.figure))
                written += f"Written: {config.figure}\n"
            tables = report(database, config)
    notes = _report_missing_success(files) if source else ""
    return "\n".join([notes, tables, written]).strip("\n") + "\n"


def _write_chosen(path: Path, chosen: duckdb.DuckDBPyRelation, source: Mapping[str, Any], config: SelectConfig) -> str:
    """Write the keys or the chosen documents, and return how many."""
    if path.suffix == ".txt":
        return f"{write_keys(path, chosen):,} keys"
    return f"{write_documents(path, chosen, source, config.files):,} documents"


def _check_output(output: str | None, paths: Sequence[str]) -> None:
    """Refuse an output that a later command would read as scores."""
    if output is None or not output.endswith(".parquet"):
        return
    for path in paths:
        if Path(output).resolve().is_relative_to(Path(path).resolve()):
            raise ValueError(f"`output` = '{output}' would be read as scores of '{path}': write it elsewhere.")


def _report_missing_success(files: Sequence[str]) -> str:
    """Return a line about each folder of scores that are not complete."""
    lines = ""
    folders = {file.rpartition("/")[0] for file in files}
    for folder in list(folders):
        parent, _, name = folder.rpartition("/")
        shard = re.fullmatch(r"shard-\d+-of-(\d+)", name)
        if shard is not None:
            shards = int(shard[1])
            folders.update(f"{parent}/{shard_name(index, shards)}" for index in range(shards))
    for folder in sorted(folders):
        system, root = fsspec.url_to_fs(folder)
        if not system.exists(f"{root}/{SUCCESS}"):
            lines += f"{folder}/{SUCCESS} is missing: not all documents are scored, or too many failed.\n"
    return lines

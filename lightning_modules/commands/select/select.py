"""``longce select``: choose documents of a corpus by their scores, and compute weights of their sources."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet
import yaml

from lightning_modules.commands.select.conditions import parse_conditions
from lightning_modules.commands.select.config import SelectConfig
from lightning_modules.commands.select.summary import MEANS, means_by_source, report
from lightning_modules.scoring.corpus.shards import PER_TOKEN, SUCCESS, ScoreShards
from lightning_modules.utilities.files import atomic_file, writable_folder, write_atomically

CORPUS = "datamodules.DocumentCorpus"
"""The data module that finds documents again."""

FOLDER = "folder"
"""Source that is not a column: the folder of a document's file."""

OUTPUTS = (".txt", ".parquet", ".jsonl")
_WRITTEN_TOGETHER = 64  # documents
_MAX_NAMED, _MAX_EXCERPT = 3, 40  # documents named in a warning, and characters of the key of each


def select(scores: str, **options: Any) -> str:
    """Choose documents by the scores that `longce predict` has written, and count those that pass by source.

    Documents that failed never pass, nor do those without a value that is asked for.

    Args:
        scores: Folder or fsspec URL of the scores.
        options: Fields of `lightning_modules.commands.select.config.SelectConfig`.

    Returns:
        Tables by source, as text.

    Raises:
        ValueError: If there are no scores, a condition or column has no meaning, a file cannot be written, no document
            passes, or the documents no longer exist.
    """
    # Refuse files that cannot be written before hours of scores are read.
    config = SelectConfig(**options)
    output, weights = (None if file is None else Path(file) for file in (config.output, config.weights))
    for file in filter(None, (output, weights)):
        _check_writable(file)
    if output is not None and output.suffix not in OUTPUTS:
        raise ValueError(f"`output` = '{output}' must end in one of {', '.join(OUTPUTS)}.")
    shards = ScoreShards(scores)
    shards.header()  # refuses other parquet files
    schema = shards.schema()
    _check_columns(schema, config.rank_by, config.by)

    numbers = list(dict.fromkeys([*MEANS, *_ladder(schema), config.rank_by, "tokens"]))
    with_documents = output is not None and output.suffix != ".txt"
    wanted = _one_value_columns(schema) if with_documents else [*numbers, "key", "file", "row", config.by]
    table = _read_scores(shards, schema, config.where, wanted)
    documents = _as_frame(table, numbers, config.by)
    if config.top is not None:
        documents["selected"] &= _is_in_top(documents, config.rank_by, config.top)
    if not documents["selected"].any():
        raise ValueError(f"None of the documents in '{scores}' passes. Ask for less.")

    if output is not None:
        chosen = table.drop(["selected"]).filter(documents["selected"].to_numpy())
        if with_documents:
            write_documents(output, chosen, shards, config.files)
        else:
            write_keys(output, chosen)
    if weights is not None:
        write_weights(weights, means_by_source(documents, [config.rank_by])[config.rank_by])
    return _completeness_note(shards) + report(documents, _ladder(schema))


def _check_columns(schema: pyarrow.Schema, rank_by: str, by: str) -> None:
    for name in (rank_by,) if by == FOLDER else (rank_by, by):
        if name not in schema.names:
            raise ValueError(f"The scores have no column {name!r}, only {schema.names}.")
    if by != FOLDER and pyarrow.types.is_nested(schema.field(by).type):
        raise ValueError(f"`by`: column '{by}' is of type {schema.field(by).type}, which does not name a source.")
    kind = schema.field(rank_by).type
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ValueError(f"`rank_by`: column '{rank_by}' is of type {kind}, which is not a number.")


def _ladder(schema: pyarrow.Schema) -> list[str]:
    return [name for name in schema.names if name.startswith("ladder_") and name.endswith("_mean")]


def _read_scores(
    shards: ScoreShards, schema: pyarrow.Schema, where: str | None, wanted: Iterable[str]
) -> pyarrow.Table:
    """Read the wanted columns of all documents, and add ``selected``: whether they meet the conditions."""
    passes = pc.field("error").is_null()
    if where is not None:
        passes = passes & parse_conditions(where, schema)
    columns = _one_value_columns(schema)
    projection = {name: pc.field(name) for name in columns if name in set(wanted)}
    # A null compared with anything is null, and does not pass.
    projection["selected"] = pc.coalesce(passes, pc.scalar(False))
    batches = (batch.replace_schema_metadata() for batch in shards.batches(columns))
    scanner = pyarrow.dataset.Scanner.from_batches(
        batches, schema=pyarrow.schema([schema.field(name) for name in columns]), columns=projection, use_threads=False
    )
    return scanner.to_table()


def _one_value_columns(schema: pyarrow.Schema) -> list[str]:
    return [name for name in schema.names if name not in PER_TOKEN]


def _as_frame(table: pyarrow.Table, numbers: Sequence[str], by: str) -> pd.DataFrame:
    """Return the numbers of documents that are summarized, with ``source`` and ``selected``."""
    columns = {name: table[name].cast(pyarrow.float64()).to_numpy() for name in numbers}
    if by == FOLDER:
        folders = pc.replace_substring_regex(table["file"], "/?[^/]*$", "")
        sources = pc.if_else(pc.equal(folders, ""), ".", folders)
    else:
        sources = table[by].cast(pyarrow.string()).fill_null("-")
    source = sources.combine_chunks().dictionary_encode().to_pandas()
    return pd.DataFrame(columns | {"source": source, "selected": table["selected"].to_numpy()})


def _is_in_top(documents: pd.DataFrame, rank_by: str, top: float) -> pd.Series:
    """Find the selected documents with the largest values; of equal ones those that come first."""
    if top <= 0 or (top > 1 and top != int(top)):
        raise ValueError(f"`top` must be a fraction up to 1 or a number of documents, got {top}.")
    ranked = documents.loc[documents["selected"], rank_by].dropna()
    count = int(top) if top > 1 else max(1, round(top * len(ranked)))
    return documents.index.isin(ranked.nlargest(count, keep="first").index)


def write_keys(path: Path, chosen: pyarrow.Table) -> None:
    """Write one key per line; warn about documents whose key is empty or has several lines."""
    left_out = []
    with atomic_file(path) as stream:
        for row in chosen.select(["key", "file", "row"]).to_pylist():
            key = row["key"]
            if key.strip() and len(key.splitlines()) == 1:
                stream.write(f"{key}\n".encode())
            else:
                excerpt = key if len(key) <= _MAX_EXCERPT else f"{key[:_MAX_EXCERPT]}.."
                left_out.append(f"row {row['row']} of '{row['file']}' ({excerpt!r})")
    if left_out:
        others = " and others" if len(left_out) > _MAX_NAMED else ""
        warnings.warn(
            f"{len(left_out):,} chosen document(s) are not in '{path}', because a key must be one line that is not"
            f" empty: {', '.join(left_out[:_MAX_NAMED])}{others}. Write .parquet or .jsonl instead.",
            stacklevel=2,
        )


def write_documents(path: Path, chosen: pyarrow.Table, shards: ScoreShards, files: str | list[str] | None) -> None:
    """Write text and scores, in the order of the files.

    Raises:
        ValueError: If a document is not where it was.
    """
    chosen = chosen.sort_by([("file", "ascending"), ("row", "ascending")]).combine_chunks()
    schema = chosen.schema.append(pyarrow.field("text", pyarrow.string()))
    documents = _read_documents(chosen, shards, files)
    written = 0
    with atomic_file(path) as stream, _table_writer(stream, path.suffix, schema) as write:
        while part := list(islice(documents, _WRITTEN_TOGETHER)):
            places, texts = zip(*part, strict=True)
            write(chosen.take(list(places)).append_column("text", pyarrow.array(texts, pyarrow.string())))
            written += len(part)
        if written != len(chosen):
            raise ValueError(f"{len(chosen) - written} of the {len(chosen)} documents do not exist any more.")


def _read_documents(
    chosen: pyarrow.Table, shards: ScoreShards, files: str | list[str] | None
) -> Iterator[tuple[int, str]]:
    """Read the text of each chosen document, with its place in the table, which is sorted by file and row."""
    source = shards.header()["source"]
    corpus = _make_corpus({**source, "files": files or source["files"]})
    groups = dict(list(chosen.select(["file", "row"]).to_pandas().groupby("file")["row"]))
    rows = {file: numbers.to_numpy() for file, numbers in groups.items()}
    for origin, text in corpus.documents(rows, shards.written().versions):
        place = int(groups[origin.file].index[0] + np.searchsorted(rows[origin.file], origin.row))
        if origin.error is not None or origin.key != chosen["key"][place].as_py():
            raise ValueError(f"Row {origin.row} of '{origin.file}' is not the document that was scored any more.")
        yield place, text


@contextmanager
def _table_writer(stream: BinaryIO, ending: str, schema: pyarrow.Schema) -> Iterator[Callable[[pyarrow.Table], None]]:
    """Yield a function that appends rows to a parquet or JSON-lines file."""
    if ending == ".parquet":
        with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            yield writer.write_table
    else:
        yield lambda table: stream.writelines(
            json.dumps(row, default=str).encode() + b"\n" for row in table.to_pylist()
        )


def _make_corpus(settings: dict[str, Any]) -> Any:
    """Make the data module as from a config, since `datamodules` is not imported here."""
    import jsonargparse  # only here: a choice of keys needs neither
    from lightning.pytorch import LightningDataModule

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    config = {"class_path": CORPUS, "init_args": settings}
    return parser.instantiate(parser.parse_object({"data": config})).data


def write_weights(path: Path, means: pd.Series) -> None:
    """Write weights for `datamodules.MixtureDataModule`: the mean of each source divided by the sum of all means.

    Raises:
        ValueError: If a mean is not above 0.
    """
    for source, mean in means.items():
        if not 0 < mean < math.inf:
            raise ValueError(
                f"The mean `{means.name}` of source '{source}' is {mean:.4g}, and weights are above 0: rank by another"
                " column, or leave the source out by `where`."
            )
    weights = {source: float(f"{weight:.6g}") for source, weight in (means / means.sum()).sort_index().items()}
    content = yaml.safe_dump({"data": {"init_args": {"weights": weights}}}, sort_keys=False, allow_unicode=True)
    write_atomically(path, f"# Mean {means.name} of the documents of each source\n{content}".encode())


def _completeness_note(shards: ScoreShards) -> str:
    try:
        shards.folder.open(SUCCESS).close()
    except FileNotFoundError:
        return f"There is no {SUCCESS}: not all documents of the corpus are scored, or too many failed.\n\n"
    return ""


def _check_writable(path: Path) -> None:
    """Raise a ``ValueError`` for a file that could not be written."""
    if path.is_dir():
        raise ValueError(f"'{path}' is a folder: name a file in it.")
    writable_folder(path.absolute().parent, remedy="Name another file.")

"""``longce select``: select documents of a corpus by their scores, and compute weights of their sources."""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import duckdb
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet
import yaml
from numpy.typing import NDArray

from lightning_modules.commands.select_config import SelectConfig
from lightning_modules.scoring.corpus.shards import PER_TOKEN, SUCCESS, ScoreShards
from lightning_modules.utilities.files import atomic_file, writable_folder, write_atomically

FOLDER = "folder"  # a source that is not a column: the folder of a document's file
OUTPUTS = (".txt", ".parquet", ".jsonl")
_WRITTEN_TOGETHER = 64  # documents
_MAX_NAMED, _MAX_EXCERPT = 3, 40  # documents named in a warning, and characters of the key of each
MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_MAX_ROWS = 40  # of a table
_ROW = "row of the table"  # a name that no column has


def select(scores: str, **options: object) -> str:
    """Select documents by the scores that `longce predict` wrote, and return tables by source, as text.

    Options are the fields of `SelectConfig`. Failed documents never pass.
    """
    config = SelectConfig(**options)  # type: ignore[arg-type]
    shards = ScoreShards(scores)
    shards.header()  # raises an error for other parquet files
    _check_options(shards, config)
    table = _read_scores(shards, config)
    documents = table.to_pandas()
    passes = documents["error"].isna() & (config.where is None or meets_conditions(table, config.where))
    documents = documents.assign(source=_source_of_each(table, config.by), selected=passes)
    if config.top is not None:
        documents["selected"] &= _is_in_top(documents, config.rank_by, config.top)
    if not documents["selected"].any():
        raise ValueError(f"No document in '{scores}' meets the conditions. Relax `where`.")

    if config.output is not None:
        if config.output.endswith(".txt"):
            write_keys(Path(config.output), documents[documents["selected"]])
        else:
            chosen = table.filter(documents["selected"].to_numpy())
            write_documents(Path(config.output), chosen, shards, config.files)
    if config.weights is not None:
        write_weights(Path(config.weights), means_by_source(documents, [config.rank_by])[config.rank_by])
    return _completeness_note(shards) + report(documents)


def _check_options(shards: ScoreShards, config: SelectConfig) -> None:
    """Refuse options that cannot work, before any scores are read."""
    schema = shards.schema([config.rank_by] if config.by == FOLDER else [config.rank_by, config.by])
    kind = schema.field(config.rank_by).type
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ValueError(f"`rank_by` must be a numeric column, but '{config.rank_by}' has type {kind}.")
    if config.by != FOLDER and pyarrow.types.is_nested(kind := schema.field(config.by).type):
        raise ValueError(f"`by` must name a source, but column '{config.by}' has type {kind}.")
    if config.output is not None and Path(config.output).suffix not in OUTPUTS:
        raise ValueError(f"`output` = '{config.output}' must end in one of {', '.join(OUTPUTS)}.")
    for file in filter(None, (config.output, config.weights)):
        writable_folder(Path(file).absolute().parent, remedy="Choose another file.")
    if config.where is not None:
        meets_conditions(shards.schema(_list_columns(shards)).empty_table(), config.where)


def _read_scores(shards: ScoreShards, config: SelectConfig) -> pyarrow.Table:
    """Read the needed columns: all but per-token values if documents are written, or else those that are used."""
    columns = _list_columns(shards)
    if config.output is None or config.output.endswith(".txt"):
        needed = {*("key", "file", "row", "error", "tokens"), *MEANS, config.rank_by, config.by}
        where = (config.where or "").lower()  # SQL ignores case
        columns = [name for name in columns if name in needed or name.lower() in where or name.startswith("ladder_")]
    batches = (batch.replace_schema_metadata() for batch in shards.batches(columns))
    return pyarrow.Table.from_batches(batches, shards.schema(columns).remove_metadata())


def _list_columns(shards: ScoreShards) -> list[str]:
    return [name for name in shards.schema().names if name not in PER_TOKEN]


def _source_of_each(table: pyarrow.Table, by: str) -> pd.Series:
    if by == FOLDER:
        return pc.replace_substring_regex(table["file"], "/?[^/]*$", "").to_pandas().replace("", ".")
    return table[by].cast(pyarrow.string()).fill_null("-").to_pandas()


def meets_conditions(documents: pyarrow.Table, where: str) -> NDArray[np.bool_]:
    """Return which documents meet a condition in SQL, as DuckDB reads it, of their columns.

    A comparison with a missing value is not met. The condition cannot read files.

    Example:
        >>> meets_conditions(pyarrow.table({"tokens": [9, 99]}), "tokens > 50 and tokens = max(tokens) over ()")
        array([False,  True])
    """
    numbered = documents.append_column(_ROW, pyarrow.array(np.arange(len(documents))))
    try:
        with duckdb.connect(config={"enable_external_access": False}) as database:
            database.register("documents", numbered)
            # Functions over several rows may return them in another order.
            found = database.sql(f'SELECT ({where}) AS met, "{_ROW}" FROM documents')
            if found.types[0] != "BOOLEAN":
                raise ValueError(f"its value is {found.types[0]}, not true or false")
            met = found.order(f'"{_ROW}"').to_arrow_table()["met"].fill_null(False)
    except (duckdb.Error, ValueError) as error:
        names = ", ".join(f'"{name}"' if "." in name else name for name in documents.column_names)
        raise ValueError(
            f"`where` = '{where}' is not a valid condition ({error}). Write SQL such as `tokens > 99 and key != 'a'` of"
            f" these columns: {names}."
        ) from error
    return met.to_numpy()


def _is_in_top(documents: pd.DataFrame, rank_by: str, top: float) -> pd.Series:
    """Return which documents are selected and have the largest values; of equal values, the first ones."""
    if top <= 0 or (top > 1 and top != int(top)):
        raise ValueError(f"`top` must be a fraction up to 1 or a whole number of documents, got {top}.")
    ranked = documents.loc[documents["selected"], rank_by].dropna()
    count = int(top) if top > 1 else max(1, round(top * len(ranked)))
    return documents.index.isin(ranked.nlargest(count, keep="first").index)


def write_keys(path: Path, chosen: pd.DataFrame) -> None:
    """Write one key per line; warn about documents whose key is empty or has several lines."""
    fits = chosen["key"].map(lambda key: bool(key.strip()) and len(key.splitlines()) == 1)
    write_atomically(path, "".join(f"{key}\n" for key in chosen.loc[fits, "key"]).encode())
    left_out = chosen[~fits]
    if len(left_out):
        named = [f"row {each.row} of '{each.file}' ({each.key[:_MAX_EXCERPT]!r})" for each in left_out.itertuples()]
        others = " and others" if len(named) > _MAX_NAMED else ""
        warnings.warn(
            f"{len(named):,} selected document(s) are not in '{path}', because a key must be one line that is not"
            f" empty: {', '.join(named[:_MAX_NAMED])}{others}. Write .parquet or .jsonl instead.",
            stacklevel=2,
        )


def write_documents(path: Path, chosen: pyarrow.Table, shards: ScoreShards, files: str | list[str] | None) -> None:
    """Write text and scores in the order of the files; raise a ``ValueError`` if a document is missing or changed."""
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
            raise ValueError(f"{len(chosen) - written} of the {len(chosen)} documents no longer exist.")


def _read_documents(
    chosen: pyarrow.Table, shards: ScoreShards, files: str | list[str] | None
) -> Iterator[tuple[int, str]]:
    """Yield the text of each chosen document with its index in the table, which is sorted by file and row."""
    source = shards.header()["source"]
    datamodules = importlib.import_module("datamodules")  # this package may not import it statically
    corpus = datamodules.DocumentCorpus(**{**source, "files": files or source["files"]})
    documents = chosen.select(["key", "file", "row"]).to_pandas()
    places = pd.Series(documents.index, index=pd.MultiIndex.from_frame(documents[["file", "row"]]))
    rows = {file: own.to_numpy() for file, own in documents.groupby("file")["row"]}
    for ref, text in corpus.documents(rows, shards.existing_scores().versions):
        place = int(places[ref.file, ref.row])
        if ref.error is not None or ref.key != documents["key"][place]:
            raise ValueError(f"Row {ref.row} of '{ref.file}' is no longer the document that was scored.")
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


def write_weights(path: Path, means: pd.Series) -> None:
    """Write weights for `datamodules.MixtureDataModule`: the mean of each source, normalized to sum 1."""
    for source, mean in means.items():
        if not 0 < mean < math.inf:
            raise ValueError(
                f"The mean `{means.name}` of source '{source}' is {mean:.4g}, but weights must be above 0: rank by"
                " another column, or exclude the source by `where`."
            )
    weights = {source: float(f"{weight:.6g}") for source, weight in (means / means.sum()).sort_index().items()}
    content = yaml.safe_dump({"data": {"init_args": {"weights": weights}}}, sort_keys=False, allow_unicode=True)
    write_atomically(path, f"# Mean {means.name} of the documents of each source\n{content}".encode())


def _completeness_note(shards: ScoreShards) -> str:
    try:
        shards.folder.open(SUCCESS).close()
    except FileNotFoundError:
        return f"{SUCCESS} is missing: not all documents of the corpus are scored, or too many failed.\n\n"
    return ""


def means_by_source(documents: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Compute means over the selected documents of each source; NaN if no document has a value."""
    return documents[documents["selected"]].groupby("source", observed=True)[list(columns)].mean()


def report(documents: pd.DataFrame) -> str:
    """Format the tables of `longce select`."""
    # Mean benefits of a longer context over a shorter one.
    ladder = [name for name in documents if name.startswith("ladder_") and name.endswith("_mean")]
    passing_tokens = documents["tokens"].where(documents["selected"])
    sources = documents.assign(passing_tokens=passing_tokens).groupby("source", observed=True)
    counts = sources[["selected", "tokens", "passing_tokens"]].sum().astype(int)
    counts.insert(0, "documents", sources.size())
    counts = counts.sort_values("selected", ascending=False, kind="stable")
    columns = [*MEANS, *ladder]
    means = means_by_source(documents, columns).reindex(counts.index)
    counts.loc["all"] = counts.sum()
    means.loc["all"] = documents.loc[documents["selected"], columns].mean()
    counts = counts.map("{:,}".format).rename(columns={"selected": "pass", "passing_tokens": "pass"})
    tables = [_format_table(pd.concat([counts, means[list(MEANS)]], axis=1))]
    if ladder:
        pairs = [" > ".join(name.split("_")[1:3]) for name in ladder]
        benefits = means[ladder].set_axis(pairs, axis=1)
        correlations = documents.loc[documents["selected"], ladder].corr()
        tables += [
            "\nMean benefit of a longer context, nats (documents that pass):",
            _format_table(benefits),
            "\nCorrelation of these benefits over documents:",
            _format_table(correlations.set_axis(pairs, axis=0).set_axis(pairs, axis=1), ""),
        ]
    return "\n".join(tables) + "\n"


def _format_table(table: pd.DataFrame, corner: str = "source") -> str:
    """Format a table as text; sources in the middle are left out if there are many."""
    table = table.rename_axis(index=None, columns=corner)
    return table.to_string(na_rep="-", float_format="{:.4g}".format, max_rows=_MAX_ROWS)

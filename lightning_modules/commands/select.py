"""``longce select``: choose documents of a corpus by their scores, and compute weights of their sources."""

import importlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import islice
from operator import and_, eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet
import yaml

from lightning_modules.scoring.score_shards import PER_TOKEN, SUCCESS, ScoreShards
from lightning_modules.utilities.files import atomic_file, writable_folder, write_atomically

FOLDER = "folder"  # a source that is not a column: the folder of a document's file
OUTPUTS = (".txt", ".parquet", ".jsonl")
_WRITTEN_TOGETHER = 64  # documents
_MAX_NAMED, _MAX_EXCERPT = 3, 40  # documents named in a warning, and characters of the key of each
MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_MAX_SOURCES = 40
_CONDITION = re.compile(r"""\s*([\w.]+)\s*(>=|<=|==|!=|>|<)\s*("[^"]*"|'[^']*'|[-+.\w]+)\s*(and\b|$)""", re.IGNORECASE)
_OPERATORS = {">": gt, "<": lt, ">=": ge, "<=": le, "==": eq, "!=": ne}
_FORM = "Write conditions as COLUMN > NUMBER, COLUMN == 'text' or COLUMN == true, joined by `and`; also <, >=, <=, !=."


def select(
    scores: str,
    *,
    where: str | None = None,
    top: float | None = None,
    rank_by: str = "benefit_mean",
    by: str = "file",
    output: str | None = None,
    files: str | list[str] | None = None,
    weights: str | None = None,
) -> str:
    """Choose documents by the scores that `longce predict` has written, and return tables by source, as text.

    Options are those of ``longce select``. Documents that failed never pass, nor do those without a value that is asked
    for.

    Raises:
        ValueError: If there are no scores, a condition or column has no meaning, a file cannot be written, no document
            passes, or the documents no longer exist.
    """
    shards = ScoreShards(scores)
    shards.header()  # refuses other parquet files
    schema = shards.schema()
    _check_options(schema, rank_by, by, output, weights)
    ladder = [name for name in schema.names if name.startswith("ladder_") and name.endswith("_mean")]
    numbers = list(dict.fromkeys([*MEANS, *ladder, rank_by, "tokens"]))
    with_documents = output is not None and not output.endswith(".txt")
    table = _read_scores(shards, schema, where, None if with_documents else {*numbers, "key", "file", "row", by})
    documents = _as_frame(table, numbers, by)
    if top is not None:
        documents["selected"] &= _is_in_top(documents, rank_by, top)
    if not documents["selected"].any():
        raise ValueError(f"None of the documents in '{scores}' passes. Ask for less.")

    if output is not None:
        chosen = table.drop(["selected"]).filter(documents["selected"].to_numpy())
        if with_documents:
            write_documents(Path(output), chosen, shards, files)
        else:
            write_keys(Path(output), chosen)
    if weights is not None:
        write_weights(Path(weights), means_by_source(documents, [rank_by])[rank_by])
    return _completeness_note(shards) + report(documents, ladder)


def _check_options(schema: pyarrow.Schema, rank_by: str, by: str, output: str | None, weights: str | None) -> None:
    """Refuse what cannot be done before hours of scores are read."""
    for name in (rank_by,) if by == FOLDER else (rank_by, by):
        if name not in schema.names:
            raise ValueError(f"The scores have no column {name!r}, only {schema.names}.")
    if by != FOLDER and pyarrow.types.is_nested(schema.field(by).type):
        raise ValueError(f"`by`: column '{by}' is of type {schema.field(by).type}, which does not name a source.")
    kind = schema.field(rank_by).type
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ValueError(f"`rank_by`: column '{rank_by}' is of type {kind}, which is not a number.")
    if output is not None and Path(output).suffix not in OUTPUTS:
        raise ValueError(f"`output` = '{output}' must end in one of {', '.join(OUTPUTS)}.")
    for file in filter(None, (output, weights)):
        if Path(file).is_dir():
            raise ValueError(f"'{file}' is a folder: name a file in it.")
        writable_folder(Path(file).absolute().parent, remedy="Name another file.")


def _read_scores(
    shards: ScoreShards, schema: pyarrow.Schema, where: str | None, wanted: set[str] | None
) -> pyarrow.Table:
    """Read the wanted columns of all documents, and add ``selected``: whether they meet the conditions."""
    passes = pc.field("error").is_null()
    if where is not None:
        passes = passes & parse_conditions(where, schema)
    columns = [name for name in schema.names if name not in PER_TOKEN]
    projection = {name: pc.field(name) for name in columns if wanted is None or name in wanted}
    # A null compared with anything is null, and does not pass.
    projection["selected"] = pc.coalesce(passes, pc.scalar(False))
    batches = (batch.replace_schema_metadata() for batch in shards.batches(columns))
    scanner = pyarrow.dataset.Scanner.from_batches(
        batches, schema=pyarrow.schema([schema.field(name) for name in columns]), columns=projection, use_threads=False
    )
    return scanner.to_table()


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
                left_out.append(f"row {row['row']} of '{row['file']}' ({key[:_MAX_EXCERPT]!r})")
    if left_out:
        others = " and others" if len(left_out) > _MAX_NAMED else ""
        warnings.warn(
            f"{len(left_out):,} chosen document(s) are not in '{path}', because a key must be one line that is not"
            f" empty: {', '.join(left_out[:_MAX_NAMED])}{others}. Write .parquet or .jsonl instead.",
            stacklevel=2,
        )


def write_documents(path: Path, chosen: pyarrow.Table, shards: ScoreShards, files: str | list[str] | None) -> None:
    """Write text and scores in the order of the files; a ``ValueError`` if a document is not where it was."""
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
    datamodules = importlib.import_module("datamodules")  # which commands may not know
    corpus = datamodules.DocumentCorpus(**{**source, "files": files or source["files"]})
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


def write_weights(path: Path, means: pd.Series) -> None:
    """Write weights for `datamodules.MixtureDataModule`: the mean of each source divided by the sum of all means."""
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


def parse_conditions(text: str, schema: pyarrow.Schema) -> pyarrow.compute.Expression:
    """Parse conditions joined by ``and`` as an expression that is true for rows that meet all, null or false otherwise.

    Raises:
        ValueError: If the text cannot be read, names an unknown column, or compares one with a value of another type.

    Example:
        >>> str(parse_conditions("tokens >= 32768", pyarrow.schema({"tokens": pyarrow.int64()})))
        '(tokens >= 32768)'
    """
    conditions = []
    position, has_next = 0, True
    while has_next:
        match = _CONDITION.match(text, position)
        if match is None:
            raise ValueError(f"`where`: cannot read '{text[position:].strip()}'. {_FORM}")
        column, sign, value, conjunction = match.groups()
        conditions.append(_condition(column, sign, _parse_value(value), schema))
        position, has_next = match.end(), bool(conjunction)
    return reduce(and_, conditions)


def _condition(column: str, sign: str, value: float | str | bool, schema: pyarrow.Schema) -> pyarrow.compute.Expression:
    if column not in schema.names:
        raise ValueError(f"`where`: the scores have no column '{column}', only {schema.names}.")
    kind = schema.field(column).type
    name = str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind)
    is_text = name.endswith(("string", "string_view"))  # Arrow has several types of text
    is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    comparable = str if is_text else float if is_number else bool if name == "bool" else None
    if type(value) is not comparable:
        raise ValueError(f"`where`: column '{column}' is of type {kind}: it cannot be {sign} {value!r}.")
    field = pc.field(column).cast(pyarrow.string()) if is_text else pc.field(column)
    return _OPERATORS[sign](field, pc.scalar(value))


def _parse_value(text: str) -> float | str | bool:
    if text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"`where`: '{text}' is not a number. {_FORM}") from error


def means_by_source(documents: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Compute means over the selected documents of each source; NaN where no document has a value."""
    return documents[documents["selected"]].groupby("source", observed=True)[list(columns)].mean()


def report(documents: pd.DataFrame, ladder: Sequence[str] = ()) -> str:
    """Format the tables of `longce select`; ``ladder`` are columns of benefits of one context length over another."""
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
    tables = [_format(pd.concat([counts, means[list(MEANS)]], axis=1))]
    if ladder:
        pairs = [" > ".join(name.split("_")[1:3]) for name in ladder]
        benefits = means[list(ladder)].set_axis(pairs, axis=1)
        correlations = documents.loc[documents["selected"], list(ladder)].corr()
        tables += [
            "\nMean benefit of a longer context, nats (documents that pass):",
            _format(benefits),
            "\nCorrelation between documents of these benefits:",
            _format(correlations.set_axis(pairs, axis=0).set_axis(pairs, axis=1), ""),
        ]
    return "\n".join(tables) + "\n"


def _format(table: pd.DataFrame, corner: str = "source") -> str:
    """Align a table as text, without the sources after the first 40."""
    others = len(table) - 1 - _MAX_SOURCES
    if others > 0:
        table = pd.concat([table.iloc[:_MAX_SOURCES], table.iloc[-1:]])
    lines = table.rename_axis(index=None, columns=corner).to_string(na_rep="-", float_format="{:.4g}".format)
    return lines + (f"\n({others} other sources)" if others > 0 else "")

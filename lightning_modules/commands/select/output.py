"""Write the keys or the documents that `longce select` has chosen, and the weights of their sources."""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow
import pyarrow.parquet
import yaml

from lightning_modules.scoring.corpus.shards import ScoreShards
from lightning_modules.utilities.files import atomic_file, plain, write_atomically
from lightning_modules.visualization.corpus.page import NO_SOURCE

_WRITTEN_TOGETHER = 64  # documents
_MAX_NAMED, _MAX_EXCERPT = 3, 40  # documents named in a warning, and characters of the key of each
_HOLDOUTS = (20, 10, 5, 3)  # one in this many documents of a mixture is for validation, and one for test


def write_keys(path: Path, chosen: pd.DataFrame) -> int:
    """Write one key per line, and return how many; warn about documents whose key is empty or has several lines."""
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
    return len(chosen) - len(left_out)


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
        yield lambda table: stream.writelines(json.dumps(plain(row)).encode() + b"\n" for row in table.to_pylist())


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


def write_mixture(path: Path, chosen: pd.DataFrame, documents: Path, by: str) -> None:
    """Write a mixture of the sources in a file of documents, with the tokens of each source as its weight.

    Sources with enough documents hold some out for validation. ``chosen`` has ``source``, ``tokens`` and ``text_hash``,
    and ``by`` is the column of the documents that names the source.
    """
    hashes = chosen["text_hash"].map(lambda digest: int(digest[:16], 16))  # as `datamodules.sources.splits.HashSplit`
    for holdout in _HOLDOUTS:
        found = pd.DataFrame({"held_out": hashes % holdout == 0, "trained": hashes % holdout > 1})
        found = found.groupby(chosen["source"]).any().all(axis=1)
        if found.any():
            break
    evaluated = found.index[found].tolist()
    sources: dict[str, Any] = {}
    for source, own in chosen.groupby("source"):
        where = [by, None if source == NO_SOURCE else source]
        init_args: dict[str, Any] = {"train": str(documents.absolute()), "where": where, "name_field": "key"}
        init_args |= {"holdout": holdout} if source in evaluated else {}
        weight = int(own["tokens"].sum())
        sources[str(source)] = {"class_path": "datamodules.TextDataModule", "weight": weight, "init_args": init_args}
    settings = {"sources": sources, **({"evaluate_on": evaluated} if evaluated else {})}
    data = {"class_path": "datamodules.MixtureDataModule", "init_args": settings}
    content = yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True)
    write_atomically(path, f"# The weights are the tokens of each source.\n{content}".encode())

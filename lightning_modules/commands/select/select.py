"""`longce select`: documents of a corpus whose scores pass, as ids or text, and weights of their sources."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jsonargparse
import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import yaml
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray

from lightning_modules.commands.select.conditions import Condition, check_conditions, parse_conditions, passing
from lightning_modules.commands.select.summary import MEANS, SourceSummary
from lightning_modules.scoring.score_shards import SUCCESS, ScoreShards
from lightning_modules.scoring.score_table import PER_TOKEN
from lightning_modules.utilities.files import atomic_file, writable_folder, write_atomically

CORPUS = "datamodules.DocumentCorpus"
"""The data module that finds documents again."""

FOLDER = "folder"
"""Source of a document that is no column: the folder of its file."""

_ALWAYS = ("key", "file", "row", "tokens", "error")
_WRITTEN_TOGETHER = 64  # documents
_NAMED, _EXCERPT = 3, 40  # documents in a warning, and characters of the key of each


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
    """Choose documents by the scores that `longce predict` has written, and tell how many pass by source.

    Documents that have failed never pass, nor do those without a value that is asked for.

    Args:
        scores: Folder or fsspec URL of the scores.
        where: Conditions on columns, joined by ``and``: ``key_token_ratio > 0.02 and tokens >= 32768``.
        top: Of the documents that meet the conditions and have a `rank_by`, take those with the largest: a share up to
            1, which is all of them, or a number from 2 on.
        rank_by: Column that ranks documents, and that `weights` are means of.
        by: Column that names a document's source; ``folder`` for the folder of its file.
        output: File of the chosen ones: ``.txt`` for their keys, one per line, ``.parquet`` or ``.jsonl`` for the
            documents with ``text`` and scores. What is there is replaced. A document whose key is empty or has several
            lines is left out of a ``.txt`` file, with a warning.
        files: The documents' files, if they are no longer where they were scored; as `data.files`.
        weights: YAML file for the mean `rank_by` of each source, as `data.weights` of a mixture of these sources:
            lay it over the experiment by ``-c``.

    Returns:
        Tables by source, as text.

    Raises:
        ValueError: If there are no scores, a condition or column has no meaning, a file cannot be written, no document
            passes, or the documents are not there any more.
    """
    for file in filter(None, (output, weights)):
        _check_writable(Path(file))
    chooser = Chooser(ScoreShards(scores), parse_conditions(where) if where else [], rank_by=rank_by, by=by)
    kinds: dict[str, Callable[[Path], None]] = {
        ".txt": chooser.write_keys,
        ".parquet": lambda path: chooser.write_documents(path, files),
        ".jsonl": lambda path: chooser.write_documents(path, files),
    }
    if output is not None and Path(output).suffix not in kinds:
        raise ValueError(f"`output` = '{output}' must end in one of {', '.join(kinds)}.")
    if top is not None:
        chooser.take_top(top)
    summary = chooser.summary()
    if output is not None:
        kinds[Path(output).suffix](Path(output))
    if weights is not None:
        write_weights(Path(weights), summary, rank_by)
    return chooser.notes() + summary.report()


class Chooser:
    """Goes through scores, a few thousand documents at a time, and knows which pass.

    Args:
        shards: The scores.
        conditions: That documents have to meet.
        rank_by: Column that ranks them.
        by: Column that names their source.
    """

    def __init__(self, shards: ScoreShards, conditions: Sequence[Condition], *, rank_by: str, by: str) -> None:
        self.shards = shards
        self.conditions = conditions
        self.rank_by = rank_by
        self.by = by
        self._least, self._ties = -math.inf, 0
        shards.header()  # refuses other parquet files
        self._schema = schema = shards.schema()
        check_conditions(conditions, schema)
        shards.schema([rank_by] if by == FOLDER else [rank_by, by])
        if by != FOLDER and pyarrow.types.is_nested(schema.field(by).type):
            raise ValueError(f"`by`: column '{by}' is of type {schema.field(by).type}, and names no source.")
        if not (pyarrow.types.is_integer(kind := schema.field(rank_by).type) or pyarrow.types.is_floating(kind)):
            raise ValueError(f"`rank_by`: column '{rank_by}' is of type {kind}, and no number.")
        self.ladder = [name for name in schema.names if name.startswith("ladder_") and name.endswith("_mean")]
        known = {*_ALWAYS, *MEANS, *self.ladder, rank_by, *(condition.column for condition in conditions)}
        self._columns = sorted(known if by == FOLDER else known | {by})

    def take_top(self, top: float) -> None:
        """Let only those with the largest values pass, of equal ones those that come first."""
        if top <= 0 or (top > 1 and top != int(top)):
            raise ValueError(f"`top` must be a share up to 1 or a number of documents, got {top}.")
        parts = [_values(batch, self.rank_by)[mask] for batch, mask in self._batches()]
        values = np.concatenate(parts) if parts else np.empty(0)
        values = values[~np.isnan(values)]
        count = min(len(values), max(1, round(top * len(values))) if top < 1 else int(top) if top > 1 else len(values))
        self._least = float(np.partition(values, len(values) - count)[len(values) - count]) if count else math.inf
        self._ties = count - int((values > self._least).sum())

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[tuple[pyarrow.RecordBatch, NDArray[np.bool_]]]:
        """Documents and which of them pass.

        Args:
            columns: Further ones to read.
        """
        ties = self._ties
        for batch, mask in self._batches(columns):
            if self._least > -math.inf:
                values = _values(batch, self.rank_by)
                equal = np.flatnonzero(mask & (values == self._least))
                mask &= values > self._least
                mask[equal[:ties]] = True
                ties -= min(ties, len(equal))
            yield batch, mask

    def _batches(self, columns: Sequence[str] | None = None) -> Iterator[tuple[pyarrow.RecordBatch, NDArray[np.bool_]]]:
        for batch in self.shards.batches(list(dict.fromkeys([*self._columns, *(columns or ())]))):
            yield batch, passing(batch, self.conditions).to_numpy(zero_copy_only=False).copy()

    def summary(self) -> SourceSummary:
        """What passes, by source.

        Raises:
            ValueError: If no document passes.
        """
        summary = SourceSummary(self.ladder, [self.rank_by])
        for batch, mask in self.batches():
            summary.add(self._sources(batch), batch, mask)
        if not any(each["passing"] for each in summary.counts().values()):
            raise ValueError(f"None of the documents in '{self.shards.folder}' passes. Ask for less.")
        return summary

    def notes(self) -> str:
        """What is to be known of the scores themselves."""
        try:
            self.shards.folder.open(SUCCESS).close()
        except FileNotFoundError:
            return f"There is no {SUCCESS}: not all documents of the corpus are scored, or too many failed.\n\n"
        return ""

    def _sources(self, batch: pyarrow.RecordBatch) -> pyarrow.Array:
        if self.by != FOLDER:
            return batch.column(self.by).cast(pyarrow.string()).fill_null("-")
        folders = pyarrow.compute.replace_substring_regex(batch.column("file"), "/?[^/]*$", "")
        return pyarrow.compute.if_else(pyarrow.compute.equal(folders, ""), ".", folders)

    def write_keys(self, path: Path) -> None:
        """Write a key on each line; a warning counts the documents whose key is empty or has several lines."""
        left_out: list[str] = []
        count = 0
        with atomic_file(path) as stream:
            for batch, mask in self.batches():
                for row in batch.select(["key", "file", "row"]).filter(pyarrow.array(mask)).to_pylist():
                    if row["key"].strip() and len(row["key"].splitlines()) == 1:
                        stream.write(f"{row['key']}\n".encode())
                        continue
                    count += 1
                    if count <= _NAMED:
                        left_out.append(f"row {row['row']} of '{row['file']}' ({_excerpt(row['key'])})")
        if count:
            warnings.warn(
                f"{count:,} chosen document(s) are not in '{path}', because a key must be one line that is not empty:"
                f" {', '.join(left_out)}{' and others' if count > _NAMED else ''}. Write .parquet or .jsonl instead.",
                stacklevel=2,
            )

    def write_documents(self, path: Path, files: str | list[str] | None) -> None:
        """Text and scores, in the order of the files.

        Raises:
            ValueError: If a document is not where it was.
        """
        names = [name for name in self._schema.names if name not in PER_TOKEN]
        table = pyarrow.Table.from_batches(
            [batch.select(names).filter(pyarrow.array(mask)) for batch, mask in self.batches(names)]
        ).sort_by([("file", "ascending"), ("row", "ascending")])
        with _document_file(
            path, table.schema.remove_metadata().append(pyarrow.field("text", pyarrow.string()))
        ) as write:
            rows, found = [], 0
            for row in self._with_text(table, files):
                rows.append(row)
                found += 1
                if len(rows) == _WRITTEN_TOGETHER:
                    write(rows)
                    rows = []
            write(rows)
            if found != len(table):
                raise ValueError(f"{len(table) - found} of the {len(table)} documents are not there any more.")

    def _with_text(self, table: pyarrow.Table, files: str | list[str] | None) -> Iterator[dict[str, Any]]:
        source = self.shards.header()["source"]
        corpus = _corpus({**source, "files": files or source["files"]})
        codes = table["file"].combine_chunks().dictionary_encode()
        starts = np.flatnonzero(np.diff(codes.indices.to_numpy(), prepend=-1))
        files_there = codes.dictionary.take(codes.indices.take(pyarrow.array(starts))).to_pylist()
        rows = dict(zip(files_there, np.split(table["row"].to_numpy(), starts[1:]), strict=True))
        first = dict(zip(files_there, starts.tolist(), strict=True))
        for origin, text in corpus.documents(rows, self.shards.written().versions):
            place = first[origin.file] + int(np.searchsorted(rows[origin.file], origin.row))
            row = table.slice(place, 1).to_pylist()[0]
            if origin.error is not None or origin.key != row["key"]:
                raise ValueError(f"Row {origin.row} of '{origin.file}' is not the document that was scored any more.")
            yield {**row, "text": text}


def write_weights(path: Path, summary: SourceSummary, column: str) -> None:
    """Weights of sources for `datamodules.MixtureDataModule`: means of a column, divided by their sum.

    Raises:
        ValueError: If a mean is not above 0.
    """
    counts = summary.counts()
    means = {source: own[column] for source, own in summary.means().items() if counts[source]["passing"]}
    for source, mean in means.items():
        if not 0 < mean < math.inf:
            raise ValueError(
                f"The mean `{column}` of source '{source}' is {mean:.4g}, and weights are above 0: rank by another"
                " column, or leave the source out by `where`."
            )
    weights = {source: float(f"{mean / sum(means.values()):.6g}") for source, mean in sorted(means.items())}
    content = yaml.safe_dump({"data": {"init_args": {"weights": weights}}}, sort_keys=False, allow_unicode=True)
    write_atomically(path, f"# Mean {column} of the documents of each source\n{content}".encode())


def _check_writable(path: Path) -> None:
    """Raise a ``ValueError`` for a file that could not be written when all is read."""
    if path.is_dir():
        raise ValueError(f"'{path}' is a folder: name a file in it.")
    writable_folder(path.absolute().parent, remedy="Name another file.")


@contextmanager
def _document_file(path: Path, schema: pyarrow.Schema) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """What writes rows to a parquet or JSON-lines file, which appears when all are there."""
    with atomic_file(path) as stream:
        if path.suffix == ".jsonl":
            yield lambda rows: cast(
                None, stream.write("".join(json.dumps(row, default=str) + "\n" for row in rows).encode())
            )
            return
        with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            yield lambda rows: writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _corpus(settings: dict[str, Any]) -> Any:
    """The data module, made as from a config: nothing here imports it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    config = {"class_path": CORPUS, "init_args": settings}
    return parser.instantiate(parser.parse_object({"data": config})).data


def _excerpt(key: str) -> str:
    return repr(key if len(key) <= _EXCERPT else f"{key[:_EXCERPT]}..")


def _values(batch: pyarrow.RecordBatch, name: str) -> NDArray[np.float64]:
    return batch.column(name).cast(pyarrow.float64()).to_numpy(zero_copy_only=False)

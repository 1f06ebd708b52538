"""Score the documents of a corpus into parquet files, and resume."""

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow
import pyarrow.compute
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from datamodules.sources.corpus import CorpusColumns, CorpusFiles, DocumentRef, Share, find_corpus, is_text
from lightning_modules.commands.corpus.config import CorpusConfig
from lightning_modules.models.loading.identity import check_same_model, describe_model
from lightning_modules.scoring.corpus.counts import count_documents, report_failures
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards, check_settings
from lightning_modules.scoring.corpus.table import find_reserved_names
from lightning_modules.scoring.long_context_scorer import EncodedDocument, LongContextScorer
from lightning_modules.scoring.score import find_device
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import remove_unfinished
from lightning_modules.utilities.identity import file_state
from lightning_modules.utilities.locks import RunLock
from lightning_modules.utilities.progress import progress_bar

_POOL_DOCUMENTS, _POOL_BATCHES = 256, 32  # limits of what is read before documents of similar length are batched
_MAX_SHARD_TOKENS = 2**24  # about 200 MB with per-token values
_NAMED_FILES = 3  # at most, in a message
_IDENTITY = {"key": pyarrow.string(), "file": pyarrow.string(), "row": pyarrow.int64()}
_COUNTED = pyarrow.schema(
    {
        **{name: pyarrow.string() for name in ("file", "error")},
        **{name: pyarrow.int64() for name in ("row", "tokens", "compared_tokens", "key_tokens")},
    }
)

Document = tuple[DocumentRef, EncodedDocument]
Rows = dict[str, NDArray[np.int64]]
"""Ascending numbers of rows, by file."""

Item = TypeVar("Item")

_log = logging.getLogger(__name__)


def score_corpus(files: Sequence[str], config: CorpusConfig) -> str:
    """Score the documents of a shard that have no scores yet, and return a line with the counts of all.

    A document is a row of a ``.parquet`` file, a line of a ``.jsonl`` or ``.json`` file, or a ``.txt`` file (text and
    JSON also as ``.gz`` and ``.zst``); file and row number identify it. Its scores are a row of a ``part-*.parquet``
    file, which is written atomically. One that fails is a row with the reason in ``error``, and counts as done.

    Args:
        files: Files, folders (searched recursively) and patterns, local or as fsspec URLs. Results name a file by its
            path relative to the folder or pattern.
        config: All other settings.

    Raises:
        ValueError: If the files, the settings and the scores that exist do not fit together, or a file changes or
            cannot be read to its end; what is scored is kept.
        IncompleteError: If more documents failed than are allowed.
    """
    # 1. Find the documents, and those that have scores.
    columns = CorpusColumns(config.text_column, config.key_column, tuple(config.columns))
    if clash := find_reserved_names(config.columns):
        raise ValueError(f"`columns` has {clash}, which are names of score columns: rename them in the corpus.")
    shards = _open_folder(config)
    scorer = _make_scorer(config)
    corpus = find_corpus(files, columns, check=config.allowed_failures < 1)
    states = _file_states(corpus)
    settings = _describe_settings(scorer, corpus, config)
    with _only_writer(shards), _sigterm_stops():
        done = _find_scored(shards, settings, corpus, states)
        shards.remove_success()
        # 2. Score the others. A thread reads and tokenizes the next documents meanwhile.
        source = {"files": [*files], "text_column": config.text_column, "key_column": config.key_column}
        writer = _Writer(shards, {"settings": settings, "source": source}, corpus, states, config)
        shares = corpus.shares(*config.shard_numbers)
        unreadable: list[str] = []
        documents = _read(corpus, shares, done, scorer.encode, unreadable)
        with progress_bar("Scoring", unit=" documents", total=_count_missing(shares, done), scaled=False) as bar:
            try:
                for pool in _read_ahead(_pools(documents, config.batch_tokens)):
                    if any(document.batch is not None for _, document in pool):
                        _load(scorer, settings["model"])
                    refs = [ref for ref, _ in pool]
                    scores = scorer.score_encoded([document for _, document in pool])
                    writer.add(refs, scores, sum(document.tokens for _, document in pool))
                    _show_rate(bar, writer)
                _verify(scorer, writer)
            finally:  # also when it is stopped: nothing computed is lost
                writer.write()
        # 3. Count all documents of the shard, those of earlier runs included.
        return _finish(shards, settings, unreadable, config)


def _open_folder(config: CorpusConfig) -> ScoreShards:
    """Return the folder of the shard; refuse a folder that has scores of another number of shards."""
    index, shards = config.shard_numbers
    whole = ScoreShards(config.output)
    own = whole if shards == 1 else ScoreShards(f"{config.output.rstrip('/')}/{_shard_name(index, shards)}")
    whole.check_writable()
    for name in whole.entries():
        other = re.fullmatch(r"shard-\d+-of-(\d+)", name)
        found = int(other[1]) if other else 1 if name.endswith(".parquet") else shards
        if found != shards:
            raise ValueError(
                f"'{config.output}' has scores in {found} shard(s), and `shard` is {config.shard}: documents would be"
                " scored twice. Use the same number of shards, or another folder."
            )
    own.check_writable()
    return own


def _shard_name(index: int, shards: int) -> str:
    return f"shard-{index:05d}-of-{shards:05d}"


def _make_scorer(config: CorpusConfig) -> LongContextScorer:
    device = config.device
    local_rank = os.environ.get("LOCAL_RANK")
    if device == "auto" and local_rank is not None and torch.cuda.is_available():
        device = f"cuda:{local_rank}"
    not_its_own = {"output", "columns", "key_column", "shard", "allowed_failures", "shard_rows", "shard_minutes"}
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in not_its_own}
    return LongContextScorer(**{**options, "device": device})


def _describe_settings(scorer: LongContextScorer, corpus: CorpusFiles, config: CorpusConfig) -> dict[str, Any]:
    """Return all settings that the scores of a shard depend on, without loading the model."""
    model = describe_model(scorer.loading, scorer.tokenizer, device=find_device(scorer.device))
    names = ["context_length", "stride", "alpha", "beta", "gamma", "contexts", "per_token", "quantization"]
    names += ["max_tokens", "add_special_tokens", "text_column", "key_column"]
    index, shards = config.shard_numbers
    # The choice of documents depends on the number of parts.
    parts = f" of {len(corpus.parts)} files and row groups"
    return {
        "model": model.identity,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype,
        "attention": model.attention,
        **{name: getattr(config, name) for name in names},
        "overlong": None if config.max_tokens is None else config.overlong,
        "columns": {name: str(kind) for name, kind in corpus.column_types.items()},
        "shard": "0/1" if shards == 1 else f"{index}/{shards}{parts}",
    }


def _load(scorer: LongContextScorer, identity: str) -> None:
    """Load the model, if it is not loaded; raise a ``ValueError`` if it is no longer the one with this identity."""
    if "document_scorer" not in vars(scorer):
        _ = scorer.document_scorer
        check_same_model(identity, scorer.loading)


def _verify(scorer: LongContextScorer, writer: "_Writer") -> None:
    """Raise a ``ValueError`` if a server has another model than before; log what the servers did."""
    if "document_scorer" not in vars(scorer):
        return
    backbone = scorer.document_scorer.backbone
    try:
        backbone.verify()
    except ValueError:
        writer.discard()  # the other model may have scored them
        raise
    if report := backbone.report():
        _log.info("%s", report)


# Scored documents of earlier runs


def _find_scored(
    shards: ScoreShards, settings: Mapping[str, Any], corpus: CorpusFiles, states: Mapping[str, Any]
) -> Rows:
    """Return the rows that have scores; raise a ``ValueError`` if they do not belong to this corpus and model."""
    tables = []
    suspects: dict[str, set[str]] = {}  # by shard: files that are not as they were when it was written
    for name, header, table in shards.read(["file", "row"]):
        check_settings(header["settings"], settings, f"{shards}/{name}")
        changed = {file for file, state in header["files"].items() if states.get(file, state) != state}
        if changed:
            suspects[name] = changed
        tables.append(table.append_column("shard", pyarrow.array([name] * len(table), pyarrow.string())))
    if not tables:
        return {}
    scored = pyarrow.concat_tables(tables)
    rows = scored.group_by(["file", "row"]).aggregate([("shard", "count"), ("shard", "max")])
    names = rows.filter(pyarrow.compute.greater(rows["shard_count"], 1))["shard_max"].unique().to_pylist()
    if names:
        raise ValueError(
            f"{shards}: {len(names)} file(s) repeat rows of other files, because two runs wrote at the same time."
            f" Delete {', '.join(names)} and run the same command again: missing rows are scored again."
        )
    if suspects:
        _check_content(shards, suspects, corpus)
    _log.info("%s already has scores of %s documents.", shards, f"{len(scored):,}")
    by_file = scored.group_by("file").aggregate([("row", "list")])
    numbers = (own.values.to_numpy() for own in by_file["row_list"])
    return dict(zip(by_file["file"].to_pylist(), map(np.sort, numbers), strict=True))


def _check_content(shards: ScoreShards, suspects: Mapping[str, set[str]], corpus: CorpusFiles) -> None:
    """Raise a ``ValueError`` if a document is another one than when it was scored, in files that may have changed."""
    names = [*_identity_schema(corpus).names, "text_hash"]
    for name, _, table in shards.read(names):
        for file in sorted(suspects.get(name, ())):
            scored = table.filter(pyarrow.compute.equal(table["file"], file)).sort_by("row")
            rows = frozenset(scored["row"].to_pylist())
            parts = [part for part in corpus.parts if part.file == file]
            found = [pair for part in parts for pair in corpus.read(part, rows.__contains__)]
            refs = [ref for ref, _ in found]
            hashes = [None if ref.error is not None else text_sha256(text) for ref, text in found]
            now = _identity_table(refs, corpus).append_column("text_hash", pyarrow.array(hashes, pyarrow.string()))
            if not now.sort_by("row").equals(scored.select(names).cast(now.schema)):
                _refuse_changes([file], shards)


def _refuse_changes(files: Sequence[str], shards: ScoreShards) -> NoReturn:
    raise ValueError(
        f"{len(files)} file(s) have changed since their documents were scored, such as {sorted(files)[:_NAMED_FILES]}:"
        f" restore them; or delete the files in '{shards}' that have them in the column `file`, to score their"
        " documents again; or write to another folder."
    )


def _file_states(corpus: CorpusFiles) -> dict[str, Any]:
    """Return for each file a value that changes when its content does; the content is compared only then."""
    return {name: file_state(file) if isinstance(file, Path) else file.identity for name, file in corpus.files.items()}


# Reading


def _read(
    corpus: CorpusFiles,
    shares: Sequence[Share],
    done: Rows,
    encode: Callable[[str], EncodedDocument],
    unreadable: list[str],
) -> Iterator[Document]:
    """Yield the documents without scores, tokenized; add files that cannot be read to the end to ``unreadable``."""
    for share in shares:
        scored = frozenset(_scored_rows(share, done).tolist())
        if len(scored) == share.count():
            continue  # the file is not opened
        wanted = partial(_is_missing, share, scored)
        try:
            for ref, text in corpus.read(share.part, wanted):
                yield ref, EncodedDocument(None, ref.error) if ref.error is not None else encode(text)
        except (ValueError, OSError) as error:
            unreadable.append(f"{share.part.file}: {' '.join(str(error).split())}")


def _is_missing(share: Share, scored: frozenset[int], row: int) -> bool:
    return row in share and row not in scored


def _scored_rows(share: Share, done: Rows) -> NDArray[np.int64]:
    part = share.part
    rows = done.get(part.file, np.empty(0, np.int64))
    end = np.iinfo(np.int64).max if part.rows is None else part.first + part.rows
    rows = rows[slice(*np.searchsorted(rows, (part.first, end)))]
    return rows[rows % share.step == share.first]


def _count_missing(shares: Sequence[Share], done: Rows) -> int | None:
    """Return how many documents have no scores; None if the corpus has JSON lines, which are not counted."""
    missing = 0
    for share in shares:
        rows = share.count()
        if rows is None:
            return None
        missing += rows - len(_scored_rows(share, done))
    return missing


def _pools(documents: Iterator[Document], batch_tokens: int | None) -> Iterator[list[Document]]:
    """Yield documents one by one, or as many as documents of similar length are chosen from."""
    limit = 1 if batch_tokens is None else _POOL_BATCHES * batch_tokens
    most = 1 if batch_tokens is None else _POOL_DOCUMENTS
    pool: list[Document] = []
    tokens = 0
    for ref, document in documents:
        pool.append((ref, document))
        tokens += document.tokens
        if tokens >= limit or len(pool) >= most:
            yield pool
            pool = []
            tokens = 0
    if pool:
        yield pool


def _read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield from an iterator that a thread advances, one item ahead."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


# Writing


class _Writer:
    """Collects rows of scores, and writes them when there are many or when time has passed."""

    def __init__(
        self,
        shards: ScoreShards,
        header: Mapping[str, Any],
        corpus: CorpusFiles,
        states: Mapping[str, Any],
        config: CorpusConfig,
    ) -> None:
        self.shards = shards
        self.header = header
        self.corpus = corpus
        self.states = states
        self.config = config
        self.documents = 0
        self.tokens = 0
        self._begun = time.monotonic()
        self.discard()

    def discard(self) -> None:
        """Forget the rows that are not written."""
        self._refs: list[DocumentRef] = []
        self._scores: list[pyarrow.Table] = []
        self._own_tokens = 0

    def add(self, refs: Sequence[DocumentRef], scores: pyarrow.Table, tokens: int) -> None:
        """Add the rows of documents; write all if they are many or old."""
        with _signals_wait():
            self._refs += refs
            self._scores.append(scores)
            self._own_tokens += tokens
            self.documents += len(refs)
            self.tokens += tokens
        minutes = (time.monotonic() - self._begun) / 60
        full = len(self._refs) >= self.config.shard_rows or self._own_tokens >= _MAX_SHARD_TOKENS
        if full or minutes >= self.config.shard_minutes:
            self.write()

    def write(self) -> None:
        """Write the rows of which the files are as they were when the command began."""
        with _signals_wait():
            if self._refs:
                files = {ref.file: self.states[ref.file] for ref in self._refs}
                local = {name: self.corpus.files[name] for name in files}
                changed = [
                    name for name, file in local.items() if isinstance(file, Path) and file_state(file) != files[name]
                ]
                if changed:
                    _refuse_changes(changed, self.shards)
                table = _identity_table(self._refs, self.corpus)
                scores = pyarrow.concat_tables(self._scores)
                for name in scores.column_names:
                    table = table.append_column(scores.schema.field(name), scores[name])
                self.shards.write(table, {**self.header, "files": files})
                self.discard()
            self._begun = time.monotonic()


def _identity_schema(corpus: CorpusFiles) -> pyarrow.Schema:
    return pyarrow.schema({**_IDENTITY, **corpus.column_types})


def _identity_table(refs: Sequence[DocumentRef], corpus: CorpusFiles) -> pyarrow.Table:
    """Return the columns that identify documents, and those of the corpus."""
    rows = [{"key": ref.key, "file": ref.file, "row": ref.row, **ref.columns} for ref in refs]
    schema = _identity_schema(corpus)
    return pyarrow.table([pyarrow.array([row.get(field.name) for row in rows], field.type) for field in schema], schema)


def _show_rate(bar: tqdm, writer: _Writer) -> None:
    seconds = max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(f"{tqdm.format_sizeof(writer.tokens / seconds)} tokens/s", refresh=False)
    bar.update(writer.documents - bar.n)


def _finish(shards: ScoreShards, settings: Mapping[str, Any], unreadable: Sequence[str], config: CorpusConfig) -> str:
    """Write ``_SUCCESS.json`` with the counts of all documents, if all are done and few failed; return a line."""
    # 1. Every file must have been read to its end.
    if unreadable:
        raise ValueError(
            f"{len(unreadable)} file(s) or parts of files could not be read to the end; all other documents are done:"
            f" {'; '.join(unreadable[:_NAMED_FILES])} -- Replace these files, delete the files in '{shards}' that have"
            " them in the column `file`, and run the same command again."
        )
    # 2. No source may have too many failed documents.
    tables = [table for _, _, table in shards.read(_COUNTED.names)]
    scores = pyarrow.concat_tables([_COUNTED.empty_table(), *tables])  # a shard may have no document
    report = report_failures(scores, _source, allowed=config.allowed_failures)
    if report:
        raise IncompleteError(
            f"More documents failed than `allowed_failures` = {config.allowed_failures:g} allows:\n{report}\nAll"
            f" scores are kept in {shards}, without {SUCCESS}. Correct these documents and score them into another"
            " folder, or accept the failures: run the same command with a larger `--allowed_failures`, which scores"
            " nothing again."
        )
    # 3. Count.
    counts = count_documents(scores)
    shards.write_success({**counts, "shards": len(tables), "settings": settings})
    return (
        f"{counts['documents']:,} documents with {counts['tokens']:,} tokens in {shards}:"
        f" {counts['failed']:,} failed and {counts['left_out']:,} left out (column `error`),"
        f" {counts['too_short']:,} too short to have a short context."
    )


def _source(file: str) -> str:
    """Return the source of a file: the file itself, or the folder of a text file, which is only one document."""
    return PurePosixPath(file).parent.as_posix() if is_text(file) else file


# Locks and signals


@contextmanager
def _only_writer(shards: ScoreShards) -> Iterator[None]:
    """Lock a local folder against other commands, and remove what killed ones left."""
    if shards.local is None:
        yield
        return
    lock = RunLock(shards.local)
    lock.begin()
    try:
        remove_unfinished(shards.local)
        yield
    finally:
        lock.leave()


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C does, so that finished documents are written."""

    def stop(number: int, _: Any) -> NoReturn:
        os.write(2, b"longce: SIGTERM: stopping; finished documents are kept.\n")
        sys.exit(128 + number)

    with _handlers({signal.SIGTERM: stop}):
        yield


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait until the end of a block, which must not be left half done."""
    received: list[int] = []
    wait = lambda number, _: received.append(number)  # noqa: E731
    with _handlers({signal.SIGTERM: wait, signal.SIGINT: wait}):
        yield
    for number in received[:1]:
        signal.raise_signal(number)


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Callable[[int, Any], object]]) -> Iterator[None]:
    """Handle signals in a block; Python allows that only in the main thread."""
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

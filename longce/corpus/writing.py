"""Write the scores of documents to files that appear complete or not at all, and find those of earlier runs."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow
import pyarrow.compute

from datamodules.sources.corpus import CorpusFiles, DocumentRef
from lightning_modules.scoring.corpus.shards import ScoreShards, check_settings
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities.identity import file_state
from longce.corpus.config import CorpusConfig
from longce.corpus.reading import Rows

_MAX_SHARD_TOKENS = 2**24  # about 200 MB with per-token values
_NAMED_FILES = 3  # at most, in a message
_IDENTITY = {"key": pyarrow.string(), "file": pyarrow.string(), "row": pyarrow.int64()}

_log = logging.getLogger(__name__)


class Writer:
    """Collects rows of scores, and writes them when there are many or when time has passed."""

    def __init__(
        self,
        shards: ScoreShards,
        header: Mapping[str, Any],
        corpus: CorpusFiles,
        states: dict[str, Any],
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
        """Write the rows; raise a ``ValueError`` if a document has changed since it was scored."""
        with _signals_wait():
            if self._refs:
                self._write_rows()
            self._begun = time.monotonic()

    def _write_rows(self) -> None:
        table = _identity_table(self._refs, self.corpus)
        scores = pyarrow.concat_tables(self._scores)
        for name in scores.column_names:
            table = table.append_column(scores.schema.field(name), scores[name])
        # 1. Leave out documents that have changed since they were scored.
        names = table["file"].unique().to_pylist()
        states = file_states(self.corpus, names)
        touched = [name for name in names if states[name] != self.states[name]]
        changed = [name for name in touched if not _has_same_documents(table, name, self.corpus)]
        is_kept = pyarrow.compute.invert(pyarrow.compute.is_in(table["file"], pyarrow.array(changed, pyarrow.string())))
        kept = table.filter(is_kept)
        # 2. Write the others, and then report the changes.
        if len(kept):
            files = {name: states[name] for name in names if name not in changed}
            self.shards.write(kept, {**self.header, "files": files})
            self.states |= files
        self.discard()
        if changed:
            _refuse_changes(changed, self.shards)


def _identity_schema(corpus: CorpusFiles) -> pyarrow.Schema:
    return pyarrow.schema({**_IDENTITY, **corpus.column_types})


def _identity_table(refs: Sequence[DocumentRef], corpus: CorpusFiles) -> pyarrow.Table:
    """Return the columns that identify documents, and those of the corpus."""
    rows = [{"key": ref.key, "file": ref.file, "row": ref.row, **ref.columns} for ref in refs]
    return pyarrow.Table.from_pylist(rows, _identity_schema(corpus))


def file_states(corpus: CorpusFiles, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each file a value that changes when its content does; the content is compared only then."""
    states: dict[str, Any] = {}
    for name in corpus.files if names is None else names:
        file = corpus.files[name]
        try:
            states[name] = file_state(file) if isinstance(file, Path) else file.identity
        except OSError:  # it is gone
            states[name] = None
    return states


def find_scored(
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
    others = sorted(set(scored["file"].unique().to_pylist()) - corpus.files.keys())
    if others:
        _log.warning("%d of their files are not among those of this command, such as '%s'.", len(others), others[0])
    by_file = scored.group_by("file").aggregate([("row", "list")])
    found = {}
    for file, numbers in zip(by_file["file"].to_pylist(), by_file["row_list"], strict=True):
        found[file] = np.sort(numbers.values.to_numpy())
    return found


def _check_content(shards: ScoreShards, suspects: Mapping[str, set[str]], corpus: CorpusFiles) -> None:
    """Raise a ``ValueError`` if a document is another one than when it was scored, in files that may have changed."""
    names = [*_identity_schema(corpus).names, "text_hash"]
    for name, _, table in shards.read(names):
        changed = [file for file in sorted(suspects.get(name, ())) if not _has_same_documents(table, file, corpus)]
        if changed:
            _refuse_changes(changed, shards)


def _has_same_documents(scored: pyarrow.Table, file: str, corpus: CorpusFiles) -> bool:
    """Return whether the scored rows of a file are still the documents at their places.

    They are compared by key, columns, and the hash of their text or, in the columns, of their token ids.
    """
    scored = scored.filter(pyarrow.compute.equal(scored["file"], file)).sort_by("row")
    rows = frozenset(scored["row"].to_pylist())
    found: list[tuple[DocumentRef, Any]] = []
    try:
        for part in corpus.parts:
            if part.file == file:
                found += corpus.read(part, rows.__contains__)
    except (ValueError, OSError):
        return False
    refs = [ref for ref, _ in found]
    now = _identity_table(refs, corpus)
    if corpus.columns.tokens is None:
        hashes = [None if ref.error is not None else text_sha256(text) for ref, text in found]
        now = now.append_column("text_hash", pyarrow.array(hashes, pyarrow.string()))
    then = scored.select(now.column_names)
    return str(now.sort_by("row").to_pylist()) == str(then.to_pylist())  # as text, in which NaN equals NaN


def _refuse_changes(files: Sequence[str], shards: ScoreShards) -> NoReturn:
    raise ValueError(
        f"{len(files)} file(s) have changed since their documents were scored, such as {sorted(files)[:_NAMED_FILES]}:"
        f" restore them; or delete the files in '{shards}' that have them in the column `file`, to score their"
        " documents again; or write to another folder."
    )


@contextmanager
def signals_stop() -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C end the command, and no other one the writing of finished documents."""

    def stop(number: int, _: Any) -> NoReturn:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: None)
        os.write(2, f"longce: {signal.Signals(number).name}: stopping; finished documents are kept.\n".encode())
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    with _handlers({signal.SIGTERM: stop, signal.SIGINT: stop}):
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

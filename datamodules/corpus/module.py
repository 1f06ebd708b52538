"""Read a corpus whose documents are scored one by one by `longce predict`."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.corpus.files import CorpusColumns, CorpusFiles, find_corpus, is_text
from datamodules.corpus.stream import CorpusLoader, CorpusRows, CorpusStream
from datamodules.packing.loader import worker_options
from lightning_modules.batch import DocumentRef
from lightning_modules.functional.checks import MAX_PROCESSES, check_count
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from lightning_modules.scoring.corpus.protocols import ReadProgress, ScoreSink
from lightning_modules.utilities.collectives import gathered, patient_group

_NAMED = 3  # files in a message


class DocumentCorpus(LightningDataModule):
    """Any number of documents to predict for: they are read as they are scored, and never all in memory.

    A document is a row of a ``.parquet`` file, a line of a ``.jsonl`` or ``.json`` file or a ``.txt`` file (those also
    as ``.gz`` and ``.zst``). File and row number identify it, so that keys may repeat. Documents are divided among
    processes and their workers by bytes, each to one of them, and those whose scores a callback already has
    (`DocumentScoresWriter`) are left out before they are tokenized.

    Args:
        files: Files, folders (searched to any depth) and patterns (with ``*``, or ``**`` for any depth), here or as
            fsspec URLs such as ``s3://bucket/corpus/*.parquet``; kinds may be mixed. A file is named by its path from
            the folder or pattern on.
        tokenizer: Hub id or local folder; by default the model's own.
        text_column: Column or field of the text; dots reach into nested ones.
        key_column: Column or field of the row key; by default the key is file name and row number.
        columns: Others to go with the scores. Of JSON lines they become text: strings as they are, all else as JSON.
        max_tokens: Most tokens of a document.
        overlong: ``cut`` scores the first tokens of a document with more, ``skip`` leaves it out with the reason.
        batch_tokens: Score several short documents together, in batches of that many tokens with padding. By default
            each is scored alone, and its scores are then bit-identical for any number of processes.
        num_workers: Processes that read and tokenize ahead for each that scores; 0 does so in the scoring process.
        add_special_tokens: Whether the tokenizer puts its special tokens around each document.
        tokenizer_revision: Branch, tag or commit of a tokenizer on the hub.
        allowed_failures: Share of the documents of a source that may fail, from 0 to 1; a source is a file, or all text
            files of a folder. With more, the run ends with exit status 1 and a report when all documents are done.
            Documents that ``overlong: skip`` leaves out do not count as failed. Below 1, a file whose first lines have
            no text is refused before anything is scored.
    """

    def __init__(
        self,
        files: str | list[str],
        *,
        tokenizer: str | None = None,
        text_column: str = "text",
        key_column: str | None = None,
        columns: list[str] | None = None,
        max_tokens: PositiveInt | None = None,
        overlong: Literal["cut", "skip"] = "cut",
        batch_tokens: PositiveInt | None = None,
        num_workers: NonNegativeInt = 2,
        add_special_tokens: bool = False,
        tokenizer_revision: str | None = None,
        allowed_failures: ClosedUnitInterval = 0.01,
    ) -> None:
        super().__init__()
        self.files = [files] if isinstance(files, str) else list(files)
        if not self.files:
            raise ValueError("`files` is empty: name files, folders or patterns of the documents.")
        check_count("`num_workers`", num_workers, minimum=0, maximum=MAX_PROCESSES)
        self.tokenizer_name = tokenizer
        self.tokenizer_revision = tokenizer_revision
        self.column_names = CorpusColumns(text_column, key_column, tuple(columns or ()))
        self.max_tokens = max_tokens
        self.overlong: Literal["cut", "skip"] = overlong
        self.batch_tokens = batch_tokens
        self.num_workers = num_workers
        self.add_special_tokens = add_special_tokens
        self.allowed_failures = float(allowed_failures)
        self._stream: CorpusStream | None = None
        self._loader: CorpusLoader | None = None
        self._versions: dict[str, str] = {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once."""
        name, revision = self.tokenizer_name, self.tokenizer_revision
        if name is None:
            model = self.trainer.lightning_module.hparams if self.trainer else {}
            name, revision = model.get("pretrained_model_name_or_path"), model.get("revision")
        if name is None or name.endswith(".json"):
            raise ValueError("The model has no tokenizer: name one by `data.tokenizer`.")
        return load_tokenizer(name, revision=revision)

    @override
    def setup(self, stage: str) -> None:
        if stage != "predict":
            raise ValueError(f"DocumentCorpus is for `longce predict`, not for {stage}: name another data module.")
        found: Any = None
        group = patient_group() if self.trainer else None
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        if rank == 0:
            try:
                found = self._find_documents()
            except (ValueError, OSError) as error:  # or the others would wait for it
                found = error
        gathered(None, group)  # hashing a corpus may take hours, and a broadcast gives up after half an hour
        found = self.trainer.strategy.broadcast(found) if self.trainer else found
        if isinstance(found, Exception):
            raise found
        corpus, self._versions, done = found
        make_row = CorpusRows(self.tokenizer, self.add_special_tokens, self.max_tokens, self.overlong)
        self._stream = CorpusStream(
            corpus, done, make_row, batch_tokens=self.batch_tokens, rank=rank, world_size=world_size
        )

    @override
    def predict_dataloader(self) -> CorpusLoader:
        strategy = self.trainer.strategy if self.trainer else None
        alone = strategy is None or type(strategy) in (SingleDeviceStrategy, DDPStrategy)
        lockstep = None if alone else strategy
        self._loader = CorpusLoader(self.stream, lockstep=lockstep, **worker_options(self.num_workers))
        return self._loader

    @property
    def stream(self) -> CorpusStream:
        """Documents of this process, known after `setup`."""
        if self._stream is None:
            raise RuntimeError("DocumentCorpus has not found its files yet: call `setup('predict')` first.")
        return self._stream

    def versions(self, files: Iterable[str]) -> dict[str, str]:
        """Identify the content of some files by their names; a ``ValueError`` if it changed since this run began."""
        found = self.stream.corpus.versions(files)
        if changed := sorted(name for name, version in found.items() if self._versions[name] != version):
            raise ValueError(
                f"{len(changed)} file(s) changed while their documents were scored, such as {changed[:_NAMED]}. Delete"
                " the shards that have them in the column `file`, if any, and start again when nothing writes to them."
            )
        return found

    @property
    def column_types(self) -> Mapping[str, pyarrow.DataType]:
        """Types of `DocumentRef.columns`."""
        return self.stream.corpus.column_types

    def source(self, file: str) -> str:
        """Return the source that a file belongs to: itself, or the folder of a text file, which is one document."""
        return PurePosixPath(file).parent.as_posix() if is_text(file) else file

    def scoring_settings(self) -> dict[str, Any]:
        """Return all settings that decide which tokens are scored, as plain values."""
        return {
            "tokenizer": tokenizer_hash(self.tokenizer),
            "add_special_tokens": self.add_special_tokens,
            "text_column": self.column_names.text,
            "key_column": self.column_names.key,
            "columns": {name: str(kind) for name, kind in self.column_types.items()},
            "max_tokens": None if self.max_tokens is None else int(self.max_tokens),
            "overlong": self.overlong if self.max_tokens is not None else None,
        }

    def source_settings(self) -> dict[str, Any]:
        """Return the arguments that find the same documents again."""
        return {"files": self.files, "text_column": self.column_names.text, "key_column": self.column_names.key}

    def expected(self) -> int | None:
        """Estimate how many documents this process gets; None if unknown."""
        return self.stream.expected(max(self.num_workers, 1))

    def read_progress(self) -> ReadProgress:
        """Return what this process has read so far."""
        return ReadProgress(0, False, []) if self._loader is None else self._loader.read_progress()

    def documents(
        self, rows: Mapping[str, NDArray[np.int64]], versions: Mapping[str, str]
    ) -> Iterator[tuple[DocumentRef, str]]:
        """Read the ref and whole text of the documents with these row numbers, file after file.

        ``versions`` identify the content of the files when the documents were scored.
        """
        corpus = find_corpus(self.files, self.column_names, lenient=True)
        if missing := sorted(set(rows) - set(corpus.names)):
            raise ValueError(f"There is no '{missing[0]}' in {', '.join(self.files)}: name the files that were scored.")
        _check_unchanged({name: versions[name] for name in rows}, corpus.versions(rows))
        for part in corpus.parts:
            if (numbers := rows.get(corpus.names[part.file])) is not None:
                yield from corpus.read(part, frozenset(numbers.tolist()).__contains__)

    def _find_documents(self) -> tuple[CorpusFiles, dict[str, str], Mapping[str, NDArray[np.int64]]]:
        """Find the files, the identity of their content, and their rows that are done."""
        corpus = find_corpus(self.files, self.column_names, lenient=self.allowed_failures == 1)
        versions = corpus.versions()
        sinks = [each for each in self.trainer.callbacks if isinstance(each, ScoreSink)] if self.trainer else []  # type: ignore[attr-defined]
        if len(sinks) > 1:
            raise ValueError("Several callbacks keep scores, and may know different documents: leave one of them.")
        if not sinks:
            return corpus, versions, {}
        written = sinks[0].existing_scores()
        if missing := sorted(set(written.versions) - set(versions)):
            raise ValueError(
                f"Documents of {len(missing)} file(s) that are not in `files` have been scored already, such as"
                f" {missing[:_NAMED]}: also name these files by the same folders or patterns, or write to another"
                " folder."
            )
        _check_unchanged(written.versions, versions)
        return corpus, versions, written.rows


def _check_unchanged(written: Mapping[str, str], versions: Mapping[str, str]) -> None:
    changed = sorted(name for name, version in written.items() if versions[name] != version)
    if changed:
        raise ValueError(
            f"{len(changed)} file(s) have changed since documents of them were scored, such as {changed[:_NAMED]}, or"
            " were scored before files were identified by their content: restore them; or delete the shards that have"
            " them in the column `file`, of which all documents are then scored again; or write to another folder."
        )

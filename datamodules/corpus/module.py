"""Data module of `longce predict`: a corpus whose documents are scored one by one."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.corpus.files import CorpusColumns, find_corpus, is_text
from datamodules.corpus.stream import CorpusLoader, CorpusStream, tokenize_document
from datamodules.packing.loader import worker_options
from datamodules.sources.locations import file_identities
from lightning_modules.batch import DocumentRef
from lightning_modules.functional.checks import MAX_PROCESSES, check_count
from lightning_modules.models.loading.config import is_served
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from lightning_modules.utilities.collectives import fail_together, gathered
from lightning_modules.utilities.identity import combined_hash, file_state

_NAMED_FILES = 3  # at most, in a message


class DocumentCorpus(LightningDataModule):
    """Documents to score, read during prediction and never all in memory.

    A document is a row of a ``.parquet`` file, a line of a ``.jsonl`` or ``.json`` file, or a ``.txt`` file (text and
    JSON also as ``.gz`` and ``.zst``). File and row number identify it, so keys may repeat. Documents are sharded
    across processes and their workers. Those whose scores a callback already has (`DocumentScoresWriter`) are
    skipped before they are tokenized.

    Args:
        files: Files, folders (searched recursively) and glob patterns (``*``, or ``**`` for any depth), local or as
            fsspec URLs such as ``s3://bucket/corpus/*.parquet``; kinds may be mixed. Results name a file by its path
            relative to the folder or pattern.
        tokenizer: Hub id or local folder; by default the model's tokenizer.
        text_column: Column or field of the text; dots reach into nested fields.
        key_column: Column or field of the document's key; by default the key is file name and row number.
        columns: Further columns to copy to the scores. Values of JSON lines become text: strings as they are, other
            values as JSON.
        max_tokens: Maximum number of tokens of a document.
        overlong: What to do with longer documents: ``cut`` scores their first tokens, ``skip`` leaves them out and
            records the reason.
        batch_tokens: Score several short documents together, in batches of at most this many tokens including padding.
            By default each document is scored alone; scores are then bit-identical for any number of processes.
        num_workers: Processes that read and tokenize for each scoring process; 0 does so in the scoring process.
        add_special_tokens: Whether the tokenizer adds special tokens to each document.
        tokenizer_revision: Branch, tag or commit of a tokenizer on the hub.
        allowed_failures: Fraction of a source's documents that may fail, from 0 to 1; a source is a file, or all text
            files of a folder. If more fail, the run still scores all documents, then prints a report and ends with exit
            status 1. Documents that ``overlong: skip`` leaves out do not count as failed. Below 1, a file whose first
            documents have no text is refused before anything is scored.
        shard: ``I/N`` scores only the I-th of N shards of the documents, from 0; the other shards are for other runs
            with the same files, each with its own output folder, on any machine and at any time.
    """

    shards_itself = True  # among processes, so `longce` sets the trainer's `use_distributed_sampler` to False

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
        shard: str = "0/1",
    ) -> None:
        super().__init__()
        self.files = [files] if isinstance(files, str) else list(files)
        if not self.files:
            raise ValueError("`files` is empty: name files, folders or patterns.")
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
        shard_format = re.fullmatch(r"(\d+)/(\d+)", shard)
        if shard_format is None or int(shard_format[1]) >= int(shard_format[2]):
            raise ValueError(f"`shard` must be I/N with I from 0 to N - 1, such as 0/8, got '{shard}'.")
        self.shard = (int(shard_format[1]), int(shard_format[2]))
        self.stream: CorpusStream  # documents of this process; available after `setup`
        self._states: dict[str, list[int]] = {}  # of the local files when the run began

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once."""
        name, revision = self.tokenizer_name, self.tokenizer_revision
        if name is None:
            model = self.trainer.lightning_module.hparams if self.trainer else {}
            name, revision = model.get("pretrained_model_name_or_path"), model.get("revision")
        if name is None or name.endswith(".json") or is_served(name):
            raise ValueError("The model has no tokenizer here: set `data.tokenizer`.")
        return load_tokenizer(name, revision=revision)

    @override
    def setup(self, stage: str) -> None:
        if stage != "predict":
            raise ValueError(f"DocumentCorpus is for `longce predict`, not for {stage}: use another data module.")
        with fail_together():
            corpus = find_corpus(self.files, self.column_names, check=self.allowed_failures < 1)
            self._states = {name: file_state(file) for name, file in corpus.files.items() if isinstance(file, Path)}
            tokenize = partial(
                tokenize_document,
                tokenizer=self.tokenizer,
                add_special_tokens=self.add_special_tokens,
                max_tokens=self.max_tokens,
                overlong=self.overlong,
            )
        # Each process takes its share by the numbers of the parts.
        if len(set(gathered(combined_hash(corpus.parts)))) > 1:
            raise ValueError(
                f"The processes find different files at {', '.join(self.files)}: use a folder that all machines share,"
                " and start when nothing writes to it."
            )
        process = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self.stream = CorpusStream(
            corpus, {}, tokenize, batch_tokens=self.batch_tokens, shard=self.shard, process=process
        )

    @override
    def predict_dataloader(self) -> CorpusLoader:
        strategy = self.trainer.strategy if self.trainer else None
        alone = strategy is None or type(strategy) in (SingleDeviceStrategy, DDPStrategy)
        return CorpusLoader(self.stream, lockstep=None if alone else strategy, **worker_options(self.num_workers))

    def skip(self, rows: Mapping[str, NDArray[np.int64]]) -> None:
        """Skip these rows, which have scores: ascending numbers by file."""
        self.stream.done = rows

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Return the content identities of files by name; raise a ``ValueError`` if one changed during this run."""
        files = {name: self.stream.corpus.files[name] for name in names}
        found = dict(zip(files, file_identities(files.values()), strict=True))
        # After hashing: the content was that of the beginning of the run.
        local = {name: file_state(file) for name, file in files.items() if isinstance(file, Path)}
        _refuse_changes(name for name in local if local[name] != self._states[name])
        return found

    def check_unchanged(self, versions: Mapping[str, str]) -> None:
        """Raise a ``ValueError`` if scored files, with these content identities, are missing or have changed."""
        if missing := sorted(versions.keys() - self.stream.corpus.files.keys()):
            raise ValueError(
                f"The output folder has scores of {len(missing)} file(s) that are not in `files`, such as"
                f" {missing[:_NAMED_FILES]}: add them with the same folders or patterns, or write to another folder."
            )
        found = self.versions(versions)
        _refuse_changes(name for name in versions if found[name] != versions[name])

    @property
    def column_types(self) -> Mapping[str, pyarrow.DataType]:
        """Types of `DocumentRef.columns`."""
        return self.stream.corpus.column_types

    def source(self, file: str) -> str:
        """Return the source of a file: the file itself, or the folder of a text file, which is only one document."""
        return PurePosixPath(file).parent.as_posix() if is_text(file) else file

    def scoring_settings(self) -> dict[str, Any]:
        """Return the settings that decide which tokens are scored, as plain values."""
        return {
            "tokenizer": tokenizer_hash(self.tokenizer),
            "add_special_tokens": "before the text" if self.add_special_tokens else False,
            "text_column": self.column_names.text,
            "key_column": self.column_names.key,
            "columns": {name: str(kind) for name, kind in self.column_types.items()},
            "max_tokens": None if self.max_tokens is None else int(self.max_tokens),
            "overlong": self.overlong if self.max_tokens is not None else None,
            "shard": self._describe_shard(),
        }

    def _describe_shard(self) -> str:
        """Return the shard, with the number that its choice of documents depends on."""
        index, shards = self.shard
        return "0/1" if shards == 1 else f"{index}/{shards} of {len(self.stream.corpus.parts)} files and row groups"

    def source_settings(self) -> dict[str, Any]:
        """Return the arguments that identify the same documents in a later run."""
        return {"files": self.files, "text_column": self.column_names.text, "key_column": self.column_names.key}

    def documents(self, rows: Mapping[str, Sequence[int]]) -> Iterator[tuple[DocumentRef, str]]:
        """Yield reference and full text of the documents with these row numbers, file by file."""
        corpus = find_corpus(self.files, self.column_names, check=False)
        if missing := sorted(rows.keys() - corpus.files.keys()):
            raise ValueError(f"'{missing[0]}' is not in {', '.join(self.files)}: set the files that were scored.")
        for part in corpus.parts:
            if (numbers := rows.get(part.file)) is not None:
                yield from corpus.read(part, frozenset(numbers).__contains__)


def _refuse_changes(names: Iterable[str]) -> None:
    changed = sorted(names)
    if changed:
        raise ValueError(
            f"{len(changed)} file(s) have changed since their documents were scored, such as {changed[:_NAMED_FILES]}:"
            " restore them; or delete the shards that have them in the column `file`, to score their documents again;"
            " or write to another folder."
        )

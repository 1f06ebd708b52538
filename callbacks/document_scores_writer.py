"""Write the scores of a corpus's documents to parquet shards while they are computed."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from tqdm import tqdm
from typing_extensions import override

from callbacks.requirements import require_long_context_lm
from lightning_modules.batch import UNREADABLE, PackedBatch
from lightning_modules.functional.influence import check_gamma, check_thresholds
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.load import choose_attention, load_config
from lightning_modules.models.scorer import Scorer
from lightning_modules.scoring.corpus.failures import count_documents, report_failures
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards, check_settings
from lightning_modules.scoring.corpus.table import ScoreTable, TokenType, find_reserved_names
from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training.monitoring.progress import watch_batch
from lightning_modules.training.preemption import uninterrupted
from lightning_modules.utilities.collectives import fail_together, gathered, patient_group
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import remove_unfinished
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import RunLock
from lightning_modules.utilities.progress import progress_bar

_MAX_SHARD_TOKENS = 2**24  # about 200 MB with per-token values


class DocumentScoresWriter(Callback):
    """Writes a row of scores for each document of a `DocumentCorpus`, and resumes with the missing documents.

    The shards are ``part-*.parquet`` files, written atomically, with the columns ``key``, ``file``, ``row``, those of
    the corpus, ``truncated``, those of `lightning_modules.scoring.corpus.columns`, and ``error``: why a document has no
    scores, or null. When all documents are done, ``_SUCCESS.json`` has the counts. If more documents of a source failed
    than `data.allowed_failures`, the run ends with exit status 1 and a report, without this file. A restarted run
    continues with the missing documents, with any number of processes; failed documents count as done. A killed process
    loses its shard in progress, SIGTERM and Ctrl-C only the batch.

    Args:
        output_dir: Folder or fsspec URL; created if needed.
        per_token: Write the long-short difference (``lsd``) and the long-context log-likelihood (``lcl``) of each token
            as lists of this type, with each token's character offsets (``token_starts``, ``token_ends``). ``lsd`` is
            null where the short context is the whole context (the first ``context_length + stride`` tokens), ``lcl``
            where a token is not scored (the first one).
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats.
        gamma: Largest weight of the soft-weighted benefit.
        shard_rows: Maximum number of documents per shard.
        shard_minutes: Time after which a shard is written even if it is not full.
    """

    def __init__(
        self,
        output_dir: str,
        per_token: TokenType | None = None,
        alpha: float = 2.0,
        beta: float = -2.0,
        gamma: float = 5.0,
        shard_rows: PositiveInt = 1000,
        shard_minutes: PositiveFloat = 15.0,
    ) -> None:
        check_thresholds(alpha, beta)
        check_gamma(gamma)
        self.shards = ScoreShards(output_dir)
        self.per_token: TokenType | None = per_token
        self.statistics = {"alpha": alpha, "beta": beta, "gamma": gamma}
        self.shard_rows = shard_rows
        self.shard_minutes = shard_minutes
        self._settings: dict[str, Any] = {}
        self._lock: RunLock | None = None
        self._table: ScoreTable | None = None  # while documents are scored
        self._scored_before = 0  # documents, by earlier runs
        self._unreadable: list[str] = []  # files of which this process could not read the rest, with reasons
        self._batch = ExitStack()  # has the bar of the current batch

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Skip the documents of earlier runs, and refuse settings that do not fit them, before the model is loaded."""
        if stage != "predict":
            return
        corpus: Any = getattr(trainer, "datamodule", None)
        if not (hasattr(corpus, "skip") and isinstance(pl_module, LongContextLM)):
            raise ValueError(
                "`DocumentScoresWriter` needs the data module datamodules.DocumentCorpus, got"
                f" {type(corpus).__name__}: set `data.class_path`."
            )
        self._corpus = corpus
        if clash := find_reserved_names(list(corpus.column_types)):  # in all processes
            raise ValueError(
                f"`data.columns` has {clash}, which are names of score columns: rename them in the corpus."
            )
        rows = None
        with fail_together(patient_group()):  # a process may hash files for hours
            self._settings = {
                **pl_module.scoring_settings(),
                **corpus.scoring_settings(),
                "checkpoint": _checkpoint_identity(trainer),
                "precision": str(trainer.precision),
                "attention": _find_attention(trainer, pl_module),
                **self.statistics,
                "per_token": self.per_token,
            }
            if trainer.is_global_zero:
                rows = self._open_folder()
        if self.shards.local is not None and self._lock is None:
            self._lock = RunLock(self.shards.local)
            self._lock.join(trainer.global_rank)
        corpus.skip(trainer.strategy.broadcast(rows))

    def _open_folder(self) -> dict[str, NDArray[np.int64]]:
        """Lock the folder against other runs, and return the rows that earlier runs have scored."""
        self.shards.check_writable()
        if self.shards.local is not None:
            self._lock = RunLock(self.shards.local)
            self._lock.begin()
            remove_unfinished(self.shards.local)  # left by killed runs: the lock excludes live ones
        existing = self.shards.existing_scores()
        self._scored_before = sum(map(len, existing.rows.values()))
        if existing.settings:
            check_settings(existing.settings, self._settings, self.shards)
            self._corpus.check_unchanged(existing.versions)
            rank_zero_info(f"{self.shards} already has scores of {self._scored_before:,} documents.")
        try:
            self.shards.check_success()
        except ValueError as error:  # a shard has changed since then; missing documents are scored again
            rank_zero_warn(str(error))
        self.shards.remove_success()
        return existing.rows

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module = require_long_context_lm(pl_module, self)
        found = {"model": pl_module.scoring_settings()["model"], "checkpoint": _checkpoint_identity(trainer)}
        if not found.items() <= self._settings.items():
            raise ValueError("The model or checkpoint changed during loading. Start again when its files are complete.")
        lengths = pl_module.document_scorer().context_lengths
        contexts = lengths.contexts if lengths is not None else ()
        self._table = ScoreTable(self._corpus.column_types, contexts, per_token=self.per_token, **self.statistics)
        self._documents = self._tokens = 0  # in the shards of this process and run
        self._unreadable = []
        self._started = self._shard_begun = time.monotonic()
        missing = self._corpus.stream.count_missing()
        self._bar = progress_bar("Scoring", unit=" documents", total=missing, scaled=False)
        self._patient = patient_group()

    @override
    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batch.enter_context(watch_batch(trainer, "this batch"))

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PackedBatch, *_: Any
    ) -> None:
        with uninterrupted(trainer):
            self._batch.close()
            self._keep_scores(trainer, outputs, batch)

    def _keep_scores(self, trainer: Trainer, outputs: Sequence[TokenScores | Failed], batch: PackedBatch) -> None:
        assert self._table is not None
        # 1. Add a row for each document, scored or failed. An idle process has outputs without references.
        for ref, scores in zip(batch["document_refs"], outputs, strict=False):
            self._table.add(ref, scores)
        for ref in batch["failed"]:
            if ref.row == UNREADABLE:
                self._unreadable.append(f"{ref.file}: {ref.error}")
            else:
                self._table.add(ref, Failed(str(ref.error)))
        # 2. Show the progress.
        rate = (self._tokens + self._table.tokens) / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)
        self._bar.update(self._documents + len(self._table) - self._bar.n)
        # 3. Write a shard if it is full or old.
        minutes = (time.monotonic() - self._shard_begun) / 60
        full = len(self._table) >= self.shard_rows or self._table.tokens >= _MAX_SHARD_TOKENS
        if full or minutes >= self.shard_minutes:
            self._write_shard(trainer)

    def _write_shard(self, trainer: Trainer) -> None:
        if self._table:  # has rows
            table = self._table.table()
            header = {
                "settings": self._settings,
                "source": self._corpus.source_settings(),
                "files": self._corpus.versions(table["file"].unique().to_pylist()),
            }
            self.shards.write(table, header, trainer.global_rank)
            self._documents += len(self._table)
            self._tokens += self._table.tokens
            self._table.clear()
        self._shard_begun = time.monotonic()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bar.close()
        # Before the last shard is complete: a model on a server may have been replaced.
        scorer = cast(Scorer, pl_module.backbone)
        scorer.verify()
        if report := scorer.report():
            rank_zero_info(report)
        self._write_shard(trainer)
        unreadable: set[str] = set()
        documents = self._scored_before
        for reasons, written in gathered((self._unreadable, self._documents), self._patient):
            unreadable.update(reasons)
            documents += written
        with fail_together(self._patient):
            if trainer.is_global_zero:
                complete = trainer.num_predict_batches == [math.inf]
                self._write_success(sorted(unreadable), documents, complete=complete)
        self._table = None

    def _write_success(self, unreadable: Sequence[str], documents: int, *, complete: bool) -> None:
        """Write ``_SUCCESS.json`` with the counts of all ``documents``, if all are done and few failed."""
        # 1. Every file must have been read to its end.
        if unreadable:
            raise ValueError(
                f"{len(unreadable)} file(s) or parts of files could not be read to the end; all other documents are"
                f" done: {'; '.join(unreadable[:3])} -- Replace these files, delete the shards that have"
                " them in the column `file`, and run the same command again."
            )
        # 2. No source may have too many failed documents. The empty table is for a run without any document.
        assert self._table is not None
        self.shards.existing_scores()  # each row must be there once
        names = ["file", "row", "error", "tokens", "compared_tokens", "key_tokens"]
        tables = [table for _, _, table in self.shards.read(names)]
        scores = pyarrow.concat_tables([self._table.table().select(names), *tables])
        if len(scores) != documents:
            raise ValueError(
                f"{self.shards} has {len(scores):,} documents instead of the {documents:,} that were written: shards"
                " were removed, or the processes write to disks of their own. Use a folder that all machines share,"
                " and run the same command again."
            )
        allowed = self._corpus.allowed_failures
        if report := report_failures(scores, self._corpus.source, allowed=allowed):
            message = f"More documents failed than `data.allowed_failures` = {allowed:g} allows:\n{report}"
            if complete:
                raise IncompleteError(
                    f"{message}\nAll scores are kept in {self.shards}, without {SUCCESS}. Correct these documents and"
                    " score them into another folder, or accept the failures: run the same command with a larger"
                    " `data.allowed_failures`, which scores nothing again."
                )
            rank_zero_warn(message)
        # 3. A run with `limit_predict_batches` is not an error, but incomplete.
        if not complete:
            rank_zero_info("Some documents are not scored yet: run the same command without a limit of batches.")
            return
        counts = count_documents(scores)
        self.shards.write_success({**counts, "shards": len(tables), "settings": self._settings})
        rank_zero_info(
            f"{counts['documents']:,} documents with {counts['tokens']:,} tokens in {self.shards}:"
            f" {counts['failed']:,} failed and {counts['left_out']:,} left out (column `error`),"
            f" {counts['too_short']:,} too short to have a short context."
        )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            if self._table is not None:  # keep the scores so far
                self._write_shard(trainer)
        finally:
            self._table = None
            self._batch.close()
            self._release_lock()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.leave()
            self._lock = None


def _checkpoint_identity(trainer: Trainer) -> str | None:
    """Return the content hash of the checkpoint, a file or a folder; None without a checkpoint."""
    return None if trainer.ckpt_path is None else f"sha256:{content_hash(Path(trainer.ckpt_path))}"


def _find_attention(trainer: Trainer, module: LongContextLM) -> str:
    """Return the attention implementation that the model will have; ``served`` if a server has it."""
    if is_served(module.loading.pretrained_model_name_or_path):
        return "served"
    half = trainer.precision not in ("32-true", "64-true")
    device = trainer.strategy.root_device
    return choose_attention(module.loading, load_config(module.loading), device=device, autocast=half)

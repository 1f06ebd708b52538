"""Write the scores of a corpus's documents as a table in parquet shards, while they are scored."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.influence import check_gamma, check_thresholds
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.scoring.corpus.failures import check_failures
from lightning_modules.scoring.corpus.protocols import ReadProgress, ScoredCorpus
from lightning_modules.scoring.corpus.shards import SUCCESS, ExistingScores, ScoreShards, check_settings
from lightning_modules.scoring.corpus.table import ScoreTable, TokenType, count_rows, find_reserved_names
from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training.preemption import SIGNAL_ECHO_SECONDS
from lightning_modules.utilities.collectives import gathered, patient_group
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import RunLock
from lightning_modules.utilities.progress import progress_bar

_SHARD_TOKENS = 2**24  # about 200 MB with values for each token
_NAMED = 3  # files in a message


class DocumentScoresWriter(Callback):
    """Writes a row of scores for each document of a `DocumentCorpus`, and knows on restart which are there.

    The folder fills with ``part-*.parquet``, each whole or not there, with the columns ``key``, ``file``, ``row``, the
    corpus's own, ``truncated``, those of `lightning_modules.scoring.corpus.columns`, and ``error``: why a document has
    no scores, or null. When all documents are done, ``_SUCCESS.json`` holds the counts; where more documents of a
    source failed than `data.allowed_failures`, the run ends with exit status 1, a report and no such file. Started
    again, a run continues with what is missing, also with another number of processes; failed documents count as
    done. Killed at any time, a process loses its shard in progress, and nothing after SIGTERM: from then on each batch
    is written at once.

    Args:
        output_dir: Folder or fsspec URL; made if needed.
        per_token: Write the long-short difference (``lsd``) and the long log-likelihood (``lcl``) of each token as
            lists of this type, with the characters of each token (``token_starts``, ``token_ends``). The difference is
            null where the short context is the whole context (the first ``context_length + stride`` tokens), the
            log-likelihood where a token is not scored (the first).
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        gamma: Largest weight of the soft-weighted benefit.
        shard_rows: Documents in a shard, at most.
        shard_minutes: Time after which a shard is written though it is not full.
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
        self._existing: ExistingScores | None = None
        self._lock: RunLock | None = None
        self._table: ScoreTable | None = None  # while documents are scored
        self._stop_requested_at: float | None = None

    def existing_scores(self) -> ExistingScores:
        """Return what earlier runs have written; no other run writes there from now on."""
        self.shards.folder.check_writable()
        if self.shards.folder.local is not None:
            self._lock = RunLock(self.shards.folder.local)
            self._lock.begin()
            self.shards.folder.remove_unfinished()  # of killed runs: no other run writes there now
        self._existing = self.shards.existing_scores()
        return self._existing

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot go together before the model is loaded."""
        if stage != "predict":
            return
        corpus: Any = getattr(trainer, "datamodule", None)
        if not (isinstance(corpus, ScoredCorpus) and isinstance(pl_module, LongContextLM)):
            raise ValueError(
                "`DocumentScoresWriter` writes what `longce predict` makes of a corpus: set `data.class_path` to"
                f" datamodules.DocumentCorpus, not {type(corpus).__name__}."
            )
        self._corpus = corpus
        self._settings = {
            **pl_module.scoring_settings(),
            **corpus.scoring_settings(),
            "checkpoint": _checkpoint_identity(trainer),
            "precision": str(trainer.precision),
            **self.statistics,
            "per_token": self.per_token and f"{self.per_token}, null where there is no value",  # once 0
        }
        refusal = trainer.strategy.broadcast(self._refusal_reason())
        if refusal is not None:
            self._release_lock()
            raise ValueError(refusal)
        if trainer.is_global_zero:
            self.shards.folder.remove(SUCCESS)
        elif self.shards.folder.local is not None:
            self._lock = RunLock(self.shards.folder.local)
        if self._lock is not None:
            self._lock.join(trainer.global_rank)

    def _refusal_reason(self) -> str | None:
        """Return why these documents cannot be scored into the folder, as the first process knows."""
        if clash := find_reserved_names(list(self._corpus.column_types)):
            return f"`data.columns` names {clash}, which are columns of the scores: rename them in the corpus."
        if self._existing is None or not self._existing.settings:
            return None
        try:
            check_settings(self._existing.settings, self._settings, self.shards.folder)
        except ValueError as error:
            return str(error)
        rank_zero_info(f"{self._existing.counts['documents']:,} documents are in {self.shards.folder} already.")
        return None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongContextLM)
        found = {"model": pl_module.scoring_settings()["model"], "checkpoint": _checkpoint_identity(trainer)}
        if not found.items() <= self._settings.items():
            raise ValueError("The model or checkpoint changed while it was loaded. Start again when it is complete.")
        lengths = pl_module.document_scorer().context_lengths
        contexts = lengths.contexts if lengths is not None else ()
        self._table = ScoreTable(self._corpus.column_types, contexts, per_token=self.per_token, **self.statistics)
        self._documents = self._tokens = 0  # in the shards of this process and run
        self._started = self._shard_begun = time.monotonic()
        processes = f" (process 1 of {trainer.world_size})" if trainer.world_size > 1 else ""
        self._bar = progress_bar(f"Scoring{processes}", unit="doc", total=self._corpus.expected())
        self._patient = patient_group()
        if threading.current_thread() is threading.main_thread():  # only there may signals be handled
            signal.signal(signal.SIGTERM, self._handle_sigterm)  # the trainer puts the old handler back

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PackedBatch, *_: Any
    ) -> None:
        assert self._table is not None
        scored: Sequence[TokenScores | Failed] = outputs
        for ref, scores in zip(
            batch["document_refs"], scored, strict=False
        ):  # an idle process has a row of no document
            self._table.add(ref, scores)
        for ref in batch["failed"]:
            self._table.add(ref, Failed(str(ref.error)))
        rate = (self._tokens + self._table.tokens) / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)
        self._bar.update(self._documents + len(self._table) - self._bar.n)
        minutes = (time.monotonic() - self._shard_begun) / 60
        full = len(self._table) >= self.shard_rows or self._table.tokens >= _SHARD_TOKENS
        if full or minutes >= self.shard_minutes or self._stop_requested_at is not None:
            self._write_shard(trainer)

    def _handle_sigterm(self, number: int, _: FrameType | None) -> None:
        # Every process continues: one that stopped by itself would leave the others waiting.
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            os.write(2, b"longce: SIGTERM: each batch is written at once from now on; another one ends the run.\n")
        elif time.monotonic() - self._stop_requested_at > SIGNAL_ECHO_SECONDS:
            os._exit(128 + number)

    def _write_shard(self, trainer: Trainer) -> None:
        assert self._table is not None
        if len(self._table):
            table = self._table.table()
            header = {
                "settings": self._settings,
                "source": self._corpus.source_settings(),
                "files": self._corpus.versions(table["file"].unique().to_pylist()),
                "counts": count_rows(table),
            }
            self.shards.write(table, header, trainer.global_rank)
            self._documents += len(self._table)
            self._tokens += self._table.tokens
            self._table.clear()
        self._shard_begun = time.monotonic()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_shard(trainer)
        self._bar.close()
        found = gathered((self._corpus.read_progress(), self._documents), self._patient)
        error = trainer.strategy.broadcast(self._write_success(found) if trainer.is_global_zero else None)
        self._table = None
        if error is not None:  # in all processes, so that none waits and each ends with the same status
            raise error

    def _write_success(self, found: list[tuple[ReadProgress, int]]) -> Exception | None:
        """Write the counts of all documents in the first process; return an error if some are missing."""
        unreadable = sorted({reason for progress, _ in found for reason in progress.unreadable})
        if unreadable:
            return ValueError(
                f"{len(unreadable)} file(s) or parts could not be read to their end, and all other documents are done:"
                f" {'; '.join(unreadable[:_NAMED])} -- Replace these files, delete the shards that have them in the"
                " column `file`, and run the same command again."
            )
        complete, allowed = all(progress.complete for progress, _ in found), self._corpus.allowed_failures
        try:
            written = self.shards.existing_scores()
            check_failures(self.shards, written.rows, self._corpus.source, allowed=allowed, complete=complete)
        except (ValueError, OSError, IncompleteError) as error:
            return error
        if not complete:
            rank_zero_info("Not all documents are done: run the same command, without a limit of batches, to resume.")
            return None
        before = 0 if self._existing is None else sum(map(len, self._existing.rows.values()))
        there, due = sum(map(len, written.rows.values())), before + sum(each.documents for each, _ in found)
        if there != due:
            return ValueError(
                f"{self.shards.folder} holds {there:,} documents, not {due:,}: does something else write there?"
            )
        found_counts = {**written.counts, "repeated_keys": self._repeated_keys(), "shards": written.shards}
        content = json.dumps({**found_counts, "settings": self._settings}, indent=2) + "\n"
        self.shards.folder.write(SUCCESS, content.encode())
        rank_zero_info(_describe_counts(found_counts, str(self.shards.folder)))
        return None

    def _repeated_keys(self) -> int:
        """Count the documents with a key that another one has; by default a key is file and row."""
        if self._settings["key_column"] is None:
            return 0
        keys = [batch.column("key") for batch in self.shards.batches(["key"])]
        times = pyarrow.chunked_array(keys, pyarrow.string()).value_counts().field("counts").to_numpy()
        return int(times[times > 1].sum())

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            if self._table is not None:  # what is scored is kept
                self._write_shard(trainer)
        finally:
            self._table = None
            self._release_lock()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.leave()
            self._lock = None


def _checkpoint_identity(trainer: Trainer) -> str | None:
    """Identify the content of the checkpoint that gives the weights, a file or a folder."""
    return None if trainer.ckpt_path is None else f"sha256:{content_hash(Path(trainer.ckpt_path))}"


def _describe_counts(found: dict[str, int], place: str) -> str:
    repeated = f" {found['repeated_keys']:,} have a key that others have." if found["repeated_keys"] else ""
    return (
        f"{found.get('documents', 0):,} documents with {found.get('tokens', 0):,} tokens in {place}:"
        f" {found.get('failed', 0):,} failed (column `error`), {found.get('too_short', 0):,} too short for a short"
        f" context.{repeated}"
    )

"""Base class of data modules with packed training sequences and whole evaluation documents."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.influence.store import InfluenceStore
from datamodules.influence.writer import InfluenceRows
from datamodules.packing.curriculum import LengthCurriculum, cut_rows
from datamodules.packing.evaluation_documents import (
    DocumentDataset,
    JoinedDocuments,
    NamedDocuments,
    ValidationSet,
    check_set_names,
)
from datamodules.packing.loader import ResumableLoader, worker_options
from datamodules.packing.packing import LongDocuments, Packing, pack_documents, pack_in_order
from datamodules.packing.positions import PoSE
from datamodules.packing.preview import preview
from datamodules.packing.samplers import RowSampler
from datamodules.packing.sequences import PackedRowDataset, Row, check_prompts, collate_rows
from datamodules.sources.documents import Source, first_documents
from datamodules.sources.splits import Split
from datamodules.token_store.store import TokenStore, build_token_store
from datamodules.token_store.tokenize import DocumentEncoder, Encoder
from lightning_modules.batch import PackedBatch, with_scored
from lightning_modules.functional.checks import MAX_PROCESSES, check_count
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.utilities.files import default_cache_dir


class PackedTextDataModule(LightningDataModule, ABC):
    """Packed sequences for training and whole documents for evaluation.

    The training text is tokenized once, into a cache that later runs share; evaluation documents are tokenized as they
    are read. The data module shards sequences itself, so run the trainer with ``use_distributed_sampler=False``.

    A subclass implements ``source``, which returns the documents of each split.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        sequence_length: Tokens per training sequence.
        packing: How to pack documents: ``concat`` cuts them wherever a sequence ends; ``best_fit`` cuts only documents
            longer than a sequence, and pads a little; ``chunk`` fills each sequence from one document.
        batch_size: Training sequences per batch and process.
        validation_batch_size: Documents per batch and process in validation, test and prediction.
        num_workers: Processes that load sequences; 0 loads them in the training process, which is fast enough.
        cache_dir: Folder for tokenized text; by default ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        isolate_documents: Whether contexts end at document boundaries. If not, a sequence counts as one document.
        loss_on_prompt: Whether prompts of training documents are scored, which helped if they are long (Table 9 of
            Xiong et al., 2023, https://arxiv.org/abs/2309.16039); by default those of texts, but not of chats.
        add_special_tokens: Whether to add special tokens; training documents end with the end-of-text token anyway.
        train_documents: Number of documents to train on, from the start of the split; null for all. The others are not
            tokenized, so set it if the steps need a small part of a large corpus.
        validation_documents: Number of documents to validate on, from the start of the split; null for all.
        validation_length: Maximum tokens of each evaluation document; ``whole`` for all, null for ``sequence_length``.
        validation_sets: Named sets of documents to validate on, instead of the split's, each with its own metrics:
            ``{books: {files: books/*.txt, documents: 8, length: 16384}, reports: {files: reports.jsonl}}``; see
            `ValidationSet`.
        test_documents: Number of documents for test and prediction, from the start of the split; null for all.
        seed: Seed of the order of the training sequences, which depends only on the seed and the epoch.
        tokenizer_revision: Branch, tag or commit of a tokenizer on the hub.
        influence: Folder of token weights or reference losses that ``longce influence`` computed for these sequences.
        long_documents: Train on long documents more often: ``{longer_than: 32768, weight: 2}``.
        curriculum: Shorter sequences in the first part of training: ``{sequence_length: 4096, share: 0.8}``.
        pose: Positions of training sequences that skip up to a target length, so that short sequences extend the
            context: ``{target_length: 131072, chunks: 2}``; see `PoSE`. Evaluation documents are not changed.
    """

    shards_itself = True  # among processes, so `longce` sets the trainer's `use_distributed_sampler` to False

    def __init__(
        self,
        tokenizer: str | None,
        *,
        sequence_length: PositiveInt = 32768,
        packing: Packing = "concat",
        batch_size: PositiveInt = 1,
        validation_batch_size: PositiveInt = 1,
        num_workers: NonNegativeInt = 0,
        cache_dir: str | None = None,
        isolate_documents: bool = True,
        loss_on_prompt: bool | None = None,
        add_special_tokens: bool = False,
        train_documents: PositiveInt | None = None,
        validation_documents: PositiveInt | None = 50,
        validation_length: PositiveInt | Literal["whole"] | None = None,
        validation_sets: dict[str, ValidationSet] | None = None,
        test_documents: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
        tokenizer_revision: str | None = None,
        influence: str | None = None,
        long_documents: LongDocuments | None = None,
        curriculum: LengthCurriculum | None = None,
        pose: PoSE | None = None,
    ) -> None:
        super().__init__()
        if influence and (long_documents or curriculum or pose):
            raise ValueError(
                "Stored token weights (`influence`) need sequences that have each token once, are not cut and have no"
                " skipped positions: remove `influence`, or `long_documents`, `curriculum` and `pose`."
            )
        if curriculum and pose:
            raise ValueError(
                "`curriculum` cuts sequences, so positions would restart instead of skipping: remove it, or `pose`."
            )
        check_count("`num_workers`", num_workers, minimum=0, maximum=MAX_PROCESSES)
        check_count("`seed`", seed, minimum=0)
        if curriculum:
            curriculum.check(sequence_length)
        if pose:
            pose.check(sequence_length)
        self.tokenizer_name = tokenizer
        self.tokenizer_revision = tokenizer_revision
        self.sequence_length = sequence_length
        self.packing = packing
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.num_workers = num_workers
        self.add_special_tokens = add_special_tokens
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.isolate_documents = isolate_documents
        self.loss_on_prompt = True if loss_on_prompt is None else loss_on_prompt
        self.evaluates_prompts = loss_on_prompt is True  # of chats; those of texts are always evaluated
        self.train_documents = train_documents
        self.validation_documents = validation_documents
        self.validation_length = validation_length
        self.validation_sets = validation_sets or {}
        check_set_names(self.validation_sets)
        self.test_documents = test_documents
        self.seed = seed
        self.influence = influence
        self.long_documents = long_documents
        self.curriculum = curriculum
        self.pose = pose
        self._switch: int | None = None
        self.rows: PackedRowDataset | None = None
        self.validation: DocumentDataset | JoinedDocuments | NamedDocuments | None = None
        self.test: DocumentDataset | JoinedDocuments | None = None

    @abstractmethod
    def source(self, split: Split) -> Source | None:
        """Return the documents of a split; None for a training split that does not exist."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once."""
        if self.tokenizer_name is None:
            raise ValueError("`tokenizer` is missing: set it to the model's tokenizer, a hub id or a local folder.")
        return load_tokenizer(self.tokenizer_name, revision=self.tokenizer_revision)

    @override
    def prepare_data(self) -> None:
        stage = self._trainer_stage()
        self._check_evaluation_source(stage)
        if stage == "fit":
            self.check_trainer()
            if self.influence:  # refuse wrong weights before text is tokenized, which may take hours
                known = {"sequence_length": self.sequence_length, "isolate_documents": self.isolate_documents}
                InfluenceStore(Path(self.influence).expanduser()).check(known)
            self._token_store()

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._set_up_training()
        if stage in ("fit", "validate"):
            self.validation = self._read_sets() or self._read_documents("validation")
        if stage == "predict" and self.tokenizer_name is None:
            raise ValueError("Scores of documents need their text: set `tokenizer`, which decodes the token ids.")
        if stage in ("test", "predict"):
            # Stored log-likelihoods are those of all tokens: an unscored one of 0 would look certain.
            self.test = self._read_documents("test", prompts=stage == "predict")

    def _set_up_training(self) -> None:
        rows = self.training_rows()
        if rows is None:
            return
        documents = len(rows.store.document_boundaries) - 1
        of_corpus = "" if self.train_documents is None else "the first "  # the others may be missed
        rank_zero_info(f"Packed {of_corpus}{documents:,} documents ({self.packing}) into {rows.rows}.")
        if self.influence:
            rows.influence = InfluenceStore(Path(self.influence).expanduser()).check(rows.identity())
        self.warn_of_repetition(len(rows), self._needed_sequences())
        self.rows = rows

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.curriculum and self.trainer and self.trainer.training:
            before = self._switch
            self._switch = round(self.curriculum.share * self.trainer.estimated_stepping_batches)
            if before not in (None, self._switch):
                rank_zero_warn(
                    f"The curriculum ends after step {self._switch}; when the checkpoint was saved, it ended after step"
                    f" {before}. `trainer.max_steps`, `accumulate_grad_batches` or `curriculum` has changed."
                )
            if self.trainer.global_step < self._switch:
                return cut_rows(batch, self.curriculum.sequence_length)
        return batch

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.curriculum:
            return {}
        return {"switch": self._switch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._switch = state_dict.get("switch")

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        rows = self._required(self.rows, "it is for evaluation, or call `setup('fit')` first")
        rank, world_size = self._reader_rank()
        sampler = RowSampler(len(rows), seed=self.seed, rank=rank, world_size=world_size)
        return self._training_loader([rows], sampler)

    @override
    def val_dataloader(self) -> DataLoader[Row]:
        if isinstance(self.validation, NamedDocuments) and self.trainer:
            self.validation.check_limit(self.trainer, self.validation_batch_size)
        return self._evaluation_loader(self.validation)

    @override
    def test_dataloader(self) -> DataLoader[Row]:
        return self._evaluation_loader(self.test)

    predict_dataloader = test_dataloader

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch; `scored` is computed here, because `on_before_batch_transfer` may have changed the labels."""
        if isinstance(batch, dict) and batch["labels"].device.type == "cpu":
            batch = with_scored(cast(PackedBatch, batch))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_rows(self) -> PackedRowDataset | None:
        """Return the packed sequences, tokenized on the first call; None without a training split."""
        store = self._token_store()
        if store is None:
            return None
        if not self.loss_on_prompt:
            check_prompts(store)
        boundaries = store.document_boundaries
        pack = (self.sequence_length, self.packing)
        if self.long_documents:
            rows = pack_in_order(boundaries, self.long_documents.order(boundaries), *pack)
        else:
            rows = pack_documents(boundaries, *pack)
        return PackedRowDataset(
            store,
            rows,
            isolate_documents=self.isolate_documents,
            loss_on_prompt=self.loss_on_prompt,
            pose=self.pose,
            pose_seed=(int(self.seed),),
        )

    def existing_rows(self) -> PackedRowDataset:
        """Return the packed sequences, or raise a ``ValueError`` without a training split."""
        return self._required(self.training_rows(), "set its training documents")

    def _required(self, rows: PackedRowDataset | None, remedy: str) -> PackedRowDataset:
        if rows is None:
            raise ValueError(f"{type(self).__name__} has no training sequences: {remedy}.")
        return rows

    def inspect(
        self, rows: Sequence[int] | None = None, *, count: int = 3, width: int = 400, names: bool = False
    ) -> str:
        """Describe training sequences, by default the first `count`; see `datamodules.packing.preview`."""
        dataset = self.existing_rows()
        if rows is None:
            rows = range(min(count, len(dataset)))
        documents = self._training_source() if names else None
        return preview(dataset, self.tokenizer, packing=self.packing, numbers=rows, width=width, documents=documents)

    def influence_rows(self, made_from: dict[str, Any], folder: str | None = None) -> InfluenceRows:
        """Return the data module of ``longce influence``, which stores values in `folder` or `influence`.

        ``made_from`` is everything else that they depend on: ``gamma``, the evaluator, ..
        """
        if self.long_documents:
            raise ValueError("Token weights are stored once per token: remove `long_documents`, which repeats tokens.")
        if self.pose:
            raise ValueError("Token weights are stored for contexts without skipped positions: remove `pose`.")
        place = folder or self.influence
        return InfluenceRows(self, made_from, Path(place).expanduser() if place else None)

    @property
    def stored_influence(self) -> dict[str, Any] | None:
        """Everything that the stored values of ``longce influence`` depend on; None without stored values."""
        if self.rows is None or self.rows.influence is None:
            return None
        return self.rows.influence.header["made_from"]

    @property
    def largest_token(self) -> int | None:
        """Largest token id of the training sequences, which must be in the model's vocabulary; None without any."""
        if self.rows is None:
            return None
        return self.rows.store.manifest["largest_token"]

    def check_trainer(self) -> None:
        """Raise a ``ValueError`` if the curriculum needs the number of steps and the trainer has no limit."""
        if self.curriculum and self.trainer and self.trainer.max_steps < 0 and (self.trainer.max_epochs or -1) < 0:
            raise ValueError("`curriculum.share` is a fraction of all steps: set `trainer.max_steps` or `max_epochs`.")

    def _training_loader(self, parts: Sequence[PackedRowDataset], sampler: RowSampler) -> ResumableLoader:
        rows: Dataset[Row] = parts[0] if len(parts) == 1 else ConcatDataset(parts)
        loader = ResumableLoader(rows, batch_size=self.batch_size, sampler=sampler, **self.loader_options())
        loader.content = zlib.crc32(repr([part.checksum() for part in parts]).encode())
        return loader

    def _token_store(self) -> TokenStore | None:
        """Open the tokenized training text; the first call tokenizes it."""
        source = self._training_source()
        if source is None:
            return None
        return build_token_store(source, self.encoder(), cache_dir=self.cache_dir)

    def _training_source(self) -> Source | None:
        source = self.source("train")
        if source is None or self.train_documents is None:
            return source
        return first_documents(source, self.train_documents)

    def _needed_sequences(self) -> int:
        """Return the number of sequences that the steps read; 0 if the run is not limited by steps."""
        if not self.trainer or self.trainer.max_steps < 0:
            return 0
        _, readers = self._reader_rank()
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches * self.batch_size * readers

    def warn_of_repetition(self, sequences: int, needed: int, *, source: str = "") -> None:
        """Warn if the run needs more sequences than `train_documents` provides, which is probably a mistake."""
        if self.train_documents is not None and needed > sequences:
            rank_zero_warn(
                f"{source}`train_documents` = {self.train_documents:,} gives {sequences:,} sequences, and the steps"
                f" read {needed:,}, so they repeat. Raise `train_documents`."
            )

    def encoder(self) -> DocumentEncoder:
        """Return the encoder of the training documents."""
        return Encoder(self.tokenizer, add_special_tokens=self.add_special_tokens)

    def _trainer_stage(self) -> str:
        if not self.trainer:
            return "fit"
        return self.trainer.state.fn or "fit"

    def _check_evaluation_source(self, stage: str) -> None:
        """Read one evaluation document, so that a hub dataset is downloaded and a wrong path fails early."""
        split: Split = "test" if stage in ("test", "predict") else "validation"
        sources = []
        if split == "validation":
            sources = [each.source() for each in self.validation_sets.values()]
        for source in sources or [self._evaluation_source(split)]:
            next(iter(source), None)

    def _evaluation_source(self, split: Split) -> Source:
        source = self.source(split)
        if source is None:
            raise ValueError(f"{type(self).__name__} has no {split} documents.")
        return source

    def _read_documents(self, split: Split, *, prompts: bool = False) -> DocumentDataset:
        """Read the documents of a split; ``prompts`` of chats are scored in any case if it is set."""
        count = self.validation_documents if split == "validation" else self.test_documents
        return self._tokenize(self._evaluation_source(split), count, self.validation_length, prompts=prompts)

    def _read_sets(self) -> NamedDocuments | None:
        """Read the named validation sets, if there are any."""
        parts = {}
        for name, each in self.validation_sets.items():
            parts[name] = self._tokenize(each.source(), each.documents, each.length or self.validation_length)
        if not parts:
            return None
        return NamedDocuments(parts)

    def _tokenize(
        self, source: Source, count: int | None, length: int | Literal["whole"] | None, *, prompts: bool = False
    ) -> DocumentDataset:
        max_tokens = None if length == "whole" else length or self.sequence_length
        tokenizer = None if self.tokenizer_name is None else self.tokenizer
        return DocumentDataset(
            islice(source, count),
            tokenizer,
            length=max_tokens,
            add_special_tokens=self.add_special_tokens,
            loss_on_prompt=self.evaluates_prompts or prompts,
        )

    def _evaluation_loader(
        self, documents: DocumentDataset | JoinedDocuments | NamedDocuments | None
    ) -> DataLoader[Row]:
        assert documents is not None, "call `setup` first"
        rank = 0
        world_size = 1
        if self.trainer:
            rank = self.trainer.global_rank
            world_size = self.trainer.world_size
        # All processes need the same number of documents, or some would wait forever: indices past the end are empty.
        numbers = range(rank, -(-len(documents) // world_size) * world_size, world_size)
        return DataLoader(documents, batch_size=self.validation_batch_size, sampler=numbers, **self.loader_options())

    def loader_options(self) -> dict[str, Any]:
        """Return the options that all loaders share."""
        workers = self.num_workers
        return {"collate_fn": collate_rows, "persistent_workers": workers > 0, **worker_options(workers)}

    def _reader_rank(self) -> tuple[int, int]:
        """Return rank and number of readers of sequences; processes that split the same sequences have one rank."""
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer else None
        if not sampler:
            return 0, 1
        return sampler["rank"], sampler["num_replicas"]

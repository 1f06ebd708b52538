"""A corpus that is too large for the disk, read as it is trained on."""

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packing.sequences import PackedRowDataset, Row
from datamodules.packing.streaming import StreamedRows, StreamingLoader, file_sources
from datamodules.text import TextDataModule
from datamodules.token_store.tokenize import Encoder


class StreamingTextDataModule(TextDataModule):
    """The corpus of a `TextDataModule`, tokenised and packed while it is read: nothing is kept on disk.

    For corpora that the token cache has no room for. It costs the order: rows are not shuffled, documents follow each
    other as in their files, and only the files are read in random order. So shuffle the documents when you write them.
    The order depends on `seed`, the number of processes and `num_workers`, and an interrupted run goes on at the very
    token. `trainer.max_steps` is needed.

    Args:
        num_workers: Processes that read and tokenise, each from files of its own; of more than 0 each tokenises with
            one thread.
        **kwargs: See :class:`TextDataModule`; `train` names files, and not a hub dataset.
    """

    @override
    def prepare_data(self) -> None:
        stage = self._stage()
        if stage == "fit":
            self._streaming_loader()  # refuses what cannot be streamed
        self._check_evaluation_source(stage)

    @override
    def setup(self, stage: str) -> None:
        if stage in ("fit", "validate"):
            self.validation = self._documents("validation", self.validation_documents)
        if stage in ("test", "predict"):
            self.test = self._documents("test", self.test_documents)

    @override
    def training_rows(self) -> PackedRowDataset | None:
        raise ValueError(
            "StreamingTextDataModule keeps no rows: use TextDataModule for mixtures, token weights and inspection."
        )

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        return self._streaming_loader()  # type: ignore[return-value]  # Lightning takes any iterable

    def _streaming_loader(self) -> StreamingLoader:
        if self.influence or self.long_documents:
            raise ValueError(
                "`influence` and `long_documents` need the whole corpus: leave them out, or do not stream."
            )
        if self.packing != "concat" or not self.loss_on_prompt:
            raise ValueError(
                "A stream knows `packing: concat` and `loss_on_prompt: true` only: set them, or do not stream."
            )
        steps = self.trainer.max_steps if self.trainer else -1
        if self.trainer is None or steps < 0:
            raise ValueError("A stream has no end: give `trainer.max_steps`.")
        source = self.source("train")
        if source is None:
            raise ValueError("There is nothing to train on: give `train`.")
        rank, world_size = self._reader()
        rows = StreamedRows(
            file_sources(source),
            Encoder(self.tokenizer, add_special_tokens=self.add_special_tokens),
            sequence_length=self.sequence_length,
            isolate_documents=self.isolate_documents,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        options = self.loader_options()
        loader = StreamingLoader(
            rows,
            batch_size=self.batch_size,
            batches=steps * self.trainer.accumulate_grad_batches,
            num_workers=options["num_workers"],
            pin_memory=torch.cuda.is_available(),
        )
        loader.stages = self._check_curriculum()
        return loader

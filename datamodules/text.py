"""Train on any corpus: files of text, JSON lines or parquet, local or remote, or a hub dataset."""

from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.loader import worker_options
from datamodules.packing.sequences import PackedRowDataset, Row
from datamodules.packing.streaming import StreamedRows, StreamingLoader, file_sources
from datamodules.sources.documents import RecordFiles, Source, TextFiles
from datamodules.sources.hub import HubDataset
from datamodules.sources.locations import JSON_LINES, PARQUET, TEXT, find_files, is_url
from datamodules.sources.splits import HashSplit, Split
from datamodules.token_store.tokenize import Encoder


class TextDataModule(PackedTextDataModule):
    """A corpus of your own.

    Each of `train`, `validation` and `test` is one of:

    - a file, or a folder (searched to any depth), of ``.txt`` (a document each), ``.jsonl`` or ``.json`` (a document on
      each line; all three also as ``.gz`` and ``.zst``) or ``.parquet`` (a document in each row);
    - a pattern of such files, with ``*``, or ``**`` for any depth;
    - one of these as an fsspec URL: ``s3://``, ``gs://``, ``https://``, ``hf://datasets/owner/name/folder``, .. It is
      read as a stream. Credentials are found as the package for the protocol finds them; other than ``https`` and
      ``hf`` it is to be installed (s3fs, gcsfs, adlfs);
    - the id of a hub dataset in parquet form, of which the split of this name is taken.

    Text is tokenized again when the content or the order of the files has changed. All bytes of local files are hashed
    for this, once for each file; elsewhere the checksum or ETag counts that the server reports.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        train: Documents to train on; null to evaluate only.
        validation: Documents to validate on; null with a `holdout`.
        test: Documents to test on and predict for; null with a `holdout`, or without any.
        text_field: Field of JSON lines, or column of parquet files, that holds the text.
        prompt_field: Field of JSON lines that holds a prompt, to which the text is the response. A document is the two
            joined as they are, so that separators and chat templates belong into them.
        name_field: Field or column by which messages and results cite a document; by default its file and line or row.
        where: ``[field, value]``: only the documents whose field holds that value; dots reach into nested fields.
        holdout: Hold out one in this many training documents for validation, and one for test; a hash of the text
            decides.
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        text_field: str = "text",
        prompt_field: str | None = None,
        name_field: str | None = None,
        where: tuple[str, Any] | None = None,
        holdout: PositiveInt | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        if holdout is not None and (train is None or validation is not None or test is not None):
            raise ValueError(
                "`holdout` takes validation and test documents from `train`: give `train`, and not the others."
            )
        if prompt_field is None and not self.loss_on_prompt:
            raise ValueError("`loss_on_prompt: false` needs to know the prompts: name their field by `prompt_field`.")
        self.paths: dict[Split, str | None] = {"train": train, "validation": validation, "test": test}
        self.text_field = text_field
        self.prompt_field = prompt_field
        self.name_field = name_field
        self.where = where
        self.holdout = holdout
        self.revision = revision

    @override
    def source(self, split: Split) -> Source | None:
        path = self.paths["train" if self.holdout else split]
        if path is not None:
            source = self._source(path, split)
            return HashSplit(source, split, self.holdout) if self.holdout else source
        if split == "train":
            return None
        raise ValueError(f"There are no {split} documents: give `{split}`, or a `holdout` of the training documents.")

    def _source(self, path: str, split: Split) -> Source:
        names = () if self.name_field is None else (self.name_field,)
        on_hub = not is_url(path) and "*" not in path and not Path(path).expanduser().exists()
        files = () if on_hub else find_files(path)
        if self.prompt_field is not None and (on_hub or not files[0].name.endswith(JSON_LINES)):
            raise ValueError(f"`prompt_field` needs JSON lines, and '{path}' is something else. Convert it.")
        if on_hub:
            hub_split: Split = "train" if self.holdout else split
            return HubDataset(path, hub_split, self.text_field, names, self.where, self.revision)
        kind = next(kind for kind in (JSON_LINES, PARQUET, TEXT) if files[0].name.endswith(kind))
        if other := next((file for file in files if not file.name.endswith(kind)), None):
            raise ValueError(
                f"'{path}' holds files of different kinds, such as {files[0].name} and {other.name}."
                " Give a pattern that fits one kind, such as folder/**/*.jsonl."
            )
        if kind != TEXT:
            return RecordFiles(files, (self.text_field,), names, self.where, self.prompt_field)
        if self.where is not None:
            raise ValueError(
                f"`where` = {self.where} needs documents with fields, and '{path}' holds text. Leave it out."
            )
        return TextFiles(files)


class StreamingTextDataModule(TextDataModule):
    """A corpus that is tokenized and packed while it is read, and too large for a token cache on disk.

    Rows are not shuffled: documents follow each other as in their files, and only the files are read in random order.
    So shuffle the documents when you write them. The order depends on `seed`, the number of processes and
    `num_workers`, and an interrupted run resumes at the very token. `trainer.max_steps` is needed.

    Args:
        num_workers: Processes that read and tokenize, each its own files; each of them tokenizes with one thread.
        **kwargs: See :class:`TextDataModule`; `train` names files, and not a hub dataset.
    """

    @override
    def prepare_data(self) -> None:
        if self._stage() == "fit":
            self.check_trainer()
            self.train_dataloader()  # refuses what cannot be streamed
        self._check_evaluation_source(self._stage())

    @override
    def setup(self, stage: str) -> None:
        super().setup("validate" if stage == "fit" else stage)  # which has no rows to prepare

    @override
    def training_rows(self) -> PackedRowDataset | None:
        raise ValueError(
            "StreamingTextDataModule keeps no rows: use TextDataModule for mixtures, token weights and inspection."
        )

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        if self.influence or self.long_documents:
            raise ValueError(
                "`influence` and `long_documents` need the whole corpus: leave them out, or do not stream."
            )
        if self.packing != "concat" or not self.loss_on_prompt:
            raise ValueError(
                "A stream supports `packing: concat` and `loss_on_prompt: true` only: set them, or do not stream."
            )
        if self.trainer is None or self.trainer.max_steps < 0:
            raise ValueError("A stream has no end: give `trainer.max_steps`.")
        if (source := self.source("train")) is None:
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
        return StreamingLoader(  # type: ignore[return-value]  # Lightning takes any iterable
            rows,
            batch_size=self.batch_size,
            batches=self.trainer.max_steps * self.trainer.accumulate_grad_batches,
            **worker_options(self.num_workers),
        )

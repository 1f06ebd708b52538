"""Data modules for any corpus: text, JSON-lines or parquet files, local or remote, or a hub dataset."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.number_types import Holdout
from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.loader import worker_options
from datamodules.packing.sequences import PackedRowDataset, Row
from datamodules.packing.streaming import StreamedRows, StreamingLoader, file_sources
from datamodules.sources.content import Content
from datamodules.sources.documents import Source
from datamodules.sources.hub import RowTable, open_source
from datamodules.sources.splits import HashSplit, Split
from datamodules.token_store.encoders import ChatEncoder, TokenIds
from datamodules.token_store.tokenize import DocumentEncoder
from lightning_modules.utilities.text_files import read_text

if TYPE_CHECKING:
    Documents = str | RowTable
else:
    Documents = str  # in configs: the parser would take any other type as a reason to read the file that is named


class TextDataModule(PackedTextDataModule):
    """A corpus of your own.

    Each of `train`, `validation` and `test` is one of:

    - a file, or a folder (searched recursively), of ``.txt`` (one document per file), ``.jsonl`` or ``.json`` (one
      document per line; all three also as ``.gz`` and ``.zst``) or ``.parquet`` (one document per row);
    - a glob pattern of such files, with ``*``, or ``**`` for any depth;
    - one of these as an fsspec URL: ``s3://``, ``gs://``, ``https://``, ``hf://datasets/owner/name/folder``, .. It is
      read as a stream. Protocols other than ``https`` and ``hf`` need a package (s3fs, gcsfs, adlfs), which also finds
      the credentials;
    - the id of a parquet dataset on the hub, whose split of this name is used.

    Text is tokenized again if the content or the order of the files has changed. Local files are identified by a hash
    of their bytes, computed once per file; remote files by the checksum or ETag that the server reports.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder; may be null with a `token_column`.
        train: Documents to train on; null to only evaluate. In Python, each split may also be a map-style
            `datasets.Dataset`.
        validation: Documents to validate on; null with a `holdout`.
        test: Documents for test and prediction; null with a `holdout`, or if neither is run.
        text_field: Field of JSON lines, or column of parquet files, with the text.
        prompt_field: Field or column with a prompt, to which the text is the response. Both are joined without a
            separator, so include separators and chat templates in them.
        messages_field: Field or column with the messages of a chat, each with ``role`` and ``content``. The tokenizer's
            chat template renders them, and marks what an assistant writes: only these tokens have a loss, unless
            `loss_on_prompt` is true.
        token_column: Field or column with token ids, which are not tokenized or changed: include special tokens, such
            as the one that ends a document.
        chat_template: Chat template (Jinja) that replaces the tokenizer's, or a file with one.
        name_field: Field or column that names documents in messages and results; by default file and line or row.
        where: ``[field, value]``: use only documents whose field has this value; dots reach into nested fields.
        holdout: Hold out one in this many training documents for validation, and one for test, chosen by a hash of the
            text; 3 or more.
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        *,
        train: Documents | None = None,
        validation: Documents | None = None,
        test: Documents | None = None,
        text_field: str = "text",
        prompt_field: str | None = None,
        messages_field: str | None = None,
        token_column: str | None = None,
        chat_template: str | None = None,
        name_field: str | None = None,
        where: tuple[str, Any] | None = None,
        holdout: Holdout | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        if holdout is not None and (train is None or validation is not None or test is not None):
            raise ValueError(
                "`holdout` takes validation and test documents from `train`: set `train`, and remove `validation` and"
                " `test`."
            )
        if sum(field is not None for field in (prompt_field, messages_field, token_column)) > 1:
            raise ValueError("A document has one of `prompt_field`, `messages_field` and `token_column`: set only one.")
        if prompt_field is None and messages_field is None and not self.loss_on_prompt:
            raise ValueError(
                "`loss_on_prompt: false` needs prompts: set `prompt_field` or `messages_field` to their field."
            )
        if messages_field is not None and kwargs.get("loss_on_prompt") is None:
            self.loss_on_prompt = False
        chats = [messages_field, *(each.messages_field for each in self.validation_sets.values())]
        if chat_template is not None and not any(chats):
            raise ValueError("`chat_template` is for chats: set `messages_field`, or remove it.")
        if tokenizer is None and (token_column is None or self.validation_sets):
            raise ValueError("`tokenizer` is missing: it is optional only for documents with a `token_column`.")
        self.paths: dict[Split, Documents | None] = {"train": train, "validation": validation, "test": test}
        self.content = Content((text_field,), prompt_field, messages_field, token_column)
        self.chat_template = None if chat_template is None else read_template(chat_template)
        self.name_field = name_field
        self.where = where
        self.holdout = holdout
        self.revision = revision

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with the chat template that is set."""
        tokenizer = super().tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @override
    def encoder(self) -> DocumentEncoder:
        if self.content.tokens is not None:
            return TokenIds(None if self.tokenizer_name is None else self.tokenizer)
        if self.content.messages is not None:
            return ChatEncoder(self.tokenizer, needs_marks=not self.loss_on_prompt)
        return super().encoder()

    @override
    def source(self, split: Split) -> Source | None:
        opened: Split = "train" if self.holdout else split
        path = self.paths[opened]
        if path is not None:
            source = open_source(
                path,
                opened,
                content=self.content,
                name_field=self.name_field,
                where=self.where,
                revision=self.revision,
            )
            if self.holdout:
                return HashSplit(source, split, self.holdout)
            return source
        if split == "train":
            return None
        raise ValueError(f"There are no {split} documents: set `{split}`, or a `holdout` of the training documents.")


def read_template(template: str) -> str:
    """Return a chat template, which may be given as a file."""
    if "{%" in template or "{{" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise ValueError(f"`chat_template` '{template}' is neither a chat template nor a file with one.")
    return read_text(str(file))


class StreamingTextDataModule(TextDataModule):
    """A corpus too large for a token cache on disk, tokenized and packed while it is read.

    Sequences are not shuffled: files are read in random order, but the documents of a file in their order. Shuffle
    documents when you write the files. The order depends on `seed`, the number of processes and `num_workers`, and an
    interrupted run resumes at the exact token. `trainer.max_steps` is required.

    Args:
        num_workers: Processes that read and tokenize, each with its own files and one thread.
        **kwargs: See :class:`TextDataModule`; `train` must name files, not a hub dataset.
    """

    @override
    def prepare_data(self) -> None:
        if self._trainer_stage() == "fit":
            self.check_trainer()
            self.train_dataloader()  # refuses settings that cannot be streamed
        self._check_evaluation_source(self._trainer_stage())

    @override
    def setup(self, stage: str) -> None:
        super().setup("validate" if stage == "fit" else stage)  # without packed sequences

    @override
    def training_rows(self) -> PackedRowDataset | None:
        raise ValueError(
            "StreamingTextDataModule does not store sequences: use TextDataModule for mixtures, token weights and"
            " inspection."
        )

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        unsupported = self.influence or self.long_documents or self.train_documents
        if unsupported or self.packing != "concat" or not self.loss_on_prompt:
            raise ValueError(
                "A stream supports only `packing: concat` and `loss_on_prompt: true`, and none of `influence`,"
                " `long_documents` and `train_documents`: set or remove them, or use TextDataModule."
            )
        if self.trainer is None or self.trainer.max_steps < 0:
            raise ValueError("A stream has no end: set `trainer.max_steps`.")
        rank, world_size = self._reader_rank()
        rows = StreamedRows(
            file_sources(self.source("train")),
            self.encoder(),
            sequence_length=self.sequence_length,
            isolate_documents=self.isolate_documents,
            pose=self.pose,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        return StreamingLoader(  # type: ignore[return-value]  # Lightning takes any iterable
            rows,
            batch_size=self.batch_size,
            steps=self.trainer.max_steps,
            batches_per_step=self.trainer.accumulate_grad_batches,
            **worker_options(self.num_workers),
        )

"""Evaluate on GovReport, a corpus of long reports."""

from pathlib import Path
from typing import Any

from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.sources.documents import RecordFiles, Source
from datamodules.sources.hub import HubDataset, holds_parquet
from datamodules.sources.splits import Split, json_lines_files


class GovReportDataModule(PackedTextDataModule):
    """Reports of US government agencies (Huang et al., 2021, https://arxiv.org/abs/2104.02112), for evaluation only.

    LongPPL is measured on them, so there is nothing to train on here.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: A hub dataset in parquet form with the text in `text_column`; a local folder of such files; or JSON-lines
            files with the text in ``input``, ``report`` or ``text``: a folder with files named ``val*`` and ``test*``,
            or a single file, used for validation and test alike.
        text_column: Column of the text in parquet data.
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        path: str = "ccdv/govreport-summarization",
        text_column: str = "report",
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        self.path = path
        self.text_column = text_column
        self.revision = revision

    @override
    def source(self, split: Split) -> Source | None:
        if split == "train":
            return None
        path = Path(self.path).expanduser()
        if path.exists() and not holds_parquet(path):
            files = (path,) if path.is_file() else json_lines_files(path, split)
            return RecordFiles(files, text_fields=("input", "report", "text"), name_fields=("id", "title"))
        return HubDataset(self.path, split, text_column=self.text_column, revision=self.revision)

"""The corpora of the paper: PG-19, Pile-arXiv and GovReport."""

import csv
from pathlib import Path
from typing import Any

from typing_extensions import override

from datamodules.number_types import Holdout
from datamodules.packed_text import PackedTextDataModule
from datamodules.sources.content import Content
from datamodules.sources.documents import RecordFiles, Source, text_folder
from datamodules.sources.hub import HubDataset, holds_parquet
from datamodules.sources.splits import HashSplit, Split, json_lines_files

ARXIV = ("meta.pile_set_name", "ArXiv")


class PG19DataModule(PackedTextDataModule):
    """Books of Project Gutenberg published before 1919 (Rae et al., 2020, https://arxiv.org/abs/1911.05507).

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: A parquet dataset on the hub with the columns ``short_book_title`` and ``text``; or a local folder of such
            parquet files, or one in the original layout: ``train/<id>.txt``, ``validation/<id>.txt``,
            ``test/<id>.txt`` and, for the titles, ``metadata.csv`` (id, title, year, url; no header).
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self, tokenizer: str, *, path: str = "emozilla/pg19", revision: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        self.path = path
        self.revision = revision

    @override
    def source(self, split: Split) -> Source:
        folder = Path(self.path).expanduser()
        if any((folder / name).is_dir() and next((folder / name).glob("*.txt"), None) for name in ("train", split)):
            return text_folder(folder / split, _read_titles(folder / "metadata.csv"))
        return HubDataset(self.path, split, name_columns=("short_book_title",), revision=self.revision)


def _read_titles(metadata: Path) -> dict[str, str]:
    """Read the title of each book by its id."""
    if not metadata.exists():
        return {}
    with metadata.open(encoding="utf-8", newline="") as file:
        return {line[0]: line[1] for line in csv.reader(file) if len(line) > 1}


class PileArxivDataModule(PackedTextDataModule):
    """Papers of the arXiv subset of the Pile (Gao et al., 2020, https://arxiv.org/abs/2101.00027).

    Documents of the Pile's other subsets are skipped.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: One of: a parquet dataset on the hub with the columns ``text`` and ``meta``; a local folder of such
            files; a local folder with JSON-lines files named ``train*``, ``val*`` and ``test*``, or in subfolders with
            these names; a single JSON-lines file, whose documents are then split by a hash of their text. JSON-lines
            files have ``text`` and ``meta.pile_set_name``, and may be compressed (``.zst``, ``.gz``).
        holdout: For a single file: one of this many documents is held out for validation, and one for test.
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        path: str = "haritzpuerto/the_pile_arxiv_50k_sample",
        holdout: Holdout = 20,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        self.path = path
        self.holdout = holdout
        self.revision = revision

    @override
    def source(self, split: Split) -> Source:
        path = Path(self.path).expanduser()
        if path.is_file():
            return HashSplit(RecordFiles((path,), where=ARXIV), split, self.holdout)
        if path.is_dir() and not holds_parquet(path):
            return RecordFiles(json_lines_files(path, split), where=ARXIV)
        return HubDataset(self.path, split, where=ARXIV, revision=self.revision)


class GovReportDataModule(PackedTextDataModule):
    """Reports of US government agencies (Huang et al., 2021, https://arxiv.org/abs/2104.02112), for evaluation only.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: A parquet dataset on the hub with the text in `text_column`; a local folder of such files; or JSON-lines
            files with the text in ``input``, ``report`` or ``text``: a folder with files named ``val*`` and ``test*``,
            or a single file for both validation and test.
        text_column: Name of the text column in parquet data.
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
            return RecordFiles(files, Content(("input", "report", "text")), name_fields=("id", "title"))
        return HubDataset(self.path, split, Content((self.text_column,)), revision=self.revision)

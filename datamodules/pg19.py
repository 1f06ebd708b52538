"""Train on PG-19, books published before 1919."""

import csv
from pathlib import Path
from typing import Any

from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.sources.documents import Source, text_folder
from datamodules.sources.hub import HubDataset
from datamodules.sources.splits import Split


class PG19DataModule(PackedTextDataModule):
    """Books of Project Gutenberg published before 1919 (Rae et al., 2020, https://arxiv.org/abs/1911.05507).

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: A hub dataset in parquet form with the columns ``short_book_title`` and ``text``; or a local folder,
            either of such parquet files or in the original layout: ``train/<id>.txt``, ``validation/<id>.txt``,
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
            return text_folder(folder / split, _titles(folder / "metadata.csv"))
        return HubDataset(self.path, split, name_columns=("short_book_title",), revision=self.revision)


def _titles(metadata: Path) -> dict[str, str]:
    """Read the title of each book by its id."""
    if not metadata.exists():
        return {}
    with metadata.open(encoding="utf-8", newline="") as file:
        return {line[0]: line[1] for line in csv.reader(file) if len(line) > 1}

"""Pile-arXiv: scientific papers."""

from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.sources.documents import RecordFiles, Source
from datamodules.sources.hub import HubDataset, holds_parquet
from datamodules.sources.splits import HashSplit, Split, json_lines_files

ARXIV = ("meta.pile_set_name", "ArXiv")


class PileArxivDataModule(PackedTextDataModule):
    """Papers of the arXiv part of the Pile (Gao et al., 2020, https://arxiv.org/abs/2101.00027).

    Documents of the Pile's other parts are passed over.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        path: One of: a hub dataset in parquet form with the columns ``text`` and ``meta``; a local folder of such
            files; a local folder with JSON-lines files named ``train*``, ``val*`` and ``test*`` or in subfolders of
            these names; a single JSON-lines file, whose documents are then split by a hash of their text. JSON-lines
            files hold ``text`` and ``meta.pile_set_name``, and may be compressed (``.zst``, ``.gz``).
        holdout: For a single file: one of this many documents is held out for validation, and one for test.
        revision: Branch, tag or commit of a hub dataset.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        path: str = "haritzpuerto/the_pile_arxiv_50k_sample",
        holdout: PositiveInt = 20,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        if holdout < 3:
            raise ValueError(f"`holdout` = {holdout} leaves no document to train on. Set it to 3 or more.")
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

"""Split a corpus by the names of its files, or by a hash of its documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from datamodules.sources.documents import Document, NoDocumentError, Source
from datamodules.sources.locations import JSON_LINES

Split = Literal["train", "validation", "test"]

_PREFIX: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}


def json_lines_files(folder: Path, split: Split) -> tuple[Path, ...]:
    """Return the files of a split by name: ``train*.jsonl`` in the folder, or all in a folder ``train*``."""
    prefix = _PREFIX[split]
    found = [*folder.glob(f"{prefix}*"), *folder.glob(f"{prefix}*/*")]
    files = tuple(sorted(file for file in found if file.is_file() and file.name.endswith(JSON_LINES)))
    if not files:
        raise FileNotFoundError(
            f"No file of the {split} split in {folder}: looked for {prefix}* and {prefix}*/* ending in"
            f" {', '.join(JSON_LINES)}. Rename the files."
        )
    return files


@dataclass(frozen=True)
class HashSplit:
    """Split of a source without splits, chosen by a hash of each document's text.

    About one of ``share`` documents is for validation and one for test; the others are for training. Equal texts are
    always in the same split, so a copy never leaks into another one.
    """

    source: Source
    split: Split
    share: int  # `holdout` of the data modules

    def __post_init__(self) -> None:
        if self.share < 3:
            raise ValueError(f"`holdout` must be at least 3, or no document is left to train on; got {self.share}.")

    def __iter__(self) -> Iterator[Document]:
        empty = True
        for document in self.source:
            if self._split_of(document) == self.split:
                empty = False
                yield document
        if empty:
            raise NoDocumentError(
                f"No document is in the {self.split} split (1 in {self.share} is held out for validation, and 1 for"
                " test). Lower `holdout`, or use a folder with a file for each split."
            )

    def fingerprint(self) -> str:
        """Combine the source's fingerprint and the split."""
        return f"{self.source.fingerprint()} {self.split} 1/{self.share}"

    def _split_of(self, document: Document) -> Split:
        held_out: dict[int, Split] = {0: "validation", 1: "test"}
        return held_out.get(int.from_bytes(sha256(document.content()).digest()[:8]) % self.share, "train")

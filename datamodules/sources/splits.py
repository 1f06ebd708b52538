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
    """Find the files of a split by name: ``train*.jsonl`` in the folder, or any in a folder ``train*``."""
    prefix = _PREFIX[split]
    found = [*folder.glob(f"{prefix}*"), *folder.glob(f"{prefix}*/*")]
    files = tuple(sorted(file for file in found if file.is_file() and file.name.endswith(JSON_LINES)))
    if not files:
        raise FileNotFoundError(
            f"No file of the {split} split in {folder}: looked for {prefix}* and {prefix}*/* ending in"
            f" {', '.join(JSON_LINES)}. Name the files accordingly."
        )
    return files


@dataclass(frozen=True)
class HashSplit:
    """A split of a source without splits: the text of a document decides where it belongs.

    About one of ``share`` documents is for validation and one for test; the others are for training. The same
    text is in the same split whatever its place in the file, so a copy never leaks from one split to another.
    """

    source: Source
    split: Split
    share: int

    def __post_init__(self) -> None:
        if self.share < 3:
            raise ValueError(f"`holdout` = {self.share} leaves no document to train on. Set it to 3 or more.")

    def __iter__(self) -> Iterator[Document]:
        empty = True
        for document in self.source:
            if self._split_of(document.text) == self.split:
                empty = False
                yield document
        if empty:
            raise NoDocumentError(
                f"None of the documents fell to the {self.split} split (1 in {self.share} is held out for validation,"
                " and 1 for test). Lower `holdout`, or give a folder with a file for each split."
            )

    def fingerprint(self) -> str:
        """Combine the source's fingerprint and the split."""
        return f"{self.source.fingerprint()} {self.split} 1/{self.share}"

    def _split_of(self, text: str) -> Split:
        held_out: dict[int, Split] = {0: "validation", 1: "test"}
        return held_out.get(int.from_bytes(sha256(text.encode()).digest()[:8]) % self.share, "train")

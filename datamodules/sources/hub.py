"""Read documents of a dataset on the Hugging Face hub, or of a local folder of parquet files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets

from datamodules.sources.documents import Document, checked_text, record_name
from datamodules.sources.locations import JSON_LINES, PARQUET, TEXT
from datamodules.sources.records import nested
from lightning_modules.utilities.identity import content_hash


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset that ``datasets.load_dataset`` can load without running code of the repository.

    It is memory-mapped, so it may be larger than memory. `path` is a hub id or a local folder of parquet files.
    """

    path: str
    split: str
    text_column: str = "text"
    name_columns: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None
    revision: str | None = None

    def __iter__(self) -> Iterator[Document]:
        found = False
        for number, record in enumerate(self._loaded_dataset):
            if self.where and nested(record, self.where[0]) != self.where[1]:
                continue
            found = True
            place = f"{self.path}, split {self.split}, row {number}"
            name = record_name(record, self.name_columns, f"{self.split}:{number}")
            yield Document(name, checked_text(record[self.text_column], place))
        if not found:
            wanted = f" with {self.where[0]} == {self.where[1]!r}" if self.where else ""
            raise ValueError(f"No document{wanted} in split {self.split!r} of {self.path!r}. Name another dataset.")

    def fingerprint(self) -> str:
        """Identify the content of local files, or the commit on the hub, and which documents are taken."""
        dataset = self._loaded_dataset  # refuses what it cannot load
        content = _hash_local_content(Path(self.path).expanduser()) or dataset._fingerprint
        return f"hub {content} {self.split} {self.revision} {self.text_column} {self.where}"

    @cached_property
    def _loaded_dataset(self) -> Any:
        dataset = _load_split(self.path, self.split, self.revision)
        if self.text_column not in dataset.column_names:
            raise ValueError(
                f"Split {self.split!r} of {self.path!r} has no column {self.text_column!r} for the text,"
                f" only {dataset.column_names}. Name another dataset, or rename the column."
            )
        return dataset


def holds_parquet(path: Path) -> bool:
    """Return whether a local folder holds parquet files at any depth."""
    return path.is_dir() and next(path.rglob("*.parquet"), None) is not None


def _hash_local_content(folder: Path) -> str | None:
    """Hash a local folder's data and the files that assign them to splits; None without such a folder."""
    if not folder.is_dir():
        return None
    return content_hash(folder, [file for file in folder.rglob("*") if file.suffix in (".parquet", ".md", ".json")])


def _load_split(path: str, split: str, revision: str | None) -> Any:
    local = Path(path).expanduser()
    # Refuse impossible paths at once: the hub takes half a minute, and a .txt would be split into lines.
    if local.exists() and not holds_parquet(local):
        raise FileNotFoundError(
            f"`path` = {path!r} is here, but neither in a layout that this data module knows nor a folder of parquet"
            " files. See the module's description for the layouts."
        )
    looks_like_a_file = path.endswith((*TEXT, *JSON_LINES, *PARQUET))
    if not local.exists() and (looks_like_a_file or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path)):
        raise FileNotFoundError(
            f"`path` = {path!r} is no local file or folder, and not of the form `owner/name` of a hub dataset."
            " Correct the path."
        )
    content = _hash_local_content(local)
    # `datasets` keeps a copy of local files by path and time of change: keep one for each content.
    cache_dir = None if content is None else str(Path(datasets.config.HF_DATASETS_CACHE) / "by-content" / content)
    try:
        name = path if content is None else str(local)
        return datasets.load_dataset(name, split=split, revision=revision, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = "in the local folder" if local.exists() else "here as a file or folder, nor on the hub"
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"No usable split {split!r} of `path` = {path!r} {where} ({type(error).__name__}: {error})."
            " Check the spelling and the network, and give a local path, or a dataset in parquet form that needs no"
            " loading script."
        ) from error

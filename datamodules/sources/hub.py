"""Open documents by a path, a pattern, a URL or the id of a dataset on the Hugging Face hub."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.sources.documents import Document, RecordFiles, Source, TextFiles, checked_text, record_name
from datamodules.sources.locations import JSON_LINES, PARQUET, TEXT, find_files, is_url
from datamodules.sources.records import nested
from datamodules.sources.splits import Split
from lightning_modules.utilities.identity import content_hash


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset that ``datasets.load_dataset`` loads without code from the repository.

    The dataset is memory-mapped, so it may exceed memory. `path` is a hub id or a local folder of parquet files.
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
            raise ValueError(f"No document{wanted} in split {self.split!r} of {self.path!r}. Use another dataset.")

    def fingerprint(self) -> str:
        """Describe the content of local files, or the commit on the hub, and which documents are read."""
        dataset = self._loaded_dataset  # raises an error if it cannot be loaded
        content = _hash_local_content(Path(self.path).expanduser()) or dataset._fingerprint
        return f"hub {content} {self.split} {self.revision} {self.text_column} {self.where}"

    @cached_property
    def _loaded_dataset(self) -> Any:
        dataset = _load_split(self.path, self.split, self.revision)
        if self.text_column not in dataset.column_names:
            raise ValueError(
                f"Split {self.split!r} of {self.path!r} has no text column {self.text_column!r}; found"
                f" {dataset.column_names}. Use another dataset, or rename the column."
            )
        return dataset


def holds_parquet(path: Path) -> bool:
    """Return whether a local folder has parquet files at any depth."""
    return path.is_dir() and next(path.rglob("*.parquet"), None) is not None


def _hash_local_content(folder: Path) -> str | None:
    """Hash a local folder's data and the files that assign data to splits; None if the folder does not exist."""
    if not folder.is_dir():
        return None
    return content_hash(folder, [file for file in folder.rglob("*") if file.suffix in (".parquet", ".md", ".json")])


def _load_split(path: str, split: str, revision: str | None) -> Any:
    local = Path(path).expanduser()
    # Refuse impossible paths early: the hub takes half a minute, and `datasets` would split a .txt file into lines.
    looks_like_a_file = path.endswith((*TEXT, *JSON_LINES, *PARQUET))
    on_hub = not looks_like_a_file and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) is not None
    if not (holds_parquet(local) if local.exists() else on_hub):
        raise FileNotFoundError(
            f"`path` = {path!r} is neither a folder with parquet files or a layout that this data module supports, nor"
            " the `owner/name` of a hub dataset. See the description of `path`."
        )
    import datasets  # takes half a second, which commands that read no data save

    content = _hash_local_content(local)
    # `datasets` identifies its copies of local files by path and modification time: identify them by content instead.
    cache_dir = None if content is None else str(Path(datasets.config.HF_DATASETS_CACHE) / "by-content" / content)
    try:
        name = path if content is None else str(local)
        return datasets.load_dataset(name, split=split, revision=revision, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = "in the local folder" if local.exists() else "on disk or on the hub"
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"No usable split {split!r} of `path` = {path!r} {where} ({type(error).__name__}: {error}). Check the"
            f" spelling, download it where there is a network (`hf download --repo-type dataset {path}`), or use a"
            " local path or a parquet dataset without a loading script."
        ) from error


def open_source(
    path: str,
    split: Split,
    *,
    text_field: str = "text",
    prompt_field: str | None = None,
    name_field: str | None = None,
    where: tuple[str, Any] | None = None,
    revision: str | None = None,
) -> Source:
    """Open text, JSON-lines or parquet files, or a split of a hub dataset; see `TextDataModule` for the arguments."""
    names = () if name_field is None else (name_field,)
    on_hub = not is_url(path) and "*" not in path and not Path(path).expanduser().exists()
    files = () if on_hub else find_files(path)
    if prompt_field is not None and (on_hub or not files[0].name.endswith(JSON_LINES)):
        raise ValueError(f"`prompt_field` needs JSON lines, but '{path}' has another format. Convert it.")
    if on_hub:
        return HubDataset(path, split, text_field, names, where, revision)
    kind = next(kind for kind in (JSON_LINES, PARQUET, TEXT) if files[0].name.endswith(kind))
    if other := next((file for file in files if not file.name.endswith(kind)), None):
        raise ValueError(
            f"'{path}' has files of different kinds, such as {files[0].name} and {other.name}."
            " Use a pattern that matches one kind, such as folder/**/*.jsonl."
        )
    if kind != TEXT:
        return RecordFiles(files, (text_field,), names, where, prompt_field)
    if where is not None:
        raise ValueError(f"`where` = {where} needs documents with fields, but '{path}' has plain text. Remove it.")
    return TextFiles(files)

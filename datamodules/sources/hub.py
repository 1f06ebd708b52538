"""Open documents by a path, a pattern, a URL or the id of a dataset on the Hugging Face hub."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from datamodules.sources.content import Content
from datamodules.sources.documents import Document, RecordFiles, Source, TextFiles, record_name
from datamodules.sources.locations import JSON_LINES, PARQUET, TEXT, find_files, is_url
from datamodules.sources.records import nested
from datamodules.sources.splits import Split
from lightning_modules.utilities.identity import content_hash


class RowTable(Protocol):
    """A map-style `datasets.Dataset`, which is not imported here because it is optional."""

    column_names: list[str]
    _fingerprint: str  # of the content and of what was done to it

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TableRows:
    """Source whose documents are the rows of a `datasets.Dataset`; ``title`` names it in errors."""

    table: RowTable
    title: str
    split: str
    content: Content = field(default_factory=Content)
    name_columns: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None

    def __post_init__(self) -> None:
        if not {"column_names", "_fingerprint", "__len__"} <= set(dir(self.table)):
            raise ValueError(
                f"The {self.split} documents must be a map-style `datasets.Dataset`, got"
                f" {type(self.table).__name__}: load the dataset without `streaming`, or write it to parquet files."
            )
        if not set(self.content.alternatives) & set(self.table.column_names):
            raise ValueError(
                f"{self.title} has no column {' or '.join(map(repr, self.content.alternatives))}; found"
                f" {self.table.column_names}. Use another dataset, or rename the column."
            )

    def __iter__(self) -> Iterator[Document]:
        found = False
        for number, record in enumerate(self.table):
            if self.where and nested(record, self.where[0]) != self.where[1]:
                continue
            found = True
            name = record_name(record, self.name_columns, f"{self.split}:{number}")
            yield self.content.read(record, name, f"{self.title}, row {number}")
        if not found:
            wanted = f" with {self.where[0]} == {self.where[1]!r}" if self.where else ""
            raise ValueError(f"No document{wanted} in {self.title}. Use another dataset.")

    def fingerprint(self) -> str:
        """Describe the content of the dataset, and which documents are read."""
        return f"table {self.table._fingerprint} {self.content} {self.where}"


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset that ``datasets.load_dataset`` loads without code from the repository.

    The dataset is memory-mapped, so it may exceed memory. `path` is a hub id or a local folder of parquet files.
    """

    path: str
    split: str
    content: Content = field(default_factory=Content)
    name_columns: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None
    revision: str | None = None

    def __iter__(self) -> Iterator[Document]:
        return iter(self._rows)

    def fingerprint(self) -> str:
        """Describe the content of local files, or the commit on the hub, and which documents are read."""
        rows = self._rows  # raises an error if the dataset cannot be loaded
        content = _hash_local_content(Path(self.path).expanduser()) or rows.table._fingerprint
        return f"hub {content} {self.split} {self.revision} {self.content} {self.where}"

    @cached_property
    def _rows(self) -> TableRows:
        table = _load_split(self.path, self.split, self.revision)
        title = f"split {self.split!r} of {self.path!r}"
        return TableRows(table, title, self.split, self.content, self.name_columns, self.where)


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
    is_found = holds_parquet(local) if local.exists() else on_hub
    if not is_found:
        raise FileNotFoundError(
            f"`path` = {path!r} is neither a folder with parquet files or a layout that this data module supports, nor"
            " the `owner/name` of a hub dataset. See the description of `path`."
        )
    import datasets  # takes half a second, which commands that read no data save

    content = _hash_local_content(local)
    name = path
    cache_dir = None
    if content is not None:
        name = str(local)
        # `datasets` identifies its copies of local files by path and time: identify them by content instead.
        cache_dir = str(Path(datasets.config.HF_DATASETS_CACHE) / "by-content" / content)
    try:
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
    path: str | RowTable,
    split: Split,
    *,
    content: Content | None = None,
    name_field: str | None = None,
    where: tuple[str, Any] | None = None,
    revision: str | None = None,
) -> Source:
    """Open text, JSON-lines or parquet files, or a split of a hub dataset; see `TextDataModule` for the arguments."""
    content = content or Content()
    names = () if name_field is None else (name_field,)
    if not isinstance(path, str):
        return TableRows(path, f"the {split} dataset", split, content, names, where)
    on_hub = not is_url(path) and "*" not in path and not Path(path).expanduser().exists()
    if on_hub:
        return HubDataset(path, split, content, names, where, revision)
    files = find_files(path)
    kind = next(kind for kind in (JSON_LINES, PARQUET, TEXT) if files[0].name.endswith(kind))
    other = next((file for file in files if not file.name.endswith(kind)), None)
    if other:
        raise ValueError(
            f"'{path}' has files of different kinds, such as {files[0].name} and {other.name}."
            " Use a pattern that matches one kind, such as folder/**/*.jsonl."
        )
    if kind != TEXT:
        return RecordFiles(files, content, names, where)
    fields = {
        "where": where,
        "prompt_field": content.prompt,
        "messages_field": content.messages,
        "token_column": content.tokens,
    }
    for name, value in fields.items():
        if value is not None:
            raise ValueError(f"`{name}` = {value} needs documents with fields, but '{path}' has plain text. Remove it.")
    return TextFiles(files)

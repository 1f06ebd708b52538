"""Open documents by a path, a pattern, a URL or a hub id."""

from pathlib import Path
from typing import Any

from datamodules.sources.documents import RecordFiles, Source, TextFiles
from datamodules.sources.hub import HubDataset
from datamodules.sources.locations import JSON_LINES, PARQUET, TEXT, find_files, is_url
from datamodules.sources.splits import Split


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

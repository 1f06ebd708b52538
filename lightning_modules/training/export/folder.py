"""A folder that is replaced as a whole, and only if an earlier export wrote all that is in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_modules.utilities.files import atomic_folder, writable_folder
from lightning_modules.utilities.locks import exclusive

MARKER = "longce_export.json"
"""File with the facts of the training and the names of the files that the export wrote."""


def check_replaceable(folder: Path) -> None:
    """Raise a ``ValueError`` unless a folder is missing, empty, or an earlier export without anything added to it."""
    if not folder.exists():
        return
    if not folder.is_dir() or folder.is_mount():
        kind = "is a mount point, which cannot be replaced" if folder.is_dir() else "is a file"
        raise ValueError(f"`output_dir` of the export, '{folder}', {kind}: name a new folder.")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if not files and not any(folder.iterdir()):
        return
    if added := sorted(files - _written_files(folder)):
        raise ValueError(
            f"`output_dir` of the export, '{folder}', exists and is not an earlier export, which would be replaced"
            f" (it holds '{added[0]}'): name a new folder, or remove this one."
        )


@contextmanager
def export_folder(target: Path, facts: str) -> Iterator[Path]:
    """Yield a folder that takes the place of an earlier export, or of that behind a link, at once as the block ends.

    Several processes that export to one folder wait for each other. The marker keeps the facts, a JSON text.

    Raises:
        ValueError: If the target is something else than an earlier export, or cannot be written, as on a full disk.
    """
    check_replaceable(target)
    writable_folder(target.resolve().parent, remedy="Name another `output_dir`.")
    try:
        with exclusive(target.resolve()), atomic_folder(target.resolve(), replace=True) as folder:
            yield folder
            files = [path for path in folder.rglob("*") if path.is_file()]
            content = {"training": json.loads(facts), "files": sorted(str(path.relative_to(folder)) for path in files)}
            (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n")
            for path in files:
                path.chmod((folder / MARKER).stat().st_mode)  # safetensors ignores the umask
            check_replaceable(target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"The export to '{target}' could not be written: {error}. What was there before still is. Free some room,"
            " or name another `output_dir`."
        ) from error


def _written_files(folder: Path) -> set[str]:
    try:
        return {MARKER, *json.loads((folder / MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError):
        return set()

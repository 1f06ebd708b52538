"""A folder that is replaced as a whole, and only if an earlier export wrote all that is in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_modules.utilities.files import atomic_folder, writable_folder
from lightning_modules.utilities.locks import exclusive

MARKER = "longce_export.json"
"""Says how the model came about and which files the export wrote."""


def check_replaceable(folder: Path) -> None:
    """Raise a ``ValueError`` unless a folder is missing, empty, or an earlier export without anything added to it."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"`output_dir` of the export, '{folder}', is a file: name a new folder.")
    if folder.is_mount():
        raise ValueError(
            f"`output_dir` of the export, '{folder}', is a mount point, which cannot be replaced: name a folder in it."
        )
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if not files and not any(folder.iterdir()):
        return
    if added := sorted(files - _written(folder)):
        raise ValueError(
            f"`output_dir` of the export, '{folder}', exists and is no earlier export, which would be replaced"
            f" (it holds '{added[0]}'): name a new folder, or remove this one."
        )


def check_writable(folder: Path) -> None:
    """Raise a ``ValueError`` unless the folder's parent, which is made if need be, can be written to."""
    writable_folder(folder.resolve().parent, remedy="Name another `output_dir`.")


def _written(folder: Path) -> set[str]:
    try:
        return {MARKER, *json.loads((folder / MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError):
        return set()


@contextmanager
def export_folder(target: Path, facts: str) -> Iterator[Path]:
    """A folder to be filled, which takes the place of an earlier export at once, when the block ends.

    Of several processes that export to one folder each waits for the one before.

    Args:
        target: The folder to be; of a link the folder that it leads to.
        facts: JSON to be kept in the marker.

    Raises:
        ValueError: If the target is something else than an earlier export, or cannot be written, as on a full disk.
    """
    check_replaceable(target)
    check_writable(target)
    try:
        with _replaced(target.resolve(), facts) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"The export to '{target}' could not be written: {error}. What was there before still is. Free some room,"
            " or name another `output_dir`."
        ) from error


@contextmanager
def _replaced(target: Path, facts: str) -> Iterator[Path]:
    with exclusive(target), atomic_folder(target, replace=True) as folder:
        yield folder
        files = [path for path in folder.rglob("*") if path.is_file()]
        (folder / MARKER).touch()
        for path in files:
            path.chmod((folder / MARKER).stat().st_mode)  # safetensors ignores the umask and lets nobody else read
        names = sorted(str(path.relative_to(folder)) for path in files)
        marker = {"training": json.loads(facts), "files": names}
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        check_replaceable(target)

"""A folder that is replaced as a whole, and only if an earlier export wrote all that is in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_modules.files import atomic_folder, writable_folder

MARKER = "longce_export.json"
"""Says how the model came about and which files the export wrote."""

REMEDY = "export to a folder on another disk"


def check_replaceable(folder: Path) -> None:
    """Raise a ``ValueError`` unless a folder is missing, empty, or an earlier export without anything added to it."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"`output_dir` of the export, '{folder}', is a file: name a new folder.")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if not files and not any(folder.iterdir()):
        return
    if added := sorted(files - _written(folder)):
        raise ValueError(
            f"`output_dir` of the export, '{folder}', exists and is no earlier export, which would be replaced"
            f" (it holds '{added[0]}'): name a new folder, or remove this one."
        )


def _written(folder: Path) -> set[str]:
    try:
        return {MARKER, *json.loads((folder / MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError):
        return set()


@contextmanager
def export_folder(target: Path, facts: str) -> Iterator[Path]:
    """A folder to be filled, which takes the place of an earlier export at once, when the block ends.

    Args:
        target: The folder to be.
        facts: JSON to be kept in the marker.

    Raises:
        ValueError: If the target is something else than an earlier export, or its parent cannot be written to.
    """
    check_replaceable(target)
    writable_folder(target.parent, remedy="Name another `output_dir`.")
    with atomic_folder(target, replace=True, remedy=REMEDY) as folder:
        yield folder
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        marker = {"training": json.loads(facts), "files": files}
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        check_replaceable(target)

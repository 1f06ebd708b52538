"""Results on disk: a line each, written at once, so that an evaluation resumes where it was stopped."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_modules.tasks.evaluation.questions import Key
from lightning_modules.tasks.evaluation.runs import TaskResult
from lightning_modules.utilities.files import writable_folder, write_atomically

SETTINGS = "settings.json"


class ResultStore:
    """A folder of results that processes and machines may share: each writes one file and reads all.

    Args:
        folder: The folder; made if missing.
        settings: Plain values that all results must agree on. They are stored; until there is a result, others may
            replace them.

    Raises:
        ValueError: If the folder cannot be written to, or holds results of other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = writable_folder(folder, remedy="Name another folder by `--output`.")
        self.settings = settings
        begun = any(path.stat().st_size for path in self.folder.glob("results-*.jsonl"))
        if not (begun and (folder / SETTINGS).is_file()):
            write_atomically(folder / SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())
        _check_same(folder / SETTINGS, settings)

    def read(self) -> list[TaskResult]:
        """Return all results, each once, in the order of their names; an unfinished line is left out."""
        found: dict[Key, TaskResult] = {}
        for path in sorted(self.folder.glob("results-*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
                result = _parsed(line, path, number)
                found.setdefault(result.key, result)

        def order(key: Key) -> tuple[str, int, float, int]:
            return key.task, key.length, -1.0 if key.depth is None else key.depth, key.index

        return [found[key] for key in sorted(found, key=order)]

    def path(self, rank: int, processes: int) -> Path:
        """Return the file of one of several processes."""
        return self.folder / f"results-{rank:05d}-of-{processes:05d}.jsonl"

    def append(self, path: Path, results: Iterable[TaskResult]) -> None:
        """Append results to a file that only this process writes, and wait until they would survive a power cut.

        The part of a line that a killed process has left is removed first. A ``ValueError`` is raised if another
        process has begun with other settings meanwhile.
        """
        _check_same(self.folder / SETTINGS, self.settings)
        lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
        with path.open("ab+") as stream:
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.seek(0, os.SEEK_END)
            stream.write(lines.encode())
            stream.flush()
            os.fsync(stream.fileno())


def _parsed(line: bytes, path: Path, number: int) -> TaskResult:
    try:
        values = json.loads(line)
        return TaskResult(**{**values, "answers": tuple(values["answers"])})
    except (ValueError, TypeError, KeyError) as error:
        names = ", ".join(field.name for field in fields(TaskResult))
        raise ValueError(
            f"'{path}', line {number}, is not a result of an evaluation ({names}): it was changed or damaged. Remove"
            " the line, and its question is put again."
        ) from error


def _check_same(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        stored = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged ({error}): name another folder by `--output`.") from error
    for name in dict.fromkeys((*stored, *settings)):
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"The results in '{path.parent}' were made with {name} = {stored.get(name)!r}, and now it is"
                f" {settings.get(name)!r}: set it back, or name another folder by `--output`."
            )

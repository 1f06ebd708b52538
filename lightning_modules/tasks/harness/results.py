"""Results of tasks of lm-evaluation-harness: a file per finished task, and one for all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import plain
from lightning_modules.visualization.report import Table, as_text_table


class Results:
    """The folder of results; those of other settings, or of another task file by its hash, raise a ``ValueError``.

    ``tasks/NAME.json`` is a task's, ``samples/NAME.jsonl`` holds questions and answers, and ``harness.json`` all that
    is known.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.settings = dict(settings)

    def write(self, name: str, result: Mapping[str, Any], task_file: str | None = None) -> None:
        """Write the result of a task; its questions and answers, if there are any, in a separate file."""
        result = dict(result)
        if (samples := result.pop("samples", None)) is not None:
            lines = "".join(json.dumps(plain(sample)) + "\n" for sample in samples)
            write_atomically(self.folder / "samples" / f"{quote(name, safe='')}.jsonl", lines.encode())
        write_json(self._path(name), {**result, "settings": self._settings(task_file)})

    def read(self, name: str, task_file: str | None = None) -> dict[str, Any] | None:
        """Return what `write` has stored, or None."""
        if not (path := self._path(name)).is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            settings = content.pop("settings")
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"'{path}' is damaged ({error}): remove it, and the task is asked again.") from error
        known = self._settings(task_file)
        if other := [name for name, value in known.items() if settings.get(name) != value]:
            there = ", ".join(f"{name}={settings.get(name)!r} (now {known[name]!r})" for name in other)
            raise ValueError(f"'{path}' is of another run: {there}. Give another `output`, or the same settings.")
        return dict(content)

    def _path(self, name: str) -> Path:
        return self.folder / "tasks" / f"{quote(name, safe='')}.json"

    def _settings(self, task_file: str | None) -> dict[str, Any]:
        return self.settings | ({"task_file": task_file} if task_file else {})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, with null for numbers that are not finite."""
    write_atomically(path, (json.dumps(plain(content), indent=1) + "\n").encode())


def table(result: Mapping[str, Any]) -> str:
    """Format results as text: a row per metric, then the scores of sets in percent."""
    rows = []
    for kind in ("tasks", "groups"):
        for name, entry in result[kind].items():
            metrics = entry["metrics"] if kind == "tasks" else entry
            about = (str(entry["questions"]), str(entry["num_fewshot"])) if kind == "tasks" else ("", "")
            for key, value in metrics.items():
                metric, _, kept = key.partition(",")
                if metric.endswith("_stderr") or value is None:
                    continue
                error = metrics.get(f"{metric}_stderr,{kept}")
                label = metric if kept == "none" else f"{metric} ({kept})"
                rows.append((name, *about, label, f"{value:.4f}", "" if error is None else f"{error:.4f}"))
    rows += [(name, "", "", "score, %", f"{value:.1f}", "") for name, value in result["scores"].items()]
    head = ("task", "questions", "examples", "metric", "value", "± error")
    text = as_text_table(Table(head, rows), left=(0, 3))
    cut = sum(entry["truncated"] for entry in result["tasks"].values())
    if cut:
        text += f"\n{cut:,} prompts were too long for `max_length` = {result['settings']['max_length']} and were cut."
    return text

"""Evaluation on longce's tasks: questions, stored results and report."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.progress import advance
from lightning_modules.models.scorer import Scorer
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.tasks.evaluation.questions import (
    Key,
    TaskResult,
    check_questions,
    make_questions,
    put_questions,
    question_keys,
)
from lightning_modules.tasks.evaluation.report import as_text, write_task_report
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.utilities.files import writable_folder, write_json
from lightning_modules.utilities.identity import combined_hash, content_hash
from lightning_modules.utilities.locks import exclusive
from lightning_modules.utilities.progress import progress_bar

log = logging.getLogger(__name__)

QUESTIONS_AT_ONCE, TOKENS_AT_ONCE = 256, 2**21
"""Limits of the questions in memory, and of their tokens: the model waits while questions are generated."""

SETTINGS = "settings.json"


class Evaluation:
    """Evaluation of a model on longce's tasks; each question has one result in the folder, from any process.

    ``tasks`` are names of longce's tasks and groups, and import paths; ``provenance`` identifies the model. Raises a
    ``ValueError`` if the folder has results of other settings.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        tasks: Sequence[str],
        tokenizer: PreTrainedTokenizerFast,
        provenance: Provenance,
    ) -> None:
        self.config = config
        self.tasks = find_tasks(tasks, **config.sources, documents=config.documents)
        self.keys = question_keys(self.tasks, config.lengths, config.samples, config.depths)
        self.prompter = Prompter(tokenizer, **config.prompting)
        check_questions(self.keys, self.tasks, self.prompter, config.seed)
        settings = {
            # A served model may move to another address.
            "model": provenance.identity if is_served(config.model) else config.model,
            **provenance._asdict(),
            "mode": config.mode,
            "seed": config.seed,
            **config.prompting,
            "gen_kwargs": config.generation or None,
            "documents": config.documents,
            **{name: None if path is None else _hash_texts(Path(path)) for name, path in config.sources.items()},
        }
        self.store = ResultStore(config.output_folder, settings)

    def missing(self, rank: int = 0, processes: int = 1) -> list[Key]:
        """Return the questions of this process that have no result yet."""
        known = {result.key for result in read_results(self.store.folder)}
        return [key for key in self.keys[rank::processes] if key not in known]

    def ask(self, backbone: Scorer, rank: int = 0, processes: int = 1) -> None:
        """Ask the missing questions, and store each result immediately."""
        with exclusive(own := self.store.path(rank, processes)):
            if not (keys := self.missing(rank, processes)):
                return
            backbone.check_length(max(key.length for key in keys))
            bar = progress_bar("tasks", unit=" tokens", total=sum(key.length for key in keys))
            answered: list[Key] = []

            def store(results: list[Any]) -> None:
                self.store.append(own, results)
                answered.extend(result.key for result in results)
                bar.set_description(f"tasks, {len(answered)} of {len(keys)} questions answered", refresh=False)
                bar.update(sum(key.length for key in answered) - bar.n)  # passes count other tokens, or a server has

            with advance(bar):
                for chunk in _split_by_cell(keys):
                    bar.set_postfix_str(f"{chunk[0].task}, {chunk[0].length} tokens", refresh=False)
                    questions = make_questions(chunk, self.tasks, self.prompter, self.config.seed)
                    options: Any = {"generation": self.config.generation, "done": store}
                    put_questions(backbone, self.prompter, questions, self.config.mode, **options)

    def report(self) -> str:
        """Write the report of all results so far, and return it as text."""
        known = {result.key: result for result in read_results(self.store.folder)}
        results = [known[key] for key in self.keys if key in known]
        missing = len(self.keys) - len(results)
        summary = write_task_report(self.store.folder, results, self.store.settings, missing)
        text = as_text(summary, missing, self.store.settings)
        return f"{text}\nReport: {self.store.folder / 'report.html'}"


def _split_by_cell(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """Yield the questions of one task and length, a limited number at a time."""
    for _, group in groupby(keys, key=lambda key: (key.task, key.length)):
        cell = list(group)
        size = max(1, min(QUESTIONS_AT_ONCE, TOKENS_AT_ONCE // cell[0].length))
        yield from (cell[first : first + size] for first in range(0, len(cell), size))


def _hash_texts(path: Path) -> str:
    """Hash the texts that questions are made from, because other texts give other questions."""
    files = list(path.glob("*.txt")) if path.is_dir() else None
    return f"sha256:{content_hash(path, files)}"


class ResultStore:
    """Folder of results that several processes and machines may share: each writes one file and reads all files.

    All results have the same settings. Settings may be replaced until there is a result.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = writable_folder(folder, remedy="Choose another folder with `--output`.")
        self.settings = settings
        begun = any(path.stat().st_size for path in self.folder.glob("results-*.jsonl"))
        with exclusive(folder / SETTINGS):
            if not (begun and (folder / SETTINGS).is_file()):
                write_json(folder / SETTINGS, settings)
            check_same_settings(folder, _read_settings(folder), settings)

    def path(self, rank: int, processes: int) -> Path:
        """Return the file of one of several processes."""
        return self.folder / f"results-{rank:05d}-of-{processes:05d}.jsonl"

    def append(self, path: Path, results: Iterable[TaskResult]) -> None:
        """Append results to the file of this process, and flush it to disk.

        An unfinished line of a killed process is removed first.
        """
        check_same_settings(self.folder, _read_settings(self.folder), self.settings)
        settings = _hash_settings(self.folder)
        lines = "".join(json.dumps({**asdict(result), "settings": settings}) + "\n" for result in results)
        with path.open("ab+") as stream:
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.seek(0, os.SEEK_END)
            stream.write(lines.encode())
            stream.flush()
            os.fsync(stream.fileno())


def read_results(folder: Path) -> list[TaskResult]:
    """Return all results in a folder, each once; unfinished lines of killed processes are left out.

    Raises a ``ValueError`` for a line that is damaged or belongs to an evaluation with other settings.
    """
    found: dict[Key, TaskResult] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        settings = _hash_settings(folder)
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            result = _parse_result(line, path, number, settings)
            found.setdefault(result.key, result)
    return list(found.values())


def _parse_result(line: bytes, path: Path, number: int, settings: str) -> TaskResult:
    try:
        values = json.loads(line)
        if values.pop("settings", settings) != settings:
            raise ValueError("its settings are not those of the folder")
        return TaskResult(**{**values, "answers": tuple(values["answers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"'{path}', line {number}, is not a result of this evaluation ({error}). Remove the line, and its question"
            " is asked again."
        ) from error


def _read_settings(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / SETTINGS).read_bytes()))


def _hash_settings(folder: Path) -> str:
    """Return the hash that each result has of the settings; empty without settings."""
    return combined_hash(_read_settings(folder))[:16] if (folder / SETTINGS).is_file() else ""


def check_same_settings(place: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names the first setting that differs."""
    for name in dict.fromkeys((*stored, *settings)):
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"The results in '{place}' have {name} = {stored.get(name)!r}, but this evaluation has"
                f" {settings.get(name)!r}: restore it, or choose another folder with `--output`."
            )

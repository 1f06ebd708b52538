"""Evaluation on longce's tasks: questions, stored answers and report."""

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.progress import advance
from lightning_modules.models.scorer import Scorer
from lightning_modules.scoring.records import Source
from lightning_modules.tasks.evaluation.answers import (
    ANSWERS_FILE,
    FOLDER,
    Answer,
    Key,
    Setting,
    read_answers,
    write_answers,
)
from lightning_modules.tasks.evaluation.config import EvaluationConfig, TaskConfig
from lightning_modules.tasks.evaluation.questions import (
    check_questions,
    make_questions,
    put_questions,
    question_keys,
)
from lightning_modules.tasks.evaluation.report import as_text, write_task_report
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks, hash_task_code
from lightning_modules.utilities.files import writable_folder
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import exclusive
from lightning_modules.utilities.progress import progress_bar

log = logging.getLogger(__name__)

QUESTIONS_AT_ONCE, TOKENS_AT_ONCE = 256, 2**21
"""Limits of the questions in memory, and of their tokens: the model waits while questions are generated."""


class Evaluation:
    """Evaluation of a model on longce's tasks; each question has one answer in the folder, from any process.

    ``tasks`` are names of longce's tasks and groups, and import paths; ``provenance`` identifies the model. Raises a
    ``ValueError`` if the folder has answers of other settings.
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
        self.short_context = config.make_short_context() if config.mode == "key_tokens" else None
        check_questions(self.keys, self.tasks, self.prompter, config.seed, self.short_context)
        # A served model may move to another address.
        name = provenance.identity if is_served(config.model) else config.model
        model = Source(name, *provenance, special_tokens=config.add_special_tokens)
        setting = describe_setting(config)
        if config.mode == "key_tokens":
            setting = setting._replace(
                context_length=config.context_length, stride=config.stride, alpha=config.alpha, beta=config.beta
            )
        task_codes = {task.name: hash_task_code(task) for task in self.tasks}
        self.store = AnswerStore(config.output_folder, model, setting, task_codes)

    def missing(self, rank: int = 0, processes: int = 1) -> list[Key]:
        """Return the questions of this process that have no answer yet."""
        known = {answer.key for answer in self.store.read()}
        return [key for key in self.keys[rank::processes] if key not in known]

    def ask(self, backbone: Scorer, rank: int = 0, processes: int = 1) -> None:
        """Ask the missing questions, and store each answer immediately."""
        with exclusive(self.store.folder / f"{rank:05d}-of-{processes:05d}"):
            keys = self.missing(rank, processes)
            if not keys:
                return
            backbone.check_length(max(key.length for key in keys))
            bar = progress_bar("tasks", unit=" tokens", total=sum(key.length for key in keys))
            answered: list[Key] = []

            def store(answers: list[Answer]) -> None:
                self.store.append(answers)
                answered.extend(answer.key for answer in answers)
                bar.set_description(f"tasks, {len(answered)} of {len(keys)} questions answered", refresh=False)
                bar.update(sum(key.length for key in answered) - bar.n)  # passes count other tokens, or a server has

            with advance(bar):
                for chunk in _split_by_cell(keys):
                    bar.set_postfix_str(f"{chunk[0].task}, {chunk[0].length} tokens", refresh=False)
                    questions = make_questions(chunk, self.tasks, self.prompter, self.config.seed)
                    self.store.begin_file(rank, processes)
                    put_questions(
                        backbone,
                        self.prompter,
                        questions,
                        self.config.mode,
                        generation=self.config.generation,
                        short_context=self.short_context,
                        done=store,
                    )

    def report(self) -> str:
        """Write the answers so far and their report, and return it as text."""
        known = {answer.key: answer for answer in self.store.read()}
        answers = [known.get(key) or self.store.identify(_without_answer(key)) for key in self.keys]
        folder = self.config.output_folder
        write_answers(folder / ANSWERS_FILE, answers)
        summary = write_task_report(folder, answers)
        return f"{as_text(summary, answers[0].settings)}\nReport: {folder / 'report.html'}"


def describe_setting(config: TaskConfig) -> Setting:
    """Return how questions are made and asked: other texts, for example, give other questions."""
    texts: dict[str, Any] = {}
    for name, path in config.sources.items():
        if path is None:
            texts[name] = None
        else:
            texts[name] = _hash_texts(Path(path))
    generation = config.generation
    return Setting(
        mode=config.mode,
        seed=config.seed,
        chat_template=config.chat_template,
        system_instruction=config.system_instruction,
        gen_kwargs=json.dumps(generation, sort_keys=True) if generation else None,
        documents=config.documents,
        **texts,
    )


def _without_answer(key: Key) -> Answer:
    return Answer(key.task, key.length, key.depth, key.index)


def _split_by_cell(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """Yield the questions of one task and length, a limited number at a time."""
    for _, group in groupby(keys, key=lambda key: (key.task, key.length)):
        cell = list(group)
        size = max(1, min(QUESTIONS_AT_ONCE, TOKENS_AT_ONCE // cell[0].length))
        for first in range(0, len(cell), size):
            yield cell[first : first + size]


def _hash_texts(path: Path) -> str:
    """Hash the texts that questions are made from, because other texts give other questions."""
    files = list(path.glob("*.txt")) if path.is_dir() else None
    return f"sha256:{content_hash(path, files)}"


class AnswerStore:
    """Answers in a folder that several processes and machines may share: each writes its own files, and reads all.

    All answers belong to one model and setting, and those of a task to one version of its code. ``task_codes`` are the
    hashes of the code of tasks, by their names.
    """

    def __init__(
        self, output: Path, model: Source, setting: Setting, task_codes: Mapping[str, str] | None = None
    ) -> None:
        earlier = next(output.glob("results-*.jsonl"), None)
        if earlier is not None:
            raise ValueError(f"'{earlier}' has answers of longce 0.1: choose another folder with `--output`.")
        self.folder = writable_folder(output / FOLDER, remedy="Choose another folder with `--output`.")
        self.model = model
        self.setting = setting
        self._task_codes = task_codes or {}
        self._file = Path()
        self._answers: list[Answer] = []  # in the file
        self.read()

    def read(self) -> list[Answer]:
        """Return all answers, each once.

        Raises a ``ValueError`` for a file that is damaged or belongs to an evaluation with other settings.
        """
        found: dict[Key, Answer] = {}
        for file in sorted(self.folder.glob("*.parquet")):
            for answer in self._read_file(file):
                found.setdefault(answer.key, answer)
        return list(found.values())

    def begin_file(self, rank: int, processes: int) -> None:
        """Begin the next file of a process, which is written again with each answer: it has few."""
        for number in itertools.count():
            self._file = self.folder / f"{rank:05d}-of-{processes:05d}-{number:05d}.parquet"
            if not self._file.exists():
                break
        self._answers = []
        # Another evaluation may have begun in the folder at the same time.
        for other in sorted(self.folder.glob("*.parquet"))[:1]:
            self._read_file(other)

    def append(self, answers: Sequence[Answer]) -> None:
        """Add answers to the file that was begun, and flush it to disk."""
        self._answers.extend(map(self.identify, answers))
        write_answers(self._file, self._answers)

    def identify(self, answer: Answer) -> Answer:
        """Return an answer with its model and setting, and the code of its task."""
        task_code = self._task_codes.get(answer.task, "")
        return replace(answer, model=self.model, setting=self.setting, task_code=task_code)

    def _read_file(self, file: Path) -> list[Answer]:
        answers = []
        for stored in read_answers(file):
            # The folder of a model may have moved, or be given by another path.
            answer = replace(stored, model=stored.model._replace(name=self.model.name))
            answers.append(answer)
            if (answer.model, answer.setting) != (self.model, self.setting):
                check_same_settings(file, answer.settings, self.identify(answer).settings)
            if answer.task in self._task_codes:
                name = f"code of the task '{answer.task}'"
                check_same_settings(file, {name: answer.task_code}, {name: self._task_codes[answer.task]})
        return answers


def check_same_settings(place: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names the first setting that differs."""
    for name in dict.fromkeys((*stored, *settings)):
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"The results in '{place}' have {name} = {stored.get(name)!r}, but this evaluation has"
                f" {settings.get(name)!r}: restore it, or choose another folder with `--output`."
            )

"""Answers of a model: a row for each question, with its score and settings; importable without torch.

`lightning_modules.tasks.evaluation.summary.summarize` computes their summary.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_modules.scoring.records import Source
from lightning_modules.utilities.tables import read_rows, write_rows

FORMAT = "longce-answers-3"

FOLDER = "answers"
"""Folder of the answers in the folder of a run, and of an evaluation that is not complete."""

ANSWERS_FILE = "answers.parquet"
"""File in a folder of ``longce evaluate`` with the answers to all questions of the last call."""


@dataclass(frozen=True)
class Key:
    """Identity of a question, which with seed and tokenizer determines its content.

    ``length`` counts the tokens of prompt and answer together. ``depth`` is the requested depth, from 0 (front) to 1
    (end); None if the task chooses it.
    """

    task: str
    length: int
    depth: float | None
    index: int


class Setting(NamedTuple):
    """Settings of an evaluation."""

    mode: str = ""
    seed: int = 0
    chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: str | None = None  # JSON
    documents: int | None = None
    haystack: str | None = None  # hashes of the texts
    squad: str | None = None
    hotpot: str | None = None
    nq_open: str | None = None
    context_length: int | None = None  # K, d and thresholds of the mode `key_tokens`
    stride: int | None = None
    alpha: float | None = None
    beta: float | None = None


class ResponseTokens(NamedTuple):
    """The tokens of a right response: whether each is a token of an answer, and its log-likelihoods in nats.

    Empty unless the mode is ``key_tokens``, and if a short context has the answer too.
    """

    is_answer: tuple[bool, ...] = ()
    long: tuple[float, ...] = ()  # given the whole question
    short: tuple[float, ...] = ()  # given the short context


_NOT_KNOWN = Source()
_NOT_SET = Setting()
_NO_TOKENS = ResponseTokens()


@dataclass(frozen=True)
class Answer:
    """A question, the model's answer, and its score from 0 to 1.

    The task scores generated answers; teacher-forced answers are right if each token is the likeliest. ``depth`` is
    None if the answer is in several places. ``prediction`` is the generated text, or the likeliest token at each
    position of the right answer. ``answer_nll`` and ``other_nll`` are sums of negative log-likelihoods, in nats, of the
    answers' tokens and of all other input tokens; None if generated. ``seconds`` of questions that are asked together
    are split equally. The ``score`` of a question that has no answer yet is NaN.
    """

    task: str
    length: int
    asked_depth: float | None
    index: int
    depth: float | None = None
    score: float = math.nan
    right_answers: tuple[str, ...] = ()
    prediction: str = ""
    prompt_tokens: int = 0
    answer_nll: float | None = None
    answer_tokens: int = 0
    other_nll: float | None = None
    other_tokens: int = 0
    seconds: float = 0.0
    response: ResponseTokens = _NO_TOKENS
    model: Source = _NOT_KNOWN
    setting: Setting = _NOT_SET
    stage: str = ""  # val or test; empty for a stored model
    step: int = 0  # optimizer steps
    task_code: str = ""  # hash of the files of a task class of the user; empty for longce's tasks

    @property
    def key(self) -> Key:
        """Key of the question."""
        return Key(self.task, self.length, self.asked_depth, self.index)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings shared by all answers of an evaluation, by name."""
        about = {"model": self.model.name, **self.model.provenance._asdict()}
        return {**about, "add_special_tokens": self.model.special_tokens, **self.setting._asdict()}


def write_answers(path: str | os.PathLike[str], answers: Sequence[Answer]) -> None:
    """Write answers to a parquet file with a column for each number and name, atomically."""
    write_rows(path, answers, Answer, format=FORMAT)


def read_answers(path: str | os.PathLike[str]) -> list[Answer]:
    """Read the answers of a file.

    Raises:
        ValueError: If the file does not hold answers.
    """
    return read_rows(path, Answer, format=FORMAT, contents="answers (.parquet of `longce evaluate`)")


def split_evaluations(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Return the answers of each evaluation: of one model, setting and step."""
    groups: dict[tuple[Source, Setting, str, int], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.model, answer.setting, answer.stage, answer.step), []).append(answer)
    return list(groups.values())

"""Putting questions to a model."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.evaluation.config import Mode
from lightning_modules.tasks.evaluation.questions import Key, Question
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.teacher_forcing import AnswerScores, teacher_forced


@dataclass(frozen=True)
class TaskResult:
    """A question, the model's answer and its score.

    Attributes:
        task: Name of the task.
        length: Tokens that prompt and answer may have together.
        asked_depth: Depth that was asked for; None if it was left to the task.
        index: Number of the question.
        depth: Depth of the answer; None if it is in many places.
        score: From 0 to 1: of generated answers by the task, of forced ones the fraction of which each token is the
            likeliest.
        answers: The right answers.
        prediction: The model's answer, or the likeliest token at each token of the right answer.
        prompt_tokens: Tokens that the model read before its answer.
        answer_nll: Sum over the tokens of the answers of their negative log-likelihoods, in nats; None if generated.
        answer_tokens: Their number; 0 if generated.
        other_nll: The same over all other tokens that were read.
        other_tokens: Their number.
        seconds: Time it took; questions that were put together share it equally.
    """

    task: str
    length: int
    asked_depth: float | None
    index: int
    depth: float | None
    score: float
    answers: tuple[str, ...]
    prediction: str
    prompt_tokens: int
    answer_nll: float | None
    answer_tokens: int
    other_nll: float | None
    other_tokens: int
    seconds: float

    @property
    def key(self) -> Key:
        """Key of the question."""
        return Key(self.task, self.length, self.asked_depth, self.index)


def put_questions(
    backbone: Backbone,
    prompter: Prompter,
    questions: Sequence[Question],
    mode: Mode,
    *,
    done: Callable[[list[TaskResult]], None] = lambda _: None,
) -> list[TaskResult]:
    """Put questions to a model, many at a time, most quickly if their lengths are alike.

    Where weights are sharded, all processes must call it, each with any number of questions.

    Args:
        backbone: The model.
        prompter: Encodes for its tokenizer.
        questions: The questions.
        mode: Whether answers are generated or forced.
        done: Called with the results of questions that were put together, as soon as there are any.

    Returns:
        Results in the order of the questions.

    Raises:
        ValueError: If the mode or a token is unknown, or a question is longer than learned positions allow.
    """
    check_mode(mode)
    results: dict[int, TaskResult] = {}
    last = time.perf_counter()

    def take(answers: dict[int, Answer]) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds, last = (now - last) / len(answers), now
        found = {number: _result(questions[number], *answer, seconds) for number, answer in answers.items()}
        results.update(found)
        done(list(found.values()))

    (_generate if mode == "generate" else _force)(backbone, prompter, questions, take)
    return [results[number] for number in range(len(questions))]


def check_mode(mode: str) -> None:
    """Raise a ``ValueError`` for an unknown mode."""
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got '{mode}'.")


Answer = tuple[float, str, int, AnswerScores | None]
"""Score, prediction, tokens of the prompt, and the scores of a forced answer."""

Take = Callable[[dict[int, Answer]], None]


def _generate(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], take: Take) -> None:
    examples = [question.example for question in questions]
    prompts = [prompter.encode(example.prompt, example.answer_prefix) for example in examples]
    end = prompter.tokenizer.eos_token_id  # ends a chat's turn, whatever the model's config specifies

    def finish(continuations: Mapping[int, list[int]]) -> None:
        found: dict[int, Answer] = {}
        for number, tokens in continuations.items():
            text = str(prompter.tokenizer.decode(tokens, skip_special_tokens=True))
            found[number] = examples[number].score(text), text, len(prompts[number]), None
        take(found)

    limits = [example.max_new_tokens for example in examples]
    generate(backbone, prompts, limits, done=finish, stopped=lambda _, tokens: tokens[-1] == end)


def _force(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], take: Take) -> None:
    forced = [
        prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
        for _, example in questions
    ]
    for (key, example), answer in zip(questions, forced, strict=True):
        if not answer.spans:
            raise ValueError(
                f"The right continuation {example.target!r:.200} of '{key.task}' holds none of its answers: set `mode`"
                " to 'generate', or correct the task's `target`."
            )

    def finish(scores: Mapping[int, AnswerScores]) -> None:
        found: dict[int, Answer] = {}
        for number, answer in scores.items():
            text = str(prompter.tokenizer.decode(answer.greedy, skip_special_tokens=True))
            found[number] = answer.score, text, forced[number].answer_start, answer
        take(found)

    teacher_forced(backbone, forced, done=finish)


def _result(
    question: Question, score: float, prediction: str, prompt_tokens: int, forced: AnswerScores | None, seconds: float
) -> TaskResult:
    key, example = question
    return TaskResult(
        task=key.task,
        length=key.length,
        asked_depth=key.depth,
        index=key.index,
        depth=example.depth,
        score=score,
        answers=example.answers,
        prediction=prediction,
        prompt_tokens=prompt_tokens,
        answer_nll=None if forced is None else -forced.answer_log_likelihood,
        answer_tokens=0 if forced is None else forced.answer_tokens,
        other_nll=None if forced is None else -forced.other_log_likelihood,
        other_tokens=0 if forced is None else forced.other_tokens,
        seconds=seconds,
    )

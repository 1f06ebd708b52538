"""Putting questions to a model."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.evaluation.config import Mode
from lightning_modules.tasks.evaluation.questions import Key, Question
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.questions.prompter import ForcedAnswer, Prompter
from lightning_modules.tasks.teacher_forcing import AnswerScores, teacher_forced


@dataclass(frozen=True)
class TaskResult:
    """A question, the model's answer and its score.

    Attributes:
        task: Name of the task.
        length: Tokens that prompt and answer may have together.
        asked_depth: Where the answer was asked to stand; None if that was left to the task.
        index: Number of the question.
        depth: Where the answer stands; None if in many places.
        score: From 0 to 1. Generated answers are judged by the task; forced ones by the share of them of which each
            token is the likeliest.
        answers: What is right.
        prediction: What the model wrote, or at each token of the right answer would have.
        prompt_tokens: Tokens that the model read before its answer.
        answer_nll: Sum over the tokens of the answers of their negative log-likelihoods, in nats; None if generated.
        answer_tokens: Their number; 0 if generated.
        other_nll: The same over all other tokens that were read.
        other_tokens: Their number.
        seconds: Time it took; of questions that were put together, an equal share.
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
        """What names the question."""
        return Key(self.task, self.length, self.asked_depth, self.index)


Done = Callable[[list[TaskResult]], None]


def put_questions(
    backbone: Backbone,
    prompter: Prompter,
    questions: Sequence[Question],
    mode: Mode,
    *,
    done: Done = lambda _: None,
) -> list[TaskResult]:
    """Put questions to a model, many at a time.

    Where weights are divided among processes, all of them must call it, with as many questions as each has.

    Args:
        backbone: The model.
        prompter: Of its tokenizer.
        questions: Any; of like lengths they are quickest.
        mode: How they are put.
        done: Called with the results of questions that were put together, as soon as there are any.

    Returns:
        Results in the order of the questions.

    Raises:
        ValueError: If there is no such mode, the model does not know a token, or a question is longer than learned
            positions allow.
    """
    check_mode(mode)
    put = _generate if mode == "generate" else _force
    results: dict[int, TaskResult] = {}
    clock = _Clock()

    def take(finished: dict[int, TaskResult]) -> None:
        results.update(finished)
        done(list(finished.values()))

    put(backbone, prompter, questions, clock, take)
    return [results[number] for number in range(len(questions))]


def check_mode(mode: str) -> None:
    """Raise a ``ValueError`` for what is no `Mode`."""
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got '{mode}'.")


class _Clock:
    """Seconds since it was last asked, shared out."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def share(self, among: int) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds / among


Take = Callable[[dict[int, TaskResult]], None]


def _generate(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], clock: _Clock, take: Take) -> None:
    examples = [question.example for question in questions]
    prompts = [prompter.encode(example.prompt, example.answer_prefix) for example in examples]

    def judge(continuations: Mapping[int, list[int]]) -> None:
        seconds = clock.share(len(continuations))
        finished = {}
        for number, tokens in continuations.items():
            prediction = str(prompter.tokenizer.decode(tokens, skip_special_tokens=True))
            score = examples[number].score(prediction)
            finished[number] = _result(questions[number], score, prediction, len(prompts[number]), seconds)
        take(finished)

    end = prompter.tokenizer.eos_token_id  # ends a chat's turn, whatever the model's own config says

    def ended(_: int, tokens: list[int]) -> bool:
        return tokens[-1] == end

    generate(backbone, prompts, [example.max_new_tokens for example in examples], done=judge, stopped=ended)


def _force(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], clock: _Clock, take: Take) -> None:
    forced = [
        prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
        for _, example in questions
    ]
    _check_forced(questions, forced)

    def judge(scores: Mapping[int, AnswerScores]) -> None:
        seconds = clock.share(len(scores))
        take({number: _forced_result(number, answer, seconds) for number, answer in scores.items()})

    def _forced_result(number: int, scores: AnswerScores, seconds: float) -> TaskResult:
        prediction = str(prompter.tokenizer.decode(scores.greedy, skip_special_tokens=True))
        return _result(questions[number], scores.score, prediction, forced[number].answer_start, seconds, scores)

    teacher_forced(backbone, forced, done=judge)


def _check_forced(questions: Sequence[Question], forced: Sequence[ForcedAnswer]) -> None:
    for (key, example), answer in zip(questions, forced, strict=True):
        if not answer.spans:
            raise ValueError(
                f"No answer of '{key.task}' stands in its right continuation {example.target!r:.200}: set `mode` to"
                " 'generate', or mend the task's `target`."
            )


def _result(
    question: Question,
    score: float,
    prediction: str,
    prompt_tokens: int,
    seconds: float,
    forced: AnswerScores | None = None,
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

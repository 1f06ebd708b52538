"""Putting questions to a model."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
        task: As in `Key`, like length, asked depth and index.
        depth: Depth of the answer; None if it is in many places.
        score: From 0 to 1: of generated answers by the task, of forced ones the fraction of which each token is the
            likeliest.
        answers: The right answers.
        prediction: The model's answer, or the likeliest token at each token of the right answer.
        prompt_tokens: Tokens that the model read before its answer.
        answer_nll: Sum over the tokens of the answers of their negative log-likelihoods, in nats; None if generated.
        answer_tokens: Their number; 0 if generated.
        other_nll: The same over all other tokens that were read, of which there are ``other_tokens``.
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
    answer_nll: float | None = None
    answer_tokens: int = 0
    other_nll: float | None = None
    other_tokens: int = 0
    seconds: float = 0.0

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
        questions: The questions, in any order.
        mode: Whether answers are generated or forced.
        done: Called with the results of questions that were put together, as soon as there are any.

    Raises:
        ValueError: If a token is unknown, or a question is longer than learned positions allow.
    """
    results: dict[int, TaskResult] = {}
    last = time.perf_counter()

    def take(found: dict[int, TaskResult]) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds, last = (now - last) / len(found), now
        timed = {number: replace(result, seconds=seconds) for number, result in found.items()}
        results.update(timed)
        done(list(timed.values()))

    (_generate if mode == "generate" else _force)(backbone, prompter, questions, take)
    return [results[number] for number in range(len(questions))]


Take = Callable[[dict[int, TaskResult]], None]


def _generate(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], take: Take) -> None:
    prompts = [prompter.encode(example.prompt, example.answer_prefix) for _, example in questions]
    end = prompter.tokenizer.eos_token_id  # ends a chat's turn, whatever the model's config specifies

    def finish(continuations: Mapping[int, list[int]]) -> None:
        found = {}
        for number, tokens in continuations.items():
            text = str(prompter.tokenizer.decode(tokens, skip_special_tokens=True))
            score = questions[number].example.score(text)
            found[number] = _result(questions[number], score, text, len(prompts[number]))
        take(found)

    limits = [example.max_new_tokens for _, example in questions]
    generate(backbone, prompts, limits, done=finish, stopped=lambda _, tokens: tokens[-1] == end)


def _force(backbone: Backbone, prompter: Prompter, questions: Sequence[Question], take: Take) -> None:
    forced = []
    for key, example in questions:
        forced.append(prompter.force(example.prompt, example.answer_prefix, example.target, example.answers))
        if not forced[-1].spans:
            raise ValueError(
                f"The right continuation {example.target!r:.200} of '{key.task}' holds none of its answers: set `mode`"
                " to 'generate', or correct the task's `target`."
            )

    def finish(scores: Mapping[int, AnswerScores]) -> None:
        found = {}
        for number, answer in scores.items():
            text = str(prompter.tokenizer.decode(answer.greedy, skip_special_tokens=True))
            found[number] = replace(
                _result(questions[number], answer.score, text, forced[number].answer_start),
                answer_nll=-answer.answer_log_likelihood,
                answer_tokens=answer.answer_tokens,
                other_nll=-answer.other_log_likelihood,
                other_tokens=answer.other_tokens,
            )
        take(found)

    teacher_forced(backbone, forced, done=finish)


def _result(question: Question, score: float, prediction: str, prompt_tokens: int) -> TaskResult:
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
    )

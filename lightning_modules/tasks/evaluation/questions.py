"""Generate questions, ask a model, and score its answers."""

import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.scorer import Scorer
from lightning_modules.tasks.evaluation.answers import Answer, Key, ResponseTokens
from lightning_modules.tasks.evaluation.config import Depths, Mode
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import ForcedAnswer, Prompter
from lightning_modules.tasks.questions.task import Task
from lightning_modules.tasks.sampling import generation_options
from lightning_modules.tasks.teacher_forcing import AnswerScores, teacher_forced

MAX_UNKNOWN = 0.1  # fraction of the tokens


class Question(NamedTuple):
    """A question and its identity."""

    key: Key
    example: Example


def question_keys(tasks: Sequence[Task], lengths: Sequence[int], samples: int, depths: Depths = None) -> list[Key]:
    """Return all questions in order: ``samples`` of each task and length, and of each depth if the task varies it."""
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):  # classes of the user, whose answers would be mixed up
        raise ValueError(f"Several `tasks` have the same name: {', '.join(names)}. Rename them.")
    spaced = _space_depths(depths)
    keys = []
    for task in tasks:
        chosen = spaced if task.varies_depth else [None]
        for length in sorted(set(lengths)):
            for depth in chosen:
                keys += [Key(task.name, length, depth, index) for index in range(samples)]
    return keys


def make_questions(keys: Iterable[Key], tasks: Sequence[Task], prompter: Prompter, seed: int) -> list[Question]:
    """Generate questions; raise a ``ValueError`` if a length is too short for a task."""
    by_name = {task.name: task for task in tasks}
    questions = []
    for key in keys:
        example = by_name[key.task].example(prompter, key.length, key.index, seed=seed, depth=key.depth)
        questions.append(Question(key, example))
    return questions


def check_questions(
    keys: Iterable[Key],
    tasks: Sequence[Task],
    prompter: Prompter,
    seed: int,
    short_context: ShortContext | None = None,
) -> None:
    """Generate the first question of each task and length, to find lengths that are too short.

    With ``short_context``, also check that some response of each can show whether a model finds key tokens. Warn if
    the tokenizer does not know the words of a question, which no model could answer.
    """
    cells = [list(cell) for _, cell in groupby(keys, key=lambda key: (key.task, key.length))]
    if short_context is not None:
        for cell in cells:
            _check_responses(cell, tasks, prompter, seed, short_context)
    for key, example in make_questions([cell[0] for cell in cells], tasks, prompter, seed):
        tokens = prompter.encode(example.prompt, example.answer_prefix)
        unknown = tokens.count(prompter.tokenizer.unk_token_id) / len(tokens)
        if unknown > MAX_UNKNOWN:
            warnings.warn(
                f"{unknown:.0%} of the tokens of '{key.task}' are unknown to the tokenizer"
                f" '{prompter.tokenizer.name_or_path}': scores are not meaningful. Use tasks in the model's language.",
                stacklevel=2,
            )


def _check_responses(
    cell: Sequence[Key], tasks: Sequence[Task], prompter: Prompter, seed: int, short_context: ShortContext
) -> None:
    """Raise a ``ValueError`` if no question of a task and length needs more than the short context."""
    for key in cell:
        (question,) = make_questions([key], tasks, prompter, seed)
        forced = _force_question(prompter, question, short_context)
        if not _is_answer_near(prompter, question, forced, short_context):
            return
    raise ValueError(
        f"Every question of '{cell[0].task}' with {cell[0].length} tokens has its answer in the short context too"
        f" (`context_length` + `stride` = {short_context.window_length}): choose lower `depths` or larger `lengths`, or"
        " lower these."
    )


def _is_answer_near(prompter: Prompter, question: Question, forced: ForcedAnswer, short_context: ShortContext) -> bool:
    """Return whether a short context of the response has an answer, so that the long context is not needed."""
    start = forced.response_start
    near = str(prompter.tokenizer.decode(forced.input_ids[max(0, start - short_context.window_length) : start]))
    # As a whole word: a short number may be a part of another one.
    return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", near) for answer in question.example.answers)


def even_depths(count: int) -> list[float]:
    """Return ``count`` evenly spaced depths from 0 to 1; ``count`` must be at least 2."""
    return [number / (count - 1) for number in range(count)]


def _space_depths(depths: Depths) -> list[float | None]:
    if depths is None:
        return [None]
    if isinstance(depths, int):
        depths = even_depths(depths) if depths > 1 else []
    if not depths or len(set(depths)) < len(depths) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError("`depths` must be a number of 2 or more, or distinct depths from 0 (front) to 1 (end).")
    return [*sorted(depths)]


def put_questions(
    backbone: Scorer,
    prompter: Prompter,
    questions: Sequence[Question],
    mode: Mode,
    *,
    generation: Mapping[str, Any] = MappingProxyType({}),
    short_context: ShortContext | None = None,
    done: Callable[[list[Answer]], None] = lambda _: None,
) -> list[Answer]:
    """Ask a model questions in groups; questions of similar length are the fastest.

    ``generation`` has arguments of `lightning_modules.tasks.sampling`; answers are greedy by default. The mode
    ``key_tokens``, and no other, needs a ``short_context``. ``done`` is called with the answers of each group. If
    weights are sharded, all processes must call this, each with any number of questions.
    """
    assert (mode == "key_tokens") == (short_context is not None)
    answers: dict[int, Answer] = {}
    last = time.perf_counter()

    def take(found: dict[int, Answer]) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds = (now - last) / len(found)
        last = now
        timed = [replace(answer, seconds=seconds) for answer in found.values()]
        answers.update(zip(found, timed, strict=True))
        done(timed)

    if mode == "generate":
        _generate_answers(backbone, prompter, questions, generation, take)
    else:
        _force_answers(backbone, prompter, questions, take, short_context)
    return [answers[number] for number in range(len(questions))]


Take = Callable[[dict[int, Answer]], None]


def _generate_answers(
    backbone: Scorer,
    prompter: Prompter,
    questions: Sequence[Question],
    generation: Mapping[str, Any],
    take: Take,
) -> None:
    if not isinstance(backbone, Backbone):
        raise ValueError("A served model cannot generate answers: set `mode` to 'teacher_forced', or load the model.")
    prompts = []
    limits = []
    for _, example in questions:
        prompts.append(prompter.encode(example.prompt, example.answer_prefix))
        limits.append(generation.get("max_gen_toks", example.max_new_tokens))
    end = prompter.tokenizer.eos_token_id  # it ends the turn of a chat, whatever the model's config specifies

    def finish(number: int, tokens: list[int]) -> None:
        text = str(prompter.tokenizer.decode(tokens, skip_special_tokens=True))
        score = questions[number].example.score(text)
        take({number: _make_answer(questions[number], score, text, len(prompts[number]))})

    generate(
        backbone,
        prompts,
        limits,
        end_tokens=[] if end is None else [end],
        options=generation_options(generation),
        seed=generation.get("seed", 0),
        done=finish,
    )


def _force_question(prompter: Prompter, question: Question, short_context: ShortContext | None) -> ForcedAnswer:
    """Return the tokens of a question and its answers.

    Raise a ``ValueError`` if it has no answers, or with ``short_context`` if its response has no other tokens, or
    begins before tokens have a short context.
    """
    key, example = question
    forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
    if not forced.spans:
        raise ValueError(
            f"The target {example.target!r:.200} of '{key.task}' contains none of its answers: correct the task's"
            " `target`, or set `mode` to 'generate'."
        )
    if short_context is None:
        return forced
    if forced.response_start < short_context.window_length:
        raise ValueError(
            f"The response to a question of '{key.task}' with {key.length} tokens begins at token"
            f" {forced.response_start}, before tokens have a short context (`context_length` + `stride` ="
            f" {short_context.window_length}): choose larger `lengths`, or lower these."
        )
    if all(forced.is_answer):
        raise ValueError(
            f"All tokens of the right response of '{key.task}' belong to its answers, so an evaluator has no other"
            " tokens to separate them from: choose another task, such as `longeval_lines`, or another `mode`."
        )
    return forced


def _force_answers(
    backbone: Scorer,
    prompter: Prompter,
    questions: Sequence[Question],
    take: Take,
    short_context: ShortContext | None,
) -> None:
    forced = []
    near = []
    for question in questions:
        tokens = _force_question(prompter, question, short_context)
        forced.append(tokens)
        near.append(short_context is not None and _is_answer_near(prompter, question, tokens, short_context))

    def finish(scores: Mapping[int, AnswerScores]) -> None:
        found = {}
        for number, answer in scores.items():
            text = str(prompter.tokenizer.decode(answer.greedy))  # special tokens are wrong answers that a reader sees
            found[number] = _make_answer(
                questions[number],
                answer.score,
                text,
                forced[number].answer_start,
                answer_nll=-answer.answer_log_likelihood,
                answer_tokens=answer.answer_tokens,
                other_nll=-answer.other_log_likelihood,
                other_tokens=answer.other_tokens,
                response=ResponseTokens() if near[number] else answer.response,
            )
        take(found)

    teacher_forced(backbone, forced, short_context=short_context, done=finish)


def _make_answer(question: Question, score: float, prediction: str, prompt_tokens: int, **numbers: Any) -> Answer:
    key, example = question
    given = (example.depth, score, example.answers, prediction, prompt_tokens)
    return Answer(key.task, key.length, key.depth, key.index, *given, **numbers)

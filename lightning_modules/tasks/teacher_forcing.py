"""Score right answers by teacher forcing: a single pass without generation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.length_dependent import rotation_key
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.tasks.evaluation.answers import ResponseTokens
from lightning_modules.tasks.questions.prompter import ForcedAnswer


class AnswerScores(NamedTuple):
    """Scores of a question's answers under teacher forcing.

    ``right`` marks the answers whose tokens are all the likeliest ones; ``greedy`` has the likeliest token at each
    position after the question. Log-likelihoods are sums in nats, over the tokens of all answers, and over all
    other tokens of question and target except the first one. ``response`` is empty without a short context.
    """

    right: list[bool]
    greedy: list[int]
    answer_log_likelihood: float
    answer_tokens: int
    other_log_likelihood: float
    other_tokens: int
    response: ResponseTokens

    @property
    def score(self) -> float:
        """Fraction of the answers that greedy decoding would generate after the preceding right tokens."""
        return sum(self.right) / len(self.right)


def teacher_forced(
    backbone: Scorer,
    questions: Sequence[ForcedAnswer],
    *,
    short_context: ShortContext | None = None,
    done: Callable[[dict[int, AnswerScores]], None] = lambda _: None,
) -> list[AnswerScores]:
    """Score the answers of questions (`Prompter.force`) by teacher forcing.

    The model runs in eval mode, without gradients or random numbers. Logits exist only for the tokens of answers and
    for a chunk of the others. If weights are sharded, all processes must call this, each with any number of questions.
    With ``short_context``, the tokens of each response are also scored in their short contexts, in windows as in
    LongPPL. ``done`` is called with the scores of the questions of each pass, by index.
    """
    results: dict[int, AnswerScores] = {}
    with torch.no_grad(), eval_mode(backbone), lockstep(backbone) as run:
        lengths = [len(question.input_ids) for question in questions]
        for group in group_rows(lengths, backbone.tokens_per_pass, backbone):
            rows = [questions[index] for index in group]
            batch = padded_rows([question.input_ids for question in rows], backbone.device)
            backbone.check_batch(batch)
            scores = dict(zip(group, _score_pass(backbone, batch, rows, run, short_context), strict=True))
            results |= scores
            done(scores)
    return [results[index] for index in range(len(questions))]


def group_rows(lengths: Sequence[int], max_tokens: int, backbone: Scorer) -> list[list[int]]:
    """Group rows of similar length, longest first; a padded group has at most ``max_tokens`` tokens.

    Rows of a group have the same `rotation_key`.
    """
    rotations = [0] * len(lengths)
    if isinstance(backbone, Backbone):
        rotations = [rotation_key(backbone.base_model.config, length) for length in lengths]
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        first = groups[-1][0] if groups else row
        fits = groups and (len(groups[-1]) + 1) * lengths[first] <= max_tokens
        if fits and rotations[row] == rotations[first]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def padded_rows(rows: Sequence[Sequence[int] | NDArray[np.int32]], device: torch.device) -> PackedBatch:
    """Pad rows on the right, which needs no mask because attention is causal."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    boundaries = [[0, len(row)] for row in rows]
    return PackedBatch(
        input_ids=tokens,
        labels=labels.to(device),
        position_ids=positions,
        document_boundaries=boundaries,
        scored=labels.ne(IGNORE_INDEX).numpy(),
    )


def _score_pass(
    backbone: Scorer,
    batch: PackedBatch,
    questions: Sequence[ForcedAnswer],
    run: Callable[..., Any],
    short_context: ShortContext | None,
) -> list[AnswerScores]:
    places = [slice(question.answer_start, len(question.input_ids)) for question in questions]
    log_likelihood, greedy = run(backbone.with_greedy, batch, places)
    scores = []
    for question, row, tokens, place in zip(questions, log_likelihood, greedy, places, strict=True):
        scores.append(_answer_scores(question, row[: place.stop].double().cpu(), tokens[place].tolist()))
    if short_context is None:
        return scores
    # Only the windows of responses are scored, which are the last ones of their questions.
    in_response = torch.zeros_like(batch["labels"], dtype=torch.bool)
    for row, question in enumerate(questions):
        in_response[row, question.response_start : len(question.input_ids)] = True
    short = short_log_likelihood(backbone, batch, short_context, wanted=in_response).fill_missing(log_likelihood)
    for row, question in enumerate(questions):
        response = _response_tokens(question, log_likelihood[row], short[row])
        scores[row] = scores[row]._replace(response=response)
    return scores


def _response_tokens(question: ForcedAnswer, long: Tensor, short: Tensor) -> ResponseTokens:
    place = slice(question.response_start, len(question.input_ids))
    return ResponseTokens(question.is_answer, tuple(long[place].tolist()), tuple(short[place].tolist()))


def _answer_scores(question: ForcedAnswer, log_likelihood: Tensor, greedy: list[int]) -> AnswerScores:
    ids = question.input_ids
    start = question.answer_start
    answer = torch.zeros(len(ids), dtype=torch.bool)
    right = []
    for first, stop in question.spans:
        answer[first:stop] = True
        right.append(greedy[first - start : stop - start] == ids[first:stop])
    answers = int(answer.sum())
    whole = float(log_likelihood.sum())
    of_answers = float(log_likelihood[answer].sum())
    others = len(ids) - 1 - answers
    return AnswerScores(right, greedy, of_answers, answers, whole - of_answers, others, ResponseTokens())

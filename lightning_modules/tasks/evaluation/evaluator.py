"""Measure an evaluator: how well its key tokens match the answer tokens of right responses (mode ``key_tokens``)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import stats

from lightning_modules.functional import key_token_mask, long_short_difference
from lightning_modules.tasks.evaluation.answers import Answer, Setting
from lightning_modules.utilities.statistics import (
    Interval,
    difference_interval,
    in_percent,
    score_interval,
    weighted_mean_interval,
)
from lightning_modules.visualization.report import Table, format_estimate


class Accuracy(NamedTuple):
    """Accuracy of a rule that classifies tokens as answer tokens, from 0 to 1, with a 95% interval of ``balanced``.

    ``balanced`` is the mean of the fraction of answer tokens that are ``found`` and the fraction of other tokens that
    are ``left_out``: 0.5 for a rule that does not distinguish them. ``interval`` is None for a single text.
    """

    found: float
    left_out: float
    balanced: float
    interval: Interval | None


class EvaluatorAccuracy(NamedTuple):
    """Accuracy with which an evaluator finds the answer tokens among the tokens of right responses.

    The two rules are LSD > alpha alone, and with LCL > beta (Equation 4). ``auc`` is the probability that an answer
    token has a larger LSD than another token, with 1/2 for a tie. ``answer_log_likelihood`` is the mean LCL of answer
    tokens in nats. Intervals cover the choice of questions, not of tokens; None for few questions.
    """

    by_lsd: Accuracy
    by_lsd_and_lcl: Accuracy
    auc: float
    answer_log_likelihood: float
    log_likelihood_interval: Interval | None
    answer_tokens: int
    other_tokens: int
    questions: int  # whose answers need the long context
    asked: int
    setting: Setting  # K, d, alpha and beta


EXPLANATION = (
    "As an evaluator: how well key tokens (LSD > alpha and LCL > beta; or LSD > alpha alone) match the answer tokens of"
    " right responses. Accuracy in percent is the mean of the fraction of answer tokens found and of other tokens left"
    " out, 50 by chance. AUC is the area under the ROC curve of LSD; LCL is in nats. Questions do not count if the"
    " short context also has the answer. The 95% intervals cover the choice of questions."
)
"""Explanation of `evaluator_table`."""

Cell = tuple[str, int]
"""Task and length."""


def measure_evaluator(answers: Sequence[Answer]) -> dict[Cell, EvaluatorAccuracy]:
    """Measure an evaluator by its answers to questions, by task and length; empty for answers of other modes.

    Questions do not count if the short context also has the answer.
    """
    asked: Counter[Cell] = Counter()
    by_cell: dict[Cell, list[Answer]] = {}
    for answer in answers:
        cell = answer.task, answer.length
        asked[cell] += not math.isnan(answer.score)
        if answer.response.is_answer:
            by_cell.setdefault(cell, []).append(answer)
    return {cell: _measure_cell(of_cell, asked[cell]) for cell, of_cell in by_cell.items()}


def _measure_cell(answers: Sequence[Answer], asked: int) -> EvaluatorAccuracy:
    # Questions of one index share their text, with the answer at other depths, so they are not independent.
    texts: list[int] = []
    tokens_of_answers: list[bool] = []
    long_scores: list[float] = []
    short_scores: list[float] = []
    for answer in answers:
        response = answer.response
        texts += [answer.index] * len(response.is_answer)
        tokens_of_answers += response.is_answer
        long_scores += response.long
        short_scores += response.short
    text = np.array(texts)
    is_answer = np.array(tokens_of_answers)
    long = torch.tensor(long_scores)
    short = torch.tensor(short_scores)
    alpha = answers[0].setting.alpha
    beta = answers[0].setting.beta
    assert alpha is not None
    assert beta is not None
    by_lsd = key_token_mask(long, short, alpha=alpha, beta=-math.inf).numpy()
    by_lsd_and_lcl = key_token_mask(long, short, alpha=alpha, beta=beta).numpy()
    sums = pd.DataFrame({"text": text, "log_likelihood": long.double().numpy()})[is_answer].groupby("text")
    tokens = sums.size().to_numpy()
    means = sums["log_likelihood"].mean().to_numpy()
    return EvaluatorAccuracy(
        by_lsd=balanced_accuracy(by_lsd, is_answer, text),
        by_lsd_and_lcl=balanced_accuracy(by_lsd_and_lcl, is_answer, text),
        auc=area_under_curve(long_short_difference(long, short).numpy(), is_answer),
        answer_log_likelihood=float(np.average(means, weights=tokens)),
        log_likelihood_interval=weighted_mean_interval(means, tokens),
        answer_tokens=int(is_answer.sum()),
        other_tokens=int((~is_answer).sum()),
        questions=len(answers),
        asked=asked,
        setting=answers[0].setting,
    )


def balanced_accuracy(predicted: NDArray[np.bool_], is_answer: NDArray[np.bool_], text: NDArray[np.int64]) -> Accuracy:
    """Return the balanced accuracy of ``[N]`` predictions, with its 95% interval over texts, each named by a number.

    The interval is that of Newcombe and Zou for the difference of the fractions of answer tokens and of other tokens
    that are predicted, which have the intervals of `score_interval` and the correlation that they have over texts.
    There must be tokens of both kinds.
    """
    fractions = []
    intervals = []
    residuals = []  # of each text, how many more tokens are predicted than the fraction of all texts expects
    _, place = np.unique(text, return_inverse=True)
    for kind in (is_answer, ~is_answer):
        fraction = float(predicted[kind].mean())
        fractions.append(fraction)
        intervals.append(score_interval(predicted[kind], text[kind].tolist()))
        residuals.append(np.bincount(place, weights=kind * (predicted - fraction)))
    found, wrong = fractions
    balanced = (1 + found - wrong) / 2
    if intervals[0] is None or intervals[1] is None:
        return Accuracy(found, 1 - wrong, balanced, None)
    spread = float(np.linalg.norm(residuals[0]) * np.linalg.norm(residuals[1]))
    correlation = float(residuals[0] @ residuals[1]) / spread if spread > 0 else 0.0
    low, high = difference_interval((found, intervals[0]), (wrong, intervals[1]), correlation)
    return Accuracy(found, 1 - wrong, balanced, ((1 + low) / 2, (1 + high) / 2))


def area_under_curve(values: NDArray[np.float32], is_answer: NDArray[np.bool_]) -> float:
    """Return the probability that an answer token has a larger value than another token, with 1/2 for a tie."""
    ranks = stats.rankdata(values)  # equal values share their mean rank
    answers = int(is_answer.sum())
    pairs = answers * (len(values) - answers)
    return (float(ranks[is_answer].sum()) - answers * (answers + 1) / 2) / pairs


def evaluator_table(measured: Mapping[str, Mapping[Cell, EvaluatorAccuracy]]) -> Table:
    """Return a table with a row for each evaluator, by name, and its questions; `EXPLANATION` describes it."""
    head = ["evaluator", "task, length", "questions", "K, d", "alpha, beta"]
    head += ["LSD and LCL", "found", "left out", "LSD alone", "AUC of LSD", "LCL of answers"]
    rows = []
    for name, cells in measured.items():
        for (task, length), accuracy in cells.items():
            setting = accuracy.setting
            rule = accuracy.by_lsd_and_lcl
            row = [name, f"{task}, {length}", f"{accuracy.questions} of {accuracy.asked}"]
            row += [f"{setting.context_length}, {setting.stride}"]
            row += [f"{setting.alpha:g}, {setting.beta:g}", _format_accuracy(rule)]
            row += [f"{100 * rule.found:.1f}", f"{100 * rule.left_out:.1f}", _format_accuracy(accuracy.by_lsd)]
            log_likelihood = format_estimate(
                accuracy.answer_log_likelihood, accuracy.log_likelihood_interval, ".2f", ".2f"
            )
            rows.append([*row, f"{accuracy.auc:.3f}", log_likelihood])
    return Table(head, rows, folded=False)


def _format_accuracy(accuracy: Accuracy) -> str:
    return format_estimate(100 * accuracy.balanced, in_percent(accuracy.interval), ".1f", ".0f")

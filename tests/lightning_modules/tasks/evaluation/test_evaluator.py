"""The accuracy of an evaluator against loops over tokens in float64, and its interval."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_modules.functional.windows import ShortContext
from lightning_modules.tasks.evaluation.answers import ResponseTokens, Setting, read_answers, write_answers
from lightning_modules.tasks.evaluation.evaluator import (
    area_under_curve,
    balanced_accuracy,
    evaluator_table,
    measure_evaluator,
)
from lightning_modules.tasks.evaluation.questions import check_questions, make_questions, put_questions, question_keys
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.utilities.statistics import score_interval
from tests.support import reference
from tests.support.toy_tasks import GUESS, SEVERAL, Guess

K, D, ALPHA, BETA = 14, 4, 0.05, -2.0
SETTING = Setting("key_tokens", context_length=K, stride=D, alpha=ALPHA, beta=BETA)


class GuessAlone(Guess):
    """A response without other tokens than those of the answer."""

    def example(self, *arguments, **options):
        return replace(super().example(*arguments, **options), answer_prefix="")


def ask(backbone, prompter, *, tasks=(GUESS,), lengths=(56, 72), samples=8, **options):
    found = find_tasks(tasks)
    questions = make_questions(question_keys(found, lengths, samples), found, prompter, 3)
    options = {"short_context": ShortContext(K, D), **options}
    answers = put_questions(backbone, prompter, questions, "key_tokens", **options)
    return questions, [replace(answer, setting=SETTING) for answer in answers]


def score_tokens(model, prompter, example):
    """The tokens after the prompt, by hand: whether each is one of an answer, its LCL and its LSD.

    None of them if the last K + d tokens of the prompt have the answer.
    """
    forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
    with torch.no_grad():
        long, short = reference.long_and_short(model, torch.tensor(forced.input_ids), K, D)
    start = len(prompter.encode(example.prompt, ""))
    if example.answers[0] in prompter.tokenizer.decode(forced.input_ids[start - K - D : start]):
        return []
    tokens = []
    for place in range(start, len(forced.input_ids)):
        is_answer = any(first <= place < stop for first, stop in forced.spans)
        tokens.append((is_answer, float(long[place]), float(long[place] - short[place])))
    return tokens


def test_accuracies_are_those_of_loops_over_the_tokens(guessing, prompter, tmp_path):
    questions, answers = ask(guessing, prompter)
    write_answers(tmp_path / "a.parquet", answers)
    assert read_answers(tmp_path / "a.parquet") == answers
    measured = measure_evaluator(read_answers(tmp_path / "a.parquet"))
    assert list(measured) == [("guess", 56), ("guess", 72)]
    model = copy.deepcopy(guessing.base_model).double()
    for (task, length), accuracy in measured.items():
        by_question = [
            score_tokens(model, prompter, example)
            for key, example in questions
            if (key.task, key.length) == (task, length)
        ]
        tokens = [token for of_question in by_question for token in of_question]
        assert (accuracy.questions, accuracy.asked) == (sum(map(bool, by_question)), 8)
        lsd_of_answers = [lsd for is_answer, _, lsd in tokens if is_answer]
        lsd_of_others = [lsd for is_answer, _, lsd in tokens if not is_answer]
        assert (accuracy.answer_tokens, accuracy.other_tokens) == (len(lsd_of_answers), len(lsd_of_others))
        wins = 0.0
        for answer in lsd_of_answers:
            for other in lsd_of_others:
                wins += 1.0 if answer > other else 0.5 if answer == other else 0.0
        assert accuracy.auc == pytest.approx(wins / len(lsd_of_answers) / len(lsd_of_others), abs=1e-12)
        for rule, beta in ((accuracy.by_lsd, -math.inf), (accuracy.by_lsd_and_lcl, BETA)):
            key_answers = [lsd > ALPHA and lcl > beta for is_answer, lcl, lsd in tokens if is_answer]
            key_others = [lsd > ALPHA and lcl > beta for is_answer, lcl, lsd in tokens if not is_answer]
            found = sum(key_answers) / len(key_answers)
            left_out = 1 - sum(key_others) / len(key_others)
            assert (rule.found, rule.left_out) == pytest.approx((found, left_out), abs=1e-12)
            assert rule.balanced == pytest.approx((found + left_out) / 2, abs=1e-12)
        likelihoods = [lcl for is_answer, lcl, _ in tokens if is_answer]
        assert accuracy.answer_log_likelihood == pytest.approx(sum(likelihoods) / len(likelihoods), abs=1e-5)
    assert any(0 < accuracy.questions < accuracy.asked for accuracy in measured.values())
    # The thresholds separate some tokens, and beta leaves out others than alpha.
    rules = [(each.by_lsd, each.by_lsd_and_lcl) for each in measured.values()]
    assert any(0 < by_lsd.found < 1 for by_lsd, _ in rules)
    assert any(by_lsd.found != both.found or by_lsd.left_out != both.left_out for by_lsd, both in rules)


def test_the_scores_and_answers_are_those_of_teacher_forcing(guessing, prompter):
    questions, answers = ask(guessing, prompter)
    forced = put_questions(guessing, prompter, questions, "teacher_forced")
    for one, other in zip(answers, forced, strict=True):
        assert (one.score, one.prediction, one.answer_nll) == (other.score, other.prediction, other.answer_nll)
        assert other.response == ResponseTokens()
    assert measure_evaluator(forced) == {}


def test_the_interval_is_that_of_a_difference_of_correlated_fractions():
    generator = np.random.default_rng(0)
    text = np.repeat(np.arange(7), 10)
    is_answer = np.tile(np.arange(10) < 4, 7)
    predicted = generator.random(70) < np.where(is_answer, 0.6, 0.4) + np.repeat(np.arange(7) - 3, 10) / 10
    accuracy = balanced_accuracy(predicted, is_answer, text)
    a_low, a_high = score_interval(predicted[is_answer], text[is_answer].tolist())
    b_low, b_high = score_interval(predicted[~is_answer], text[~is_answer].tolist())
    a = np.mean([float(each) for each in predicted[is_answer]])
    b = np.mean([float(each) for each in predicted[~is_answer]])
    of_answers = [predicted[is_answer & (text == each)].mean() - a for each in range(7)]
    of_others = [predicted[~is_answer & (text == each)].mean() - b for each in range(7)]
    r = np.dot(of_answers, of_others) / math.sqrt(np.dot(of_answers, of_answers) * np.dot(of_others, of_others))
    assert abs(r) > 0.2
    low = a - b - math.sqrt((a - a_low) ** 2 + (b_high - b) ** 2 - 2 * r * (a - a_low) * (b_high - b))
    high = a - b + math.sqrt((a_high - a) ** 2 + (b - b_low) ** 2 - 2 * r * (a_high - a) * (b - b_low))
    assert accuracy.balanced == pytest.approx(0.5 + (a - b) / 2)
    assert accuracy.interval == pytest.approx((0.5 + low / 2, 0.5 + high / 2))
    assert balanced_accuracy(predicted[:10], is_answer[:10], text[:10]).interval is None


def simulate(generator, questions, *, found, wrong):
    """Responses whose questions differ, in answer tokens and other tokens alike."""
    shift = np.repeat(generator.choice([-0.15, 0.15], questions), 18)
    is_answer = np.tile(np.arange(18) < 5, questions)
    probability = np.where(is_answer, found, wrong) + shift
    return generator.random(len(shift)) < probability, is_answer, np.repeat(np.arange(questions), 18)


@pytest.mark.parametrize(("found", "wrong"), [(0.5, 0.2), (0.8, 0.16)])
def test_the_interval_covers_the_true_accuracy(found, wrong):
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        low, high = balanced_accuracy(*simulate(generator, 12, found=found, wrong=wrong)).interval
        covered += low <= 0.5 + (found - wrong) / 2 <= high
    assert 0.92 < covered / 300 <= 1


@pytest.mark.parametrize(("predicted", "balanced"), [(False, 0.5), (True, 0.5)])
def test_a_rule_that_does_not_distinguish_tokens_is_at_chance_with_an_interval(predicted, balanced):
    is_answer = np.tile([True, False, False], 12)
    accuracy = balanced_accuracy(np.full(36, predicted), is_answer, np.repeat(np.arange(12), 3))
    assert accuracy.balanced == balanced
    assert accuracy.interval[0] < balanced < accuracy.interval[1]
    perfect = balanced_accuracy(is_answer, is_answer, np.repeat(np.arange(12), 3))
    assert (perfect.balanced, perfect.interval[1]) == (1.0, 1.0)
    assert 0.75 < perfect.interval[0] < 0.95


def test_area_under_the_curve_counts_ties_as_half():
    assert area_under_curve(np.array([1.0, 2, 2, 3]), np.array([False, True, False, True])) == (1 + 0.5 + 1 + 1) / 4


def test_a_table_has_a_row_for_each_evaluator_and_its_questions(guessing, prompter):
    _, answers = ask(guessing, prompter, lengths=(72,))
    measured = measure_evaluator(answers)
    counted = measured["guess", 72].questions
    table = evaluator_table({"one": measured, "other": measured, "none": {}})
    assert [row[:5] for row in table.rows] == [
        [name, "guess, 72", f"{counted} of 8", f"{K}, {D}", f"{ALPHA:g}, {BETA:g}"] for name in ("one", "other")
    ]
    assert {len(row) for row in table.rows} == {len(table.head)}


def test_responses_that_show_nothing_are_refused(guessing, prompter):
    with pytest.raises(ValueError, match=r"'guess' with 40 tokens begins at token \d+, .* = 60.*lower"):
        ask(guessing, prompter, tasks=(GUESS,), lengths=(40,), short_context=ShortContext(50, 10))
    tasks = [GuessAlone()]
    keys = question_keys(tasks, [40], 1)
    with pytest.raises(ValueError, match="All tokens of the right response of 'guess' belong to its answers"):
        check_questions(keys, tasks, prompter, 3, ShortContext(K, D))
    check_questions(keys, tasks, prompter, 3)
    with pytest.raises(ValueError, match=r"'several' with 40 tokens has its answer in the short context too .* = 18"):
        check_questions(
            question_keys(find_tasks([SEVERAL]), [40], 2), find_tasks([SEVERAL]), prompter, 3, ShortContext(K, D)
        )

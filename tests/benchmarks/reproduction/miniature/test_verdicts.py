import copy

import pytest

from benchmarks.reproduction.miniature.measure import METRICS
from benchmarks.reproduction.miniature.verdicts import Verdict, summarize, verdicts


def correlations(accuracies=(0.1, 0.5), **spearman):
    values = {metric: {"spearman": spearman.get(metric, -0.1)} for metric in METRICS}
    models = [{"accuracy": accuracy, "group": "trained"} for accuracy in accuracies]
    return {"seeds": [{"models": models, "correlations": {"trained": values}}]}


def pair(steps, cpu_seconds, accuracy=0.9, perplexity=20.0):
    short = {"CE": {"accuracy": 0.9, "perplexity": 20.0}, "LongCE": {"accuracy": accuracy, "perplexity": perplexity}}
    return {"gain_at_equal": {"steps": steps, "cpu_seconds": cpu_seconds, "flops": 0.0}, "short": short}


def window(context_length, stride, accuracy, overhead, flops_overhead, default=False):
    return {
        "objective": "LongCE",
        "context_length": context_length,
        "stride": stride,
        "default": default,
        "accuracy": accuracy,
        "overhead": overhead,
        "flops_overhead": flops_overhead,
    }


def outcomes(letter, experiment):
    return {verdict.claim: verdict.outcome for verdict in verdicts({letter: experiment})}


def outcome(letter, experiment, words):
    (found,) = [value for claim, value in outcomes(letter, experiment).items() if words in claim]
    return found


@pytest.mark.parametrize(
    ("longppl", "ppl", "expected"),
    [
        (-0.9, -0.2, "reproduced"),
        (-0.9, -0.7, "not reproduced"),
        (-0.75, -0.1, "not reproduced"),
        (-0.9, 0.7, "not reproduced"),
    ],
)
def test_longppl_correlates_and_ppl_does_not(longppl, ppl, expected):
    assert outcome("A", correlations(longppl=longppl, perplexity=ppl), "PPL does not correlate") == expected


def test_the_summary_counts_claims_and_names_younger_rules():
    def verdict(outcome, older=True):
        return Verdict("A", "claim", "rule", older, outcome, "1")

    found = [verdict("reproduced"), verdict("reproduced"), verdict("not testable at this size")]
    assert summarize(found) == "2 of 3 claims are reproduced, 1 not testable at this size."
    younger = summarize([*found, verdict("not reproduced", older=False)])
    assert younger == (
        "2 of 4 claims are reproduced, 1 not reproduced, 1 not testable at this size. The rules of 1 claims became"
        " stricter after the first results."
    )
    both = {"A": correlations(), "B": {"pairs": [{**pair(0.1, 0.1), "base": "a"}]}}
    rules = {each.claim: each.rule_is_older for each in verdicts(both)}
    assert sum(rules.values()) == 7
    assert not any(older for claim, older in rules.items() if "LongCE" in claim)


def test_variants_of_longppl_have_to_be_weaker():
    experiment = correlations(longppl=-0.9, longppl_self=-0.95, longppl_soft=-0.7, perplexity_answers=-0.9)
    assert outcome("A", experiment, "Soft influence") == "reproduced"
    assert outcome("A", experiment, "evaluates itself") == "not reproduced"
    assert outcome("A", experiment, "PPL of answers") == "reproduced"


def test_models_that_hardly_differ_test_nothing():
    assert set(outcomes("A", correlations((0.4, 0.55), longppl=-1.0)).values()) == {"not testable at this size"}


def test_an_undefined_correlation_tests_nothing():
    experiment = correlations(longppl=-0.9)
    experiment["seeds"][0]["correlations"]["trained"]["longppl_self"] = {"undefined": "no key token"}
    assert outcome("A", experiment, "evaluates itself") == "not testable at this size"
    assert outcome("A", experiment, "LongPPL correlates strongly") == "reproduced"


def test_correlations_are_averaged_over_base_seeds():
    one, other = correlations(longppl=-0.9), correlations(longppl=-0.6)
    both = {"seeds": one["seeds"] + other["seeds"]}
    assert outcome("A", both, "LongPPL correlates strongly") == "not reproduced"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.03, 0.05, 0.01, 0.02, 0.04), "reproduced"),
        ((0.01, 0.02, -0.02, 0.01, 0.0), "not reproduced"),
        ((0.2, -0.01, 0.05, 0.0, 0.01), "not reproduced"),
        ((0.2, 0.2, 0.2), "not testable at this size"),  # no interval of fewer than 5 pairs
    ],
)
def test_gain_of_longce(gains, expected):
    pairs = [{**pair(0.0, gain), "base": f"seed{number}"} for number, gain in enumerate(gains)]
    assert outcome("B", {"pairs": pairs}, "training time") == expected
    of_two = [{**entry, "base": f"seed{number % 2}"} for number, entry in enumerate(pairs)]
    assert set(outcomes("B", {"pairs": of_two}).values()) == {"not testable at this size"}


@pytest.mark.parametrize(
    ("accuracy", "perplexity", "expected"), [(0.89, 20.9, True), (0.87, 20.0, False), (0.9, 21.1, False)]
)
def test_short_contexts(accuracy, perplexity, expected):
    experiment = {"pairs": [{**pair(0.1, 0.1, accuracy, perplexity), "base": base} for base in "abc"]}
    assert (outcome("B", experiment, "short contexts") == "reproduced") == expected


@pytest.mark.parametrize(
    ("both", "lsd", "answers", "expected"),
    [
        (0.9, 0.4, 100, "reproduced"),
        (0.7, 0.2, 100, "not reproduced"),
        (0.9, 0.7, 100, "not reproduced"),
        (0.9, 0.4, 10, "not testable at this size"),
    ],
)
def test_precision_of_key_tokens(both, lsd, answers, expected):
    scores = {"recall": 0.7, "balanced_accuracy": 0.85}
    rules = {"LSD": {**scores, "precision": lsd}, "LSD and LCL": {**scores, "precision": both}}
    assert outcome("C", {"rules": rules, "answers": answers}, "LCL condition") == expected


def test_thresholds_and_windows():
    thresholds = [[{"spearman": value} for value in (-0.9, -0.85, -0.82, -0.5)]]
    windows = [
        window(64, 64, 0.7, 0.5, 0.5, default=True),
        window(64, 128, 0.69, 0.3, 0.3),
        window(32, 64, 0.5, 0.4, 0.4),
    ]
    experiment = {"thresholds": thresholds, "windows": windows}
    assert set(outcomes("D", experiment).values()) == {"reproduced"}
    worse = copy.deepcopy(experiment)
    worse["windows"][1]["accuracy"] = 0.6
    worse["thresholds"][0][0] = {"undefined": "no key token"}
    assert set(outcomes("D", worse).values()) == {"not reproduced"}
    assert len(outcomes("D", {**experiment, "windows": []})) == 1


def test_loss_by_context():
    def model(rows, gain, r_squared, name="seed0"):
        return {"name": name, "rows": rows, "gain": gain, "fit": {"r_squared": r_squared}}

    def found(*models):
        return list(outcomes("E", {"models": list(models)}).values())

    assert found(model(64, 0.0, 0.1), model(512, 0.1, 0.95)) == ["reproduced", "reproduced"]
    assert found(model(64, 0.09, 0.1), model(512, 0.1, 0.8)) == ["not reproduced", "not reproduced"]
    assert found(model(64, 0.0, 0.1), model(512, 0.01, 0.95))[0] == "not testable at this size"
    assert found(model(64, 0.1, 0.95), model(64, 0.1, 0.95))[1] == "not testable at this size"
    assert found(model(512, 0.5, 0.1, "evaluator"), model(64, 0.0, 0.9), model(512, 0.1, 0.95))[0] == "reproduced"


def test_lost_in_the_middle():
    def found(*shares, questions=60):
        return list(outcomes("F", {"models": {"CE": shares}, "questions_per_depth": questions}).values())

    assert found(0.8, 0.6, 0.9) == ["reproduced"]
    assert found(0.5, 0.6, 0.9) == ["not reproduced"]
    assert found(0.8, 0.6, 0.9, questions=5) == ["not testable at this size"]

"""Simulate how often 95% intervals of `lightning_modules.utilities.statistics` contain the true value.

Models are drawn from normal distributions with a known correlation; questions have a known chance of a right answer,
which varies between texts with several questions; documents have numbers of tokens that are log-normal.

    python benchmarks/interval_coverage.py
"""

import argparse
import math

import numpy as np

from lightning_modules.utilities.statistics import (
    compare_correlations,
    correlate_values,
    score_interval,
    weighted_mean_interval,
)
from lightning_modules.visualization.report import Table, as_markdown_table

CORRELATIONS = (0.0, -0.5, -0.8, -0.96, -0.99)
PAIRS = ((-0.96, -0.2, 0.3), (-0.9, -0.6, 0.7), (-0.9, -0.9, 0.7), (0.0, 0.0, 0.5))
"""Correlations of two metrics with the score, and with each other."""


def draw(rng: np.random.Generator, models: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the values of models from a normal distribution."""
    first, noise = rng.standard_normal((2, models))
    return first, correlation * first + math.sqrt(1 - correlation**2) * noise


def cover_correlations(rng: np.random.Generator, sizes: list[int], rounds: int) -> Table:
    """Return the coverage of Pearson's and Spearman's intervals."""
    rows = []
    for models in sizes:
        cells = []
        for correlation in CORRELATIONS:
            truth = {"pearson": correlation, "spearman": 6 / math.pi * math.asin(correlation / 2)}
            hits = dict.fromkeys(truth, 0)
            for _ in range(rounds):
                x, y = draw(rng, models, correlation)
                for kind, true in truth.items():
                    low, high = correlate_values(x, y, kind).interval
                    hits[kind] += low <= true <= high
            cells.append(" / ".join(f"{100 * count / rounds:.1f}" for count in hits.values()))
        rows.append((str(models), *cells))
    return Table(("models", *(f"true correlation {value}" for value in CORRELATIONS)), rows)


def cover_differences(rng: np.random.Generator, sizes: list[int], rounds: int) -> Table:
    """Return the coverage of Zou's interval, and how often Williams' test rejects equal correlations."""
    rows = []
    for models in sizes:
        cells = []
        for first, second, between in PAIRS:
            matrix = np.array([[1, between, first], [between, 1, second], [first, second, 1]])
            found = [
                compare_correlations(*(rng.standard_normal((models, 3)) @ np.linalg.cholesky(matrix).T).T, "pearson")
                for _ in range(rounds)
            ]
            covered = np.mean([each.interval[0] <= first - second <= each.interval[1] for each in found])
            cells.append(f"{100 * covered:.1f} / {100 * np.mean([each.p < 0.05 for each in found]):.1f}")
        rows.append((str(models), *cells))
    return Table(("models", *(f"{first} and {second}" for first, second, _ in PAIRS)), rows)


def cover_scores(rng: np.random.Generator, rounds: int) -> Table:
    """Return the coverage of the intervals of mean scores, for independent questions and for several of a text."""
    rows = []
    for texts, each in ((20, 1), (100, 1), (10, 11), (30, 5)):
        cells = []
        for chance in (0.1, 0.5, 0.9, 0.97):
            hits = 0
            for _ in range(rounds):
                chances = np.full(texts, chance) if each == 1 else rng.beta(2 * chance, 2 * (1 - chance), texts)
                right = rng.random((texts, each)) < chances[:, None]
                low, high = score_interval(right.ravel(), np.repeat(np.arange(texts), each).tolist())
                hits += low <= chance <= high
            cells.append(f"{100 * hits / rounds:.1f}")
        rows.append((f"{texts} x {each}", *cells))
    return Table(("texts x questions", *(f"{chance} right" for chance in (0.1, 0.5, 0.9, 0.97))), rows)


def cover_means(rng: np.random.Generator, rounds: int) -> Table:
    """Return the coverage of the interval of a mean over documents, and of the bootstrap's percentiles instead."""
    rows = []
    for documents in (5, 8, 16, 50):
        cells = []
        for spread in (0.3, 1.0):  # standard deviation of the logarithm of the number of tokens
            hits = np.zeros(2)
            for _ in range(rounds):
                tokens = np.ceil(np.exp(rng.normal(4, spread, documents)))
                values = rng.normal(0, 0.05, documents) + rng.normal(0, 0.5, documents) / np.sqrt(tokens)
                drawn = rng.integers(documents, size=(1000, documents))
                means = (values * tokens)[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
                for number, (low, high) in enumerate(
                    (weighted_mean_interval(values, tokens), np.quantile(means, (0.025, 0.975)))
                ):
                    hits[number] += low <= 0 <= high
            cells.append(" / ".join(f"{value:.1f}" for value in 100 * hits / rounds))
        rows.append((str(documents), *cells))
    return Table(("documents", "similar lengths", "lengths that differ by a factor of e"), rows)


def main() -> None:
    """Print four tables of coverage in percent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=int, nargs="+", default=[5, 6, 7, 9, 12, 20, 30])
    parser.add_argument("--rounds", type=int, default=1000, help="simulations of each cell")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for title, table in (
        (
            "Correlations, coverage in percent: Pearson / Spearman",
            cover_correlations(rng, options.models, options.rounds),
        ),
        (
            "Differences of two correlations: coverage of the interval / tests that reject at p < 0.05, in percent",
            cover_differences(rng, options.models, options.rounds),
        ),
        ("Mean scores, coverage in percent", cover_scores(rng, options.rounds)),
        ("Means over documents, coverage in percent: jackknife / bootstrap", cover_means(rng, options.rounds)),
    ):
        print(f"\n{title}\n\n{as_markdown_table(table)}", flush=True)


if __name__ == "__main__":
    main()

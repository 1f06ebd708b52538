"""Weighted samples are drawn as often as their weights demand, by the seed alone."""

import json

import numpy as np
import pandas as pd
import pyarrow
import pytest

from lightning_modules.commands.select.choice import connect, is_in_sample, sampling_weights
from lightning_modules.commands.select.command import select
from lightning_modules.commands.select.rows import NUMBER


def documents(count, **columns):
    generator = np.random.default_rng(0)
    table = pd.DataFrame({"file": [f"{n % 7}.jsonl" for n in range(count)], "row": np.arange(count) // 7})
    return table.assign(tokens=generator.integers(1, 100, count), **columns)


def test_a_sample_depends_on_the_seed_and_not_on_the_order():
    table = documents(500)
    weights = np.random.default_rng(1).exponential(size=500)
    drawn = set(table.index[is_in_sample(table, weights, count=50, seed=3)])
    assert len(drawn) == 50
    order = np.random.default_rng(2).permutation(500)
    shuffled = table.iloc[order]
    assert set(shuffled.index[is_in_sample(shuffled, weights[order], count=50, seed=3)]) == drawn
    assert set(table.index[is_in_sample(table, weights, count=50, seed=4)]) != drawn
    assert drawn < set(table.index[is_in_sample(table, weights, count=60, seed=3)]), "a larger sample has more"
    assert is_in_sample(table, None, count=1000).all()


def test_documents_are_drawn_as_often_as_drawing_one_by_one():
    """The reference draws one after another, each by its share of the weights that are left."""
    weights = np.array([0.0, 1.0, 2.0, 3.0, 8.0])
    table, seeds = documents(5), 20_000
    # A document's random number is a hash of its place, so other places are other draws.
    places = np.arange(5 * seeds).reshape(seeds, 5)
    counts = np.zeros(5)
    for rows in places[:300]:
        counts += is_in_sample(table.assign(row=rows), weights, count=2)
    generator, expected = np.random.default_rng(0), np.zeros(5)
    for _ in range(seeds):
        expected[generator.choice(5, 2, replace=False, p=weights / weights.sum())] += 1
    np.testing.assert_allclose(counts / 300, expected / seeds, atol=0.07)
    assert counts[0] == 0


def test_a_number_of_tokens_is_never_exceeded():
    table = documents(300)
    for limit in range(1, 7000, 137):
        drawn = is_in_sample(table, None, tokens=limit)
        assert table.loc[drawn, "tokens"].sum() <= limit
        assert limit < 100 or table.loc[drawn, "tokens"].sum() > limit - 100
    assert is_in_sample(table, None, tokens=10**9).all()


def test_documents_of_no_weight_are_never_drawn():
    table = documents(100)
    drawn = is_in_sample(table, np.arange(100.0) * (np.arange(100) % 2 == 0), count=80)
    assert not drawn[1::2].any()
    assert drawn.sum() == 49


def test_weights_by_an_expression():
    values = {"n": [1, None, 3], "x": [0.5, 2.0, float("nan")], "key": ["a", "b", "c"], NUMBER: [0, 1, 2]}
    database = connect()
    table = database.from_arrow(pyarrow.table(values))
    assert sampling_weights(table, "n * 2").tolist() == [2.0, 0.0, 6.0]
    assert sampling_weights(table, "greatest(n - 2, 0)").tolist() == [0, 0, 1]
    for expression, message in (
        (
            "n - 2",
            r"is -1 for a document, and negative or not finite for 1 of 3: use for example `greatest\(n - 2, 0\)",
        ),
        ("x", "is nan for a document"),
        ("key", "its value is VARCHAR, not a number"),
        ("n > 1", "its value is BOOLEAN, not a number"),
        ("nope", r"(?s)`sample_weight` = 'nope' is not valid.*of these columns: n, x, key"),
    ):
        with pytest.raises(ValueError, match=message):
            sampling_weights(table, expression)


def test_files_of_equal_names_in_two_folders_are_drawn_independently():
    table = pd.DataFrame({"file": "a.jsonl", "row": [*range(500), *range(500)]})
    drawn = is_in_sample(table, None, count=500)
    first, second = drawn[:500], drawn[500:]
    assert 200 < (first == second).sum() < 300


def test_a_column_may_have_quotes_in_its_name(tmp_path):
    scores = pd.DataFrame({'the "best"': [1.0, 3.0, 2.0], "source": ["a", "b", "c"]})
    scores.to_parquet(tmp_path / "scores.parquet")
    output = tmp_path / "chosen.jsonl"
    select(str(tmp_path), rank_by='the "best"', by='the "best"', top=2, output=str(output))
    assert [json.loads(line)["source"] for line in output.read_text().splitlines()] == ["b", "c"]

"""Documents are chosen as a slow list of rows demands, and drawn as often as their weights demand."""

import hashlib
import json
import math
import tempfile

import numpy as np
import pandas as pd
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longce.corpus.select.choice import NUMBER, choose_documents, connect
from longce.corpus.select.command import select
from longce.corpus.select.config import SelectConfig

WHERE = {
    None: lambda row: True,
    "tokens > 3": lambda row: row["tokens"] is not None and row["tokens"] > 3,
    "score IS NULL OR source = 'a'": lambda row: row["score"] is None or row["source"] == "a",
}
WEIGHTS = {
    None: lambda row: 1.0,
    "tokens": lambda row: float(row["tokens"] or 0),
    "2 * (source = 'b')::INT + (row = 1)::INT": lambda row: 2.0 * (row["source"] == "b") + (row["row"] == 1),
}


def arrival(row, copy, seed, weight):
    digits = hashlib.md5(f"{seed}/{row['row']}/{copy}/{row['file']}".encode()).hexdigest()[:13]
    return -math.log((int(digits, 16) + 0.5) / 2**52) / weight


def choose_slowly(rows, config):
    """Return the numbers of the chosen rows by plain loops."""
    kept = [row for row in rows if row["error"] is None and WHERE[config.where](row)]
    if config.unique:
        firsts = {}
        for row in sorted(kept, key=lambda row: (row["file"], row["row"], row[NUMBER])):
            firsts.setdefault(row["text_hash"] or row[NUMBER], row)
        kept = list(firsts.values())
    if config.top is not None:
        kept = [row for row in kept if row["score"] is not None and not math.isnan(row["score"])]
        kept.sort(key=lambda row: (-row["score"], row[NUMBER]))
        kept = kept[: int(config.top) if config.top > 1 else max(1, round(config.top * len(kept)))]
    if config.sample is not None or config.sample_tokens is not None:
        arrivals = []
        copies = {}
        for row in sorted(kept, key=lambda row: row[NUMBER]):
            weight = WEIGHTS[config.sample_weight](row)
            if weight > 0:
                place = row["file"], row["row"]
                copies[place] = copies.get(place, 0) + 1
                arrivals.append((arrival(row, copies[place], config.seed, weight), row[NUMBER], row))
        kept = [row for _, _, row in sorted(arrivals)[: config.sample]]
        if config.sample_tokens is not None:
            total = np.cumsum([row["tokens"] for row in kept])
            kept = [row for row, sum_ in zip(kept, total, strict=True) if sum_ <= config.sample_tokens]
    return {row[NUMBER] for row in kept}


ROWS = st.fixed_dictionaries(
    {
        "file": st.sampled_from(["a.jsonl", "b/é.jsonl"]),
        "row": st.integers(0, 5),
        "tokens": st.integers(0, 9),
        "score": st.sampled_from([None, math.nan, -1.0, 0.5, 2.0, math.inf]),
        "source": st.sampled_from("ab"),
        "text_hash": st.sampled_from([None, "x", "y", "z"]),
        "error": st.sampled_from([None, None, None, "broken"]),
    }
)
SCHEMA = pyarrow.schema(
    {
        **dict.fromkeys(("file", "source", "text_hash", "error"), pyarrow.string()),
        **dict.fromkeys(("row", "tokens", NUMBER), pyarrow.int64()),
        "score": pyarrow.float64(),
    }
)


def choose(table, **options):
    """Return the chosen rows of an arrow or pandas table."""
    with connect(rows=100) as database:
        database.register("rows", table)
        database.execute("CREATE TABLE documents AS FROM rows")
        choose_documents(database, SelectConfig(**options))
        return {number for (number,) in database.sql(f'SELECT "{NUMBER}" FROM chosen').fetchall()}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(ROWS, min_size=1, max_size=25),
    st.sampled_from(list(WHERE)),
    st.booleans(),
    st.sampled_from([None, 0.3, 1, 3]),
    st.sampled_from([None, 2, 9]),
    st.sampled_from([None, 7, 30]),
    st.sampled_from(list(WEIGHTS)),
    st.integers(0, 2),
)
def test_each_option_keeps_what_a_loop_over_the_rows_keeps(
    rows, where, unique, top, sample, sample_tokens, weight, seed
):
    for number, row in enumerate(rows):
        row[NUMBER] = number
    options = {"where": where, "unique": unique, "top": top, "rank_by": "score", "by": "source", "seed": seed}
    options |= {"sample": sample, "sample_tokens": sample_tokens}
    if sample is not None or sample_tokens is not None:
        options["sample_weight"] = weight
    expected = choose_slowly(rows, SelectConfig(**options))
    table = pyarrow.Table.from_pylist(rows, SCHEMA)
    if expected:
        assert choose(table, **options) == expected
    else:
        with pytest.raises(ValueError, match="No document "):
            choose(table, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"where": "tokens > 1000"}, "`where`"),
        ({"where": "tokens > 1000", "top": 2, "rank_by": "nothing"}, "`where`"),
        ({"top": 2, "rank_by": "nothing"}, "`rank_by` = nothing"),
        ({"sample": 2, "sample_weight": "nothing"}, "`sample_weight` = nothing"),
        ({"sample": 2, "sample_weight": "0 * tokens"}, r"`sample_weight` = 0 \* tokens"),
        ({"sample_tokens": 1}, "`sample_tokens` = 1"),
    ],
)
def test_what_leaves_no_document_is_named(options, named):
    table = documents(5, nothing=np.nan).assign(tokens=2)
    with pytest.raises(ValueError, match=f"^No document .*{named}") as caught:
        choose(table, **options)
    assert ("`where`" in str(caught.value)) == ("where" in options)
    with pytest.raises(ValueError, match="column `error`"):
        choose(table.assign(error="broken"))


def documents(count, **columns):
    generator = np.random.default_rng(0)
    table = pd.DataFrame({"file": [f"{n % 7}.jsonl" for n in range(count)], "row": np.arange(count) // 7})
    return table.assign(tokens=generator.integers(1, 100, count), error=None, **{NUMBER: np.arange(count)}, **columns)


def test_a_sample_depends_on_the_seed_and_not_on_the_order():
    table = documents(500, weight=np.random.default_rng(1).exponential(size=500))
    options = {"sample_weight": "weight", "seed": 3}
    drawn = choose(table, sample=50, **options)
    assert len(drawn) == 50
    assert choose(table.iloc[np.random.default_rng(2).permutation(500)], sample=50, **options) == drawn
    assert choose(table, sample=50, sample_weight="weight", seed=4) != drawn
    assert drawn < choose(table, sample=60, **options), "a larger sample has more"
    assert len(choose(table, sample=1000)) == 500


def test_documents_are_drawn_as_often_as_drawing_one_by_one():
    """The reference draws one after another, each by its fraction of the weights that are left."""
    weights = np.repeat([0.0, 1.0, 2.0, 3.0, 8.0], 2000)
    drawn = choose(documents(len(weights), weight=weights), sample=4000, sample_weight="weight")
    generator = np.random.default_rng(0)
    reference = generator.choice(len(weights), 4000, replace=False, p=weights / weights.sum())
    counts, expected = (np.bincount(np.array(list(found)) // 2000, minlength=5) for found in (drawn, reference))
    assert counts[0] == 0
    np.testing.assert_allclose(counts, expected, atol=100)  # 4 standard deviations


def test_a_number_of_tokens_is_used_up_and_never_exceeded():
    table = documents(300)
    for limit in range(100, 7000, 690):
        drawn = choose(table, sample_tokens=limit)
        assert limit - 100 < table.loc[list(drawn), "tokens"].sum() <= limit


def test_files_of_equal_names_in_two_folders_are_drawn_independently():
    table = documents(1000).assign(file="a.jsonl", row=[*range(500), *range(500)])
    drawn = choose(table, sample=500)
    first = {number for number in drawn if number < 500}
    second = {number - 500 for number in drawn if number >= 500}
    assert 200 < 500 - len(first ^ second) < 300


def test_rows_that_do_not_fit_into_memory_are_on_disk(monkeypatch, tmp_path):
    generator = np.random.default_rng(0)
    rows = 300_000
    numbers = generator.integers(0, rows, rows)
    table = pyarrow.table(
        {
            NUMBER: np.arange(rows),
            "file": [f"a file with a long name {number % 100}" for number in range(rows)],
            "row": np.arange(rows),
            "error": pyarrow.nulls(rows, pyarrow.string()),
            "text_hash": [f"{number:064}" for number in numbers],
            "score": generator.random(rows),
        }
    )
    options = {"unique": True, "top": 0.5, "rank_by": "score"}
    expected = choose(table, **options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("longce.corpus.select.choice.MEMORY", 40_000_000)  # the rows alone are more
    monkeypatch.setattr("longce.corpus.select.choice.MEMORY_PER_ROW", 0)
    monkeypatch.setattr("longce.corpus.select.choice.THREADS", 1)
    assert choose(table, **options) == expected
    assert len(expected) == round(len(np.unique(numbers)) / 2)
    assert list(tmp_path.rglob("*")) == [tmp_path / "temporary"]


def test_a_column_may_have_quotes_in_its_name(tmp_path):
    scores = pd.DataFrame({'the "best"': [1.0, 3.0, 2.0], "source": ["a", "b", "c"]})
    scores.to_parquet(tmp_path / "scores.parquet")
    output = tmp_path / "chosen.jsonl"
    select(str(tmp_path), rank_by='the "best"', by='the "best"', top=2, output=str(output))
    assert [json.loads(line)["source"] for line in output.read_text().splitlines()] == ["b", "c"]

"""The page of a corpus: its numbers are those of slow sums, its slider runs, and its size is bounded."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from lightning_modules.visualization.corpus.page import corpus_page, draw_histogram, inspect_command
from lightning_modules.visualization.corpus.summary import (
    BINS,
    OTHERS,
    histogram,
    join_small_sources,
    thresholds,
    totals,
)
from tests.support.browser import check_page, launch_chromium

HEADER = {
    "source": {"files": ["raw texts"], "text_column": "body"},
    "settings": {"context_length": 64, "stride": 32, "max_tokens": None, "alpha": 2.0, "beta": -2.0},
    "model": "evaluator",
}


def make_scores(count, sources=3, seed=0):
    """Scores of documents, of which every fifth is too short; sources by Zipf's law."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(10, 5000, count)
    ratio = np.where(np.arange(count) % 5 == 0, np.nan, generator.exponential(0.02, count))
    table = pd.DataFrame(
        {
            "key": [f"<b>key `{n}`</b>" for n in range(count)],
            "file": [f"part{n % 3}.jsonl" for n in range(count)],
            "row": np.arange(count) // 3,
            "tokens": tokens,
            "compared_tokens": np.where(np.isnan(ratio), 0, tokens),
            "key_token_ratio": ratio,
            "benefit_mean": ratio - 0.01,
            "longppl": ratio * 100,
            "perplexity": generator.exponential(10, count),
            "ladder_64_128_mean": ratio,
            "ladder_64_whole_mean": ratio * 2,
        }
    )
    names = np.array([f"source {n}" for n in range(sources)])[generator.geometric(0.4, count).clip(max=sources) - 1]
    return table.assign(source=names, lsd_mass=table["benefit_mean"] * table["compared_tokens"])


@pytest.fixture
def scores():
    return make_scores(400, sources=9)


def test_sums_by_source_are_those_of_a_loop(scores):
    joined = scores.assign(source=join_small_sources(scores["source"], max_sources=4))
    found = totals(joined, ["key_token_ratio", "lsd_mass"])
    largest = [name for name, _ in Counter(scores["source"]).most_common(4)]
    groups = [name if name in largest else OTHERS for name in scores["source"]]
    assert set(found.index) == {*largest, OTHERS}
    assert found["documents"].is_monotonic_decreasing
    for source, own in scores.groupby(np.array(groups)):
        mass = [
            row.benefit_mean * row.compared_tokens for row in own.itertuples() if row.benefit_mean == row.benefit_mean
        ]
        assert found.loc[source, "documents"] == len(own)
        assert found.loc[source, "tokens"] == own["tokens"].sum()
        assert found.loc[source, "lsd_mass"] == pytest.approx(np.mean(mass))
        assert found.loc[source, "key_token_ratio"] == pytest.approx(own["key_token_ratio"].mean())


@pytest.mark.parametrize(("column", "log"), [("tokens", True), ("lsd_mass", False), ("key_token_ratio", False)])
def test_histograms_count_every_document_with_a_value(scores, column, log):
    edges, counts = histogram(scores, column, log=log)
    values = scores[column].dropna()
    bounds = [-np.inf, *edges[1:-1], np.inf]
    expected = [((low <= values) & (values < high)).sum() for low, high in pairwise(bounds)]
    assert sum(counts.values()).tolist() == expected
    assert sum(expected) == len(values)
    largest = scores["source"].mode()[0]
    assert counts[largest].sum() == scores.loc[scores["source"] == largest, column].notna().sum()
    assert len(edges) == BINS + 1
    assert (np.diff(edges) > 0).all()


def test_a_threshold_keeps_what_the_shown_condition_selects(scores):
    scores.loc[3, "key_token_ratio"] = np.inf
    found = thresholds(scores, "key_token_ratio")
    assert len(found) > 50
    assert found[0][1] > 300
    assert found[-1][1] <= 2, "up to the largest finite value"
    above = {value: documents for value, documents, _ in thresholds(scores.assign(tokens=7), "tokens")}
    assert above == {7: 0}, "a document at the threshold is not above it"
    for value, documents, tokens in found:
        kept = scores[scores["key_token_ratio"] > float(f"{value:.4g}")]
        assert (documents, tokens) == (len(kept), kept["tokens"].sum())


def test_the_ladder_has_the_means_of_longer_contexts_over_the_shortest_one(scores, tmp_path):
    other = scores.assign(ladder_128_whole_mean=7.0)
    page = corpus_page(other, HEADER, "scores", folder=tmp_path)
    assert "longer contexts over one of 64 tokens" in page
    ladder = page[page.index("Context ladder</h") : page.index("Thresholds</h")]
    columns = re.findall(r"<th[^>]*>([^<]*)</th>", ladder)
    assert columns == ["source", "128", "whole"]
    first = next(iter(totals(other, ["ladder_64_128_mean"]).index))
    mean = other.loc[other["source"] == first, "ladder_64_128_mean"].mean()
    assert f"{mean:.4g}" in ladder


@pytest.mark.limit(3)  # draws five figures three times
def test_every_corpus_has_a_page(tmp_path):
    table = make_scores(1, sources=1)  # too short: nothing is compared
    page = corpus_page(table, HEADER, "scores", folder=tmp_path)
    assert "1 documents with" in page
    table = make_scores(30)
    names = np.array(["_a", r"$\frac$ $", "</script><b>" * 9])[np.arange(30) % 3]
    equal = table.assign(tokens=7, key_token_ratio=0.0, benefit_mean=0.0, source=names)
    page = corpus_page(equal, HEADER, "scores", folder=tmp_path)
    assert "30 documents" in page
    assert "<b>" not in page


@pytest.mark.limit(3)  # draws five figures twice
def test_documents_link_to_their_page_or_show_its_command(scores, tmp_path):
    best = scores.loc[scores["benefit_mean"].idxmax()]
    (tmp_path / f"_inspect-{best.file}-{best.row}.html").write_text("")
    assert "first words" not in corpus_page(scores, HEADER, "scores", folder=tmp_path), "scores of earlier versions"
    page = corpus_page(scores.assign(first_words="It <i>began</i>"), HEADER, "scores", folder=tmp_path)
    assert page.count(">It &lt;i&gt;began&lt;/i&gt;<") >= 20
    assert f'<a href="_inspect-{best.file}-{best.row}.html">' in page
    assert "<b>key" not in page
    assert page.count("longce inspect &#39;raw texts/part") >= 20
    row = {"file": "a.jsonl", "row": 3}
    assert inspect_command(row, HEADER, tmp_path / "x.html") == (
        "longce inspect 'raw texts/a.jsonl' --row 3 --text_column body --evaluator evaluator --context_length 64"
        f" --stride 32 --alpha 2.0 --beta -2.0 --output {tmp_path}/x.html"
    )
    assert "--row" not in inspect_command({"file": "a.txt", "row": 0}, HEADER, tmp_path / "x.html")


@pytest.mark.slow
def test_the_slider_works_by_keyboard_without_a_network(scores, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(corpus_page(scores, HEADER, "scores", folder=tmp_path))
    steps = thresholds(scores, "lsd_mass")
    with launch_chromium() as browser:
        check_page(browser, path)
        page = browser.new_page(viewport={"width": 360, "height": 800})
        messages, requests = [], []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url[:5]))
        page.goto(path.as_uri())
        page.get_by_label("Keep documents whose").select_option("lsd_mass")
        page.get_by_label("is above").focus()
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        value, documents, tokens = steps[7]
        shown = page.locator("#kept").inner_text()
        assert shown.startswith(f"{documents} documents (")
        assert f"{tokens:,} tokens" in shown
        assert float(re.search(r"> (\S+)\"", shown)[1]) == value
        assert "benefit_mean * compared_tokens" in shown
        page.keyboard.press("End")
        assert page.locator("#kept").inner_text().startswith("0 documents")
        assert page.get_by_label("is above").get_attribute("aria-valuetext").startswith("above")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert messages == []
    assert set(requests) <= {"file:", "data:"}


def test_labels_of_a_narrow_range_are_plain_numbers():
    svg = draw_histogram(np.geomspace(4000, 4200, 5), {"a": np.ones(4, dtype=int)}, "length, tokens", log=True)
    assert len(re.findall(r">4,\d\d\d<", svg)) >= 3
    svg = draw_histogram(np.geomspace(1024, 1025, 5), {"a": np.ones(4, dtype=int)}, "length, tokens", log=True)
    labels = re.findall(r">([\d.,]+)<", svg)
    assert sorted(labels) == ["0", "1", "1,024", "1,025"], "whole numbers, each once"

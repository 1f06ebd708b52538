"""Records against plain sums over all tokens of all documents."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from lightning_modules.functional import long_perplexity, soft_influence
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.measure import Document, measure
from lightning_modules.scoring.records import (
    Definition,
    Source,
    Sums,
    add,
    read_records,
    split_measurements,
    summarize,
    write_records,
)
from lightning_modules.scoring.token_scores import TokenScores
from tests.support.records import EVALUATOR, MODEL, make_record

pytestmark = pytest.mark.core

DEFINITIONS = {"loose": Definition(8, 4, 0.5, -3.0), "strict": Definition(8, 4, 1.5, -1.0, gamma=2.0)}


def make_scores(words, generator):
    """An evaluator's scores of a text whose words are its tokens, in which a third is key."""
    ends = torch.tensor([len(word) + 1 for word in words]).cumsum(0)
    offsets = torch.stack([torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]]), ends], dim=1)
    long = -torch.rand(len(words), generator=generator)
    short = long - 3 * (torch.rand(len(words), generator=generator) > 0.6) * torch.rand(len(words), generator=generator)
    return TokenScores("", "judge", 8, 4, torch.arange(len(words)), offsets, long, short)


def make_documents(seed, sizes=(40, 1, 90, 12)):
    """Documents with the model's log-likelihoods and the evaluator's scores; the tokens are the same."""
    generator = torch.Generator().manual_seed(seed)
    for number, size in enumerate(sizes):
        words = ["é" * (1 + place % 3) for place in range(size)]
        scores = make_scores(words, generator)
        tokens = Tokens(scores.token_ids, scores.offsets)
        scored = torch.arange(size) > 0
        document = Document(f"{number}.txt", "".join(f"{word} " for word in words), tokens, scored, "books")
        yield document, -2 * torch.rand(size, generator=generator), scores


def test_numbers_are_those_of_all_tokens_together():
    """In float64, by the functions of the equations over one long tensor."""
    found = list(make_documents(0))
    records = [
        record
        for document, log_likelihood, scores in found
        for record in measure(document, log_likelihood, scores, DEFINITIONS, model=MODEL, evaluator=EVALUATOR)
    ]
    by_label = summarize(records, by="thresholds_label")
    assert list(by_label) == ["loose", "strict"]
    long = torch.cat([log_likelihood for _, log_likelihood, _ in found])
    scored = torch.cat([document.scored for document, *_ in found])
    for label, definition in DEFINITIONS.items():
        keys = [
            find_key_tokens(scores, alpha=definition.alpha, beta=definition.beta).mask & document.scored
            for document, _, scores in found
        ]
        key = torch.cat(keys)
        soft = torch.cat([soft_influence(scores.long, scores.short, gamma=definition.gamma) for *_, scores in found])
        sums = by_label[label]
        assert sums.longppl == pytest.approx(float(long_perplexity(long, key)), rel=1e-12)
        assert sums.perplexity == pytest.approx(float(long_perplexity(long, scored)), rel=1e-12)
        assert sums.longppl_soft == pytest.approx(float(long_perplexity(long, soft * scored)), rel=1e-12)
        assert (sums.key_tokens, sums.tokens, sums.unscored) == (int(key.sum()), int(scored.sum()), 4)
        assert 0 < sums.key_tokens < sums.tokens
        without = sum(not bool(each.any()) for each in keys)
        assert (sums.documents, sums.without_key_tokens, sums.by_characters) == (4, without, 0)
        nats = float(-long[scored].double().sum())
        size = sum(len(document.text.encode()) for document, *_ in found)
        unread = sum(int(scores.offsets[0, 1]) * 2 - 1 for *_, scores in found)  # of each first word: é and a space
        assert sums.bits_per_byte == pytest.approx(nats / math.log(2) / (size - unread), rel=1e-12)
    assert by_label["strict"].key_tokens < by_label["loose"].key_tokens


def test_precomputed_spans_have_no_evaluator():
    document, log_likelihood, _ = next(make_documents(1))
    spans = document.tokens.offsets[5:8].clone()
    (record,) = measure(document, log_likelihood, spans, {"": Definition()}, model=MODEL, evaluator=Source("folder"))
    key = torch.zeros(40, dtype=torch.bool)
    key[5:8] = True
    assert record.sums.longppl == pytest.approx(float(long_perplexity(log_likelihood, key)), rel=1e-12)
    assert record.alignment == "characters"
    absent = {"longppl_soft", "longppl_per_evaluator_token", "evaluator_tokens_sharing_characters"}
    assert not absent & set(record.sums.numbers())


def test_a_key_token_that_is_not_scored_does_not_count():
    """Spans may cover the first token, whose log-likelihood means nothing."""
    document, log_likelihood, _ = next(make_documents(1))
    spans = document.tokens.offsets[:3].clone()
    (record,) = measure(document, log_likelihood, spans, {"": Definition()}, model=MODEL, evaluator=Source("folder"))
    assert record.sums.key_tokens == 2
    assert record.sums.key_nll == pytest.approx(-float(log_likelihood[1:3].double().sum()), rel=1e-12)
    (record,) = measure(
        document, log_likelihood, spans[:1], {"": Definition()}, model=MODEL, evaluator=Source("folder")
    )
    assert (record.sums.key_tokens, record.sums.without_key_tokens) == (0, 1)


def test_tokens_without_a_log_likelihood_or_characters_are_counted_apart():
    document, log_likelihood, scores = next(make_documents(2))
    log_likelihood[0] = math.nan
    offsets = scores.offsets.clone()
    offsets[7] = offsets[7, 0]  # no characters
    document = document._replace(tokens=Tokens(scores.token_ids, offsets))
    settings = {"definitions": {"": DEFINITIONS["loose"]}, "model": MODEL, "evaluator": EVALUATOR}
    (record,) = measure(document, log_likelihood, scores, **settings)
    assert record.sums.nll == pytest.approx(-float(log_likelihood[1:].double().sum()), rel=1e-12)
    assert (record.sums.without_characters, record.sums.evaluator_without_characters) == (1, 0)


def test_fractions_of_odd_tokens_are_of_their_own_tokenizer():
    of_model = {"text_tokens": 8, "sharing_characters": 2, "without_characters": 1}
    of_evaluator = {"evaluator_sharing_characters": 5, "evaluator_without_characters": 4, "evaluator_tokens": 10}
    sums = Sums(by_characters=1, **of_model, **of_evaluator)
    numbers = sums.numbers()
    found = [
        numbers[f"{whose}tokens_{what}"]
        for whose in ("", "evaluator_")
        for what in ("sharing_characters", "without_characters")
    ]
    assert found == [0.25, 0.125, 0.5, 0.4]
    assert sums.coverage_warning().startswith("37.5% of the model's tokens and 90.0% of the evaluator's")
    alone = Sums(by_characters=1, **of_model)
    assert alone.coverage_warning().startswith("37.5% of the model's tokens and 0.0% of the evaluator's")
    assert sums._replace(by_characters=0).coverage_warning() is None


def test_what_identifies_a_source_has_the_names_of_its_fields():
    source = Source(*(f"some {name}" for name in Source._fields))
    for part in (source.provenance, source.numerics):
        assert part._asdict() == {name: f"some {name}" for name in part._fields}


def test_documents_of_one_measurement_stay_together_and_others_apart():
    records = [make_record(name, 2.0 + place, 3.0, step=step) for step in (1, 2) for place, name in enumerate("ab")]
    assert [[each.document for each in part] for part in split_measurements(records)] == [["a", "b"], ["a", "b"]]


def test_a_model_that_has_diverged_gives_no_number_and_hides_none():
    """NaN must not vanish from a sum, as it does in pandas."""
    good, bad = (make_record(name, 2.0, 3.0) for name in "ab")
    diverged = bad._replace(sums=bad.sums._replace(nll=math.nan, key_nll=math.nan))
    total = summarize([good, diverged])
    assert math.isnan(total.perplexity)
    assert math.isnan(total.longppl)
    assert total.tokens == 200
    huge = bad._replace(sums=bad.sums._replace(nll=1e9))
    assert summarize([good, huge]).perplexity == math.inf


def test_without_tokens_there_is_no_number():
    numbers = Sums().numbers()
    assert all(math.isnan(numbers[name]) for name in ("longppl", "perplexity", "bits_per_byte", "key_bits_per_byte"))
    assert numbers["key_token_share"] == numbers["tokens_sharing_characters"] == 0
    assert summarize([]) == Sums()
    assert summarize([], by="set") == {}


def test_a_sum_does_not_depend_on_the_order_or_the_number_of_processes():
    generator = np.random.default_rng(0)
    parts = [Sums(documents=1, nll=float(value), tokens=3) for value in np.exp(generator.normal(0, 20, 500))]
    assert add(parts) == add(parts[::-1]) == add([parts[place] for place in generator.permutation(500)])
    assert add(parts).nll == math.fsum(part.nll for part in parts)


def test_a_file_gives_back_its_records_and_columns(tmp_path):
    records = [
        make_record(
            "a", 2.0, 3.0, set="books", stage="val", step=7, evaluator_label="judge", thresholds_label="strict"
        ),
        make_record("日本", 1.5, 2.5, key_tokens=0, definition=Definition(0, 0, 1.0, -1.0, "authors", 2.0)),
        make_record("nan", 2.0, 3.0)._replace(sums=Sums(nll=math.nan)),
    ]
    write_records(tmp_path / "a.parquet", records)
    assert repr(read_records(tmp_path / "a.parquet")) == repr(records)  # NaN is not equal to itself
    write_records(tmp_path / "a.parquet", [make_record("caf\udce9", 2.0, 3.0)])  # bytes that are no text
    assert read_records(tmp_path / "a.parquet")[0].document == "caf\\udce9"
    write_records(tmp_path / "a.parquet", [])
    assert read_records(tmp_path / "a.parquet") == []
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "b.parquet")


def test_several_names_group_by_their_values():
    records = [
        make_record("a", 2.0, 3.0, set=name, model=MODEL._replace(name=model)) for name in "xy" for model in "mn"
    ]
    assert list(summarize(records, by=("set", "model.name"))) == [("x", "m"), ("x", "n"), ("y", "m"), ("y", "n")]
    assert [each.documents for each in summarize(records, by="set").values()] == [2, 2]
    with pytest.raises(AttributeError, match="colour"):
        summarize(records, by="colour")


@pytest.mark.parametrize(
    ("odd", "by_characters", "warned"),
    [((1, 0, 0, 0), 1, False), ((2, 0, 0, 0), 1, True), ((0, 0, 1, 1), 1, True), ((0, 0, 9, 9), 0, False)],
)
def test_tokens_without_characters_of_their_own_are_warned_of_only_if_they_matter(odd, by_characters, warned):
    sums = Sums(by_characters=by_characters, text_tokens=100, evaluator_tokens=100)
    names = ("sharing_characters", "without_characters", "evaluator_sharing_characters", "evaluator_without_characters")
    sums = sums._replace(**dict(zip(names, odd, strict=True)))
    assert (sums.coverage_warning() is not None) == warned


def test_reading_records_needs_no_torch():
    code = "import sys, lightning_modules.scoring.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

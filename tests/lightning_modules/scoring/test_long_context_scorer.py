"""The scorer of batches of rows equals `longce corpus score`, whatever the form and size of the batch."""

import json
import pickle
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import processors

from lightning_modules.scoring import long_context_scorer
from lightning_modules.scoring.long_context_scorer import LongContextScorer
from lightning_modules.scoring.token_scores import shorten_text
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from tests.conftest import make_text, tiny_model
from tests.support.texts import sentencepiece_like

SIZES = {"context_length": 16, "stride": 8}
THRESHOLDS = {"alpha": 0.5, "beta": -6.0}
TEXTS = [make_text(words, seed) for seed, words in enumerate((60, 1, 20, 90))] + [" ", None]


@pytest.fixture(scope="module")
def predicted(model_dir, tmp_path_factory):
    """Scores of the texts by `longce corpus score`."""
    folder = tmp_path_factory.mktemp("predicted")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet")
    options = {"contexts": [16, 32], "max_tokens": 100, "allowed_failures": 1.0, "dtype": "float32", "device": "cpu"}
    config = CorpusConfig(model=str(model_dir), output=str(folder / "out"), **SIZES, **THRESHOLDS, **options)
    score_corpus([str(folder / "a.parquet")], config)
    table = pyarrow.parquet.read_table(folder / "out").sort_by("row")
    return table.drop_columns(["key", "file", "row"]).replace_schema_metadata()


@pytest.fixture(scope="module")
def scorer(model_dir):
    options = {**SIZES, **THRESHOLDS, "contexts": [16, 32], "max_tokens": 100}
    return LongContextScorer(str(model_dir), **options, dtype="float32", device="cpu")


def test_scores_are_those_of_the_command_to_the_last_digit(scorer, predicted):
    found = scorer.score(TEXTS)
    assert found.schema == predicted.schema == scorer.schema
    assert found.drop_columns("error").equals(predicted.drop_columns("error"))
    assert any(found["truncated"].to_pylist())
    assert found["error"].null_count == 4
    assert found["error"].to_pylist()[4] == predicted["error"].to_pylist()[4]
    assert found["error"].to_pylist()[5] == "the text is null"


def test_the_form_of_a_batch_is_that_of_its_scores(scorer, predicted):
    columns = {"text": TEXTS, "id": [*range(6)]}
    expected = [{"id": number, **row} for number, row in enumerate(predicted.to_pylist())]
    expected[5]["error"] = "the text is null"
    found = [scorer(columns)]
    assert found[0].keys() == {"id", *scorer.schema.names}
    tables = [pyarrow.table(found[0]), scorer(pyarrow.table(columns))]
    assert all(table.to_pylist() == expected for table in tables)
    assert tables[1].schema.field("benefit_mean").type == pyarrow.float64()
    one_by_one = [row for number, text in enumerate(TEXTS) for row in scorer([{"text": text, "id": number}])]
    assert one_by_one == expected
    assert scorer([]) == []
    some = scorer([{"text": TEXTS[1], "x": 1}, {"text": 5, "id": 3}, {"text": "\ud800"}])
    assert [(row["x"], row["id"], row["error"] is None) for row in some] == [
        (1, None, True),
        (None, 3, False),
        (None, None, False),
    ]
    assert scorer(pyarrow.table(columns).slice(0, 0)).schema == tables[1].schema


def test_columns_of_a_batch_without_any_value_keep_their_types(scorer):
    tables = [scorer(pyarrow.table({"text": [text]})) for text in (TEXTS[0], TEXTS[1], " ")]
    assert tables[1]["benefit_mean"].null_count == tables[2]["tokens"].null_count == 1
    assert tables[0].schema == tables[1].schema == tables[2].schema


def test_a_scorer_is_pickled_without_its_model_which_is_loaded_once(scorer, predicted, monkeypatch):
    scorer.score(TEXTS[:1])
    content = pickle.dumps(scorer)
    assert len(content) < 5_000
    loads = []
    load = long_context_scorer.load_scorer
    monkeypatch.setattr(long_context_scorer, "load_scorer", lambda *given: loads.append(1) or load(*given))
    other = pickle.loads(content)
    assert other.score([" "])["error"].null_count == 0
    assert not loads, "nothing needed the model"
    assert other.score(TEXTS[:2]).equals(predicted.slice(0, 2))
    assert other.score(TEXTS[2:4]).equals(predicted.slice(2, 2))
    assert len(loads) == 1


def test_documents_of_a_batch_have_nearly_the_scores_that_they_have_alone(model_dir, predicted):
    options = {**SIZES, **THRESHOLDS, "contexts": [16, 32], "max_tokens": 100, "batch_tokens": 150}
    scorer = LongContextScorer(str(model_dir), **options, dtype="float32", device="cpu")
    groups = [len(group) for group in scorer.group_by_length([scorer.encode(text) for text in TEXTS])]
    assert groups == [2, 1, 1], "the short ones share a batch"
    for found, expected in zip(scorer.score(TEXTS).to_pylist(), predicted.to_pylist(), strict=True):
        numbers = {name: value for name, value in expected.items() if isinstance(value, float)}
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)


def test_a_document_beyond_the_positions_of_the_model_has_failed_and_the_others_have_not(scorer, monkeypatch):
    backbone = scorer.document_scorer.backbone
    monkeypatch.setattr(backbone, "max_length", 40)
    monkeypatch.setattr(backbone.base_model.config, "rope_parameters", None)
    errors = scorer.score(TEXTS[:3])["error"].to_pylist()
    assert errors[1] is None
    assert "40" in errors[0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"body": "a"}], "no column 'text', only"),
        ([{"text": "a", "tokens": 3}], "a column 'tokens', which is that of"),
    ],
)
def test_rows_that_do_not_fit_are_refused(scorer, rows, named):
    with pytest.raises(ValueError, match=named):
        scorer(rows)


@pytest.mark.parametrize(
    ("options", "named"), [({"stride": 0}, "stride"), ({"gamma": 0.5}, "gamma"), ({"overlong": "foo"}, "overlong")]
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(options, named):
    with pytest.raises(ValueError, match=named):
        LongContextScorer("nowhere", **options)


@pytest.mark.parametrize(
    ("text", "line"), [("  a\n\tb ", "a b"), ("ab " * 30, "ab " * 26 + "a…"), ("字" * 81, "字" * 79 + "…")]
)
def test_first_words_are_one_short_line(text, line):
    assert shorten_text(text) == line


@pytest.mark.parametrize("overlong", ["cut", "skip"])
def test_token_ids_have_the_scores_of_their_text(model_dir, overlong):
    options = {**SIZES, **THRESHOLDS, "per_token": "float32", "dtype": "float32", "device": "cpu"}
    by_text = LongContextScorer(str(model_dir), **options, max_tokens=150, overlong=overlong)
    by_ids = LongContextScorer(str(model_dir), **options, max_tokens=150, overlong=overlong, token_column="ids")
    texts = [text for text in TEXTS if text and text.strip()]
    ids = [by_text.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert max(map(len, ids)) > 150 > min(map(len, ids))
    expected = by_text([{"text": text} for text in texts])
    assert by_ids([{"ids": each} for each in ids]) == expected
    assert pickle.loads(pickle.dumps(by_ids))(pyarrow.table({"ids": ids})).to_pylist() == expected
    unsigned = by_ids({"ids": [np.array(each, "uint16") for each in ids]})
    assert pyarrow.table(unsigned).to_pylist() == expected
    (ended,) = by_ids([{"ids": [*ids[0], *[by_text.tokenizer.eos_token_id] * 40]}])  # and padding
    assert (ended["scored_tokens"], ended["perplexity"]) == (expected[0]["scored_tokens"], expected[0]["perplexity"])
    (first,) = by_ids([{"ids": [0, *ids[0]]}])  # the first id of the vocabulary
    assert (first["error"], first["tokens"]) == (None, expected[0]["tokens"] + 1)
    wrong = by_ids([{"ids": each} for each in (None, [], [3, -1], [3, 10**6], [0.5], [[1]], "text")])
    assert [row["tokens"] for row in wrong] == [None] * 7
    reasons = ["are null", "left out", "integers", "integers", "integers", "integers", "cannot be used"]
    assert all(reason in row["error"] for row, reason in zip(wrong, reasons, strict=True))


@pytest.mark.parametrize("special", [False, True])
def test_token_ids_have_the_hash_of_their_text_and_the_same_scored_tokens(special, tmp_path, corpus):
    tokenizer = sentencepiece_like(corpus)  # which puts a space before a text
    before = processors.TemplateProcessing(single="<s> </s> $A", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = before
    tokenizer.save_pretrained(tmp_path)
    by_text = LongContextScorer(str(tmp_path), add_special_tokens=special).encode("an an")
    by_ids = LongContextScorer(str(tmp_path), token_column="ids").encode_tokens(by_text.batch["input_ids"][0])
    assert (by_ids.text_hash, by_ids.first_words) == (by_text.text_hash, by_text.first_words)
    for name in ("offsets", "labels"):
        assert torch.equal(by_ids.batch[name], by_text.batch[name])
    assert (by_ids.batch["scored"] == by_text.batch["scored"]).all()


def test_token_ids_of_a_vocabulary_that_skips_ids(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] += 20
    file.write_text(json.dumps(content), encoding="utf-8")
    tiny_model(vocab_size=vocabulary[last] + 1).save_pretrained(tmp_path)
    options = {**SIZES, **THRESHOLDS, "dtype": "float32", "device": "cpu"}
    by_text = LongContextScorer(str(tmp_path), **options)
    text = f"{last.replace('Ġ', ' ')} {make_text(100)}"
    ids = by_text.tokenizer.encode(text, add_special_tokens=False)
    assert max(ids) == vocabulary[last] >= len(by_text.tokenizer)
    by_ids = LongContextScorer(str(tmp_path), **options, token_column="ids")
    assert by_ids([{"ids": ids}]) == by_text([{"text": text}])
    assert "integers from 0 to" in by_ids([{"ids": [vocabulary[last] + 1]}])[0]["error"]


def test_a_tokenizer_that_cannot_be_loaded_is_no_fault_of_the_documents(model_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_dir / name, tmp_path)
    with pytest.raises(ValueError, match="tokenizer"):
        LongContextScorer(str(tmp_path))([{"text": TEXTS[0]}])

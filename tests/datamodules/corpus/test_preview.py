"""The summary of a corpus: exact where the corpus is as small as the sample, and an error where nothing has text."""

import numpy as np
import pytest

from datamodules.corpus.files import CorpusColumns, find_corpus
from datamodules.corpus.preview import preview_corpus
from tests.conftest import make_text
from tests.datamodules.corpus.test_corpus import COLUMNS, write_lines, write_parquet


def preview(folder, tokenizer, columns=COLUMNS, **settings):
    return preview_corpus(find_corpus([str(folder)], columns), tokenizer, **settings)


def test_text_files_are_counted_and_measured(tmp_path, tokenizer):
    texts = [make_text(length, length) for length in (5, 20, 80)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    found = preview(tmp_path, tokenizer, max_tokens=30)
    tokens = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    assert (found.documents, found.files, found.fields) == (3, {"text": 3}, ())
    assert sorted(found.sizes) == [len(text) for text in texts]
    assert sorted(found.lengths) == sorted(min(count, 30) for count in tokens)
    assert found.size == pytest.approx(sum(map(len, texts)))
    assert found.tokens == pytest.approx(sum(found.lengths))
    assert found.overlong == pytest.approx(np.mean([count > 30 for count in tokens]))
    skipped = preview(tmp_path, tokenizer, max_tokens=max(tokens) - 1, overlong="skip")
    assert sorted(skipped.lengths) == sorted(tokens)[:2], "they have no tokens to score"
    assert skipped.tokens == pytest.approx(sum(sorted(tokens)[:2]))
    assert skipped.overlong == pytest.approx(1 / 3)
    told = found.describe(short_context=25)
    for part in ("3 text", "documents  3 with", "Latin 100%", "are longer than `max_tokens`"):
        assert part in told


def test_a_large_corpus_is_estimated_from_a_few_documents(tmp_path, tokenizer, monkeypatch):
    generator = np.random.default_rng(0)
    texts = [make_text(length, number) for number, length in enumerate(generator.integers(1, 30, 800).tolist())]
    write_parquet(tmp_path / "a.parquet", texts[:400], group=20, lang=["de"] * 400)
    write_lines(tmp_path / "b.jsonl", *({"text": text, "lang": "fr", "title": "x" * 40} for text in texts[400:]))
    counted = []
    encode = type(tokenizer.backend_tokenizer).encode
    monkeypatch.setattr(
        "datamodules.corpus.preview._count_tokens",
        lambda text, tokenizer: counted.append(text) or len(encode(tokenizer.backend_tokenizer, text).ids),
    )
    found = preview(tmp_path, tokenizer)
    assert 40 <= len(counted) <= 64
    assert found.files == {"parquet": 1, "JSON lines": 1}
    assert found.fields == ("lang", "text", "title")
    assert set(found.contents) == {"de", "fr"}
    tokens = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    assert found.documents == pytest.approx(800, rel=0.15)
    assert found.tokens == pytest.approx(tokens, rel=0.3)
    assert found.size == pytest.approx(sum(map(len, texts)), rel=0.2)
    assert f"documents  about {found.documents:,.0f} with" in found.describe(short_context=0)


def test_lines_are_counted_by_the_length_of_those_of_their_own_file(tmp_path, tokenizer):
    write_lines(tmp_path / "long.jsonl", *({"text": "word " * 1000} for _ in range(20)))
    write_lines(tmp_path / "short.jsonl", *({"text": "word"} for _ in range(300)))
    found = preview(tmp_path, tokenizer)
    assert found.documents == pytest.approx(320)
    assert sum(size > 100 for size in found.sizes) < 20, "files are sampled by their numbers of documents"


def test_scripts_of_texts_without_a_language(tmp_path, tokenizer):
    write_lines(tmp_path / "a.jsonl", {"text": "где что"}, {"text": "abcd 漢字"}, {"text": "  "}, b"{broken")
    found = preview(tmp_path, tokenizer)
    assert dict(found.contents) == {"Cyrillic": 6, "Latin": 4, "CJK": 2}
    assert len(found.sizes) == 2


@pytest.mark.parametrize(("text", "named"), [({"en": "x"}, "dict"), (" ", r"data\.text_column")])
def test_a_corpus_without_text_is_refused(tmp_path, tokenizer, text, named):
    write_lines(tmp_path / "a.jsonl", *({"body": "fine", "text": text} for _ in range(3)))
    with pytest.raises(ValueError, match=named):
        preview(tmp_path, tokenizer)
    columns = CorpusColumns("body", None, ())
    assert preview(tmp_path, tokenizer, columns).documents == pytest.approx(3)

import json
from pathlib import Path

import datasets
import pytest
import zstandard

from datamodules.corpora import GovReportDataModule, PG19DataModule, PileArxivDataModule

WORDS = "abcdefgh"


@pytest.fixture
def books(tmp_path, word_tokenizer):
    for name, text in {"train/2": "a b c", "train/10": "d e", "validation/3": "a b", "test/4": "c"}.items():
        (tmp_path / "pg19" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pg19" / f"{name}.txt").write_text(text)
    metadata = '3,Moby Dick; or The Whale,1851,http://books/3\n4,"Emma, a Novel",1815,http://books/4\n'
    (tmp_path / "pg19" / "metadata.csv").write_text(metadata)
    return PG19DataModule(
        word_tokenizer, path=str(tmp_path / "pg19"), sequence_length=3, cache_dir=str(tmp_path / "cache")
    )


def test_original_layout(books):
    books.prepare_data()
    books.setup("fit")
    assert books.rows.store.tokens.tolist() == [4, 5, 0, 1, 2, 3, 0]
    books.setup("test")
    batch = next(iter(books.test_dataloader()))
    assert (batch["names"], batch["text"]) == (["4 Emma, a Novel"], ["c"])
    assert next(iter(books.val_dataloader()))["names"] == ["3 Moby Dick; or The Whale"]


def test_a_missing_split_is_named_before_anything_is_tokenized(books):
    (Path(books.path) / "validation" / "3.txt").unlink()
    with pytest.raises(FileNotFoundError, match="validation"):
        books.prepare_data()
    assert not books.cache_dir.exists()


@pytest.mark.parametrize(
    ("kind", "row", "options", "expected"),
    [
        (PG19DataModule, {"short_book_title": "Emma", "publication_date": 1815, "text": "a b"}, {}, "a b"),
        (PileArxivDataModule, {"text": "a b", "meta": {"pile_set_name": "ArXiv"}}, {}, "a b"),
        (PileArxivDataModule, {"text": "c", "meta": {"pile_set_name": "Books3"}}, {}, None),
        (GovReportDataModule, {"report": "a b", "summary": "c"}, {}, "a b"),
        (GovReportDataModule, {"report": "a b", "summary": "c"}, {"text_column": "summary"}, "c"),
    ],
)
def test_parquet_columns_of_the_hub(tmp_path, word_tokenizer, kind, row, options, expected):
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    source = kind(word_tokenizer, path=str(tmp_path), **options).source("test")
    if expected is None:
        with pytest.raises(ValueError, match="'ArXiv'"):
            list(source)
    else:
        (document,) = source
        assert document.text == expected
        assert document.name == row.get("short_book_title", document.name)


def record(text, part="ArXiv"):
    return {"text": text, "meta": {"pile_set_name": part}}


def write(file, *records):
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(each) + "\n" for each in records).encode()
    file.write_bytes(zstandard.ZstdCompressor().compress(content) if file.suffix == ".zst" else content)


def module(word_tokenizer, tmp_path, path, **kwargs):
    return PileArxivDataModule(
        word_tokenizer, path=str(path), cache_dir=str(tmp_path / "cache"), **{"sequence_length": 2, **kwargs}
    )


def test_layout_of_the_pile(word_tokenizer, tmp_path):
    write(tmp_path / "pile/train/00.jsonl.zst", record("a b"), record("c", "Books3"))
    write(tmp_path / "pile/train/01.jsonl.zst", record("d"))
    write(tmp_path / "pile/val.jsonl.zst", record("e f"))
    write(tmp_path / "pile/test.jsonl.zst", record("g", "Books3"), record("h"))
    pile = module(word_tokenizer, tmp_path, tmp_path / "pile")
    pile.prepare_data()
    pile.setup("fit")
    pile.setup("test")
    assert pile.rows.store.tokens.tolist() == [1, 2, 0, 4, 0]
    assert [batch["text"] for batch in pile.val_dataloader()] == [["e f"]]
    assert [batch["names"] for batch in pile.test_dataloader()] == [["test.jsonl.zst:2"]]


def test_a_single_file_is_split_without_leaks(word_tokenizer, tmp_path):
    texts = [f"{a} {b}" for a in WORDS for b in WORDS]
    write(tmp_path / "all.jsonl", *map(record, texts))
    pile = module(word_tokenizer, tmp_path, tmp_path / "all.jsonl", holdout=4)
    splits = [[document.text for document in pile.source(split)] for split in ("train", "validation", "test")]
    assert sorted(text for split in splits for text in split) == sorted(texts)
    assert all(splits)


@pytest.mark.parametrize("field", ["input", "report", "text"])
def test_one_file_is_used_for_validation_and_test(word_tokenizer, tmp_path, field):
    records = [{"id": "crs_1", "title": "Grants", field: "a b c"}, {field: "d", "output": "e"}]
    (tmp_path / "reports.jsonl").write_text("\n".join(map(json.dumps, records)))
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path / "reports.jsonl"), validation_length=2)
    module.prepare_data()
    for stage, loader in (("validate", module.val_dataloader), ("test", module.test_dataloader)):
        module.setup(stage)
        batches = list(loader())
        assert [batch["names"][0] for batch in batches] == ["crs_1 Grants", "reports.jsonl:2"]
        assert [batch["text"][0] for batch in batches] == ["a b", "d"]
    module.setup("fit")
    with pytest.raises(ValueError, match="GovReportDataModule"):
        module.train_dataloader()  # there is nothing to train on
    (tmp_path / "folder").mkdir()
    for split in ("validation", "test"):
        (tmp_path / "folder" / f"{split}.jsonl").write_text(json.dumps({field: f"a {split}"}))
        source = GovReportDataModule(word_tokenizer, path=str(tmp_path / "folder")).source(split)
        assert [document.text for document in source] == [f"a {split}"]

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


def test_without_metadata_the_name_is_the_number(books):
    (Path(books.path) / "metadata.csv").unlink()
    assert [document.name for document in books.source("test")] == ["4"]


def test_missing_split_is_named(books):
    (Path(books.path) / "validation" / "3.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"No \.txt file in .*/validation"):
        books.prepare_data()
    assert not books.cache_dir.exists()  # found before anything was tokenised


def test_pg19_parquet_columns_of_the_hub(tmp_path, word_tokenizer):
    rows = [{"short_book_title": "Emma", "publication_date": 1815, "url": "http://books/4", "text": "a b"}]
    (tmp_path / "clone").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "clone" / "test-00000-of-00001.parquet")
    module = PG19DataModule(word_tokenizer, path=str(tmp_path / "clone"))
    module.setup("test")
    assert next(iter(module.test_dataloader()))["names"] == ["Emma"]


def test_default_is_a_dataset_without_loading_script(word_tokenizer):
    assert PG19DataModule(word_tokenizer).path == "emozilla/pg19"


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


def test_pile_arxiv_parquet_columns_of_the_hub(word_tokenizer, tmp_path):
    (tmp_path / "clone").mkdir()
    rows = [record("a b"), record("c", "Books3")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "clone" / "validation-00000-of-00001.parquet")
    pile = module(word_tokenizer, tmp_path, tmp_path / "clone")
    assert [document.text for document in pile.source("validation")] == ["a b"]


def test_a_file_without_papers_is_an_error(word_tokenizer, tmp_path):
    write(tmp_path / "all.jsonl", record("a", "Books3"))
    with pytest.raises(ValueError, match=r"No document with meta.pile_set_name == 'ArXiv'"):
        module(word_tokenizer, tmp_path, tmp_path / "all.jsonl").prepare_data()


def test_holdout_must_leave_something(word_tokenizer, tmp_path):
    write(tmp_path / "all.jsonl", record("a"))
    with pytest.raises(ValueError, match="`holdout` must be at least 3"):
        module(word_tokenizer, tmp_path, tmp_path / "all.jsonl", holdout=2).prepare_data()


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


def test_a_folder_has_a_file_for_each_split(word_tokenizer, tmp_path):
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"report": f"a {split}"}))
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path))
    assert [document.text for document in module.source("validation")] == ["a validation"]
    assert [document.text for document in module.source("test")] == ["a test"]


def test_gov_report_parquet_column_of_the_hub(word_tokenizer, tmp_path):
    rows = [{"report": "a b", "summary": "c"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path))
    assert [document.text for document in module.source("test")] == ["a b"]
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path), text_column="summary")
    assert [document.text for document in module.source("test")] == ["c"]


def test_there_is_nothing_to_train_on(word_tokenizer, tmp_path):
    (tmp_path / "reports.jsonl").write_text('{"text": "a"}')
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path / "reports.jsonl"))
    module.prepare_data()
    module.setup("fit")
    with pytest.raises(ValueError, match="GovReportDataModule has no training sequences: it is for evaluation"):
        module.train_dataloader()

from pathlib import Path

import datasets
import pytest

from datamodules.pg19 import PG19DataModule


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


def test_parquet_columns_of_the_hub(tmp_path, word_tokenizer):
    rows = [{"short_book_title": "Emma", "publication_date": 1815, "url": "http://books/4", "text": "a b"}]
    (tmp_path / "clone").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "clone" / "test-00000-of-00001.parquet")
    module = PG19DataModule(word_tokenizer, path=str(tmp_path / "clone"))
    module.setup("test")
    assert next(iter(module.test_dataloader()))["names"] == ["Emma"]


def test_default_is_a_dataset_without_loading_script(word_tokenizer):
    assert PG19DataModule(word_tokenizer).path == "emozilla/pg19"

import json

import datasets
import pytest
import zstandard

from datamodules.pile_arxiv import PileArxivDataModule

WORDS = "abcdefgh"


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


def test_parquet_columns_of_the_hub(word_tokenizer, tmp_path):
    (tmp_path / "clone").mkdir()
    rows = [record("a b"), record("c", "Books3")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "clone" / "validation-00000-of-00001.parquet")
    pile = module(word_tokenizer, tmp_path, tmp_path / "clone")
    assert [document.text for document in pile.source("validation")] == ["a b"]


def test_a_file_without_papers_is_an_error(word_tokenizer, tmp_path):
    write(tmp_path / "all.jsonl", record("a", "Books3"))
    with pytest.raises(ValueError, match=r"No document with meta.pile_set_name == 'ArXiv'"):
        module(word_tokenizer, tmp_path, tmp_path / "all.jsonl").prepare_data()


def test_holdout_must_leave_something(word_tokenizer):
    with pytest.raises(ValueError, match="`holdout` = 2 leaves no document to train on"):
        PileArxivDataModule(word_tokenizer, holdout=2)

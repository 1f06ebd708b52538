import pytest

from datamodules.sources.documents import Document
from datamodules.sources.splits import HashSplit, json_lines_files


class Source:
    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return (Document(str(number), text) for number, text in enumerate(self.texts))

    def fingerprint(self):
        return "source"


TEXTS = [f"text {number}" for number in range(2000)]


def split(name, texts=TEXTS, share=20):
    return [document.text for document in HashSplit(Source(texts), name, share)]


def test_every_document_is_in_one_split_of_about_the_stated_share():
    train, validation, test = split("train"), split("validation"), split("test")
    assert sorted(train + validation + test) == sorted(TEXTS)
    assert 60 < len(validation) < 140
    assert 60 < len(test) < 140
    splits = [("train", 20), ("validation", 20), ("train", 10)]
    assert len({HashSplit(Source([]), *which).fingerprint() for which in splits}) == 3


def test_the_split_depends_on_the_text_alone():
    assert set(split("validation", TEXTS[1000:] + TEXTS[:50])) < set(split("validation"))
    assert len(split("validation", TEXTS + TEXTS)) == 2 * len(split("validation"))  # copies never part
    assert split("validation", ["text 24"]) == ["text 24"]  # fixed for ever: published numbers depend on it


def test_an_empty_split_names_the_remedy():
    with pytest.raises(ValueError, match="`holdout`"):
        split("test", ["text 24"])


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["train.jsonl", "val.jsonl", "train.txt"], ["train.jsonl"]),
        (["train/01.jsonl.zst", "train/00.jsonl.zst", "val.jsonl.zst"], ["train/00.jsonl.zst", "train/01.jsonl.zst"]),
        (["train_2.json.gz", "train_1.json"], ["train_1.json", "train_2.json.gz"]),
    ],
)
def test_files_of_a_split(tmp_path, names, found):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(file.relative_to(tmp_path)) for file in json_lines_files(tmp_path, "train")] == found
    with pytest.raises(FileNotFoundError, match="test"):
        json_lines_files(tmp_path, "test")


@pytest.mark.parametrize("share", [0, 1, 2])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(share):
    with pytest.raises(ValueError, match="`holdout` must be at least 3"):
        HashSplit(Source(TEXTS), "train", share)

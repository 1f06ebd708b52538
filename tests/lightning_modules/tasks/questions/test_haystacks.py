import re

import pytest

from lightning_modules.tasks.questions.haystacks import LONGEST_SENTENCE, Essays, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two!  Three?\nFour", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Hu met J. Doe, etc. Then he left.", ["Mr. Hu met J. Doe, etc. Then he left."]),
        ('"Go." He went. (So it was.) Yes.', ['"Go."', "He went.", "(So it was.)", "Yes."]),
        ("It costs 3.50 dollars, e.g. here.", ["It costs 3.50 dollars, e.g. here."]),
        ("“Go.” “No!” She", ["“Go.”", "“No!”", "She"]),
        ("你好。再见。", ["你好。", "再见。"]),
        ("A HEADING\n \nText\ngoes on.", ["A HEADING", "Text goes on."]),
        ("", []),
    ],
)
def test_splits_into_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_text_without_periods_is_cut():
    words = "word " * 1000 + "x" * 2500
    sentences = split_sentences(words)
    assert max(map(len, sentences)) <= LONGEST_SENTENCE
    assert "".join(sentences).replace(" ", "") == words.replace(" ", "")


def test_essays_are_read_in_order_and_repeated(tmp_path):
    (tmp_path / "b.txt").write_text("\ufeffThree.\nFour.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("One. Two.")
    (tmp_path / "c.md").write_text("Never.")
    essays = Essays(tmp_path)
    assert essays.sentences(3) == ["One.", "Two.", "Three."]
    assert essays.sentences(6, start=3) == ["Four.", "One.", "Two.", "Three.", "Four.", "One."]


def test_essays_are_read_only_as_far_as_needed(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    essays = Essays(tmp_path)
    assert essays.sentences(2) == ["One.", "Two."]
    with pytest.raises(ValueError, match=r"b\.txt"):
        essays.sentences(3)


def test_folders_without_text_are_refused(tmp_path):
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text("\n")
    for name in ("nowhere", ".", "blank"):
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            Essays(tmp_path / name)


def test_synthetic_essays_are_endless_and_have_no_answer():
    sentences = Essays().sentences(2500)
    assert sentences == Essays().sentences(3000)[:2500]
    assert Essays().sentences(10, start=1500) == sentences[1500:1510]
    assert len(set(sentences)) > 2400
    assert not re.search("[0-9-]|special|magic|San Francisco", " ".join(sentences))
    assert split_sentences(" ".join(sentences)) == sentences

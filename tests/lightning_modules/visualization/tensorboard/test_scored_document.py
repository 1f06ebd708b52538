import pytest
import torch

from lightning_modules.visualization.tensorboard.scored_document import AFTER, BEFORE, printable


def test_a_short_document_is_one_part(make_document):
    assert make_document([" a"] * 30).excerpts(30) == [(0, 30)]
    assert make_document([" a"]).excerpts(1) == [(0, 1)]


def test_parts_lie_around_the_most_marked_key_tokens(make_document):
    lsd = [0.0] * 1000
    for index, value in {100: 3.0, 110: 5.0, 500: 4.0, 900: 2.5}.items():
        lsd[index] = value
    document = make_document([" a"] * 1000, lsd, key=[100, 110, 500, 900])
    assert document.excerpts(90) == [(100 - BEFORE, 110 + AFTER + 1), (500 - BEFORE, 500 + AFTER + 1)]
    assert document.excerpts(40) == [(110 - BEFORE, 110 + AFTER + 1)]
    assert document.excerpts(5) == [(0, 5)], "not even one part fits"


def test_without_key_tokens_parts_lie_around_the_most_helped(make_document):
    lsd = [0.0] * 300
    lsd[200] = 1.0
    assert make_document([" a"] * 300, lsd).excerpts(50) == [(200 - BEFORE, 200 + AFTER + 1)]
    assert make_document([" a"] * 300, [-1.0] * 300).excerpts(50) == [(0, 50)]


def test_order_of_helped_and_key_tokens(make_document):
    document = make_document([" a"] * 5, [1.0, 3.0, -1.0, 2.0, 0.0], key=[0, 2, 3])
    assert document.most_helped(9) == [1, 3, 0]
    assert document.most_helped(1) == [1]
    assert document.most_helped(9, key_only=True) == [3, 0, 2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([" sea", " a", " b", " sea"], 3),
        ([" sea", " a", " sea", " sea"], 1),
        ([" seam", " a", " b", " sea"], None),
        ([" sea", " seam", " seasea", " sea"], 3),
        ([" a", " sea"], None),
    ],
)
def test_distance_to_the_same_token(make_document, words, expected):
    document = make_document(words)
    assert document.distance(len(words) - 1) == expected


def test_distance_is_that_of_looking_at_each_token(make_document):
    generator = torch.Generator().manual_seed(0)
    words = ["ab", "abab", "a", "b", " "]
    document = make_document([words[i] for i in torch.randint(5, (200,), generator=generator)])
    for index in range(200):
        texts = [document.text[start:end] for start, end in document.scores.offsets.tolist()]
        earlier = [i for i in range(index) if texts[i] == texts[index]]
        assert document.distance(index) == (index - earlier[-1] if earlier else None)


def test_pieces_are_the_text_once(make_document):
    document = make_document(["ab", "cde", "f"])
    document.scores.offsets[:] = torch.tensor(
        [[0, 2], [1, 3], [5, 6]]
    )  # two bytes of one letter; characters of no token
    assert list(document.pieces(0, 3)) == [(0, "", "ab"), (1, "", "c"), (2, "de", "f")]
    assert list(document.pieces(1, 1)) == []


def test_printable():
    assert printable("a\n\tb\r") == "a⏎⇥b"
    assert printable("\u202e\x00\ud800\u2028") == "\ufffd" * 4
    assert printable("é 漢 🙂") == "é 漢 🙂"

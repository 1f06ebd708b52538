import html
import math
import re

import pytest
import torch
from tensorboard.plugin_util import markdown_to_safe_html

from lightning_modules.visualization.tensorboard.documents import (
    AFTER,
    BEFORE,
    escaped,
    excerpts_markdown,
    helped_markdown,
    learned_markdown,
    printable,
    probability,
)

NASTY = [
    " |",
    "*",
    "**b**",
    "`x`",
    "[a](http://b)",
    "<script>alert(1)</script>",
    "&lt;",
    "# h",
    "\n",
    "\n\n---\n",
    "_i_",
]
NASTY += ["\\", '"', "1. ", "    code", "![i](x)", "http://x.y", "~~s~~", "| --- |", "&#42;", "\u202e", "\ud800", ":::"]


def shown(markdown):
    """Text that a reader of TensorBoard sees, and the tags it is in."""
    page = markdown_to_safe_html(markdown)
    return html.unescape(re.sub(r"<[^>]*>", "", page)), set(re.findall(r"<(\w+)", page)), page


def test_probability():
    assert [probability(math.log(p)) for p in (1.0, 0.5, 0.0012, 0.0009)] == ["100.0%", "50.0%", "0.1%", "9e-04"]
    assert probability(-math.inf) == "0e+00"


@pytest.mark.parametrize("token", NASTY)
def test_any_text_is_shown_as_it_is(token):
    text, tags, _ = shown(f"x{escaped(token)}y")
    assert " ".join(text.split()) == " ".join(
        f"x{token}y".replace("\n", "⏎").replace("\u202e", "\ufffd").replace("\ud800", "\ufffd").split()
    )
    assert tags == {"p"}


def test_key_tokens_are_bold_with_their_numbers_and_everything_else_is_text(make_document):
    words = [word for token in NASTY for word in (" plain", token)]
    lsd = [0.0, 3.0] * len(NASTY)
    document = make_document(words, lsd, key=range(1, len(words), 2), name="<b>|name")
    text, tags, page = shown(excerpts_markdown(document, tokens=1000, title=document.name))
    assert tags == {"p", "strong", "em", "a"}
    assert text.startswith("<b>|name")
    visible = sum(bool(word.strip()) for word in words[1::2])
    assert page.count('title="LSD 3.00 nats, long 36.8%, short 1.8%"') == visible
    assert "<script>alert(1)</script>" in text
    assert text.count("▆") == len(NASTY) + 1  # and in the legend


def test_steps_of_the_difference(make_document):
    document = make_document([" a", " b", " c", " d", " e", " f"], [0.4, 0.6, 1.5, 2.5, 4.5, -0.6])
    assert excerpts_markdown(document, tokens=9, title="").endswith(" a b▂ c▄ d▆ e█ f▿")


def rows(markdown):
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines()]
    return lines[2:]


def test_most_helped_tokens(make_document):
    one = make_document(["a", " sea", " b", " sea"], [0.0, 1.0, -1.0, 4.0], key=[3], name="one")
    two = make_document([" x", " |"], [2.0, 0.5], name="two")
    found = rows(helped_markdown([one, two], count=3))
    assert found[0] == ["a sea b **sea**", "36.8%", "0.7%", "4.00", "yes", "2", "one&#44; token 3"]
    assert [row[3] for row in found] == ["4.00", "2.00", "1.00"]
    assert "never" in found[1]
    assert shown(helped_markdown([one, two]))[1] == {"table", "thead", "tbody", "tr", "th", "td", "strong"}


def test_a_token_of_spaces_can_be_seen(make_document):
    document = make_document(["a", "\n", "b"], [0.0, 3.0, 0.0], key=[1])
    assert "**␣**" in helped_markdown([document])


def test_what_was_learned_of_key_tokens(make_document):
    document = make_document(["a", " b", " c"], [0.0, 1.0, 2.0], long=[-1.0, -0.5, -2.0], key=[1, 2])
    then = torch.tensor([0.0, -2.0, -4.0])
    text = learned_markdown(document, then, then=7)
    assert "at step 7: 5.0%, now: 28.7%" in text  # exp(-3), exp(-1.25)
    table = rows(text.partition("\n\n")[2])
    assert table[0] == ["a **b** c", "13.5%", "60.7%", "+1.50 ▄", "22.3%"]
    assert table[1] == ["a b **c**", "1.8%", "13.5%", "+2.00 ▄", "1.8%"]
    document.key[:] = False
    assert "no key token" in learned_markdown(document, then, then=7)


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

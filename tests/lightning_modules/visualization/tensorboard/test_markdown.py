import html
import math
import re

import pytest
import torch
from tensorboard.plugin_util import markdown_to_safe_html

from lightning_modules.visualization.tensorboard.markdown import (
    escaped,
    excerpts_markdown,
    helped_markdown,
    learned_markdown,
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

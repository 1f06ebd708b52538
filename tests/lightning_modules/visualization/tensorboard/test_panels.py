import html
import re

import pytest
import torch
from tensorboard.plugin_util import markdown_to_safe_html

from lightning_modules.visualization.tensorboard.panels import escaped, helped_markdown

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


@pytest.mark.parametrize("token", NASTY)
def test_any_text_is_shown_as_it_is(token):
    text, tags, _ = shown(f"x{escaped(token)}y")
    assert " ".join(text.split()) == " ".join(
        f"x{token}y".replace("\n", "⏎").replace("\u202e", "\ufffd").replace("\ud800", "\ufffd").split()
    )
    assert tags == {"p"}


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


def test_distance_is_that_of_looking_at_each_token(make_document):
    generator = torch.Generator().manual_seed(0)
    words = ["ab", "abab", "a", "b", " "]
    document = make_document([words[i] for i in torch.randint(5, (200,), generator=generator)])
    for index in range(200):
        texts = [document.text[start:end] for start, end in document.scores.offsets.tolist()]
        earlier = [i for i in range(index) if texts[i] == texts[index]]
        assert document.distance(index) == (index - earlier[-1] if earlier else None)

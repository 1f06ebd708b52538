import numpy as np
import pytest
import torch

from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.image import MOST_LINES, WIDTH, _colour, _Page, token_image
from lightning_modules.visualization.tensorboard.sums import BenefitCounts, PositionSums


def count(image, colour):
    return int((image == np.array(colour, dtype=np.uint8)).all(-1).sum())


def test_tokens_have_the_colour_of_their_difference(make_document):
    plain = token_image(make_document([" word"] * 9), tokens=9, title="t")
    helped = token_image(make_document([" word"] * 9, [0.0] * 8 + [3.0]), tokens=9, title="t")
    assert plain.dtype == np.uint8
    assert plain.shape == helped.shape
    assert count(helped, _colour(3.0)) > 200
    assert count(plain, _colour(3.0)) == 0
    assert _colour(0.0) == (255, 255, 255)
    assert _colour(3.0)[0] > _colour(3.0)[2]
    assert _colour(-3.0)[0] < _colour(-3.0)[2]
    assert _colour(99.0) == _colour(4.0)


def test_key_tokens_are_in_boxes(make_document):
    without, with_key = (token_image(make_document([" word"] * 9, key=key), tokens=9, title="t") for key in ([], [4]))
    assert count(with_key, (150, 0, 60)) > count(without, (150, 0, 60)) + 50


def test_lines_are_broken_where_they_are_full_and_where_the_text_breaks():
    page = _Page()
    for index in range(400):
        page.put(index, " word" if index else "first\n")
    page.end_line()
    assert page.lines[0] == [(0, "first ", 16.0)]
    assert [index for line in page.lines for index, *_ in line] == list(range(400))
    assert 10 < len(page.lines) < 40
    assert all(x < WIDTH for line in page.lines for *_, x in line)


def test_a_picture_has_a_largest_height(make_document):
    image = token_image(make_document(["a\n"] * 500), tokens=500, title="t")
    assert image.shape == (2 * 16 + (MOST_LINES + 3) * 23, WIDTH, 3)


@pytest.mark.parametrize("words", [["\u202eabc", "漢字", "🙂", "\ud800", "", "<script>"], ["x" * 5000], ["\n"]])
def test_any_text_can_be_drawn(make_document, words):
    assert token_image(make_document(words, key=[0]), tokens=99, title="\ud800").shape[1] == WIDTH


def test_figures():
    benefit, positions = BenefitCounts(), PositionSums(3)
    long = -torch.rand(500) * 8
    benefit.add(long, long - torch.randn(500))
    at_two, at_three = (benefit_figure(benefit, alpha=alpha, beta=-2.0, title="t") for alpha in (2.0, 3.0))
    assert at_two.shape == at_three.shape
    assert (at_two != at_three).any(), "thresholds are drawn"
    positions.add(torch.arange(1, 300), *torch.rand(3, 299))
    small = position_figure(positions, title="t")
    large = position_figure(positions, title="t", short=1, key_share=2)
    assert small.shape[1] == large.shape[1]
    assert small.shape[0] < large.shape[0]

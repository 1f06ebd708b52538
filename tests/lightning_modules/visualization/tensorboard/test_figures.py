import torch
from torch.utils.tensorboard._utils import figure_to_image

from lightning_modules.visualization.tensorboard.figures import (
    LCL_EDGES,
    LSD_EDGES,
    benefit_counts,
    benefit_figure,
    position_figure,
)
from lightning_modules.visualization.tensorboard.sums import PositionSums


def test_counts_are_those_of_one_token_at_a_time():
    generator = torch.Generator().manual_seed(0)
    long = -20 * torch.rand(400, generator=generator)
    short = torch.where(torch.rand(400, generator=generator) < 0.2, long, -20 * torch.rand(400, generator=generator))
    counts = benefit_counts(long, short)
    for a, b in zip(long, short, strict=True):
        if a != b:
            row = max(sum(bool(a >= edge) for edge in LCL_EDGES) - 1, 0)
            column = min(max(sum(bool(a - b >= edge) for edge in LSD_EDGES) - 1, 0), len(LSD_EDGES) - 2)
            counts[row, column] -= 1
    assert (counts == 0).all()


def test_figures():
    long = -torch.rand(500) * 8
    short = long - torch.randn(500)
    at_two, at_three = (
        figure_to_image(benefit_figure(long, short, alpha=alpha, beta=-2.0, title="t")) for alpha in (2.0, 3.0)
    )
    assert at_two.shape == at_three.shape
    assert (at_two != at_three).any(), "thresholds are drawn"
    small, large = PositionSums(1), PositionSums(3)
    small.add(torch.arange(1, 300), torch.rand(299))
    large.add(torch.arange(1, 300), *torch.rand(3, 299))
    shapes = [figure_to_image(position_figure(positions, title="t")).shape for positions in (small, large)]
    assert shapes[0][2] == shapes[1][2]
    assert shapes[0][1] < shapes[1][1]

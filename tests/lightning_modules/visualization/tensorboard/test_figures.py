import torch

from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.sums import BenefitCounts, PositionSums


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

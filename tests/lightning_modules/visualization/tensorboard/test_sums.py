import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX, MAX_SEQUENCE_LENGTH
from lightning_modules.functional import ShortScores
from lightning_modules.visualization.tensorboard.sums import SAMPLED, PositionSums, WeightSample


def test_means_by_position():
    positions = PositionSums(1)
    positions.add(torch.arange(1, 13), torch.arange(1.0, 13.0))
    positions.add(torch.tensor([5]), torch.tensor([60.0]))
    # Bins begin at 1, 2, 3, 4, 6, 8, 12.
    assert positions.means().tolist() == [[1, 2, 3, 14 / 3, 6.5, 9.5, 12], [1, 2, 3, 23, 6.5, 9.5, 12]]
    positions.add(torch.tensor([MAX_SEQUENCE_LENGTH]), torch.tensor([1.0]))
    assert positions.means()[:, -1].tolist() == [MAX_SEQUENCE_LENGTH, 1]


def test_the_power_law_is_found_and_only_where_there_is_one():
    positions, context = PositionSums(1), torch.arange(1, 5000)
    assert positions.fit() is None
    positions.add(context[:20], torch.ones(20))
    assert positions.fit() is None, "two bins"
    positions, flat = PositionSums(1), PositionSums(1)
    positions.add(context, (8 / context) ** 0.5 + 2)
    fit = positions.fit()
    assert (fit.b, fit.g) == (pytest.approx(0.5, abs=0.01), pytest.approx(2, abs=0.01))
    flat.add(context, torch.where(context < 16, 9.0, 2.0))
    assert flat.fit() is None, "what comes before 16 tokens does not count"


def batch(tokens):
    generator = torch.Generator().manual_seed(0)
    long, short = -torch.rand(2, 2, tokens, generator=generator)
    labels = torch.zeros(2, tokens, dtype=torch.int64)
    labels[:, : tokens // 2] = IGNORE_INDEX
    differs = torch.rand(2, tokens, generator=generator) < 0.5
    return long, (long - short).exp(), labels, short, differs


def test_a_small_batch_is_looked_at_whole():
    sample, (long, weight, labels, short, differs) = WeightSample(), batch(40)
    sample.add(long, weight, ShortScores(short, differs), labels)
    sample.add(long, weight, None, labels)  # weights that do not follow from a short context
    assert len(sample) == 2
    weights, differences = sample.take()
    scored = labels.ne(IGNORE_INDEX)
    assert torch.equal(weights, weight[scored].double().repeat(2))
    torch.testing.assert_close(differences, (long - short)[scored & differs].double())
    assert len(sample) == 0
    assert [len(part) for part in sample.take()] == [0, 0]


def test_of_a_large_one_a_bounded_part():
    sample, (long, weight, labels, short, differs) = WeightSample(), batch(50_000)
    sample.add(long, weight, ShortScores(short, differs), labels)
    weights, differences = sample.take()
    assert 0.4 * SAMPLED < len(weights) < 0.6 * SAMPLED
    assert set(weights.tolist()) <= set(weight[:, 25_000:].double().flatten().tolist())
    assert weights.mean() == pytest.approx(float(weight.mean()), abs=0.05)
    assert 0.4 * len(weights) < len(differences) < 0.6 * len(weights)

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.packing.samplers import MixtureSampler, RowSampler, epoch_counts


@st.composite
def mixtures(draw):
    """Rows, weights and number of processes of a mixture that has at least one row of each source."""
    count = draw(st.integers(1, 5))
    weights = {f"s{i}": draw(st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7.0])) for i in range(count)}
    rows = {name: draw(st.integers(150 * count, 250 * count)) for name in weights}
    return rows, weights, draw(st.integers(1, 4))


def samplers(rows, weights, world_size, seed=0):
    return [MixtureSampler(rows, weights, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)]


def source_of(rows, row):
    """Number of the source that a row belongs to."""
    return np.searchsorted(np.cumsum(list(rows.values())), row, side="right")


@given(mixtures())
@settings(max_examples=20)
def test_shares_are_exact_at_every_row_of_an_epoch(mixture):
    rows, weights, world_size = mixture
    shares = [
        Fraction(str(weight)) / sum(Fraction(str(each)) for each in weights.values()) for weight in weights.values()
    ]
    each = samplers(*mixture)
    order = each[0].epoch_order(0)
    parts = [list(sampler) for sampler in each]
    assert np.stack(parts, axis=1).flatten().tolist() == order.tolist(), "processes share the rows"
    assert [len(sampler) for sampler in each] == [len(order) / world_size] * world_size
    for index, share in enumerate(shares):
        seen = np.cumsum(source_of(rows, order) == index)
        assert abs(seen[-1] - len(order) * share) < 1
        worst = max(abs(count - (n + 1) * float(share)) for n, count in enumerate(seen.tolist()))
        assert worst <= 1.5 + float(share) * len(shares) / 2
    longest = min(rows[name] / share for name, share in zip(rows, shares, strict=True))
    assert longest - world_size - 1 < len(order) <= longest


@given(mixtures())
@settings(max_examples=10)
def test_no_row_comes_again_before_all_of_its_source_were_seen(mixture):
    rows, _, _ = mixture
    (sampler, *_) = samplers(*mixture)
    seen = np.concatenate([sampler.epoch_order(epoch) for epoch in range(5)])
    for index, count in enumerate(rows.values()):
        own = seen[source_of(rows, seen) == index] - sum(list(rows.values())[:index])
        for start in range(0, len(own), count):
            one_pass = own[start : start + count]
            assert len(set(one_pass.tolist())) == len(one_pass)
            assert len(one_pass) < count or set(one_pass.tolist()) == set(range(count))


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: epoch_counts({"a": 10, "b": 5}, {"a": 100, "b": 1}, world_size=1), "'b'"),
        (lambda: MixtureSampler({"a": 1, "b": 1}, {"a": 1, "b": 1}, world_size=3), "3 processes"),
        (lambda: RowSampler(1, world_size=2), "2 processes"),
    ],
)
def test_too_few_rows_are_refused(refused, named):
    with pytest.raises(ValueError, match=named):
        refused()


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        sampler = RowSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert sorted(order(1, 2)) == list(range(50))
    # 0 + 1 == 1 + 0: the two must not be added up
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(("rows", "world_size"), [(1, 1), (7, 1), (9, 3), (10, 3), (11, 3)])
def test_an_epoch_has_every_row_once_but_those_left_out_for_evenness(rows, world_size):
    left_out = []
    for epoch in range(12):
        readers = [RowSampler(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
        for reader in readers:
            reader.set_epoch(epoch)
        seen = [row for reader in readers for row in reader]
        assert len(set(seen)) == len(seen) == rows // world_size * world_size
        left_out.append(frozenset(range(rows)) - set(seen))
    assert len(set(left_out)) > 1 or rows % world_size == 0, "other ones in other epochs"


def test_order_is_a_function_of_seed_and_epoch_and_weights():
    rows, weights = {"a": 40, "b": 30}, {"a": 2, "b": 1}

    def order(epoch=1, seed=3, weights=weights):
        return MixtureSampler(rows, weights, seed=seed).epoch_order(epoch).tolist()

    assert order() == order()
    assert all(order() != other for other in (order(epoch=2), order(seed=4), order(weights={"a": 1, "b": 1})))
    assert sorted(order()) != sorted(order(epoch=2))

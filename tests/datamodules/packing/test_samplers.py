import pytest

from datamodules.packing.samplers import RowSampler


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        sampler = RowSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert sorted(order(1, 2)) == list(range(50))
    # 0 + 1 == 1 + 0: the two must not be added up
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_refuses_more_processes_than_rows():
    with pytest.raises(ValueError, match=r"1 row\(s\) are not enough for 2 processes"):
        RowSampler(1, world_size=2)

import pytest

from datamodules.packing.samplers import DocumentSampler, RowSampler


def test_rows_are_shared_out_evenly_and_once():
    ranks = [list(RowSampler(11, seed=3, rank=rank, world_size=3)) for rank in range(3)]
    assert [len(rows) for rows in ranks] == [3, 3, 3]
    assert len(set().union(*ranks)) == 9


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


def test_documents_are_shared_out_once_and_filled_up_with_empty_rows():
    samplers = [DocumentSampler(5, rank=rank, world_size=3) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == [[0, 3], [1, 4], [2, 5]]
    assert [len(sampler) for sampler in samplers] == [2, 2, 2]


def test_any_number_of_documents_is_shared_out_once_in_equal_numbers():
    for documents in range(1, 12):
        for world_size in range(1, 6):
            samplers = [DocumentSampler(documents, rank=rank, world_size=world_size) for rank in range(world_size)]
            indices = [list(sampler) for sampler in samplers]
            assert len({len(part) for part in indices}) == 1
            assert all(len(part) == len(sampler) for part, sampler in zip(indices, samplers, strict=True))
            assert sorted(index for part in indices for index in part if index < documents) == list(range(documents))

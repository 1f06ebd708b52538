"""Ranks that gather weights in every pass run the same number of passes, however much work each has."""

import threading

import pytest
import torch
import torch.distributed as dist

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.models.lockstep import any_rank, lockstep

PATIENCE = 60.0  # seconds until a process that waits in vain gives up


class Group:
    """Two threads as the processes of a group: `all_reduce` and every pass wait for both, as collectives do."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=PATIENCE)
        self.values = {}

    def all_reduce(self, tensor, op):
        self.values[threading.get_ident()] = int(tensor)
        self.barrier.wait()
        result = {dist.ReduceOp.MAX: max}[op](self.values.values())
        self.barrier.wait()
        tensor.fill_(result)


class Recorder(torch.nn.Module):
    """A backbone that records its passes; with a group, each pass waits for the other process."""

    device = torch.device("cpu")

    def __init__(self, group=None):
        super().__init__()
        self.group, self.is_sharded, self.in_lockstep = group, group is not None, False
        self.batches = []

    def forward(self, batch):
        if self.group is not None:
            self.group.barrier.wait()
        self.batches.append((batch, torch.is_grad_enabled()))
        return batch


def run_both(process, monkeypatch):
    """The backbones of two threads that each call ``process(rank, backbone)``."""
    group = Group()
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    backbones, errors = [Recorder(group), Recorder(group)], []

    def run(rank):
        try:
            process(rank, backbones[rank])
        except Exception as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
    assert not errors, errors
    return backbones


@pytest.mark.parametrize("work", [(3, 1), (0, 2), (2, 2), (0, 0)])
def test_all_run_as_many_passes_as_the_one_with_the_most_work(work, monkeypatch):
    def process(rank, backbone):
        with lockstep(backbone) as run:
            assert [run(backbone, number) for number in range(work[rank])] == list(range(work[rank]))
        assert not backbone.in_lockstep

    for own, backbone in zip(work, run_both(process, monkeypatch), strict=True):
        assert [batch for batch, _ in backbone.batches[:own]] == list(range(own))
        dummies = backbone.batches[own:]
        assert len(dummies) == max(work) - own
        for batch, with_gradient in dummies:
            assert batch["labels"].tolist() == [[IGNORE_INDEX]]
            assert not with_gradient


def test_a_block_in_another_is_a_part_of_it(monkeypatch):
    def process(rank, backbone):
        with lockstep(backbone):
            for number in range(2 * rank):
                with lockstep(backbone) as run:
                    run(backbone, number)
            assert backbone.in_lockstep

    idle, busy = run_both(process, monkeypatch)
    assert [batch for batch, _ in busy.batches] == [0, 1]
    assert len(idle.batches) == 2


def alone(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("there is nobody to ask"))
    return Recorder()


def test_a_process_whose_weights_are_its_own_asks_nobody(monkeypatch):
    backbone = alone(monkeypatch)
    with lockstep(backbone) as run:
        assert run(backbone, "batch") == "batch"
    assert len(backbone.batches) == 1
    assert any_rank(True, "cpu")
    assert not any_rank(False, "cpu")


def test_an_error_in_the_block_is_not_hidden_by_waiting_for_others(monkeypatch):
    backbone = alone(monkeypatch)
    backbone.is_sharded = True
    with pytest.raises(KeyError, match="the cause"), lockstep(backbone):
        raise KeyError("the cause")
    assert not backbone.batches
    assert not backbone.in_lockstep

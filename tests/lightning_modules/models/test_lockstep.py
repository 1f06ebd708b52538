"""Processes that gather weights in every pass make equally many of them, however much work each has."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_modules.models.lockstep import Passes

PATIENCE = 5.0  # seconds until a process that waits in vain gives up


class Group:
    """Two threads as the processes of a group: `all_reduce` and every pass wait for both, as collectives do."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=PATIENCE)
        self.values = {}

    def all_reduce(self, tensor, op):
        self.values[threading.get_ident()] = int(tensor)
        self.barrier.wait()
        result = {dist.ReduceOp.MAX: max, dist.ReduceOp.MIN: min, dist.ReduceOp.SUM: sum}[op](self.values.values())
        self.barrier.wait()
        tensor.fill_(result)


class Recorder:
    """A backbone that records its passes; with a group, each pass waits for the other process."""

    device = torch.device("cpu")

    def __init__(self, group=None):
        self.group, self.in_step = group, group is not None
        self.passes, self.read, self.calls = 0, [], []

    def within(self, function):
        if self.group is not None:
            self.group.barrier.wait()
        self.passes += 1
        return function()

    def decoder(self, **inputs):
        self.read.append(inputs)
        return SimpleNamespace(last_hidden_state=torch.full((1, 1, 3), 7.0))

    def logits(self, hidden_states):
        self.calls.append(hidden_states)


def run_both(work, monkeypatch):
    """The backbones and results of two threads of which each has so many functions to call."""
    group = Group()
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    backbones, results, errors = [Recorder(group), Recorder(group)], [[], []], []

    def process(rank):
        try:
            with Passes(backbones[rank]) as passes:
                for number in range(work[rank]):
                    results[rank].append(passes(lambda number=number: (rank, number)))
        except Exception as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
    assert not errors, errors
    return backbones, results


@pytest.mark.parametrize("work", [(3, 1), (0, 2), (2, 2), (0, 0)])
def test_all_make_as_many_passes_as_the_one_with_the_most_work(work, monkeypatch):
    backbones, results = run_both(work, monkeypatch)
    assert [backbone.passes for backbone in backbones] == [max(work)] * 2
    assert results == [[(rank, number) for number in range(work[rank])] for rank in range(2)]
    for rank, backbone in enumerate(backbones):
        idle = max(work) - work[rank]
        assert len(backbone.read) == len(backbone.calls) == idle, "decoder and head, as both may gather weights"
        for inputs, hidden_states in zip(backbone.read, backbone.calls, strict=True):
            assert inputs["use_cache"] is False
            for name in ("input_ids", "position_ids"):
                assert inputs[name].tolist() == [[0]]
                assert inputs[name].dtype == torch.int64
            assert hidden_states.eq(7.0).all()


def alone(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("there is nobody to ask"))
    return Recorder()


def test_a_process_whose_weights_are_its_own_asks_nobody(monkeypatch):
    backbone = alone(monkeypatch)
    with Passes(backbone) as passes:
        assert passes(lambda: "result") == "result"
    assert backbone.passes == 1


def test_an_error_in_the_block_is_not_hidden_by_waiting_for_others(monkeypatch):
    backbone = alone(monkeypatch)
    backbone.in_step = True
    with pytest.raises(KeyError, match="the cause"), Passes(backbone):
        raise KeyError("the cause")
    assert backbone.passes == 0

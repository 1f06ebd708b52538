"""Processes that notice when another one is gone."""

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_modules import companions
from lightning_modules.companions import Companions, gathering


class Strategy:
    """Two processes that can tell each other one thing."""

    def __init__(self, pipe):
        self.pipe = pipe

    def broadcast(self, value):
        if isinstance(value[1], bytes) and value[1]:
            self.pipe.send(value)
            return value
        return self.pipe.recv()


def _process(rank, pipe, behaviour, said):
    companions.GRACE = 0.3
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.dup2(said, 2)
    trainer = SimpleNamespace(world_size=2, num_nodes=1, is_global_zero=rank == 0, strategy=Strategy(pipe))
    watch = Companions()
    watch.setup(trainer, None, "fit")
    time.sleep(0.2)
    behaviour(rank, watch)
    os._exit(0)


def _one_dies(rank, watch):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)  # computes for itself


def _other_dies(rank, watch):
    _one_dies(1 - rank, watch)


def _both_end(rank, watch):
    watch.teardown(None, None, "fit")
    time.sleep(1.5 * rank)  # the other one has long ended


def _stopped(rank, watch):
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    watch.on_exception(None, None, SIGTERMException())
    time.sleep(1.5 * (1 - rank))


def _slow(rank, watch):
    time.sleep(2)
    watch.teardown(None, None, "fit")


def run(behaviour, tmp_path):
    """Exit statuses, the seconds it took, and what the processes said."""
    context = multiprocessing.get_context("fork")
    pipes = context.Pipe()
    said = os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    processes = [context.Process(target=_process, args=(rank, pipes[rank], behaviour, said)) for rank in range(2)]
    begin = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    return [process.exitcode for process in processes], time.monotonic() - begin, (tmp_path / "said").read_text()


@pytest.mark.parametrize(("behaviour", "statuses"), [(_one_dies, [-9, 1]), (_other_dies, [1, -9])])
def test_a_death_ends_a_process_that_is_busy(tmp_path, behaviour, statuses):
    found, seconds, said = run(behaviour, tmp_path)
    assert found == statuses
    assert 0.3 < seconds < 10
    assert (
        "longce: error: Another process of the run has ended: its own output says why. Then run the same command again"
        in said
    )


@pytest.mark.parametrize("behaviour", [_both_end, _stopped, _slow])
def test_who_says_goodbye_or_is_slow_is_not_taken_for_dead(tmp_path, behaviour):
    assert run(behaviour, tmp_path)[::2] == ([0, 0], "")


def test_a_stranger_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(companions, "GRACE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def call():
            for token in (b"", b"hung up", b"x" * 16, b"t" * 16):
                callers.append(socket.create_connection(address))
                callers[-1].sendall(token)
                if token == b"hung up":
                    callers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    callers[-1].close()  # with a reset

        callers = []
        threading.Thread(target=call).start()
        (found,) = companions._accepted(server, b"t" * 16, 1)
        assert found.getpeername() == callers[3].getsockname()
        for each in (*callers, found):
            each.close()


def test_where_a_firewall_forbids_it_the_run_goes_on(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert companions._connected("127.0.0.1", port, b"t" * 16) == []
    assert "No connection to watch 127.0.0.1" in caplog.text


def test_the_start_is_waited_for_so_long(monkeypatch):
    said, ends = [], []
    monkeypatch.setattr(companions, "_say", said.append)
    monkeypatch.setattr(companions, "_end", ends.append)
    monkeypatch.setattr(companions, "PATIENCE", 0.5)
    monkeypatch.setattr(companions, "GATHERING", 1.5)
    launched = SimpleNamespace(launcher=None)
    first, second = (
        SimpleNamespace(world_size=2, local_rank=rank, num_nodes=1, strategy=launched) for rank in range(2)
    )
    with gathering(first):
        time.sleep(2.5)
    assert len(said) == len(ends) == 1
    assert "within 2 s" in ends[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with gathering(second):
            time.sleep(1.3)
        assert (len(said), len(ends)) == (2, 1), "the first process is there, and others are waited for"
    with gathering(second):
        time.sleep(1.3)
    assert ends[1] == "The first process of the run has ended"
    monkeypatch.setattr(companions, "GATHERING", 0.0)
    with gathering(first):
        pass  # over before it is looked at
    with gathering(SimpleNamespace(world_size=1, local_rank=0)):
        time.sleep(1.2)
    forks = SimpleNamespace(launcher=_MultiProcessingLauncher(None, start_method="fork"))
    with gathering(SimpleNamespace(world_size=2, local_rank=0, num_nodes=1, strategy=forks)):
        time.sleep(1.2)  # its processes find each other, and not this one
    assert len(ends) == 2

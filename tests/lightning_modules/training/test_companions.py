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

from lightning_modules.training import companions
from lightning_modules.training.companions import Companions, gathering


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
    time.sleep(0.8 * rank)  # the other one has long ended


def _stopped(rank, watch):
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    watch.on_exception(None, None, SIGTERMException())
    time.sleep(0.8 * (1 - rank))


def _slow(rank, watch):
    time.sleep(0.8)
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
    assert seconds > 0.3
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


class Clock:
    """An event that is not set, and the time, which passes only while somebody waits for it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(companions.time, "monotonic", clock.monotonic)
    return clock


@pytest.mark.parametrize(
    ("follows", "listens", "reason", "seconds"),
    [
        (False, False, "Not all processes of the run have started within 300 s", 301),
        (True, True, "Not all processes of the run have started within 300 s", 301),
        (True, False, "The first process of the run has ended", 41),
    ],
)
def test_the_start_is_waited_for_so_long(monkeypatch, clock, follows, listens, reason, seconds):
    said, ends = [], []
    monkeypatch.setattr(companions, "_say", said.append)
    monkeypatch.setattr(companions, "_end", ends.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        if not listens:
            server.close()
        companions._gather(clock, follows)
    (end,) = ends
    assert end.startswith(reason)
    assert clock.now == seconds
    waiting = "Waiting for other processes of the run to start, until 300 s are over."
    assert said == ([waiting] if listens or not follows else []), "once, and not where nobody will come"


def test_who_has_met_the_others_waits_no_longer(monkeypatch, clock):
    met = threading.Event()
    met.set()
    assert companions._waited_in_vain(met, True) is None
    monkeypatch.setattr(companions.dist, "is_initialized", lambda: clock.now > 2)
    assert companions._waited_in_vain(clock, True) is None
    assert clock.now == 3


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        ({"world_size": 2, "local_rank": 0, "num_nodes": 1}, False),
        ({"world_size": 2, "local_rank": 1, "num_nodes": 1}, True),
        ({"world_size": 4, "local_rank": 1, "num_nodes": 2}, False),  # the first process is on another machine
        ({"world_size": 1, "local_rank": 0, "num_nodes": 1}, None),
        # Processes that this one forks find each other, and not this one.
        ({"world_size": 2, "local_rank": 0, "num_nodes": 1, "start_method": "fork"}, None),
    ],
)
def test_which_processes_are_waited_for(monkeypatch, settings, watched):
    calls, called = [], threading.Event()
    monkeypatch.setattr(companions, "_gather", lambda *arguments: calls.append(arguments) or called.set())
    method = settings.pop("start_method", None)
    launcher = None if method is None else _MultiProcessingLauncher(None, start_method=method)
    threads = threading.active_count()
    with gathering(SimpleNamespace(**settings, strategy=SimpleNamespace(launcher=launcher))):
        if watched is None:
            assert threading.active_count() == threads
            return
        assert called.wait(20)
        ((done, follows),) = calls
        assert follows == watched
        assert not done.is_set()
    assert done.is_set()

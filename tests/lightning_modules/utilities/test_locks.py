import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
from filelock import LeaseCompromise

from lightning_modules.utilities import locks
from lightning_modules.utilities.files import atomic_folder, building_prefix
from lightning_modules.utilities.locks import RunLock, exclusive

FORK = multiprocessing.get_context("fork")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_at_a_time_and_nothing_is_left(tmp_path):
    count, inside, seen = 0, 0, []

    def work():
        nonlocal count, inside
        for _ in range(5):
            with exclusive(tmp_path / "target"):
                inside += 1
                seen.append(inside)
                before = count
                time.sleep(0.0005)
                count = before + 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (count, max(seen)) == (20, 1)
    assert names(tmp_path) == []
    with exclusive(tmp_path / "one"), exclusive(tmp_path / "other"):
        assert names(tmp_path) == [".one.lock", ".other.lock"]


@pytest.mark.parametrize("folder", [".building-target@elsewhere-xyz", "another"])
def test_unfinished_folders_go_with_their_lock_and_others_stay(tmp_path, folder):
    if folder == "another":
        folder = f"{building_prefix(tmp_path / 'another').rpartition('/')[2]}xyz"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "file").touch()
    os.utime(tmp_path / folder, (time.time() + 1e6,) * 2)  # no clock is asked
    with exclusive(tmp_path / "target"):
        assert (tmp_path / folder).exists() == ("another" in folder)


def test_a_failure_frees_the_lock(tmp_path):
    with pytest.raises(KeyboardInterrupt), exclusive(tmp_path / "target"):
        raise KeyboardInterrupt
    with exclusive(tmp_path / "target"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), exclusive(tmp_path / "file" / "target"):
        pass


def hold(target):
    with exclusive(target), atomic_folder(target) as folder:
        (folder / "file").write_text("half")
        time.sleep(300)


def test_who_waits_is_told_for_whom_and_takes_over_from_a_dead_holder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    holder = FORK.Process(target=hold, args=(tmp_path / "target",))
    holder.start()
    until(lambda: list(tmp_path.glob(".building-*/file")))
    taken = threading.Event()

    def wait():
        with exclusive(tmp_path / "target"):
            assert names(tmp_path) == [".target.lock"]
            taken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: f"Waiting for process {holder.pid} on " in caplog.text)
    assert not taken.is_set()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    waiting.join(120)
    assert taken.is_set()
    assert caplog.text.count("Waiting for") == 1
    assert names(tmp_path) == []


def test_only_the_folders_of_the_dead_are_removed(tmp_path):
    for target in ("alive", "dead"):
        process = FORK.Process(target=hold, args=(tmp_path / target,))
        process.start()
        until(lambda target=target: list(tmp_path.glob(f".building-{target}*/file")))
        if target == "dead":
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        else:
            alive = process
    try:
        with exclusive(tmp_path / "another"):
            assert [name.split("@")[0] for name in names(tmp_path)] == [
                ".alive.lock",
                ".another.lock",
                ".building-alive",
            ]
            assert list(tmp_path.glob(".building-alive*/file"))
    finally:
        alive.kill()
        alive.join()


def marker(path, *, host, pid=4321, age=0.0):
    """What a process on another machine, or a dead one on this machine, has left."""
    path.write_text(f"filelock/2\npid={pid}\nhost={host}\nmode=lease\ntoken=abc\nduration={locks.LEASE!r}\nstart=5\n")
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "LEASE", 0.6)
    monkeypatch.setattr(locks, "HEARTBEAT", 0.1)


def hold_run(folder, rank, ready, end):
    lock = RunLock(folder)
    lock.begin() if rank == 0 else lock.join(rank)
    ready.set()
    end.wait(300)
    os._exit(0)  # as a crash: nothing is released


@pytest.fixture
def held(tmp_path):
    """Starts a process that holds the lock of a rank."""
    processes = []

    def start(rank):
        ready = FORK.Event()
        processes.append(FORK.Process(target=hold_run, args=(tmp_path, rank, ready, FORK.Event())))
        processes[-1].start()
        assert ready.wait(120)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_second_run_is_refused_at_once_and_told_who_holds_the_folder(tmp_path, held, suspended):
    process, begin = held(0), time.monotonic()
    if suspended:  # it may wake up any time, and write
        os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=rf"process {process.pid} .*rank-0\.lock"):
        RunLock(tmp_path).begin()
    assert time.monotonic() - begin < locks.LEASE, "it did not wait for the lease"


def test_a_dead_process_does_not_block(tmp_path, held):
    process = held(0)
    process.kill()
    process.join()
    assert names(tmp_path) == [".rank-0.lock"]
    lock = RunLock(tmp_path)
    lock.begin(patience=0)
    lock.leave()
    lock.leave()
    assert names(tmp_path) == []


def begin_at_once(folder, start, said, end):
    start.wait(120)
    lock = RunLock(folder, folder / "checkpoints")
    try:
        lock.begin()
        os.write(said, b"began ")
        end.wait(300)
    except ValueError:
        os.write(said, b"refused ")
    os._exit(0)  # what it holds is left for the next round


@pytest.mark.slow
def test_of_runs_that_start_at_once_one_begins(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for _ in range(5):
        start, end, (heard, said) = FORK.Event(), FORK.Event(), os.pipe()
        runs = [FORK.Process(target=begin_at_once, args=(tmp_path, start, said, end)) for _ in range(3)]
        for run in runs:
            run.start()
        start.set()
        outcome = b""
        while len(outcome.split()) < len(runs):
            outcome += os.read(heard, 100)
        end.set()
        for run in runs:
            run.join()
        assert sorted(outcome.split()) == [b"began", b"refused", b"refused"]


def test_a_run_begins_when_the_last_process_of_the_one_before_is_gone(tmp_path, held):
    first, second = held(0), held(1)
    first.kill()
    first.join()
    with pytest.raises(ValueError, match=f"process {second.pid} "):
        RunLock(tmp_path).begin(patience=0.2)
    assert names(tmp_path) == [".rank-1.lock"], "who is refused holds nothing"
    threading.Timer(0.3, second.kill).start()
    threading.Timer(0.4, second.join).start()
    lock = RunLock(tmp_path)
    lock.begin(patience=120)
    assert names(tmp_path) == [".rank-0.lock"]
    lock.leave()


@pytest.mark.parametrize("age", [-1e6, 1e6])
def test_a_dead_run_on_another_machine_is_waited_out_whatever_its_clock(tmp_path, impatient, age, caplog):
    marker(tmp_path / ".rank-0.lock", host="elsewhere", age=age)
    lock, begin = RunLock(tmp_path), time.monotonic()
    lock.begin(patience=120)
    assert time.monotonic() - begin > 0.5
    assert "process 4321 on elsewhere holds" in caplog.text
    lock.leave()


def test_a_run_survives_a_disk_that_does_not_answer(tmp_path, caplog):
    error = OSError("Stale file handle")
    lost = locks._run_lease(tmp_path / ".rank-0.lock")._on_compromise
    lost(LeaseCompromise(str(tmp_path / ".rank-0.lock"), "abc", "refresh-failed", error))
    assert "Cannot touch" in caplog.text
    assert "Stale file handle" in caplog.text


def test_a_process_that_joins_waits_for_the_one_of_the_run_before(tmp_path, held):
    process = held(1)
    threading.Timer(0.2, process.kill).start()
    threading.Timer(0.3, process.join).start()
    lock = RunLock(tmp_path)
    lock.join(1)
    lock.join(1)
    assert names(tmp_path) == [".rank-1.lock"]
    lock.leave()


def taken_over(folder):
    lock = RunLock(folder)
    lock.begin()
    time.sleep(300)


def test_a_deleted_lock_is_taken_again_by_a_run_that_lives(tmp_path, impatient, caplog):
    lock, path = RunLock(tmp_path), tmp_path / ".rank-0.lock"
    lock.begin()
    path.unlink()
    until(path.exists)
    until(lambda: "was deleted: locked again" in caplog.text)
    with pytest.raises(ValueError, match="in use"):
        RunLock(tmp_path).begin(patience=0)
    lock.leave()
    assert names(tmp_path) == []


def test_a_run_that_was_taken_over_ends(tmp_path, impatient, capfd):
    process = FORK.Process(target=taken_over, args=(tmp_path,))
    process.start()
    until(lambda: "start=" in (tmp_path / ".rank-0.lock").read_text() if names(tmp_path) else False)
    (tmp_path / ".rank-0.lock").unlink()  # by hand, though the run lives
    lock = RunLock(tmp_path)
    lock.begin()
    process.join(120)
    assert process.exitcode == 1
    assert f"was taken over by process {os.getpid()} on " in capfd.readouterr().err
    lock.leave()

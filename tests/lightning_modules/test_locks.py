import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest

from lightning_modules.files import atomic_folder, building_prefix
from lightning_modules.locks import ABANDONED, RunLock, exclusive

FORK = multiprocessing.get_context("fork")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_at_a_time_and_nothing_is_left(tmp_path):
    count, most, inside = 0, 0, 0

    def work():
        nonlocal count, most, inside
        for _ in range(20):
            with exclusive(tmp_path / "target"):
                inside += 1
                most = max(most, inside)
                seen = count
                time.sleep(0.0005)
                count = seen + 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (count, most) == (80, 1)
    assert names(tmp_path) == []


def test_different_targets_do_not_wait(tmp_path):
    with exclusive(tmp_path / "one"), exclusive(tmp_path / "other"):
        assert names(tmp_path) == [".one.lock", ".other.lock"]


def test_a_failure_frees_the_lock(tmp_path):
    with pytest.raises(KeyboardInterrupt), exclusive(tmp_path / "target"):
        raise KeyboardInterrupt
    with exclusive(tmp_path / "target"):
        pass


def hold(target):
    with exclusive(target), atomic_folder(target) as folder:
        (folder / "file").write_text("half")
        time.sleep(60)


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
    until(lambda: "Waiting for" in caplog.text)
    assert f"Waiting for process {holder.pid} on " in caplog.text
    assert "which prepares target." in caplog.text
    assert not taken.is_set()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    waiting.join(20)
    assert taken.is_set()
    assert "which a process that died has left" in caplog.text
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


@pytest.mark.parametrize(("age", "stays"), [(0, True), (ABANDONED + 60, False)])
def test_another_machines_folder_goes_when_it_was_not_touched_for_long(tmp_path, age, stays):
    folder = tmp_path / ".building-target@elsewhere-xyz"
    folder.mkdir()
    (folder / "file").touch()
    for path in (folder / "file", folder):
        os.utime(path, (time.time() - age,) * 2)
    with exclusive(tmp_path / "target"):
        assert folder.exists() == stays


def test_a_folder_without_a_lock_is_left_alone(tmp_path):
    folder = tmp_path / f"{building_prefix(tmp_path / 'other').rpartition('/')[2]}xyz"
    folder.mkdir()
    with exclusive(tmp_path / "target"):
        assert folder.exists()


def test_without_locks_everybody_works(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with exclusive(tmp_path / "target"), exclusive(tmp_path / "target"):
        pass
    assert caplog.text.count("the same work may be done twice") == 2


def test_other_errors_are_not_swallowed(tmp_path):
    with pytest.raises(OSError, match="No such file"), exclusive(tmp_path / "missing" / "target"):
        pass


def hold_run(folder, ready, end):
    lock = RunLock(folder)
    lock.begin()
    lock.join()
    ready.set()
    end.wait(20)


def test_a_run_begins_when_the_one_before_is_gone(tmp_path):
    ready, end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold_run, args=(tmp_path, ready, end))
    process.start()
    assert ready.wait(20)
    with pytest.raises(ValueError, match="Another run is writing"):
        RunLock(tmp_path).begin(patience=0.3)
    threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.begin(patience=20)
    process.join()
    first.join()
    second.join()
    with pytest.raises(ValueError, match="Another run"):
        RunLock(tmp_path).begin(patience=0)
    first.leave()
    with pytest.raises(ValueError, match="Another run"):  # a process of the run is left
        RunLock(tmp_path).begin(patience=0)
    second.leave()
    second.leave()
    RunLock(tmp_path).begin(patience=0)


def test_forked_children_do_not_keep_a_run_that_has_left(tmp_path):
    lock = RunLock(tmp_path)
    lock.begin()
    end = FORK.Event()
    child = FORK.Process(target=end.wait, args=(20,))
    child.start()
    lock.leave()
    RunLock(tmp_path).begin(patience=0)
    end.set()
    child.join()

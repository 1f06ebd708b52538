import hashlib
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from lightning_modules.utilities import identity
from lightning_modules.utilities.identity import combined_hash, content_hash, file_hashes


@pytest.fixture
def settled(monkeypatch):
    """Trust the times of files that were written just now, as if the test had waited."""
    monkeypatch.setattr(identity, "SETTLING_TIME", 0)


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose bytes are read."""
    names = []
    original = identity._hash_file
    monkeypatch.setattr(
        identity, "_hash_file", lambda path, stop: names.append(Path(path).name) or original(path, stop)
    )
    return names


def write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def edit_in_place(path, content):
    """Change the bytes; size, inode and modification time stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (before.st_size, before.st_ino, before.st_mtime_ns)


def memos():
    return list(Path(os.environ["LONGCE_CACHE"], "identity").glob("*.json"))


def test_hash_is_that_of_all_bytes_in_the_order_asked_for(tmp_path):
    a, b = write(tmp_path / "x", a=b"one", b=b"two")
    assert combined_hash({"a": 1, "b": 2}) == combined_hash({"b": 2, "a": 1}), "mappings have no order"
    assert len({combined_hash(parts) for parts in (["a", "b"], ["b", "a"], ["ab", ""])}) == 3
    expected = [hashlib.sha256(content).hexdigest() for content in (b"two", b"one", b"two")]
    assert file_hashes([b, a, b]) == expected
    assert file_hashes([]) == []
    assert content_hash(b) == expected[0]


def test_folder_is_its_names_and_bytes_wherever_it_is(tmp_path):
    write(tmp_path / "x", a=b"one", b=b"two")
    first = content_hash(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "deep" / "copy")
    assert content_hash(tmp_path / "deep" / "copy") == first
    write(tmp_path / "swapped", a=b"two", b=b"one")
    write(tmp_path / "renamed", a=b"one", c=b"two")
    write(tmp_path / "more" / "below", c=b"")
    write(tmp_path / "more", a=b"one", b=b"two")
    assert len({first, *(content_hash(tmp_path / name) for name in ("swapped", "renamed", "more"))}) == 4
    assert content_hash(tmp_path / "more", [tmp_path / "more" / name for name in "ba"]) == first


def test_files_are_read_once(tmp_path, settled, hashed):
    files = write(tmp_path / "x", a=b"one", b=b"two")
    os.utime(files[0], (2**32, 2**32))  # a time in the future does not keep it from being remembered
    first = file_hashes(files)
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    assert file_hashes([tmp_path / "linked" / "a", files[1]]) == first
    assert sorted(hashed) == ["a", "b"]
    write(tmp_path / "x", c=b"three")
    file_hashes([*files, tmp_path / "x" / "c"])
    file_hashes(files)  # an entry that is added leaves the others
    assert sorted(hashed) == ["a", "b", "c"]


@pytest.mark.parametrize("attack", ["edit", "replace", "copy back", "grow"])
def test_a_changed_file_is_hashed_again_though_its_time_is_the_old_one(tmp_path, settled, attack):
    (file,) = write(tmp_path / "x", a=b"one")
    content_hash(file)
    before = file.stat()
    if attack == "edit":
        edit_in_place(file, b"two")
    elif attack == "grow":
        file.write_bytes(b"three")
    else:
        (other,) = write(tmp_path / "y", a=b"two")
        other.replace(file) if attack == "replace" else shutil.copyfile(other, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content_hash(file) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("keeps_change_times", [True, False])
def test_a_file_that_changed_within_a_tick_of_the_clock_is_not_remembered(tmp_path, monkeypatch, keeps_change_times):
    (file,) = write(tmp_path / "x", a=b"one")
    coarse = file.stat().st_mtime_ns
    state = [3, 1, coarse, coarse if keeps_change_times else 0]  # the same before and after the change
    monkeypatch.setattr(identity, "file_state", lambda path: state)
    assert content_hash(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    assert content_hash(file) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_clock_that_was_moved_makes_no_old_hash_true(tmp_path, monkeypatch, hours):
    (file,) = write(tmp_path / "x", a=b"one")
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + hours * 3600 * 10**9)
    content_hash(file)
    assert bool(memos()) == (hours > 0)  # the file is from the future, or from yesterday
    edit_in_place(file, b"two")
    assert content_hash(file) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({path: [1] for path in json.loads(text)}),
    ],
)
def test_a_damaged_memo_is_ignored_and_replaced(tmp_path, settled, hashed, damage):
    (file,) = write(tmp_path / "x", a=b"one")
    expected = content_hash(file)
    (memo,) = memos()
    memo.write_text(damage(memo.read_text()))
    assert [content_hash(file), content_hash(file)] == [expected] * 2
    assert hashed == ["a", "a"]


def hash_slowly(folder, log, go, found):
    """A process of its own, which notes whose bytes it reads."""
    identity.SETTLING_TIME, original = 0, identity._hash_file

    def hash_file(path, stop):
        with log.open("a") as stream:
            stream.write(f"{os.path.basename(path)}\n")
        time.sleep(0.3)
        return original(path, stop)

    identity._hash_file = hash_file
    go.wait(120)
    found.put(content_hash(folder))


def test_of_many_processes_one_hashes(tmp_path):
    write(tmp_path / "x", a=b"one", b=b"two")
    fork = multiprocessing.get_context("fork")
    go, found = fork.Event(), fork.SimpleQueue()
    arguments = (tmp_path / "x", tmp_path / "log", go, found)
    running = [fork.Process(target=hash_slowly, args=arguments) for _ in range(4)]
    for process in running:
        process.start()
    go.set()
    for process in running:
        process.join(120)
    assert {found.get() for _ in running} == {content_hash(tmp_path / "x")}
    assert sorted((tmp_path / "log").read_text().split()) == ["a", "b"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (file,) = write(tmp_path / "x", a=b"one")
    monkeypatch.setenv("LONGCE_CACHE", "/proc/longce")
    with pytest.raises(ValueError, match="Cannot write to the folder /proc/longce/identity"):
        content_hash(file)


def test_interrupted_hashing_keeps_finished_files_and_stops_within_the_others(tmp_path, settled, hashed, monkeypatch):
    files = write(tmp_path / "x", a=b"one", b=b"two", c=b"three")
    original, hash_file = identity.file_state, identity._hash_file
    endless = os.path.realpath("/dev/zero")
    monkeypatch.setattr(identity, "file_state", lambda path: [0, 1, 0, 0] if path == endless else original(path))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one of the threads stays with the endless file

    def interrupt(path, stop):
        if Path(path).name == "c":  # the last of the others, so that the other thread has finished them
            raise KeyboardInterrupt
        return hash_file(path, stop)

    monkeypatch.setattr(identity, "_hash_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        file_hashes([*files, Path(endless)])
    monkeypatch.setattr(identity, "_hash_file", hash_file)
    (memo,) = memos()
    assert {Path(path).name for path in json.loads(memo.read_bytes())} == {"a", "b"}


@pytest.mark.parametrize("name", ["none", "pipe", "x", "dangling"])
def test_files_that_cannot_be_hashed_are_named(tmp_path, name):
    (file,) = write(tmp_path / "x", a=b"one")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        file_hashes([file, tmp_path / name])


@pytest.mark.parametrize("change", ["write", "remove"])
def test_a_file_that_changes_meanwhile_is_refused(tmp_path, monkeypatch, change):
    (file,) = write(tmp_path / "x", a=b"one")
    original = hashlib.sha256

    def sha256(*arguments):
        if not arguments and file.exists():  # the hash of the file begins
            file.write_bytes(b"longer") if change == "write" else file.unlink()
        return original(*arguments)

    monkeypatch.setattr(hashlib, "sha256", sha256)
    with pytest.raises((ValueError, FileNotFoundError), match=str(file)):
        content_hash(file)
    assert not memos()

import errno
import io
import json
import multiprocessing
import os
import pickle
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_modules.training.checkpoints.io import (
    CheckedCheckpointIO,
    check_checkpoint,
    check_integrity,
    find_damage,
    newest_checkpoint,
)
from lightning_modules.training.checkpoints.sharded import CheckpointError
from lightning_modules.utilities import files
from tests.support.distributed import run_distributed
from tests.support.faults import Evil, same

STATE = {"state_dict": {"weight": torch.arange(5000.0)}, "optimizer_states": [{"step": 3, "betas": (0.9, 0.95)}]}


def save(path, content=STATE, *, age=0):
    CheckedCheckpointIO().save_checkpoint(content, path)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_is_saved_is_loaded_here_and_by_torch_alone(tmp_path):
    path = save(tmp_path / "folder" / "a.ckpt")
    assert same(CheckedCheckpointIO().load_checkpoint(path), STATE)
    assert same(torch.load(path, weights_only=True), STATE)
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]


def test_a_changed_byte_is_harmless_or_found(tmp_path):
    small = {"weight": torch.arange(40.0), "step": 7}
    path = save(tmp_path / "a.ckpt", small)
    whole = path.read_bytes()
    found = 0
    for place in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        os.utime(path, ns=(place, place))
        try:
            assert same(CheckedCheckpointIO().load_checkpoint(path), small), place
        except ValueError:
            found += 1
    payload = whole.index(small["weight"].numpy().tobytes())
    assert found > 53, "the bytes of the tensor alone"
    path.write_bytes(whole[:payload] + b"\xff" + whole[payload + 1 :])
    assert torch.load(path, weights_only=True)["weight"][0] != 0, "torch itself does not look"


def test_a_damaged_file_is_refused_with_the_newest_good_one_beside_it(tmp_path):
    save(tmp_path / "step-1.ckpt", age=30)
    save(tmp_path / "step-2.ckpt", age=20)
    save(tmp_path / "weights-3.ckpt", {"state_dict": {}}, age=10)
    last = save(tmp_path / "step-3.ckpt")
    assert newest_checkpoint(tmp_path) == last
    whole = last.read_bytes()
    for length in (0, 7, len(whole) // 2, len(whole) - 2000, len(whole) - 1):
        last.write_bytes(whole[:length])
        for refusing in (check_checkpoint, check_integrity, CheckedCheckpointIO().load_checkpoint):
            with pytest.raises(ValueError, match=r"`ckpt_path`.*step-3\.ckpt.*step-2\.ckpt"):
                refusing(last)
    with pytest.raises(ValueError, match=r"none\.ckpt"):
        check_checkpoint(tmp_path / "none.ckpt")


def test_the_newest_that_is_good_is_chosen_and_the_log_says_what_was_passed_over(tmp_path, caplog):
    assert newest_checkpoint(tmp_path) is None
    folder = tmp_path / "checkpoints"
    good = save(folder / "step-9.ckpt", age=30)
    save(folder / "step-10.ckpt").write_bytes(b"PK")
    (folder / "last.ckpt").symlink_to("step-10.ckpt")
    (folder / "step-11.ckpt").mkdir()  # what a sharded strategy has begun
    assert newest_checkpoint(tmp_path) == good
    skipped = [record.getMessage().split("/")[-1].split(":")[0] for record in caplog.records]
    assert skipped == ["step-11.ckpt", "step-10.ckpt"]
    (folder / "step-11.ckpt").rmdir()
    sharded(folder / "step-11.ckpt")
    assert newest_checkpoint(tmp_path) == folder / "step-11.ckpt"
    (folder / "step-11.ckpt" / "meta.pt").unlink()
    assert newest_checkpoint(tmp_path) == good, "without what is not divided"
    good.unlink()
    with pytest.raises(ValueError, match=r"step-11\.ckpt.*step-10\.ckpt"):
        newest_checkpoint(tmp_path)


def sharded(path):
    """What FSDP2 leaves, without any part."""
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
    torch.save({}, path / "meta.pt")
    return path


def test_a_sharded_checkpoint_names_the_strategy_that_loads_it(tmp_path):
    with pytest.raises(ValueError, match=r"`trainer\.strategy`"):
        CheckedCheckpointIO().load_checkpoint(sharded(tmp_path / "step-1.ckpt"))


def test_files_folders_and_links_are_removed(tmp_path):
    file, folder, kept = save(tmp_path / "a.ckpt"), sharded(tmp_path / "b.ckpt"), sharded(tmp_path / "kept.ckpt")
    (tmp_path / "link.ckpt").symlink_to("kept.ckpt")
    for path in (file, str(folder), tmp_path / "link.ckpt"):
        CheckedCheckpointIO().remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == [kept]
    assert len(list(kept.iterdir())) == 2


def test_what_is_no_file_is_no_checkpoint(tmp_path):
    assert find_damage(Path("/dev/zero")) == "is not a file"
    assert find_damage(Path("a\0b")) == "does not exist"
    with pytest.raises(ValueError, match="web"):
        CheckedCheckpointIO().load_checkpoint("https://example.org/a.ckpt")


def test_weights_alone_are_evaluated_and_not_trained_on(tmp_path):
    whole = save(tmp_path / "step-1.ckpt")
    weights = save(tmp_path / "step-2.ckpt", {"state_dict": {}})
    check_checkpoint(weights)
    check_checkpoint(whole, resume=True)
    with pytest.raises(ValueError, match=r"`x`.*step-2\.ckpt"):
        check_checkpoint(weights, "x", resume=True)
    assert newest_checkpoint(tmp_path, resume=False) == weights
    save(tmp_path / "step-3.ckpt", {"optimizer_states": []})
    assert newest_checkpoint(tmp_path) == whole, "no weights"


def flip_tensor_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(STATE["state_dict"]["weight"].numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)


def test_content_is_compared_when_it_is_loaded_and_not_before(tmp_path):
    good, flipped = save(tmp_path / "step-1.ckpt"), save(tmp_path / "step-2.ckpt")
    flip_tensor_bit(flipped)
    check_checkpoint(flipped)
    assert newest_checkpoint(tmp_path) == flipped
    for refusing in (check_integrity, CheckedCheckpointIO().load_checkpoint):
        with pytest.raises(ValueError, match=r"checksum.*step-1\.ckpt"):
            refusing(flipped)
    check_integrity(good)


def others_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save(3, path),
        lambda path: torch.save({}, path),
        lambda path: torch.save({"state_dict": 1}, path),
        others_archive,
        lambda path: torch.save({"optimizer_states": Evil(f"{path}.ran")}, path),
        lambda path: path.write_bytes(pickle.dumps(Evil(f"{path}.ran"))),
    ],
)
def test_only_checkpoints_with_weights_are_accepted_and_no_code_runs(tmp_path, monkeypatch, write):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"`x` '.*a\.ckpt'"):
        check_checkpoint(tmp_path / "a.ckpt", "x")
    with pytest.raises(ValueError, match=r"a\.ckpt"):
        newest_checkpoint(tmp_path)
    if write is others_archive:
        with pytest.raises(ValueError, match=r"`ckpt_path`.*a\.ckpt"):
            CheckedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_is_saved_can_be_checked_whatever_torch_was_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    check_integrity(path)
    flip_tensor_bit(path)
    with pytest.raises(ValueError, match="checksum"):
        check_integrity(path)


def test_loading_maps_the_file(tmp_path):
    """Each process of a machine would hold all of it otherwise."""
    path = save(tmp_path / "a.ckpt", {"weight": torch.zeros(1 << 24)})  # 64 MiB
    before = memory()
    loaded = CheckedCheckpointIO().load_checkpoint(path)
    assert memory() - before < 32 << 20
    assert loaded["weight"].shape == (1 << 24,)


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


@pytest.mark.parametrize("fails", ["fsync", "write", "torch"])
def test_a_full_disk_leaves_the_old_checkpoint_and_says_what_to_do(tmp_path, monkeypatch, fails):
    path = save(tmp_path / "a.ckpt")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_fault_of_the_disk(*_):
        raise RuntimeError("torch")

    if fails == "fsync":
        monkeypatch.setattr(files.os, "fsync", full)
    elif fails == "torch":
        monkeypatch.setattr(torch, "save", no_fault_of_the_disk)
    else:
        stream = type("Stream", (io.BytesIO,), {"write": full, "fileno": lambda self: 0})
        monkeypatch.setattr(files.os, "fdopen", lambda descriptor, mode: os.close(descriptor) or stream())
    error, named = (RuntimeError, "torch") if fails == "torch" else (CheckpointError, r"a\.ckpt.*No space left")
    with pytest.raises(error, match=named):
        CheckedCheckpointIO().save_checkpoint({"other": 1}, path)
    monkeypatch.undo()
    assert same(CheckedCheckpointIO().load_checkpoint(path), STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def _save_for_ever(path):
    for step in range(10_000):
        CheckedCheckpointIO().save_checkpoint({"step": step, "weight": torch.full((200_000,), float(step))}, path)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path = save(tmp_path / "a.ckpt", {"step": -1, "weight": torch.full((200_000,), -1.0)})
    for trial in range(12):
        before = path.stat().st_ino
        process = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(path,))
        process.start()
        while path.stat().st_ino == before:  # until its first checkpoint is there
            assert process.is_alive()
            time.sleep(0.0005)
        time.sleep(0.003 * trial)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        loaded = CheckedCheckpointIO().load_checkpoint(path)
        assert loaded["step"] >= 0
        assert torch.equal(loaded["weight"], torch.full((200_000,), float(loaded["step"])))
    assert all(file == path or file.name.startswith(files.BUILDING) for file in tmp_path.iterdir())
    files.remove_unfinished(tmp_path, "*.ckpt")
    assert list(tmp_path.iterdir()) == [path]


def load_damaged(rank, world_size, whole, damaged, folder):
    assert same(CheckedCheckpointIO().load_checkpoint(whole), STATE)
    with pytest.raises(ValueError, match=r"checksum.*whole\.ckpt"):
        CheckedCheckpointIO().load_checkpoint(damaged)
    with pytest.raises(ValueError, match=r"'meta\.pt'"):
        check_integrity(folder)


def test_several_processes_refuse_a_damaged_one_together(tmp_path):
    whole, damaged = save(tmp_path / "whole.ckpt"), save(tmp_path / "damaged.ckpt")
    flip_tensor_bit(damaged)
    folder = sharded(tmp_path / "sharded")
    size = (folder / "meta.pt").stat().st_size
    (folder / "checksums.json").write_text(json.dumps({"meta.pt": [size, 1]}))
    run_distributed(load_damaged, whole, damaged, folder)

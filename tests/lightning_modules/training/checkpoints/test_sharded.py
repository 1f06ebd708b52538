"""Folders that processes write together: whole or not there, and refused if anything in them was changed."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_modules.training.checkpoints.io import (
    CheckedCheckpointIO,
    check_checkpoint,
    check_integrity,
    newest_checkpoint,
)
from lightning_modules.training.checkpoints.sharded import (
    MANIFEST,
    CheckpointError,
    find_content_damage,
    find_folder_damage,
    is_sharded,
    load_unsharded,
    no_code,
    write_sharded,
)
from lightning_modules.utilities.files import BUILDING


def write(value, folder):
    """As Lightning's strategy does it: torch's part, then what is not divided, by the first process."""
    state = {"weight": torch.full((50,), value), "settings": {"lr": 0.1, "betas": (0.9, 0.95)}}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"global_step": int(value)}, folder / "meta.pt")


def save(target, value):
    write_sharded(target, lambda folder: write(value, folder))


def read(target):
    state = {"weight": torch.zeros(50), "settings": {}}
    with no_code():
        dcp.load(state, checkpoint_id=target)
    return state["weight"][0].item()


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield tmp_path / "checkpoints"
    dist.destroy_process_group()


def test_a_folder_is_replaced_as_a_whole_and_removed_as_a_whole(alone, monkeypatch):
    target = alone / "step-1.ckpt"
    for value in (1.0, 2.0):
        save(target, value)
        assert [path.name for path in alone.iterdir()] == [target.name]
        assert read(target) == value
        assert find_folder_damage(target) is find_content_damage(target, 0, 1) is None
    assert newest_checkpoint(alone) == target
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed when it has hardly begun to remove
    CheckedCheckpointIO().remove_checkpoint(target)
    assert all(path.name.startswith(BUILDING) for path in alone.iterdir())
    assert newest_checkpoint(alone) is None


def test_each_missing_or_shorter_file_is_noticed_without_reading(alone):
    target = alone / "step-1.ckpt"
    save(target, 1.0)
    names = sorted(path.name for path in target.iterdir())
    assert names == [".metadata", "__0_0.distcp", MANIFEST, "meta.pt"]
    for name in names:
        copy = alone / "copy.ckpt"
        shutil.copytree(target, copy)
        os.truncate(copy / name, (copy / name).stat().st_size - 1)
        with pytest.raises(ValueError, match=r"copy\.ckpt.*step-1\.ckpt"):
            check_checkpoint(copy)
        (copy / name).unlink()
        if name != MANIFEST:  # Lightning's own folders have none
            with pytest.raises(ValueError, match=r"copy\.ckpt"):
                check_checkpoint(copy)
        shutil.rmtree(copy)


def test_each_flipped_bit_is_found(alone):
    target = alone / "step-1.ckpt"
    save(target, 1.0)
    for path in [path for path in target.iterdir() if path.name != MANIFEST]:
        whole = path.read_bytes()
        for place in range(0, len(whole), len(whole) // 20):
            changed = bytearray(whole)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            assert path.name in find_content_damage(target, 0, 1)
        path.write_bytes(whole)
    assert find_content_damage(target, 0, 1) is None


def test_a_manifest_cannot_point_elsewhere(alone):
    target = alone / "step-1.ckpt"
    save(target, 1.0)
    for content in ("[", "[1]", '{"a": 3}'):
        (target / MANIFEST).write_text(content)
        assert "is damaged" in find_folder_damage(target)
    (target / MANIFEST).write_text(json.dumps({"../x": [1, 2]}))
    assert "x is missing" in find_folder_damage(target)
    assert is_sharded(target)


def fail_in_one(rank, folder):
    """Of two processes the second one cannot write, then the first one; called where there are two."""
    folder.mkdir(exist_ok=True)
    (folder / "store").touch()
    dist.barrier()
    target = folder / "checkpoints" / "step-1.ckpt"
    save(target, 1.0)
    for failing in (1, 0):

        def writes(path, failing=failing):
            write(2.0, path)
            if rank == failing:
                raise OSError(28, "No space left on device")

        with pytest.raises(CheckpointError, match=rf"process {failing}: No space left"):
            write_sharded(target, writes)
    with pytest.raises(CheckpointError, match="process 0"):
        save(folder / "store" / "step-1.ckpt", 1.0)  # a file is in the way
    assert read(target) == 1.0
    dist.barrier()
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    own = json.loads((target / MANIFEST).read_text())
    assert {name[:3] for name in own} >= {"__0", "__1"}
    dist.barrier()
    if rank == 0:
        path = target / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    dist.barrier()
    with pytest.raises(ValueError, match=r"__1_0\.distcp"):  # whoever has read it
        check_integrity(target)


def test_weights_are_gathered_by_a_process_that_belongs_to_no_group(alone):
    target = alone / "step-1.ckpt"
    weights = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}

    def parts(folder):
        dcp.save({"state_dict": weights, "optimizer_0": {"state": torch.zeros(9), "lr": 0.1}}, checkpoint_id=folder)
        torch.save({"global_step": 7}, folder / "meta.pt")

    write_sharded(target, parts)
    dist.destroy_process_group()
    content = load_unsharded(target)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert set(content) == {"global_step", "state_dict"}
    assert content["global_step"] == 7
    torch.testing.assert_close(content["state_dict"], weights, rtol=0, atol=0)

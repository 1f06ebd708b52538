"""Attacks on the folder of a run: by second runs, copies, evaluations, wrong checkpoints."""

import hashlib
import json
import multiprocessing
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_modules.training.run import RUN_FILE, Run, RunMember, read_run
from lightning_modules.utilities.locks import RunLock

FORK = multiprocessing.get_context("fork")


def save(folder, step, run=None, *, name=None):
    path = folder / "checkpoints" / (name or f"step-{step}.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"state_dict": {}, "optimizer_states": [], "global_step": step}
    torch.save(content | ({} if run is None else {"run_id": run}), path)
    return path


def start(folder, checkpoint=None, config="model: 1\n", **options):
    """What a training does with its folder before it loads anything."""
    run = Run()
    run.begin([folder, folder / "checkpoints"])
    try:
        run.record(checkpoint, config, 7, **options)
    finally:
        run.leave()
    return run.id


def configs(folder):
    return {path.name: path.read_text() for path in folder.glob("*.yaml")}


def test_a_run_is_recorded_once(tmp_path):
    folder = tmp_path / "run"
    identity = start(folder, config=yaml.safe_dump({"seed_everything": 7}))
    content = (folder / RUN_FILE).read_bytes()
    record, saved = json.loads(content), (folder / "config.yaml").read_bytes()
    assert (record["id"], record["seed"]) == (identity, 7)
    assert record["config_sha256"] == hashlib.sha256(saved).hexdigest()
    last = save(folder, 8, identity)
    assert start(folder, last, "model: 2\n") == start(folder, last, "model: 3\n") == identity
    assert (folder / RUN_FILE).read_bytes() == content
    resumed = {"config-resumed-at-step-8.yaml": "model: 2\n", "config-resumed-at-step-8-2.yaml": "model: 3\n"}
    assert configs(folder) == {"config.yaml": saved.decode(), **resumed}
    assert start(folder, save(tmp_path / "backup", 9, identity)) == identity
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").write_text("mine")
    assert start(tmp_path / "own") != identity, "two runs have two identities"
    assert configs(tmp_path / "own") == {"config.yaml": "mine", "config-resumed-at-step-0.yaml": "model: 1\n"}
    assert read_run(tmp_path / "own")["config"] == "config-resumed-at-step-0.yaml"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_start_without_a_checkpoint_is_replaced_by_the_next_one(tmp_path):
    """Whatever it has logged is not that of the run that the folder then contains."""
    folder = tmp_path / "run"
    first = start(folder, config="precision: bf16-mixed\n")
    own = ("events.out.tfevents.1", "hparams.yaml", "documents/val-a-step-0.parquet", "answers/val-step-0.parquet")
    for name in (*own, "mine.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("first")
    second = start(folder, config="precision: 32-true\n")
    assert first != second
    assert {name for name in contents(folder) if "/" not in name} == {"config.yaml", RUN_FILE, "mine.txt"}
    assert (folder / "config.yaml").read_text() == "precision: 32-true\n"
    assert read_run(folder)["id"] == second
    assert read_run(folder / "unfinished-1")["id"] == first
    assert {(folder / "unfinished-1" / name).read_text() for name in own} == {"first"}
    # A resumed run that lost its folder of checkpoints is the same run, and one of another run is not.
    assert start(folder, save(tmp_path / "moved", 8, second)) == second
    assert start(folder, save(tmp_path / "other", 8, "another")) not in (first, second)
    assert "config.yaml" in configs(folder)


def test_files_of_the_user_are_no_records_of_a_start(tmp_path):
    """Without a logger, a run's folder is one that the user chose, and may also contain a corpus."""
    run = Run()
    run.begin([tmp_path])
    (tmp_path / "documents" / "folder").mkdir(parents=True)
    (tmp_path / "documents" / "book.txt").write_text("mine")
    run.leave()
    start(tmp_path)
    start(tmp_path)
    assert (tmp_path / "documents" / "book.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]"])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / RUN_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json"):
        start(tmp_path)


def test_a_training_from_scratch_does_not_mix_with_an_earlier_one(tmp_path):
    save(tmp_path, 8, start(tmp_path))
    with pytest.raises(ValueError, match=r"step-8\.ckpt.*`--ckpt_path"):
        start(tmp_path)
    assert list(configs(tmp_path)) == ["config.yaml"]


def test_a_checkpoint_of_another_run_is_refused_in_a_run(tmp_path):
    save(tmp_path / "a", 8, start(tmp_path / "a"))
    other = save(tmp_path / "b", 9, start(tmp_path / "b"))
    for checkpoint, named in ((other, "2 runs"), (save(tmp_path / "old", 9), "old")):
        with pytest.raises(ValueError, match=named):
            start(tmp_path / "a", checkpoint)
    assert start(tmp_path / "c", other) != read_run(tmp_path / "b")["id"], "a new run"


def test_going_back_is_refused_while_later_checkpoints_would_win(tmp_path):
    identity = start(tmp_path)
    early, late = save(tmp_path, 8, identity), save(tmp_path, 12, identity)
    with pytest.raises(ValueError, match=r"`ckpt_path`.* step 8.*step-12\.ckpt"):
        start(tmp_path, early, named=True)
    start(tmp_path, early)  # the newest good one is known, and damage that the record does not show is passed over
    late.write_bytes(late.read_bytes()[:-50])
    start(tmp_path, early, named=True)
    assert "config-resumed-at-step-8.yaml" in configs(tmp_path)


def test_checkpoints_kept_elsewhere_stay_with_their_run(tmp_path):
    """A logger that numbers its runs makes a new folder at each start; `dirpath` is the same."""
    ids = []
    for number in range(3):
        run = Run()
        run.begin([tmp_path / f"version_{number}", tmp_path / "checkpoints"])
        run.record(tmp_path / "checkpoints" / f"step-{number}.ckpt" if number else None, "", 0)
        run.leave()
        save(tmp_path, number + 1, run.id)
        ids.append(run.id)
    assert len(set(ids)) == 1


def test_a_link_to_the_last_checkpoint_resumes(tmp_path):
    save(tmp_path, 8)  # of an earlier version, without an id
    link = tmp_path / "checkpoints" / "last.ckpt"
    link.symlink_to("step-8.ckpt")
    assert start(tmp_path, link, named=True) == read_run(tmp_path)["id"]


def hold(folder, ready, end):
    run = Run()
    run.begin([folder, folder / "checkpoints"])
    run.record(None, "", 0)
    ready.set()
    end.wait(300)
    os._exit(1)


def test_a_second_run_is_refused_and_changes_nothing(tmp_path):
    ready, end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "run", ready, end))
    process.start()
    assert ready.wait(120)
    before = contents(tmp_path / "run")
    for folders in (["run"], ["other", "run/checkpoints"]):  # also if only the checkpoints are those of the run
        refused = Run()
        with pytest.raises(ValueError, match=f"in use by process {process.pid} "):
            refused.begin([tmp_path / folder for folder in folders])
        refused.leave()  # as the command line does
    assert contents(tmp_path / "run") == before
    assert not (tmp_path / "other").exists()
    process.kill()
    process.join()
    start(tmp_path / "run")


def test_the_other_processes_keep_the_run(tmp_path):
    """The first one may have died, and they may still write."""
    run = Run()
    trainer = SimpleNamespace(world_size=3, is_global_zero=False, global_rank=2, ckpt_path=None)
    trainer.strategy = SimpleNamespace(broadcast=lambda folders: [tmp_path, tmp_path / "of the first node"])
    member = RunMember(run)
    member.setup(trainer, None, "validate")
    assert not list(tmp_path.iterdir())
    member.setup(trainer, None, "fit")
    with pytest.raises(ValueError, match="in use by process"):
        RunLock(tmp_path).begin(patience=0.1)
    member.teardown(trainer, None, "fit")
    lock = RunLock(tmp_path)
    lock.begin(patience=0)
    lock.leave()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_process_keeps_the_run_until_its_command_ends(tmp_path, processes):
    """`fit` returns before other commands of the process are done, and a single process asks nobody."""
    run = Run()
    run.begin([tmp_path])
    told = []
    trainer = SimpleNamespace(world_size=processes, is_global_zero=True, global_rank=0, ckpt_path=None)
    trainer.strategy = SimpleNamespace(broadcast=lambda folders: told.append(folders) or folders)
    RunMember(run).setup(trainer, None, "fit")
    RunMember(run).teardown(trainer, None, "fit")
    assert told == [[tmp_path]] * (processes - 1)
    with pytest.raises(ValueError, match="in use"):
        RunLock(tmp_path).begin()
    run.leave()


def test_a_process_that_launches_others_keeps_its_locks(tmp_path):
    run = Run()
    run.begin([tmp_path])
    pickle.loads(pickle.dumps(RunMember(run)))._run.leave()
    with pytest.raises(ValueError, match="in use"):
        RunLock(tmp_path).begin()
    run.leave()


def test_what_killed_processes_have_left_is_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / ".building-step-9.ckpt@elsewhere-xyz").mkdir(parents=True)
    (folder / ".building-step-9.ckpt@here-xyz").touch()
    start(tmp_path)
    assert not folder.exists(), "empty"

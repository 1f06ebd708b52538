"""All shards as tasks of a Ray cluster on this machine: the rows of the local command, also if a process is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from longce.corpus.stop_flag import StopFlag
from tests.conftest import make_text
from tests.support import forks
from tests.support.commands import longce, refused

# Workers of a priority as low as Ray's default wait for all other tests of a busy machine.
ENVIRONMENT = {
    "RAY_ADDRESS": "local",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6, "dtype": "float32", "device": "cpu"}
DOCUMENTS = 24


@pytest.fixture
def documents(tmp_path):
    """Three files, in which one document cannot be scored and one is too short."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [make_text(20 + 3 * number, number) for number in range(DOCUMENTS)]
    texts[5] = None
    texts[6] = "a"
    for part in range(3):
        rows = [{"text": text} for text in texts[part::3]]
        table = pyarrow.Table.from_pylist(rows, pyarrow.schema({"text": pyarrow.string()}))
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=3)
    return folder


def corpus_score(documents, model_dir, output, num_shards):
    words = ["corpus", "score", str(documents), "--model", str(model_dir), "--output", str(output), "--shard_rows", "2"]
    words += [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    return [*words, "--allowed_failures", "1", "--engine", "ray", "--num_shards", str(num_shards)]


def run_in_session(function, *arguments):
    os.setsid()
    function(*arguments)


def start(folder, function, *arguments):
    """Start a command in a session of its own, which prints to two files of a folder."""
    for name in ("out", "err"):
        (folder / name).write_text("")
    return forks.start(run_in_session, function, *arguments, out=folder / "out", err=folder / "err")


def score_after_an_error(wrong, command):
    """Run two commands in one cluster, of which the first has an error that only a task finds."""
    assert "no column 'no'" in refused(*wrong), "as of the local command"
    longce(*command)


def parts(output):
    """Return the time of change of each finished file."""
    return {path: path.stat().st_mtime_ns for path in output.glob("shard-*/part-*.parquet")}


def rows(output):
    found = pyarrow.parquet.read_table(output, partitioning=None).to_pylist()
    return sorted(found, key=lambda row: (row["file"], row["row"]))


def tasks(command):
    """Return the processes in which Ray runs a task of a command, not those of other tests that run meanwhile."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_task = entry.name.isdecimal() and (entry / "cmdline").read_bytes().startswith(b"ray::score_shard")
            if is_task and os.getsid(int(entry.name)) == command.pid:  # `start` begins a session
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
def test_ctrl_c_and_a_killed_process_lose_nothing(documents, model_dir, tmp_path, monkeypatch):
    """Stopped by Ctrl-C and started again, with one of its processes killed, it has the rows of the local command."""
    local = tmp_path / "local"
    settings = {**SETTINGS, "shard_rows": 2, "allowed_failures": 1.0}
    printed_locally = score_corpus([str(documents)], CorpusConfig(model=str(model_dir), output=str(local), **settings))
    output = tmp_path / "ray"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    command = corpus_score(documents, model_dir, output, 3)
    wrong = [
        *corpus_score(documents, model_dir, tmp_path / "error", 1),
        "--token_column",
        "no",
    ]  # tasks get all options

    # 1. Ctrl-C keeps finished documents and leaves no task.
    process = start(tmp_path, longce, *command)
    while not parts(output) and process.is_alive():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the command
    process.join(180)  # tasks have 60 s to write
    err = (tmp_path / "err").read_text()
    assert process.exitcode == 130, err
    assert "finished documents are kept" in err
    assert "Traceback" not in err
    assert tasks(process) == []
    kept = parts(output)
    assert set(output.rglob("*part-*")) == kept.keys()  # no file is half written
    assert 0 < len(rows(output)) < DOCUMENTS

    # 2. The same command scores the others, although one of its processes is killed.
    process = start(tmp_path, score_after_an_error, wrong, command)
    killed = []
    while not killed and process.is_alive():
        time.sleep(0.01)
        for task in tasks(process)[:1] if parts(output).keys() - kept.keys() else []:
            os.kill(task, signal.SIGKILL)
            killed.append(task)
    process.join()
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert killed
    assert rows(output) == rows(local)
    assert len(rows(output)) == DOCUMENTS
    assert [row["file"] for row in rows(output) if row["error"]] == ["2.parquet"]
    printed = (tmp_path / "out").read_text().splitlines()
    counts = [line for line in printed if "documents with" in line]  # Ray reports lost processes
    assert counts == [printed_locally.replace(str(local), str(output))]
    assert kept.items() <= parts(output).items()

    # 3. Its shards are those of the local command, which has nothing left to score.
    before = parts(output)
    config = CorpusConfig(model=str(model_dir), output=str(output), shard="1/3", **settings)
    score_corpus([str(documents)], config)
    assert parts(output) == before


@pytest.mark.slow
# Not "auto": it finds the clusters of all processes of this machine, also those of tests that run meanwhile.
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nothing"])
def test_a_wrong_address_is_an_error_that_names_it(address, documents, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = CorpusConfig(model="m", output=str(tmp_path / "out"), engine="ray", num_shards=2)
    with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray cluster .* unset RAY_ADDRESS"):
        score_corpus([str(documents)], config)


@pytest.mark.parametrize(
    "options", [{"engine": "ray"}, {"num_shards": 2}, {"engine": "ray", "num_shards": 2, "shard": "0/2"}]
)
def test_options_that_contradict_each_other_are_refused(options):
    with pytest.raises(ValueError, match="engine"):
        CorpusConfig(model="m", output="o", **options)


def test_the_process_of_the_flag_needs_no_torch():
    code = f"import sys, {StopFlag.__module__}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""A corpus scored by one process and in shards, also killed on the way."""

import json
import multiprocessing
import os
import random
import signal
import time

import pyarrow
import pyarrow.parquet
import torch

from lightning_modules.scoring.corpus.shards import SUCCESS
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from tests.conftest import byte_level_tokenizer, make_text, tiny_model

FORK = multiprocessing.get_context("fork")
DOCUMENTS = 60


def prepare(folder):
    """A model, and a corpus of documents of 0 to 40 words in parquet, JSON lines and text files, a few broken."""
    lengths = random.Random(0)
    texts = [make_text(lengths.choice([1, 5, 10, 20, 40]), seed) for seed in range(DOCUMENTS)]
    tokenizer = byte_level_tokenizer(texts)
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", len(tokenizer), seed=1).save_pretrained(folder / "model")
    (folder / "corpus").mkdir()
    rows = [{"id": f"p{n}", "text": text if n != 7 else None, "n": n} for n, text in enumerate(texts[:30])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "corpus" / "a.parquet", row_group_size=7)
    lines = [json.dumps({"id": f"j{n}", "text": text, "n": n}) for n, text in enumerate(texts[30:55])]
    (folder / "corpus" / "b.jsonl").write_text("\n".join([*lines[:9], "{broken", *lines[9:]]))
    for number, text in enumerate(texts[55:]):
        (folder / "corpus" / f"{number}.txt").write_text(text if number != 3 else " ")


def score(folder, output, options):
    torch.set_num_threads(1)
    settings = {"model": str(folder / "model"), "output": str(output), "key_column": "id", "columns": ["n"]}
    settings |= {"context_length": 16, "stride": 8, "contexts": [16, 32, 64], "alpha": 0.5, "beta": -6.0}
    settings |= {"dtype": "float32", "device": "cpu", "attn_implementation": "sdpa", "shard_rows": 2}
    score_corpus([str(folder / "corpus")], CorpusConfig(**{**settings, "allowed_failures": 1.0, **options}))


def start(folder, output, shards=1, **options):
    """The processes of the shards."""
    processes = []
    for shard in range(shards):
        own = {**options, "shard": f"{shard}/{shards}"}
        processes.append(FORK.Process(target=score, args=(folder, output, own)))
        processes[-1].start()
    return processes


def finish(processes, status=0):
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [status] * len(processes)


def rows(output):
    """All rows by file and row number, each once."""
    found = pyarrow.parquet.read_table(output, partitioning=None).to_pylist()
    assert len({(row["file"], row["row"]) for row in found}) == len(found), "a row is there twice"
    return {(row.pop("file"), row.pop("row")): row for row in found}


def largest_difference(first, second):
    """Of all numbers, relative to 1 or their size; all else must be equal."""
    assert first.keys() == second.keys()
    largest = 0.0
    for place, row in first.items():
        other = second[place]
        assert {name: value for name, value in row.items() if not isinstance(value, float)} == {
            name: value for name, value in other.items() if not isinstance(value, float)
        }, place
        numbers = [(value, other[name]) for name, value in row.items() if isinstance(value, float)]
        largest = max([largest, *(abs(a - b) / max(1.0, abs(a)) for a, b in numbers)])
    return largest


def kill(folder, output, shards, generator):
    """Start a run and kill one of its processes, or all, when it has written something; whether it was still there."""
    before = len(list(output.rglob("*.parquet")))
    wanted = before + generator.randint(1, 2)
    processes = start(folder, output, shards)
    while len(list(output.rglob("*.parquet"))) < wanted and any(process.is_alive() for process in processes):
        time.sleep(0.002)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    return bool(alive)


def score_and_kill(folder, kills):
    """Score a corpus in all ways, where SIGKILL ends some runs, and return what differs. Without threads: it forks."""
    generator = random.Random(0)
    found = {}
    # Elsewhere: a process that has trained a tokenizer has threads, which those forked from it would wait for.
    preparing = FORK.Process(target=prepare, args=(folder,))
    preparing.start()
    finish([preparing])
    finish(start(folder, folder / "one"))
    expected = rows(folder / "one")
    found["documents"] = len(expected)
    found["errors"] = sorted(str(row["error"]).split(" ", 1)[-1][:40] for row in expected.values() if row["error"])
    finish(start(folder, folder / "failures", allowed_failures=0.01), status=1)
    assert not (folder / "failures" / SUCCESS).exists(), "more failed than are allowed"
    finish(start(folder, folder / "batches", batch_tokens=512))
    found["batches"] = largest_difference(expected, rows(folder / "batches"))
    finish(start(folder, folder / "shards", 2))
    found["shards"] = largest_difference(expected, rows(folder / "shards"))
    killed, partly = folder / "killed", []
    for _ in range(kills):
        partly.append(kill(folder, killed, 1, generator))
        partly[-1] = partly[-1] and len(rows(killed))
    kill(folder, folder / "killed shards", 2, generator)
    finish(start(folder, folder / "killed shards", 2))
    assert largest_difference(expected, rows(folder / "killed shards")) == 0.0
    assert not (killed / SUCCESS).exists()
    finish(start(folder, killed))
    found["killed at"] = partly
    found["killed"] = largest_difference(expected, rows(killed))
    found["success"] = json.loads((killed / SUCCESS).read_text())
    return found

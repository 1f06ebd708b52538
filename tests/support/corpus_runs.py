"""A corpus scored by one process, by several and in shards, also killed on the way.

`python -m tests.support.corpus_runs 5` tells of it.

The processes are forked from one that has imported everything. The number is how many runs are killed by SIGKILL.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from callbacks import DocumentScoresWriter
from datamodules import DocumentCorpus
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.scoring.corpus.shards import SUCCESS
from lightning_modules.training.fsdp import FullyShardedStrategy
from tests.conftest import byte_level_tokenizer, make_text, tiny_model

FORK = multiprocessing.get_context("fork")
DOCUMENTS = 60


def prepare(folder):
    """A model, and a corpus of documents of 0 to 90 words in parquet, JSON lines and text files, a few broken."""
    lengths = random.Random(0)
    texts = [make_text(lengths.choice([1, 5, 20, 50, 90]), seed) for seed in range(DOCUMENTS)]
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


def predict(folder, output, rank, world_size, port, strategy, settings):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    module = LongContextLM(
        str(folder / "model"),
        context_length=16,
        stride=8,
        ladder=ContextLadder([16, 32, 64]),
        attn_implementation="sdpa",
    )
    settings = {"num_workers": 1, "allowed_failures": 1.0, **settings}
    corpus = DocumentCorpus(str(folder / "corpus"), key_column="id", columns=["n"], **settings)
    writer = DocumentScoresWriter(str(output), alpha=0.5, beta=-6.0, shard_rows=2)
    trainer = Trainer(
        accelerator="cpu",
        strategy=FullyShardedStrategy() if strategy == "fsdp" else strategy,
        devices=world_size,
        inference_mode=False,
        logger=False,
        callbacks=[writer],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.predict(module, datamodule=corpus, return_predictions=False)


def start(folder, output, world_size, strategy="ddp", **settings):
    """The processes of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    strategy = strategy if world_size > 1 else "auto"
    arguments = [(folder, output, rank, world_size, port, strategy, settings) for rank in range(world_size)]
    processes = [FORK.Process(target=predict, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes


def finish(processes, status=0):
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [status] * len(processes)


def rows(output):
    """All rows by file and row number, each once."""
    found = pyarrow.parquet.read_table(output).to_pylist()
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


def kill(folder, output, world_size, generator):
    """Start a run and kill one of its processes, or all, when it has written something; whether it was still there."""
    shards = len(list(output.glob("*.parquet")))
    wanted = shards + generator.randint(1, 2)
    processes = start(folder, output, world_size)
    while len(list(output.glob("*.parquet"))) < wanted and all(process.is_alive() for process in processes):
        time.sleep(0.002)
    alive = [process for process in processes if process.is_alive()]
    for process in alive if generator.random() < 0.5 else alive[:1]:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:  # none waits for the one that is gone
        process.join(60)
        assert process.exitcode is not None
    return bool(alive)


def main(kills):
    generator, found = random.Random(0), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Elsewhere: a process that has trained a tokenizer has threads, which those forked from it would wait for.
        preparing = FORK.Process(target=prepare, args=(folder,))
        preparing.start()
        finish([preparing])
        finish(start(folder, folder / "one", 1))
        expected = rows(folder / "one")
        found["documents"] = len(expected)
        found["errors"] = sorted(str(row["error"]).split(" ", 1)[-1][:40] for row in expected.values() if row["error"])
        finish(start(folder, folder / "two", 2, num_workers=2, allowed_failures=0.01), status=1)
        assert not (folder / "two" / SUCCESS).exists(), "more failed than are allowed, and both processes say so"
        found["two processes"] = largest_difference(expected, rows(folder / "two"))
        finish(start(folder, folder / "batches", 1, batch_tokens=512, num_workers=0))
        found["batches"] = largest_difference(expected, rows(folder / "batches"))
        finish(start(folder, folder / "fsdp", 2, "fsdp"))
        found["fsdp"] = largest_difference(expected, rows(folder / "fsdp"))
        for shard in range(2):
            finish(start(folder, folder / "shards" / str(shard), 1, shard=f"{shard}/2"))
        found["shards"] = largest_difference(expected, rows(folder / "shards"))
        killed, partly = folder / "killed", []
        for turn in range(kills):
            partly.append(kill(folder, killed, 1 + turn % 2, generator))
            partly[-1] = partly[-1] and len(rows(killed))
        assert not (killed / SUCCESS).exists()
        finish(start(folder, killed, 2))
        found["killed at"] = partly
        found["killed"] = largest_difference(expected, rows(killed))
        found["success"] = json.loads((killed / SUCCESS).read_text())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))

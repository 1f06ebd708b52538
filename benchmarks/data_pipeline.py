"""Compare tokenizing and packing with `datasets.map`, and measure reading and peak memory.

    python benchmarks/data_pipeline.py --texts FOLDER_OF_TXT --tokenizer TOKENIZER_FOLDER --processes 2

Tokenizing and packing: from text files to packed sequences on disk, against `datasets.Dataset.map(batched=True)` with
the same tokenizer and the usual grouping, in two batch sizes of which the faster counts; converting the texts to its
own format is not timed. Rounds alternate, and the best of each counts.

Reading: packed sequences in random order through the training loader, from a warm cache. A token is 8 bytes (int64) in
a batch, plus its label and position, which are not counted, and 2 or 4 in the store.

Memory: the peak resident memory of a process that tokenizes a streamed synthetic corpus of that many gigabytes.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import datasets
from transformers import PreTrainedTokenizerFast

from datamodules.packing.loader import ResumableLoader
from datamodules.packing.packing import pack_documents
from datamodules.packing.samplers import RowSampler
from datamodules.packing.sequences import PackedRowDataset, collate_rows
from datamodules.sources.documents import Document, text_folder
from datamodules.token_store.store import TokenStore, build_token_store
from datamodules.token_store.tokenize import Encoder
from lightning_modules.models.tokenization.tokenizer import load_tokenizer

THEIR_BATCHES = (1000, 4)  # their default, and one that distributes a few long books evenly


@dataclass(frozen=True)
class SyntheticTexts:
    """Documents of 10 to 500 kB, mostly short, up to a total number of bytes."""

    total: float

    def __iter__(self) -> Iterator[Document]:
        random = Random(0)
        words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(5000)]
        made = number = 0
        while made < self.total:
            text = " ".join(random.choices(words, k=int(random.paretovariate(1) * 1600) % 80_000 + 10))
            made, number = made + len(text), number + 1
            yield Document(str(number), text)

    def fingerprint(self) -> str:
        """Return a name that depends on the size."""
        return f"synthetic {self.total}"


def ours(texts: Path, tokenizer: PreTrainedTokenizerFast, folder: Path, length: int) -> TokenStore:
    store = build_token_store(text_folder(texts), Encoder(tokenizer, add_special_tokens=False), cache_dir=folder)
    pack_documents(store.document_boundaries, length)
    return store


def theirs(
    dataset: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, length: int, processes: int, size: int
) -> Any:
    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*each, tokenizer.eos_token_id] for each in ids]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain(*batch["input_ids"]))
        return {"input_ids": [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]}

    options = {"batched": True, "batch_size": size, "num_proc": processes, "load_from_cache_file": False}
    columns = dataset.column_names
    tokens = dataset.map(tokenize, remove_columns=columns, cache_file_name=str(folder / "tokens.arrow"), **options)
    return tokens.map(group, cache_file_name=str(folder / "rows.arrow"), **options)


def seconds(work: Callable[[Path], Any]) -> float:
    """Time some work in a temporary folder."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # `datasets.map` switches it off and does not switch it on again
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        work(Path(folder))
        return time.perf_counter() - started


def compare(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [document.text for document in text_folder(options.texts)]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    length = options.sequence_length
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder)
        dataset = datasets.load_from_disk(folder)
        works: dict[str, Callable[[Path], Any]] = {"ours": lambda at: ours(options.texts, tokenizer, at, length)}
        for size in THEIR_BATCHES:
            works[f"datasets, batches of {size}"] = lambda at, size=size: theirs(  # type: ignore[misc]
                dataset, tokenizer, at, length, options.processes, size
            )
        for _ in range(options.rounds):
            for name, work in works.items():
                best[name] = min(best.get(name, float("inf")), seconds(work))
    print(f"| tokenize and pack {len(texts)} texts, {megabytes:.1f} MB | seconds | MB/s of text |\n|---|---|---|")
    for name, value in best.items():
        print(f"| {name} | {value:.2f} | {megabytes / value:.2f} |")
    fastest = min(value for name, value in best.items() if name != "ours")
    print(f"| datasets / ours | {fastest / best['ours']:.2f} | |\n")


def read(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ours(options.texts, tokenizer, Path(folder), options.sequence_length)
        store.verify()
        rows = PackedRowDataset(store, pack_documents(store.document_boundaries, options.sequence_length))
        width = store.tokens.itemsize
        columns = f"rows/s | MB/s (int64) | MB/s in the store ({width} bytes)"
        print(f"| read sequences of {options.sequence_length} tokens | {columns} |\n|---|---|---|---|")
        for workers in options.workers:
            rate = read_rate(rows, workers, options.read_seconds)
            tokens = rate * options.sequence_length / 1e6
            print(f"| {workers} workers | {rate:.0f} | {tokens * 8:.0f} | {tokens * width:.0f} |")
    print()


def read_rate(rows: PackedRowDataset, workers: int, at_least: float) -> float:
    """Return sequences per second, after an epoch that warms caches and starts workers."""
    loader = ResumableLoader(
        rows,
        batch_size=1,
        sampler=RowSampler(len(rows)),
        collate_fn=collate_rows,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for _ in loader:
        pass
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < at_least:
        count += sum(len(batch["input_ids"]) for batch in loader)
    return count / passed


def memory(options: argparse.Namespace) -> None:
    print("| tokenize a synthetic corpus | peak resident MB | MB/s of text |\n|---|---|---|")
    for gigabytes in options.synthetic_gb:
        arguments = ("--tokenizer", options.tokenizer, "--only_synthetic", str(gigabytes))
        command = [sys.executable, __file__, *map(str, arguments)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"| {gigabytes} GB | {result.stdout.strip()} |")


def only_synthetic(gigabytes: float, tokenizer: PreTrainedTokenizerFast) -> None:
    """Tokenize a synthetic corpus and print the memory and rate of this process."""
    encoder = Encoder(tokenizer, add_special_tokens=False)
    taken = seconds(lambda folder: build_token_store(SyntheticTexts(gigabytes * 1e9), encoder, cache_dir=folder))
    print(f"{peak_megabytes():.0f} | {gigabytes * 1e3 / taken:.2f}")


def peak_megabytes() -> float:
    """Return the peak resident memory of this process, without that of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` includes the peak of the parent process on Linux
        return next(int(line.split()[1]) / 1e3 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="folder of .txt files; without it only memory is measured")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--sequence_length", type=int, default=32768)
    parser.add_argument("--processes", type=int, default=2, help="of `datasets.map`; ours uses all cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--read_seconds", type=float, default=3.0)
    parser.add_argument("--synthetic_gb", type=float, nargs="*", default=[0.02, 0.2])
    parser.add_argument("--only_synthetic", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    if options.only_synthetic is not None:
        only_synthetic(options.only_synthetic, tokenizer)
        return
    if options.texts is not None:
        datasets.disable_progress_bars()
        compare(options, tokenizer)
        read(options, tokenizer)
    memory(options)


if __name__ == "__main__":
    main()

"""Compare `longce corpus score` with a loop over the code of the paper's authors, in documents per second.

Both read the same parquet file with the same random model, tokenizer and settings, in this process and in turn; medians
of the rounds. The authors' loop calls `longppl.compute_longppl` with the model as its own evaluator, document by
document. Our time includes everything: reading, tokenizing, scoring, statistics and writing shards.

    python benchmarks/corpus.py --documents 16 --rounds 3
"""

import argparse
import contextlib
import io
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import transformers
from longppl.longppl import compute_longppl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus

ALPHA, BETA = 0.5, -12.0  # of a random model


def prepare(folder: Path, documents: int, lengths: tuple[int, int], vocabulary: int, width: int, layers: int) -> None:
    """Write a random Llama with a word tokenizer, and a parquet file of random documents."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 32, 1),
        num_key_value_heads=max(width // 64, 1),
        vocab_size=vocabulary,
        max_position_embeddings=1 << 17,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder / "model")
    generator = random.Random(0)
    texts = []
    for _ in range(documents):
        length = round(math.exp(generator.uniform(*map(math.log, lengths))))
        texts.append(" ".join(f"w{generator.randrange(vocabulary)}" for _ in range(length)))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "corpus.parquet", row_group_size=64)


def theirs(folder: Path, context_length: int, stride: int) -> dict[int, tuple[float | None, float, int]]:
    """Return LongPPL, perplexity and key tokens of each document by the authors' code."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found = {}
    for row, text in enumerate(pyarrow.parquet.read_table(folder / "corpus.parquet")["text"].to_pylist()):
        settings = {"trunc_len": context_length, "sliding_window": stride, "alpha": ALPHA, "beta": BETA}
        result = compute_longppl(text, model, model, tokenizer, tokenizer, **settings)
        found[row] = (result["longppl"], result["ppl"], result["n_key_token"] or 0)
    return found


def ours(
    folder: Path, context_length: int, stride: int, batch_tokens: int | None = None
) -> dict[int, tuple[float | None, float, int]]:
    """Return the same from the shards that our run has written."""
    with tempfile.TemporaryDirectory() as output:
        config = CorpusConfig(
            model=str(folder / "model"),
            output=output,
            context_length=context_length,
            stride=stride,
            alpha=ALPHA,
            beta=BETA,
            batch_tokens=batch_tokens,
            dtype="float32",
            device="cpu",
        )
        score_corpus([str(folder / "corpus.parquet")], config)
        rows = pyarrow.parquet.read_table(output).to_pylist()
    return {row["row"]: (row["longppl"], row["perplexity"], row["key_tokens"]) for row in rows}


def measure(function: Callable[[], dict]) -> tuple[float, dict]:
    """Return the CPU seconds of this process, which do not count other work on the machine, and the result."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    with contextlib.redirect_stdout(io.StringIO()):
        result = function()
    return clock() - started, result


def disagreement(first: dict, second: dict) -> float:
    """Return the largest relative difference of LongPPL and perplexity; infinite if the key tokens differ."""
    largest = 0.0
    for row, (*numbers, keys) in first.items():
        *others, other_keys = second[row]
        if keys != other_keys:
            return math.inf
        pairs = [(a, b) for a, b in zip(numbers, others, strict=True) if a is not None]
        largest = max([largest, *(abs(float(b) / float(a) - 1) for a, b in pairs)])
    return largest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs=2, default=[500, 3000], help="shortest and longest, in tokens")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context_length", type=int, default=512)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--batch_tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        folder, sizes = Path(temporary), (options.context_length, options.stride)
        shape = (options.vocabulary, options.width, options.layers)
        prepare(folder, options.documents, tuple(options.lengths), *shape)
        ways = {
            "authors' loop": partial(theirs, folder, *sizes),
            "longce corpus score": partial(ours, folder, *sizes),
            f"longce corpus score, batches of {options.batch_tokens} tokens": partial(
                ours, folder, *sizes, options.batch_tokens
            ),
        }
        runs = {name: [measure(way) for _ in range(options.rounds)] for name, way in ways.items()}
    seconds = {name: statistics.median(each[0] for each in rounds) for name, rounds in runs.items()}
    first = next(iter(ways))
    shortest, longest = options.lengths
    print(f"{options.documents} documents of {shortest} to {longest} tokens, K={sizes[0]}, d={sizes[1]}\n")
    print("| | documents/s | ratio | largest difference of LongPPL and perplexity |\n|---|---|---|---|")
    for name in ways:
        difference = disagreement(runs[first][0][1], runs[name][0][1])
        rate, ratio = options.documents / seconds[name], seconds[first] / seconds[name]
        print(f"| {name} | {rate:.2f} | {ratio:.2f} | {difference:.0e} |")


if __name__ == "__main__":
    main()

"""Do token weights pay on books? Compare them with cross entropy at equal CPU time, on a model of 4 million parameters.

Declared before any test run: a method pays if the 95% interval (jackknife over the held-out books) of the ratio of its
LongPPL to that of cross entropy is below 1 after the same CPU time, in the mean over the seeds, and if the ratio is
below 1 for each seed. All have the learning rate with which cross entropy has the lowest LongPPL of other books, on
another seed.

A base model (6 layers, hidden size 192) learns books in rows of 512 tokens. Each run continues it for some steps of
rows of 1,024 tokens with a larger RoPE base. The evaluator, whose key tokens LongPPL averages over, is the base model
after many more such steps with cross entropy.

    OMP_NUM_THREADS=1 python benchmarks/book_weights.py --books FOLDER --tokenizer FOLDER --methods LongCE

FOLDER has UTF-8 texts in ``train``, ``validation`` and ``test``. The result of each run is a file in the output folder;
the same command resumes, and prints the table.
"""

import argparse
import itertools
import math
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.token_weights import METHODS, Run, batch_of, select_rows, stored_json, stored_tensors
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import key_token_mask, soft_influence
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import long_and_short
from lightning_modules.utilities.statistics import TOKENS, corpus_mean, paired_ratio

SHORT, LENGTH, ROWS, K = 512, 1024, 2, 32  # tokens of a base model's row and of a run's, rows of a step, K
ALPHA, BETA = 0.5, -4.0  # of key tokens; with the paper's, models of this size have hardly any
RATES = (6.25e-5, 1.25e-4, 2.5e-4, 5e-4)
TUNING_SEED, TEST_SEEDS = 100, (0, 1, 2)
KNOWN = [name for name, method in METHODS.items() if method.scorer in ("windows", "sliding", "evaluator")]
VOCABULARY = 8192


def new_model(theta: float) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    )


def long_model(state: dict[str, Tensor]) -> Backbone:
    model = new_model(theta=40_000.0)
    model.load_state_dict(state)
    model.set_attn_implementation(register_document_attention())
    backbone = Backbone(model)
    backbone.windows_per_pass = lambda _: 64  # at this size a pass costs more than what it computes
    return backbone


class Books:
    """The tokens of books, and rows cut from them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        encode = AutoTokenizer.from_pretrained(tokenizer)
        if len(encode) > VOCABULARY:
            raise SystemExit(
                f"The tokenizer in {tokenizer} has {len(encode)} tokens: take one of at most {VOCABULARY}."
            )
        self.ids = {
            part: [
                torch.tensor(encode(path.read_text())["input_ids"]) for path in sorted((folder / part).glob("*.txt"))
            ]
            for part in ("train", "validation", "test")
        }
        for part, books in self.ids.items():
            if not books or min(map(len, books)) < 2 * LENGTH:
                raise SystemExit(f"{folder / part} needs .txt files, each of at least {2 * LENGTH} tokens.")

    def rows(self, length: int, seed: int) -> Tensor:
        """Return the training books in rows ``[N, length]``, cut at random places and shuffled."""
        rng = np.random.default_rng(seed)
        cut = [ids[rng.integers(length) :] for ids in self.ids["train"]]
        rows = torch.cat([ids[: len(ids) // length * length].view(-1, length) for ids in cut])
        return rows[torch.from_numpy(rng.permutation(len(rows)))]

    def batches(self, count: int, seed: int) -> list[PackedBatch]:
        """Return batches of `ROWS` rows of the training books."""
        epochs = (self.rows(LENGTH, 1000 * seed + epoch) for epoch in itertools.count())
        rows = torch.stack(list(itertools.islice(itertools.chain.from_iterable(epochs), count * ROWS)))
        return [batch_of(part) for part in rows.split(ROWS)]

    def held_out(self, part: str, rows: int) -> list[PackedBatch]:
        """Return one batch of each book: rows evenly spread over it."""
        batches = []
        for ids in self.ids[part]:
            starts = np.linspace(0, len(ids) - LENGTH, rows, dtype=int)
            batches.append(batch_of(torch.stack([ids[start : start + LENGTH] for start in starts])))
        return batches


def train_base(books: Books, seconds: float) -> dict[str, Tensor]:
    """Train in short rows for some CPU seconds."""
    torch.manual_seed(0)
    model, started = new_model(theta=10_000.0), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    step, rows = 0, itertools.chain.from_iterable(books.rows(SHORT, seed).split(8) for seed in range(1000))
    while (passed := (time.process_time() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * passed))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids := next(rows), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"base: step {step}, {passed:.0%}, loss {loss:.3f}", flush=True)
        step += 1
    return model.state_dict()


class Examination:
    """Held-out books with the evaluator's key tokens."""

    def __init__(self, evaluator: Backbone, batches: list[PackedBatch]) -> None:
        self.batches = batches
        with half_precision():
            pairs = [long_and_short(evaluator, batch, context_length=K, stride=K // 2) for batch in batches]
        self.key_tokens = [key_token_mask(*pair, alpha=ALPHA, beta=BETA) for pair in pairs]

    @torch.no_grad()
    def __call__(self, backbone: Backbone) -> dict[str, list[float]]:
        """Return mean log-likelihoods and numbers of all and of key tokens, one of each book."""
        backbone.eval()
        table: dict[str, list[float]] = {name: [] for name in ("all", "tokens", "key", "key_tokens")}
        for batch, key in zip(self.batches, self.key_tokens, strict=True):
            with half_precision():
                long, scored = backbone(batch).double(), batch["labels"].ne(IGNORE_INDEX)
            for mean, count, tokens in (("all", "tokens", scored), ("key", "key_tokens", key)):
                table[mean].append(float(long[tokens].mean()))
                table[count].append(int(tokens.sum()))
        return table


def half_precision() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Comparison:
    """All runs in one folder."""

    def __init__(self, folder: Path, books: Books, *, base_seconds: float, steps: int, evaluator_steps: int) -> None:
        self.folder, self.books, self.steps = folder, books, steps
        folder.mkdir(parents=True, exist_ok=True)
        self.state = stored_tensors(folder / "base.pt", lambda: train_base(books, base_seconds))
        state = stored_tensors(folder / "evaluator.pt", lambda: self._train_evaluator(evaluator_steps))
        self.evaluator = long_model(state).eval().requires_grad_(False)
        self.batches = cache(lambda seed: books.batches(2 * steps, seed))
        self.influence = cache(self._influence)
        self.exam = cache(lambda part: Examination(self.evaluator, books.held_out(part, 3)))
        self.costs = stored_json(folder / "costs.json", self._measure_costs)

    def _train_evaluator(self, steps: int) -> dict[str, Tensor]:
        run = Run(long_model(self.state), METHODS["CE"], steps=steps, rate=2.5e-4, window=K)
        for number, batch in enumerate(self.books.batches(steps, 999)):
            with half_precision():
                run.step(batch, number)
        return run.backbone.base_model.state_dict()

    @torch.no_grad()
    def _influence(self, seed: int, count: int) -> list[Tensor]:
        """Return the weights of the tokens of each batch by the evaluator."""
        with half_precision():
            pairs = [long_and_short(self.evaluator, b, context_length=K, stride=K) for b in self.batches(seed)[:count]]
        return [soft_influence(*pair) for pair in pairs]

    def _measure_costs(self) -> dict[str, float]:
        """Measure the median CPU seconds of a step, by way of scoring."""
        names = {"none": "CE", "windows": "LongCE", "sliding": "LongCE, sliding window"}
        runs = {
            name: Run(long_model(self.state), METHODS[each], steps=9, rate=1e-4, window=K)
            for name, each in names.items()
        }
        times: dict[str, list[float]] = {name: [] for name in (*runs, "evaluator")}
        for number, batch in enumerate(self.books.batches(8, 7_000)):  # in each round all take a turn
            with half_precision():
                for name, run in runs.items():
                    times[name].append(run.step(batch, number))
                started = time.process_time()
                long_and_short(self.evaluator, batch, context_length=K, stride=K)
                times["evaluator"].append(times["none"][-1] + time.process_time() - started)
        return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}

    def result(self, name: str, counted: bool, rate: float, seed: int) -> dict[str, Any]:
        """Return the result of a run, which is read if it exists."""
        key = "-".join((name, "counted" if counted else "free", f"{rate:g}", str(seed))).replace(" ", "_")
        return stored_json(self.folder / f"{key.replace(',', '')}.json", lambda: self._train(name, counted, rate, seed))

    def _train(self, name: str, counted: bool, rate: float, seed: int) -> dict[str, Any]:
        method = METHODS[name]
        step, scoring = self.costs["none"], self.costs[method.scorer or "none"] - self.costs["none"]
        steps = int(self.steps * step / (step + (1 + method.selects) * scoring)) if counted else self.steps
        batches, weights = self.batches(seed), []
        if method.scorer == "evaluator":
            weights = self.influence(seed, (1 + method.selects) * steps)
        if method.selects:
            batches, weights = select_rows(batches, weights, steps), []
        torch.manual_seed(seed)
        run, seconds = Run(long_model(self.state), method, steps=steps, rate=rate, window=K), 0.0
        for number, batch in enumerate(batches[:steps]):
            with half_precision():
                seconds += run.step(batch, number, weights[number] if weights else None)
        books = self.exam("validation" if seed == TUNING_SEED else "test")(run.backbone)
        found = {"method": name, "counted": counted, "rate": rate, "seed": seed, "steps": steps, "seconds": seconds}
        print(found, {name: round(value, 3) for name, value in perplexities([books]).items()}, flush=True)
        return found | {"books": books}


# -------------------------------------------------------------------------------------------------------------- report


def per_book(seeds: list[dict[str, list[float]]]) -> pd.DataFrame:
    """Return LongPPL and perplexity of each book, geometric means over the seeds, and numbers of tokens."""
    mean = {name: np.mean([books[name] for books in seeds], axis=0) for name in ("all", "key")}
    first = seeds[0]
    return pd.DataFrame(
        {
            "perplexity": np.exp(-mean["all"]),
            "longppl": np.exp(-mean["key"]),
            "tokens": first["tokens"],
            "key_tokens": first["key_tokens"],
        }
    )


def perplexities(seeds: list[dict[str, list[float]]]) -> dict[str, float]:
    table = per_book(seeds)
    return {kind: corpus_mean(table, kind) for kind in ("longppl", "perplexity")}


def tuned_rate(comparison: Comparison) -> float:
    """Return the learning rate with which cross entropy has the lowest LongPPL of the validation books."""
    found = {rate: perplexities([comparison.result("CE", True, rate, TUNING_SEED)["books"]]) for rate in RATES}
    return min(RATES, key=lambda rate: found[rate]["longppl"])


def report(comparison: Comparison, names: list[str]) -> None:
    """Print a row of each method, with ratios to cross entropy and their intervals over the books."""
    base = per_book([comparison.exam("test")(long_model(comparison.state))])
    print("key tokens of", len(base), "books:", base["key_tokens"].sum(), "of", base["tokens"].sum(), comparison.costs)
    print(
        "| method | scoring | rate | steps | LongPPL | ratio to CE | by seed | perplexity | ratio to CE |\n"
        + "|---" * 9
        + "|"
    )
    print("| base model | | | 0 |", " | | | ".join(f"{corpus_mean(base, k):.3f}" for k in TOKENS), "| |")
    reference, rate = {}, tuned_rate(comparison)
    stored = [name for name in names if METHODS[name].scorer == "evaluator"]
    for name, counted in [*((name, True) for name in ("CE", *names)), *((name, False) for name in stored)]:
        runs = [comparison.result(name, counted, rate, seed) for seed in TEST_SEEDS]
        reference = reference or {
            "all": per_book([r["books"] for r in runs]),
            "seeds": [per_book([r["books"]]) for r in runs],
        }
        cells = []
        for kind in TOKENS:
            table = per_book([run["books"] for run in runs])
            cells.append(f"{corpus_mean(table, kind):.3f}")
            ratio, interval = ratio_of(table, reference["all"], kind)
            low, high = interval or (math.nan, math.nan)
            cells.append(f"{ratio:.4f} ({low:.4f} to {high:.4f})" if name != "CE" else "")
            if kind == "longppl":
                ratios = [
                    ratio_of(per_book([r["books"]]), ce, kind)[0]
                    for r, ce in zip(runs, reference["seeds"], strict=True)
                ]
                cells.append(", ".join(f"{ratio:.3f}" for ratio in ratios) if name != "CE" else "")
        scoring = "" if name == "CE" else "counted" if counted else "free"
        print("|", " | ".join([name, scoring, f"{rate:g}", str(runs[0]["steps"]), *cells]), "|", flush=True)


def ratio_of(table: pd.DataFrame, baseline: pd.DataFrame, kind: str) -> tuple[float, tuple[float, float] | None]:
    return paired_ratio(table.assign(**{f"{kind}_baseline": baseline[kind]}), kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help=f"a folder, of at most {VOCABULARY} tokens")
    parser.add_argument("--methods", nargs="+", choices=KNOWN, default=["LongCE", "stored by the evaluator"])
    parser.add_argument("--output", type=Path, default=Path("runs/book_weights"))
    parser.add_argument("--base_seconds", type=float, default=2700, help="CPU time of the base model")
    parser.add_argument("--steps", type=int, default=60, help="of cross entropy")
    parser.add_argument("--evaluator_steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {name: getattr(options, name) for name in ("base_seconds", "steps", "evaluator_steps")}
    report(Comparison(options.output, Books(options.books, options.tokenizer), **sizes), options.methods)


if __name__ == "__main__":
    main()

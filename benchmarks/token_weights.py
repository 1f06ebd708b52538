"""Which token weights pay? Compare LongCE, its variants and its controls with cross entropy, all with tuned rates.

The language is that of `benchmarks.indirect_language`, in which counting words does not find the far answers.

Declared before any test run: an arm pays if the 95% interval (Student's t over all pairs of an arm and cross entropy
with the same base model and seed) of its gain in far answers is above 0. Rates, budgets and references have changed
since, as `docs/weights.md` says. Every arm has its own learning rate: the best of the grid on the tuning seed, with the
first base model. Cross entropy has the best of all but the smallest on the test seeds themselves, so that its rate
cannot be an unlucky one; gains over the rate of its tuning seed are shown as well. Arms that score tokens have three
budgets: the steps of cross entropy (scoring counts as free), its operations, and its CPU time.

A base model (3 layers, hidden size 64) learns the language in sequences of 128 tokens. Each run continues it for some
steps of 4 rows of 512 tokens, half of which are cut from long documents and half packed from several, with a larger
RoPE base. Lightning is left out, because its fixed costs would be a large part of a step of this size.

    OMP_NUM_THREADS=1 python benchmarks/token_weights.py --output runs/token_weights

There are as many processes as base models. The result of each run is a file in the output folder; the same command
resumes, and prints the table.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.indirect_language import IndirectWriter
from datamodules.packing.sequences import collate_examples
from datamodules.recall import recall_tokenizer
from datamodules.recall.documents import RecallRecord, Word
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.commands.plan.flops import ce_step_flops, forward_flops, short_pass_flops, sliding_pass_flops
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import key_token_mask, long_cross_entropy, long_perplexity, soft_influence
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import (
    long_and_short,
    short_log_likelihood,
    sliding_window_log_likelihood,
)
from lightning_modules.objectives import CrossEntropy, Interpolated, LongCE, Normalized, Objective
from lightning_modules.utilities.statistics import weighted_mean_interval

DEEP, SMALL = {"size": 64, "layers": 4}, {"size": 32, "layers": 2}  # evaluators
LENGTH, ROWS, K, FAR = 512, 4, 64, 128  # tokens of a row, rows of a step, K = d, and from where on an answer is far
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
CE_RATES = RATES[1:]  # of cross entropy on the test seeds
TUNING_SEED, TEST_SEEDS = 100, tuple(range(6))

Scorer = Literal["windows", "sliding", "evaluator", "small", "reference"]
Budget = Literal["steps", "operations", "CPU"]


@dataclass(frozen=True)
class Method:
    """How tokens are weighted: by an objective of the log-likelihoods, by stored weights, or by a rule."""

    objective: Callable[[int], Objective]  # for a number of steps
    scorer: Scorer | None = None
    rule: Callable[[PackedBatch, Any, int], Tensor] | None = None  # weights [B, T] by a batch, what was scored, and K
    selects: bool = False  # whether it chooses the rows that it trains on


def plain(objective: Objective) -> Callable[[int], Objective]:
    return lambda _: objective


# --------------------------------------------------------------------------------------------------------------- rules


def exposure_weights(batch: PackedBatch, _: Any, window: int) -> Tensor:
    """Weight tokens by the length of their context, after EXACT (arXiv 2605.10544); the details are ours.

    Contexts beyond K are in buckets of powers of two, which share an extra weight of half of the scored tokens equally.
    """
    positions, scored = batch["position_ids"], batch["labels"].ne(IGNORE_INDEX)
    bucket = positions.clamp(min=1).double().log2().floor().long()
    beyond = scored & (positions >= window)
    weights = torch.ones(positions.shape)
    for number in bucket[beyond].unique():
        members = beyond & (bucket == number)
        weights[members] += 0.5 * scored.sum() / len(bucket[beyond].unique()) / members.sum()
    return weights


def late_weights(batch: PackedBatch, *_: Any) -> Tensor:
    """Weight 3 in the second half of a row, 1 in the first."""
    length = batch["labels"].shape[1]
    return torch.ones(batch["labels"].shape).index_fill(1, torch.arange(length // 2, length), 3.0)


def lexical_weights(batch: PackedBatch, _: Any, window: int) -> Tensor:
    """Weight 5 where a word follows its predecessor as it did in the document, but not within K words."""
    weights = torch.ones(batch["labels"].shape)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for start, stop in itertools.pairwise(batch["document_boundaries"][row]):
            seen: dict[tuple[int, int], int] = {}
            for place in range(start + 1, stop):
                pair = (ids[place - 1], ids[place])
                if place - seen.get(pair, place) > window:
                    weights[row, place] = 5.0
                seen[pair] = place
    return weights


def shuffled_weights(batch: PackedBatch, stored: Tensor, _: int) -> Tensor:
    """Give the stored weights to other tokens, at random."""
    scored = batch["labels"].ne(IGNORE_INDEX)
    values = stored[scored]
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    return torch.ones_like(stored).masked_scatter(scored, values[torch.randperm(len(values), generator=generator)])


def stored_weights(_: PackedBatch, stored: Tensor, __: int) -> Tensor:
    return stored


METHODS: dict[str, Method] = {
    "CE": Method(plain(CrossEntropy())),
    "LongCE": Method(plain(LongCE()), "windows"),
    "LongCE, normalized": Method(plain(Normalized(LongCE())), "windows"),
    "LongCE, half CE": Method(plain(Interpolated(LongCE())), "windows"),
    "LongCE, sliding window": Method(plain(LongCE()), "sliding"),
    "stored by the evaluator": Method(plain(LongCE()), "evaluator", stored_weights),
    "stored by a small evaluator": Method(plain(LongCE()), "small", stored_weights),
    "EXACT": Method(plain(Normalized(LongCE())), None, exposure_weights),
    "Rho-1": Method(plain(Normalized(LongCE())), "reference"),
    "documents selected by the evaluator": Method(plain(CrossEntropy()), "evaluator", selects=True),
    "control: second half": Method(plain(LongCE()), None, late_weights),
    "control: far bigrams": Method(plain(LongCE()), None, lexical_weights),
    "control: shuffled weights": Method(plain(LongCE()), "evaluator", shuffled_weights),
}
COUNTED = (
    "LongCE",
    "LongCE, half CE",
    "LongCE, sliding window",
    "stored by the evaluator",
    "stored by a small evaluator",
)
ARMS: tuple[tuple[str, Budget], ...] = (
    *((name, "steps") for name in METHODS),
    *itertools.product(COUNTED, ("operations", "CPU")),
)


# ---------------------------------------------------------------------------------------------------------------- data


@cache
def vocabulary() -> dict[str, int]:
    return recall_tokenizer().get_vocab()


def token_ids(records: list[RecallRecord]) -> Tensor:
    """Return ``[N, length + 1]`` ids of documents of the same length, ``<bos>`` first."""
    ids = vocabulary()
    return torch.tensor([[ids["<bos>"], *(ids[word.text] for word in record.words)] for record in records])


class LinkedWriter(IndirectWriter):
    """Writer of documents in which many names have the value of another, for learning to follow such links."""

    bounds = (0.3, 0.6, 0.9)


def records(
    count: int, *, length: int, slot: int, seed: int, writer: type[IndirectWriter] = IndirectWriter
) -> list[RecallRecord]:
    """Return documents of ``length`` tokens with ``<bos>``."""
    return [RecallRecord(tuple(writer((seed, index), slot).words(length - 1))) for index in range(count)]


def cut_rows(count: int, *, length: int, **language: Any) -> Tensor:
    """Return ``[count, length]`` ids cut from documents twice as long, so that half begin in the middle of one."""
    rows = token_ids(records(-(-count // 2), length=2 * length, **language)).reshape(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(language["seed"]))][:count]


def training_batches(count: int, seed: int) -> list[PackedBatch]:
    """Return batches of `ROWS` rows, half of them cut from long documents and half packed from two to four."""
    whole = cut_rows(count * ROWS // 2, length=LENGTH, slot=16, seed=50_000 + seed)
    rng = np.random.default_rng(seed)
    parts = records(count * ROWS * 2, length=LENGTH, slot=16, seed=60_000 + seed)
    ids, batches = iter(token_ids(parts)), []
    for number in range(count):
        rows = [{"input_ids": row, "position_ids": torch.arange(LENGTH)} for row in whole[2 * number : 2 * number + 2]]
        for _ in range(ROWS - len(rows)):
            cuts = rng.choice(np.arange(64, LENGTH - 63, 32), size=rng.integers(1, 4), replace=False)
            sizes = np.diff([0, *sorted(cuts), LENGTH]).tolist()
            rows.append(
                {
                    "input_ids": torch.cat([next(ids)[:size] for size in sizes]),
                    "position_ids": torch.cat([torch.arange(size) for size in sizes]),
                }
            )
        batches.append(collate_examples(rows))
    return batches


def batch_of(ids: Tensor) -> PackedBatch:
    return collate_examples([{"input_ids": row, "position_ids": torch.arange(len(row))} for row in ids])


# -------------------------------------------------------------------------------------------------------------- models


def new_model(size: int = 64, theta: float = 500.0, layers: int = 3) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=size,
            intermediate_size=5 * size // 2,
            num_hidden_layers=layers,
            num_attention_heads=size // 16,
            num_key_value_heads=size // 16,
            max_position_embeddings=LENGTH,
            initializer_range=size**-0.5,  # with the usual 0.02 the model learns to look up words much later
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    )


def long_model(state: dict[str, Tensor], **shape: Any) -> Backbone:
    model = new_model(theta=4000.0, **shape)
    model.load_state_dict(state)
    model.set_attn_implementation(register_document_attention())
    backbone = Backbone(model)
    # All windows of a batch in one pass: at this size a pass costs more than what it computes.
    backbone.windows_per_pass = lambda _: 1 << 20
    return backbone


def optimizer_of(model: torch.nn.Module, rate: float, steps: int) -> tuple[Any, Any]:
    """Return AdamW and its schedule, a warm-up of up to 20 steps and a cosine to a tenth of the learning rate."""
    warmup = max(min(20, steps // 4), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(step / max(steps, 1), 1)))
    )
    return optimizer, schedule


def learn(model: LlamaForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], steps: int, rate: float) -> None:
    """Train with weighted cross entropy on ``[B, T]`` ids and weights."""
    optimizer, schedule = optimizer_of(model, rate, steps)
    for _, (ids, weights) in zip(range(steps), batches, strict=False):
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        update(model, loss @ weights[:, 1:].flatten() / weights[:, 1:].sum(), optimizer, schedule)


def update(model: torch.nn.Module, loss: Tensor, optimizer: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


@cache
def answer_words() -> frozenset[str]:
    from benchmarks.indirect_language import value_forms
    from datamodules.recall.language import GENRES

    return frozenset([*GENRES, *(form for forms in value_forms() for form in forms)])


def learn_to_look_up(model: LlamaForCausalLM, seed: int) -> None:
    """Train on random words said again and again until the model knows how they go on: later it uses that for names."""
    generator = torch.Generator().manual_seed(seed)
    optimizer, schedule = optimizer_of(model, 4e-3, 1_000_000)
    for _ in range(6_000):
        period = int(torch.randint(16, 33, (), generator=generator))
        ids = torch.randint(4, len(vocabulary()), (32, period), generator=generator).repeat(1, 4)[:, :64]
        known = model(ids).logits[:, period - 1 : -1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(known, ids[:, period:].flatten())
        if loss < 0.3:
            return
        update(model, loss, optimizer, schedule)
    raise RuntimeError(f"The model with seed {seed} does not learn to look up words: take another seed.")


def by_word(word: Word) -> float:
    """Return a larger weight for words that can be answers."""
    return 8.0 if word.text in answer_words() else 1.0


def by_inference(word: Word) -> float:
    """Return a larger weight for answers, above all for those that are known by way of another name."""
    return 1.0 if word.kind != "answer" else 24.0 if word.inference == "hops" else 8.0


def language(
    *,
    length: int,
    rows: int,
    slot: int,
    seed: int,
    weigh: Callable[[Word], float] = lambda _: 1.0,
    writer: type[IndirectWriter] = IndirectWriter,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and weights, each ``[rows, length]``."""
    for number in range(1_000):
        some = {"length": 2 * length, "slot": slot, "seed": 1_000 * seed + number}
        documents = records(50 * rows, writer=writer, **some)
        weights = torch.tensor([[1.0, *map(weigh, document.words)] for document in documents]).view(-1, length)
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(some["seed"]))
        ids = token_ids(documents).view(-1, length)
        yield from zip(ids[order].split(rows), weights[order].split(rows), strict=True)


def base_weights(seed: int, steps: int = 300, *, size: int = 64, layers: int = 3) -> dict[str, Tensor]:
    """Train a model in short sequences: to look up words, then for some steps the language, then fewer events."""
    torch.manual_seed(seed)
    model = new_model(size, layers=layers)
    learn_to_look_up(model, seed)
    learn(model, language(length=128, rows=16, slot=5, seed=10 + seed, weigh=by_word), steps, 4e-3)
    learn(model, language(length=128, rows=16, slot=16, seed=20 + seed), 300, 2e-3)
    return model.state_dict()


def evaluator_weights(seed: int, **shape: int) -> dict[str, Tensor]:
    """Train a model longer than the base models: also to follow links between names, and in long documents."""
    model = long_model(base_weights(seed, 800, **shape), **shape).base_model
    for weigh in (by_word, by_inference, by_inference):
        for length, rows, steps in ((128, 16, 600), (LENGTH, 4, 800)):
            linked = language(length=length, rows=rows, slot=5, seed=30 + length, weigh=weigh, writer=LinkedWriter)
            learn(model, linked, steps, 3e-3)
        learn(model, language(length=LENGTH, rows=4, slot=16, seed=41), 300, 1.5e-3)
    return model.state_dict()


# ---------------------------------------------------------------------------------------------------------- evaluation


class Examination:
    """Held-out documents, and an evaluator's key tokens in the first 64."""

    def __init__(self, evaluator: Backbone, *, count: int, seed: int) -> None:
        self.records = records(count, length=LENGTH, slot=16, seed=seed)
        self.ids = token_ids(self.records)
        pair = long_and_short(evaluator, batch_of(self.ids[:64]), context_length=K, stride=K)
        self.key_tokens = key_token_mask(*pair)

    @torch.no_grad()
    def __call__(self, backbone: Backbone) -> dict[str, float]:
        """Return the fraction of far answers that are the likeliest word, by kind, and perplexity and LongPPL."""
        backbone.eval()
        likeliest = torch.cat([backbone.base_model(ids).logits[:, :-1].argmax(-1) for ids in self.ids.split(50)])
        hits: Counter[tuple[str, bool]] = Counter()
        for record, guesses, ids in zip(self.records, likeliest.tolist(), self.ids[:, 1:].tolist(), strict=True):
            for word, guess, right in zip(record.words, guesses, ids, strict=True):
                if word.kind == "answer" and word.distance > FAR:
                    hits.update([(word.inference, guess == right), ("far answers", guess == right)])
        batch = batch_of(self.ids[:64])
        long, scored = backbone(batch), batch["labels"].ne(IGNORE_INDEX)
        kinds = ("far answers", "repeat", "paraphrase", "hops", "gist")
        return {kind: hits[kind, True] / max(1, hits[kind, True] + hits[kind, False]) for kind in kinds} | {
            "perplexity": float(long_perplexity(long, scored)),
            "longppl": float(long_perplexity(long, self.key_tokens)),
        }


def counted_answers(count: int = 500) -> float:
    """Return the share of far answers that counting finds: what last followed the same two words, or the same one."""
    hits: Counter[bool] = Counter()
    for record in records(count, length=LENGTH, slot=16, seed=902):
        after: dict[tuple[str, ...], str] = {}
        texts = [word.text for word in record.words]
        for place, word in enumerate(record.words):
            contexts = (tuple(texts[max(place - 2, 0) : place]), tuple(texts[max(place - 1, 0) : place]))
            if word.kind == "answer" and word.distance > FAR:
                hits[next((after[each] for each in contexts if each in after), None) == word.text] += 1
            after |= dict.fromkeys(contexts, word.text)
    return hits[True] / hits.total()


# ------------------------------------------------------------------------------------------------------------ training


class Run:
    """A model in training with a method, whose short context has `window` to twice as many tokens."""

    def __init__(self, backbone: Backbone, method: Method, *, steps: int, rate: float, window: int = K) -> None:
        self.backbone, self.method, self.window = backbone.train(), method, window
        self.objective = method.objective(steps)
        self.optimizer, self.schedule = optimizer_of(self.backbone, rate, steps)

    def step(self, batch: PackedBatch, number: int, stored: Tensor | None = None) -> float:
        """Train on a batch, with what was scored before the run, and return the CPU seconds."""
        started = time.process_time()
        method, objective, short = self.method, self.objective.at_step(number), None
        if method.scorer == "windows":
            short = short_log_likelihood(self.backbone, batch, context_length=self.window, stride=self.window)
        elif method.scorer == "sliding":
            short = sliding_window_log_likelihood(self.backbone, batch, context_length=self.window)
        long, scored = self.backbone(batch), batch["labels"].ne(IGNORE_INDEX)
        if method.scorer == "reference":
            excess = (stored - long.detach())[scored]
            weights = torch.zeros_like(long).masked_scatter(scored, (excess >= excess.quantile(0.4)).to(long.dtype))
        elif method.rule is not None:
            weights = method.rule(batch, stored, self.window).masked_fill(~scored, 0.0)
        else:
            weights = objective(long.detach(), short, batch)
        divisor = float(weights.sum()) if objective.normalized and weights.sum() > 0 else None
        loss = long_cross_entropy(long, weights, batch["labels"], divisor=divisor)
        update(self.backbone, loss, self.optimizer, self.schedule)
        return time.process_time() - started


def stored_json(path: Path, make: Callable[[], Any]) -> Any:
    if not path.exists():
        path.with_suffix(".part").write_text(json.dumps(make(), indent=1))
        path.with_suffix(".part").rename(path)
    return json.loads(path.read_text())


def stored_tensors(path: Path, make: Callable[[], Any]) -> Any:
    if not path.exists():
        torch.save(make(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return torch.load(path, weights_only=True)


class Comparison:
    """All runs of one base model in one folder."""

    def __init__(self, folder: Path, base: int, *, steps: int, documents: int) -> None:
        self.folder, self.base, self.steps = folder, base, steps
        (folder / f"base{base}").mkdir(parents=True, exist_ok=True)
        self.state = stored_tensors(folder / f"base{base}.pt", lambda: base_weights(base))
        evaluator = stored_tensors(folder / "evaluator.pt", lambda: evaluator_weights(0, **DEEP))
        small = stored_tensors(folder / "small.pt", lambda: evaluator_weights(7, **SMALL))
        self.scorers = {
            "evaluator": long_model(evaluator, **DEEP),
            "small": long_model(small, **SMALL),
        }
        for scorer in self.scorers.values():
            scorer.eval().requires_grad_(False)
        exam = partial(Examination, self.scorers["evaluator"], count=documents)
        self.exams = {TUNING_SEED: exam(seed=901), None: exam(seed=902)}
        self.batches = lru_cache(maxsize=1)(partial(training_batches, 2 * steps))
        self.scores = lru_cache(maxsize=8)(self._score)
        self.costs = stored_json(folder / "costs.json", self._measure_costs)

    @torch.no_grad()
    def _score(self, scorer: str, seed: int, count: int) -> list[Tensor]:
        """Return what a frozen model says of each batch: weights of its tokens, or their log-likelihoods."""
        backbone = self.scorers["evaluator" if scorer == "reference" else scorer]
        batches = self.batches(seed)[:count]
        if scorer == "reference":
            return [backbone(batch) for batch in batches]
        return [soft_influence(*long_and_short(backbone, batch, context_length=K, stride=K)) for batch in batches]

    def _measure_costs(self) -> dict[str, dict[str, float]]:
        """Measure the median CPU seconds of a step, and count its operations, by way of scoring."""
        batches = training_batches(27, 7_000)
        names = {"none": "CE", "windows": "LongCE", "sliding": "LongCE, sliding window"}
        runs = {
            name: Run(long_model(self.state), METHODS[method], steps=27, rate=1e-3) for name, method in names.items()
        }
        times: dict[str, list[float]] = {name: [] for name in (*runs, "evaluator", "small")}
        for number, batch in enumerate(batches):  # in each round all take a turn: a busy machine slows all of them
            for name in [*times][number % len(times) :] + [*times][: number % len(times)]:
                if name in runs:
                    times[name].append(runs[name].step(batch, number))
                else:
                    started = time.process_time()
                    with torch.no_grad():
                        long_and_short(self.scorers[name], batch, context_length=K, stride=K)
                    times[name].append(time.process_time() - started)
        seconds = {name: statistics.median(each[2:]) for name, each in times.items()}
        seconds |= {name: seconds["none"] + seconds[name] for name in ("evaluator", "small")}
        shape, deep, small = (ModelShape.of(new_model(**size).config) for size in ({}, DEEP, SMALL))
        step = ce_step_flops(shape, LENGTH, "none").total
        operations = {
            "none": step,
            "windows": step + short_pass_flops(shape, LENGTH, K, K).total,
            "sliding": step + sliding_pass_flops(shape, LENGTH, K).total,
        }
        for name, each in (("evaluator", deep), ("small", small)):
            scoring = forward_flops(each, LENGTH, LENGTH - 1).total + short_pass_flops(each, LENGTH, K, K).total
            operations[name] = step + scoring
        return {"CPU": seconds, "operations": operations}

    def steps_of(self, name: str, budget: Budget) -> int:
        """Return the optimizer steps that fit in a budget."""
        if budget == "steps":
            return self.steps
        costs = self.costs[budget]
        return int(self.steps * costs["none"] / costs[METHODS[name].scorer or "none"])

    def result(self, name: str, budget: Budget, rate: float, seed: int) -> dict[str, Any]:
        """Return the result of a run, which is read if it exists."""
        key = "-".join((name, budget, f"{rate:g}", str(seed))).replace(" ", "_").replace(",", "").replace(":", "")
        path = self.folder / f"base{self.base}" / f"{key}.json"
        return stored_json(path, lambda: self._train(name, budget, rate, seed))

    def _train(self, name: str, budget: Budget, rate: float, seed: int) -> dict[str, Any]:
        method, steps = METHODS[name], self.steps_of(name, budget)
        torch.manual_seed(seed)
        frozen = method.scorer in ("evaluator", "small", "reference")
        batches = self.batches(seed)
        scores = self.scores(method.scorer, seed, 2 * steps if method.selects else self.steps) if frozen else []
        if method.selects:
            batches, scores = select_rows(batches, scores, steps), []
        run = Run(long_model(self.state), method, steps=steps, rate=rate)
        seconds = 0.0
        for number, batch in enumerate(batches[:steps]):
            seconds += run.step(batch, number, scores[number] if scores else None)
        outcome = self.exams.get(seed, self.exams[None])(run.backbone)
        found = {"base": self.base, "arm": name, "budget": budget, "rate": rate, "seed": seed, "steps": steps}
        print(found, f"{outcome['far answers']:.3f}", flush=True)
        return found | {"seconds": seconds} | outcome


def select_rows(batches: list[PackedBatch], weights: list[Tensor], count: int) -> list[PackedBatch]:
    """Return ``count`` batches of the rows whose weights have the largest sums, in their order."""
    size = len(batches[0]["input_ids"])
    rows = [
        {name: batch[name][row] for name in ("input_ids", "position_ids")} for batch in batches for row in range(size)
    ]
    sums = torch.cat([each.sum(1) for each in weights])
    chosen = sums.topk(count * size).indices.sort().values.tolist()
    kept = [rows[index] for index in chosen]
    return [collate_examples(kept[first : first + size]) for first in range(0, len(kept), size)]


# -------------------------------------------------------------------------------------------------------------- report


def tuned_rates(comparison: Comparison) -> dict[tuple[str, Budget], float]:
    """Return the best rate of each arm on the tuning seed."""
    rates: dict[tuple[str, Budget], float] = {}
    for arm in ARMS:
        found = {rate: comparison.result(*arm, rate, TUNING_SEED)["far answers"] for rate in RATES}
        rates[arm] = max(found, key=found.__getitem__)
    return rates


def report(comparisons: list[Comparison], rates: dict[tuple[str, Budget], float]) -> list[dict[str, Any]]:
    """Run the test seeds, and print and return a row of means and paired differences for each arm."""
    rows: list[dict[str, Any]] = []
    tried = {
        rate: [c.result("CE", "steps", rate, seed) for c in comparisons for seed in TEST_SEEDS] for rate in CE_RATES
    }
    best = max(CE_RATES, key=lambda rate: statistics.mean(run["far answers"] for run in tried[rate]))
    arm_rates, references = rates | {("CE", "steps"): best}, {"best": tried[best]}
    references["tuned"] = [c.result("CE", "steps", rates["CE", "steps"], s) for c in comparisons for s in TEST_SEEDS]
    print(
        "| arm | budget | rate | steps | far | repeat | paraphrase | hops | gist | PPL | LongPPL | minus CE | by base |"
        f" minus CE at {rates['CE', 'steps']:g} |"
    )
    print("|---" * 14 + "|")
    for name, budget in ARMS:
        runs = [c.result(name, budget, arm_rates[name, budget], seed) for c in comparisons for seed in TEST_SEEDS]
        row = {"arm": name, "budget": budget, "rate": arm_rates[name, budget], "steps": runs[0]["steps"]}
        kinds = ("far answers", "repeat", "paraphrase", "hops", "gist", "perplexity", "longppl")
        row |= {kind: statistics.mean(run[kind] for run in runs) for kind in kinds}
        gains = {}
        for reference, ce in references.items():
            differences = np.array([a["far answers"] - b["far answers"] for a, b in zip(runs, ce, strict=True)])
            interval = weighted_mean_interval(differences, np.ones(len(differences))) or (math.nan, math.nan)
            gains[reference] = (float(differences.mean()), *interval)
            row.setdefault("gains by base", [float(part.mean()) for part in np.split(differences, len(comparisons))])
        rows.append(row | {"gains": gains})
        cells = [f"{row[kind]:.1%}" for kind in kinds[:5]] + [f"{row[kind]:.2f}" for kind in kinds[5:]]
        if name != "CE":
            best_gain, tuned_gain = (
                "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * value for value in gain)) for gain in gains.values()
            )
            cells += [best_gain, ", ".join(f"{100 * part:+.1f}" for part in row["gains by base"]), tuned_gain]
        print("|", " | ".join([name, budget, f"{row['rate']:g}", str(row["steps"]), *cells]), "|")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/token_weights"))
    parser.add_argument("--steps", type=int, default=80, help="of cross entropy")
    parser.add_argument("--documents", type=int, default=200, help="that answers are counted in")
    parser.add_argument("--bases", type=int, nargs="+", default=[1, 2], help="seeds of the base models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = {"steps": options.steps, "documents": options.documents}
    if stored_json(options.output / "options.json", lambda: sizes) != sizes:
        parser.error(f"{options.output} has runs of other sizes than {sizes}: take another folder")
    new = partial(Comparison, options.output, **sizes)
    comparisons = [new(base) for base in options.bases]
    print("evaluator:", comparisons[0].exams[None](comparisons[0].scorers["evaluator"]), "counting:", counted_answers())
    for comparison in comparisons:
        base = comparison.exams[None](long_model(comparison.state))
        print("base", comparison.base, base, comparison.costs, flush=True)
    processes = len(options.bases)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        tuning = [(*arm, rate, TUNING_SEED) for arm in ARMS for rate in RATES]
        parts = [tuning[first::processes] for first in range(processes)]
        list(pool.map(partial(run_all, new), itertools.repeat(options.bases[0]), parts))
        rates = tuned_rates(comparisons[0])
        arms = [*((*arm, rate) for arm, rate in rates.items()), *(("CE", "steps", rate) for rate in CE_RATES)]
        test = [(*arm, seed) for arm in arms for seed in TEST_SEEDS]
        list(pool.map(partial(run_all, new), options.bases, itertools.repeat(test)))
    (options.output / "table.json").write_text(json.dumps(report(comparisons, rates), indent=1))


def run_all(new: Callable[[int], Comparison], base: int, runs: list[tuple[str, Budget, float, int]]) -> None:
    """Make runs of a base model, in a process of its own."""
    torch.set_num_threads(1)
    comparison = new(base)
    for run in sorted(runs, key=lambda run: run[3]):  # those of a seed share their batches and scores
        comparison.result(*run)


if __name__ == "__main__":
    main()

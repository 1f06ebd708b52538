"""Compare time and memory of scoring and of a LongCE step with the code of the paper's authors.

Scoring is compared with the package of the paper's authors (`longppl` 0.3.0). It has no training step; the baseline of
the step is the same formula written as their training script has it: full logits of the row and of each window.
Both run in this process, in turn, on the same random models and text; medians of the rounds. Thresholds are quantiles
of the evaluator's scores: 60 % of the tokens are candidates (LCL > beta), as in text, and a tenth has LSD > alpha.
A baseline that would not fit into memory is left out, and so is its ratio.

    python benchmarks/against_authors.py --lengths 4096 8192 --vocabularies 32000 128256 --rounds 3
    python benchmarks/against_authors.py --shape D --lengths 2048 --vocabularies 8000 --context_length 512 --stride 128
"""

import argparse
import contextlib
import ctypes
import gc
import io
import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from longppl.longppl import compute_longppl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.commands.plan.flops import Flops, attention_pairs, ce_step_flops, scoring_flops, short_pass_flops
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import ShortContext, long_cross_entropy, long_perplexity, short_context_windows
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import enable_checkpointing
from lightning_modules.models.short_context import long_and_short, short_log_likelihood
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.objectives import CrossEntropy, LongCE, Objective, StoredInfluence
from lightning_modules.scoring.evaluator import score_text
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens

SHAPES = {
    "S": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
    "D": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "num_attention_heads": 8},
}
CANDIDATES, KEYS = 0.6, 0.1


class Setting(NamedTuple):
    """One setting of the table: token counts throughout."""

    shape: str
    vocabulary: int
    length: int
    context_length: int
    stride: int

    def __str__(self) -> str:
        return f"{self.shape} V={self.vocabulary} n={self.length} K={self.context_length} d={self.stride}"

    @property
    def sizes(self) -> dict[str, int]:
        """Return the arguments for functions that make short contexts."""
        return {"context_length": self.context_length, "stride": self.stride}


class Run(NamedTuple):
    """Seconds, MiB above entry, and what came out."""

    seconds: float
    memory: float
    result: object


def build(shape: str, vocabulary: int, seed: int) -> transformers.PreTrainedModel:
    """Return a random Llama of one of the shapes."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", **SHAPES[shape], num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=1 << 18
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_document_attention()).eval()


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words ``w0``, ``w1``, .., so that the length of a text in tokens is exact."""
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def measure(function: Callable[[], object]) -> Run:
    """Run a function once and measure its time and memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise memory freed by an earlier run would be reused, uncounted
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # reset the peak
    # With one thread, CPU time: it does not depend on what else runs on the machine.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    before, started = _status("VmRSS"), clock()
    with contextlib.redirect_stdout(io.StringIO()):
        result = function()
    return Run(clock() - started, _status("VmHWM") - before, result)


def _status(field: str) -> float:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith(field)) / 1024


def _available() -> float:
    with open("/proc/meminfo") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("MemAvailable")) / 1024


# ------------------------------------------------------------------------------------------------------- what is timed


def plain_longce_step(model: transformers.PreTrainedModel, ids: Tensor, context_length: int, stride: int) -> float:
    """Compute loss and gradients with full logits, one window at a time."""
    model.train()
    logits = model(input_ids=ids).logits
    losses = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    weights = torch.ones_like(losses)
    with torch.no_grad():
        for start in range(0, ids.shape[1] - context_length, stride):
            stop = min(start + context_length + stride, ids.shape[1])
            window = model(input_ids=ids[:, start:stop]).logits[0, context_length - 1 : -1]
            short = F.cross_entropy(window, ids[0, start + context_length : stop], reduction="none")
            long = losses[start + context_length - 1 : stop - 1]
            weights[start + context_length - 1 : stop - 1] = (short - long).exp().clamp(max=5.0)
    loss = (losses * weights).mean()
    loss.backward()
    model.zero_grad()
    model.eval()
    return loss.item()


def longce_step(backbone: Backbone, batch: PackedBatch, sizes: dict[str, int]) -> float:
    """Compute loss and gradients as `LongContextLM` does."""
    backbone.train()
    return _step(backbone, batch, LongCE(), short_log_likelihood(backbone, batch, **sizes))


def cross_entropy_step(backbone: Backbone, batch: PackedBatch) -> float:
    """Compute loss and gradients of cross entropy."""
    backbone.train()
    return _step(backbone, batch, CrossEntropy())


def stored_step(backbone: Backbone, batch: PackedBatch, stored: Tensor) -> float:
    """Compute loss and gradients with weights stored beside the sequence."""
    backbone.train()
    return _step(backbone, PackedBatch(**batch, influence=stored), StoredInfluence())


def _step(backbone: Backbone, batch: PackedBatch, objective: Objective, short: ShortContext | None = None) -> float:
    long = backbone(batch)
    loss = long_cross_entropy(long, objective(long.detach(), short, batch), batch["labels"])
    loss.backward()
    backbone.zero_grad()
    backbone.eval()
    return loss.item()


def authors_score(
    text: str, model: object, evaluator: object, tokenizer: object, setting: Setting, alpha: float, beta: float
) -> tuple[float, int]:
    """Return LongPPL and the number of key tokens by the authors' package."""
    out = compute_longppl(
        text, model, evaluator, tokenizer, tokenizer, None, setting.context_length, setting.stride, alpha, beta
    )
    return float(out["longppl"]), out["n_key_token"]


def score(
    text: str,
    model: Backbone | None,
    evaluator: Backbone,
    tokenizer: PreTrainedTokenizerFast,
    setting: Setting,
    alpha: float,
    beta: float,
) -> tuple[float, int]:
    """Return both as ``longce score`` computes them; without a model the evaluator is the model."""
    document = encode_document(text, tokenizer)
    scores = score_text(text, evaluator, tokenizer, **setting.sizes, beta=beta)
    with torch.no_grad():
        log_likelihood = scores.long.unsqueeze(0) if model is None else model(document)
    key = find_key_tokens(scores, document_tokens(document), alpha=alpha, beta=beta).mask
    key = key & document["labels"].ne(IGNORE_INDEX)
    return float(long_perplexity(log_likelihood, key)), int(key.sum())


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(setting: Setting, rounds: int, chosen: list[str]) -> dict[str, dict[str, Run]]:
    """Return the medians of the baseline and of our code for each kind of work."""
    model, evaluator = (build(setting.shape, setting.vocabulary, seed) for seed in range(2))
    tokenizer = word_tokenizer(setting.vocabulary)
    ids = torch.randint(setting.vocabulary, (1, setting.length), generator=torch.Generator().manual_seed(0))
    text = " ".join(f"w{index}" for index in ids[0].tolist())
    batch = encode_document(text, tokenizer)
    ours, our_evaluator = Backbone(model), Backbone(evaluator)
    enable_checkpointing(model, True)
    thresholds = {
        key: _thresholds(scorer, batch, setting) for key, scorer in (("evaluator", our_evaluator), ("model", ours))
    }

    def step(kind: bool | str, function: Callable[[], float]) -> float:
        enable_checkpointing(model, kind)
        return function()

    scoring = partial(authors_score, text, model, evaluator, tokenizer, setting, *thresholds["evaluator"])
    alone = partial(authors_score, text, model, model, tokenizer, setting, *thresholds["model"])
    plain = partial(step, True, partial(plain_longce_step, model, ids, **setting.sizes))
    work: dict[str, dict[str, Callable[[], object]]] = {
        "score": {
            "baseline": scoring,
            "ours": partial(score, text, ours, our_evaluator, tokenizer, setting, *thresholds["evaluator"]),
        },
        "score, evaluator = model": {
            "baseline": alone,
            "ours": partial(score, text, None, ours, tokenizer, setting, *thresholds["model"]),
        },
        "LongCE step": {
            "baseline": plain,
            "ours": partial(step, True, partial(longce_step, ours, batch, setting.sizes)),
            "ours, selective checkpointing": partial(
                step, "selective", partial(longce_step, ours, batch, setting.sizes)
            ),
            "our CE step": partial(step, True, partial(cross_entropy_step, ours, batch)),
            "our step with stored weights": partial(
                step, True, partial(stored_step, ours, batch, torch.ones(1, setting.length))
            ),
        },
    }
    results = {}
    for name in chosen:
        functions = dict(work[name])
        if _baseline_memory(setting, name) > 0.8 * _available():
            del functions["baseline"]
        runs = [{side: measure(function) for side, function in functions.items()} for _ in range(rounds)]
        results[name] = {side: _median([each[side] for each in runs]) for side in functions}
    return results


def _thresholds(scorer: Backbone, batch: PackedBatch, setting: Setting) -> tuple[float, float]:
    """Return the alpha and beta that give the wanted fractions of candidates and key tokens."""
    long, short = long_and_short(scorer, batch, **setting.sizes)
    differs = long != short
    alpha = (long - short)[differs].quantile(1 - KEYS).item()
    return max(alpha, 0.0), long[differs].quantile(1 - CANDIDATES).item()


def _baseline_memory(setting: Setting, name: str) -> float:
    """Estimate the MiB of the baseline by a measured rule: 2 copies of the logits to score, 3.4 to train."""
    return setting.length * setting.vocabulary * 4 / 2**20 * (3.4 if "step" in name else 2.0)


def _median(runs: list[Run]) -> Run:
    seconds, memory = (statistics.median(run[field] for run in runs) for field in range(2))
    return Run(seconds, memory, runs[-1].result)


def _rows(setting: Setting, results: dict[str, dict[str, Run]]) -> list[str]:
    lines = []
    for name, sides in results.items():
        baseline = sides.get("baseline")
        for side, run in sides.items():
            if side == "baseline":
                continue
            what = name if side == "ours" else f"{name}: {side}"
            if baseline is None:
                numbers = f"- / {run.seconds:.2f} | | - / {run.memory:.0f} | | no baseline: too much memory"
            else:
                numbers = (
                    f"{baseline.seconds:.2f} / {run.seconds:.2f} | {run.seconds / baseline.seconds:.2f}"
                    f" | {baseline.memory:.0f} / {run.memory:.0f} | {run.memory / max(baseline.memory, 1):.2f}"
                    f" | {_agreement(baseline.result, run.result) if side.startswith('ours') else ''}"
                )
            lines.append(f"| {setting} | {what} | {numbers} |")
    return lines


def _agreement(theirs: object, mine: object) -> str:
    """Describe how far the two results agree."""
    if isinstance(theirs, tuple) and isinstance(mine, tuple):
        return f"LongPPL differs by {abs(mine[0] / theirs[0] - 1):.0e}, key tokens {theirs[1]} / {mine[1]}"
    assert isinstance(theirs, float)
    assert isinstance(mine, float)
    return f"loss differs by {abs(mine / theirs - 1):.0e}"


# ------------------------------------------------------------------------------------------------------- floor, growth


def machine_rates(setting: Setting) -> tuple[float, float]:
    """Measure GFLOP/s of matrix products and causal attention on this machine: medians of 5."""
    shape, rows = SHAPES[setting.shape], setting.context_length + setting.stride
    left, right = torch.randn(rows, shape["hidden_size"]), torch.randn(shape["hidden_size"], shape["intermediate_size"])
    head = shape["hidden_size"] // shape["num_attention_heads"]
    query = torch.randn(1, shape["num_attention_heads"], rows, head)
    product = 2.0 * rows * shape["hidden_size"] * shape["intermediate_size"]
    attention = 2.0 * shape["hidden_size"] * rows * rows
    work = (lambda: left @ right, lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    times = [statistics.median(measure(partial(_repeat, run)).seconds / 20 for _ in range(5)) for run in work]
    return product / times[0] / 1e9, attention / times[1] / 1e9


def _repeat(function: Callable[[], object]) -> None:
    for _ in range(20):
        function()


def _floor_rows(setting: Setting, results: dict[str, dict[str, Run]]) -> list[str]:
    """Compare measured time with the time that the operations take at the rates of this machine."""
    gemm, attention = machine_rates(setting)
    shape = ModelShape.of(build(setting.shape, setting.vocabulary, 0).config)
    sizes = (setting.length, setting.context_length, setting.stride)
    short = short_pass_flops(shape, *sizes)
    floors: dict[tuple[str, str], Flops] = {
        ("score", "ours"): _scoring_floor(shape, *sizes),
        ("score, evaluator = model", "ours"): _scoring_floor(shape, *sizes, shared_pass=True),
        ("LongCE step", "ours"): ce_step_flops(shape, setting.length, "full") + short,
        ("LongCE step", "ours, selective checkpointing"): ce_step_flops(shape, setting.length, "selective") + short,
    }
    lines = [f"Rates here: matrix products {gemm:.0f} GFLOP/s, causal attention {attention:.0f} GFLOP/s."]
    for (name, side), flops in floors.items():
        if side in results.get(name, {}):
            seconds = flops.gemm / gemm / 1e9 + (flops.attention + flops.attention_backward) / attention / 1e9
            run = results[name][side]
            lines.append(
                f"{setting}, {name}, {side}: {flops.total / 1e9:.0f} GFLOP, floor {seconds:.2f} s, measured"
                f" {run.seconds:.2f} s, {run.seconds / seconds:.2f} x"
            )
    return lines


def _scoring_floor(
    shape: ModelShape, tokens: int, context_length: int, stride: int, *, shared_pass: bool = False
) -> Flops:
    """Count the operations that an exact LongPPL needs: no unused logits or last-layer attention of the evaluator."""
    total = scoring_flops(shape, shape, tokens, context_length, stride, shared_pass=shared_pass)
    if not shared_pass:
        total += Flops(-2.0 * (context_length + stride - 1) * shape.head_weights)
    for start, first, _ in short_context_windows([0, tokens], context_length=context_length, stride=stride):
        total += Flops(attention=-shape.pair_flops * attention_pairs(first - start - 1, shape.windows[-1]))
    return total


def _growth(table: dict[Setting, dict[str, dict[str, Run]]]) -> list[str]:
    """Fit exponents of time and memory in the length, from the shortest to the longest sequence of a vocabulary."""
    lines = []
    for vocabulary in sorted({setting.vocabulary for setting in table}):
        settings = sorted((s for s in table if s.vocabulary == vocabulary), key=lambda s: s.length)
        for name in table[settings[0]]:
            for side in ("baseline", "ours"):
                runs = [(s.length, table[s][name][side]) for s in settings if side in table[s][name]]
                if len(runs) > 1:
                    (n, first), (m, last) = runs[0], runs[-1]
                    slopes = [math.log(last[field] / first[field]) / math.log(m / n) for field in range(2)]
                    lines.append(
                        f"V={vocabulary}, {name}, {side}, {n} to {m} tokens:"
                        f" time ~ n^{slopes[0]:.2f}, memory ~ n^{slopes[1]:.2f}"
                    )
    return lines


def main() -> None:
    """Print the tables."""
    kinds = ["score", "score, evaluator = model", "LongCE step"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000])
    parser.add_argument("--context_length", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", choices=kinds, nargs="+", default=kinds)
    parser.add_argument("--floor", action="store_true", help="also the FLOP floor at this machine's measured rates")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    print(f"{versions}, {torch.get_num_threads()} threads, {platform.machine()}, float32, {options.rounds} round(s)\n")
    print("| setting | what | s: baseline / ours | ratio | MiB above entry: baseline / ours | ratio | results |")
    print("|---|---|---|---|---|---|---|")
    table = {}
    for vocabulary in options.vocabularies:
        for length in options.lengths:
            setting = Setting(options.shape, vocabulary, length, options.context_length, options.stride)
            table[setting] = compare(setting, options.rounds, options.what)
            print("\n".join(_rows(setting, table[setting])), flush=True)
    print("\n" + "\n".join(_growth(table)))
    if options.floor:
        for setting, results in table.items():
            print("\n".join(["", *_floor_rows(setting, results)]))


if __name__ == "__main__":
    main()

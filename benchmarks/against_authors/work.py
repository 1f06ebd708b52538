"""Timed work: scoring and a LongCE step, each with the authors' code and with ours."""

import contextlib
import ctypes
import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from longppl.longppl import compute_longppl
from torch import Tensor

from benchmarks.against_authors.subjects import Reader, Setting, Subject
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortScores, long_cross_entropy, long_perplexity
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import enable_checkpointing
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.objectives import CrossEntropy, LongCE, Objective, StoredInfluence
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens
from lightning_modules.scoring.scored_model import score_text

KINDS = ("score", "score, evaluator = model", "LongCE step")
SIDES = ("baseline", "ours", "ours, selective checkpointing", "our CE step", "our step with stored weights")


class Run(NamedTuple):
    """Seconds, MiB above entry, and what came out."""

    seconds: float
    memory: float
    result: object


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


def longce_step(backbone: Backbone, batch: PackedBatch, short_context: ShortContext) -> float:
    """Compute loss and gradients as `LongContextLM` does."""
    backbone.train()
    return _step(backbone, batch, LongCE(), short_log_likelihood(backbone, batch, short_context))


def cross_entropy_step(backbone: Backbone, batch: PackedBatch) -> float:
    """Compute loss and gradients of cross entropy."""
    backbone.train()
    return _step(backbone, batch, CrossEntropy())


def stored_step(backbone: Backbone, batch: PackedBatch, stored: Tensor) -> float:
    """Compute loss and gradients with weights stored beside the sequence."""
    backbone.train()
    return _step(backbone, PackedBatch(**batch, influence=stored), StoredInfluence())


def _step(backbone: Backbone, batch: PackedBatch, objective: Objective, short: ShortScores | None = None) -> float:
    long = backbone(batch)
    loss = long_cross_entropy(long, objective(long.detach(), short, batch), batch["labels"])
    loss.backward()
    backbone.zero_grad()
    backbone.eval()
    return loss.item()


def authors_score(
    subject: Subject, evaluator: Reader, setting: Setting, alpha: float, beta: float
) -> tuple[float, int]:
    """Return LongPPL and the number of key tokens by the authors' package."""
    (model, tokenizer), sizes = subject.reader, (setting.context_length, setting.stride)
    readers = (model, evaluator.model, tokenizer, evaluator.tokenizer)
    out = compute_longppl(subject.text, *readers, None, *sizes, alpha, beta)
    return float(out["longppl"] or "nan"), out["n_key_token"] or 0


def score(subject: Subject, evaluator: Reader, setting: Setting, alpha: float, beta: float) -> tuple[float, int]:
    """Return both as ``longce score`` computes them; if the evaluator is the model, by one long pass."""
    model, tokenizer = subject.reader
    scores = score_text(subject.text, Backbone(evaluator.model), evaluator.tokenizer, setting.short_context, beta=beta)
    document = encode_document(subject.text, tokenizer)
    # A special token before the text is for the evaluator only, as in the authors' code.
    one_pass = evaluator is subject.reader and torch.equal(scores.token_ids, document["input_ids"][0])
    with torch.no_grad():
        log_likelihood = scores.long.unsqueeze(0) if one_pass else Backbone(model)(document)
    rule = "paper" if tokenizer is evaluator.tokenizer else "authors"
    key = find_key_tokens(scores, document_tokens(document), alpha=alpha, beta=beta, rule=rule).mask
    key = key & document["labels"].ne(IGNORE_INDEX)
    return float(long_perplexity(log_likelihood, key)), int(key.sum())


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(
    subject: Subject, setting: Setting, rounds: int, kinds: Sequence[str], sides: Sequence[str]
) -> Iterator[tuple[str, dict[str, Run]]]:
    """Yield each kind of work with the medians of the baseline and of our code."""
    enable_checkpointing(subject.reader.model, True)
    work = {**scoring_work(subject, setting), **step_work(subject, setting)}
    for name in kinds:
        functions = {side: work[name][side] for side in sides if side in work[name]}
        if _baseline_memory(setting, name) > 0.8 * _available():
            functions.pop("baseline", None)
        runs = [{side: measure(function) for side, function in functions.items()} for _ in range(rounds)]
        yield name, {side: _median([each[side] for each in runs]) for side in functions}


def scoring_work(subject: Subject, setting: Setting) -> dict[str, dict[str, Callable[[], object]]]:
    """Return what scores the text: by the evaluator, read apart even if it is the model, and by the model alone."""
    apart = Reader(*subject.evaluator)  # another object, so that the model reads once more
    work: dict[str, dict[str, Callable[[], object]]] = {}
    for name, evaluator in ((KINDS[0], apart), (KINDS[1], subject.reader)):
        arguments = (subject, evaluator, setting, *subject.alpha_and_beta(evaluator, setting))
        work[name] = {"baseline": partial(authors_score, *arguments), "ours": partial(score, *arguments)}
    return work


def step_work(subject: Subject, setting: Setting) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the training steps: loss and gradients."""
    model, batch = subject.reader.model, subject.batch
    ours, length = Backbone(model), batch["input_ids"].shape[1]

    def step(kind: bool | str, function: Callable[[], float]) -> float:
        enable_checkpointing(model, kind)
        return function()

    sizes = (setting.context_length, setting.stride)
    functions: dict[str, tuple[bool | str, Callable[[], float]]] = {
        "baseline": (True, partial(plain_longce_step, model, batch["input_ids"], *sizes)),
        "ours": (True, partial(longce_step, ours, batch, setting.short_context)),
        "ours, selective checkpointing": ("selective", partial(longce_step, ours, batch, setting.short_context)),
        "our CE step": (True, partial(cross_entropy_step, ours, batch)),
        "our step with stored weights": (True, partial(stored_step, ours, batch, torch.ones(1, length))),
    }
    return {KINDS[2]: {side: partial(step, *arguments) for side, arguments in functions.items()}}


def _baseline_memory(setting: Setting, name: str) -> float:
    """Estimate the MiB of the baseline by a measured rule: 2 copies of the logits to score, 3.4 to train."""
    return setting.length * setting.vocabulary * 4 / 2**20 * (3.4 if "step" in name else 2.0)


def _median(runs: list[Run]) -> Run:
    seconds = statistics.median(run.seconds for run in runs)
    memory = statistics.median(run.memory for run in runs)
    return Run(seconds, memory, runs[-1].result)

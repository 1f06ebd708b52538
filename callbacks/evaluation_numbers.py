"""Numbers of an evaluation by one evaluator: of all documents together, and a table with those of each."""

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_modules.functional import long_perplexity
from lightning_modules.functional.influence import check_thresholds
from lightning_modules.functional.text_bits import TextBits, add_bits, text_bits
from lightning_modules.scoring.key_tokens import Coverage, Tokens, add_coverage
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.training.checkpoints.resume import is_remote, run_folder
from lightning_modules.training.evaluation import new_perplexity
from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.files import atomic_file


class Thresholds(NamedTuple):
    """Thresholds of key tokens, in nats."""

    alpha: float = 2.0
    beta: float = -2.0


class ScoredDocument(NamedTuple):
    """A document that the trained model has scored, until the end of the evaluation."""

    set: str
    name: str
    text: str  # empty for a sequence that only keeps the processes in lockstep
    tokens: Tokens
    log_likelihood: Tensor  # [T], on the model's device
    scored: Tensor  # [T] bool, in main memory


class Influence(NamedTuple):
    """Key tokens of a document for each of the named thresholds, and its soft weights."""

    key: dict[str, Tensor]  # [T] bool
    soft: Tensor | None  # [T] float64; precomputed spans have none
    coverage: Coverage
    bits: dict[str, TextBits]  # bits and bytes of the key spans and of the text


_UNITS = ("bytes", "key_bytes", "evaluator_key_tokens")
"""What the numbers of bits are per."""

Found = Sequence[tuple[ScoredDocument, Influence]]


def read_thresholds(given: Mapping[str, Mapping[str, float]] | None, default: Thresholds) -> dict[str, Thresholds]:
    """Return the named thresholds, or the default without a name; raise a ``ValueError`` for wrong names or values."""
    if not given:
        return {"": default}
    named = {}
    for name, values in given.items():
        if not name or "/" in name or set(values) - {"alpha", "beta"}:
            raise ValueError(f"`thresholds` must be names without '/', each with `alpha` and `beta`, got {given}.")
        named[name] = Thresholds(**values)
        check_thresholds(*named[name])
    return named


def measure_bits(document: ScoredDocument, spans: Tensor, evaluator_offsets: Tensor | None = None) -> TextBits:
    """Measure a document and its ``[M, 2]`` key spans in bits and bytes; nothing if it has no log-likelihoods."""
    count = len(document.tokens.ids)
    if len(document.log_likelihood) < count:
        return TextBits()
    log_likelihood = document.log_likelihood[:count].cpu()
    scored = document.scored[:count]
    return text_bits(document.text, log_likelihood, document.tokens.offsets, scored, spans, evaluator_offsets)


def measure_key_tokens(
    trainer: Trainer, documents: Found, thresholds: str, *, device: torch.device, place: str, warned: set[str]
) -> dict[str, Any]:
    """Return LongPPL and counts of key tokens; ``place`` names the documents in a warning, which is not repeated."""
    longppl = new_perplexity(device)
    counts = torch.zeros(4, dtype=torch.float64)
    for document, influence in documents:
        key = influence.key[thresholds]
        longppl.update(document.log_likelihood, key.to(device))
        counts += torch.tensor([key.sum(), document.scored.sum(), not key.any(), 1], dtype=torch.float64)
    key_tokens, scored, without, total = trainer.strategy.reduce(counts.to(device), reduce_op="sum").tolist()
    if without and place not in warned:
        warned.add(place)
        rank_zero_warn(
            f"{without:.0f} of {total:.0f} {place} documents have no key token"
            + (": LongPPL is undefined (NaN)." if key_tokens == 0 else " and do not count in LongPPL.")
            + " They may be too short for `context_length`, or the evaluator may not use the long context."
        )
    return {
        "longppl": longppl.compute(),
        "key_tokens": key_tokens,
        "key_token_share": key_tokens / max(scored, 1),
        "documents_without_key_tokens": without,
        **_add_bits(trainer, (influence.bits[thresholds] for _, influence in documents), device),
    }


def _add_bits(trainer: Trainer, documents: Iterable[TextBits], device: torch.device) -> dict[str, float]:
    """Return the numbers over the documents of all processes, without those of which nothing is known."""
    own = torch.tensor(add_bits(documents), dtype=torch.float64, device=device)
    bits = TextBits(*trainer.strategy.reduce(own, reduce_op="sum").tolist())
    numbers = bits.numbers()
    if not bits.evaluator_key_tokens and bits.key_bytes:  # precomputed spans
        del numbers["longppl_per_evaluator_token"]
    return numbers


def measure_alignment(trainer: Trainer, documents: Found, *, device: torch.device, place: str) -> dict[str, Any]:
    """Return the numbers that do not depend on thresholds: how tokens cover the characters, and soft LongPPL."""
    total = torch.tensor(add_coverage(influence.coverage for _, influence in documents), dtype=torch.float64)
    coverage = Coverage(*trainer.strategy.reduce(total.to(device), reduce_op="sum").tolist())
    if (warning := coverage.warning()) is not None:
        rank_zero_warn(f"{place} documents: {warning}")
    soft = new_perplexity(device)
    for document, influence in documents:
        if influence.soft is not None:
            soft.update(document.log_likelihood, influence.soft.to(device))
    return {
        "documents_aligned_by_characters": coverage.by_characters,
        **coverage.fractions(),
        "longppl_soft": soft.compute(),
    }


def write_documents(
    trainer: Trainer,
    documents: Found,
    thresholds: Mapping[str, Thresholds],
    *,
    stage: str,
    evaluator: str,
    settings: Mapping[str, Any],
) -> None:
    """Write a row per document and thresholds to ``documents/STAGE-EVALUATOR-step-N.parquet`` in the run's folder.

    Each row has the ``settings`` by which key tokens were found, so that a file can be read without the config.
    """
    own = []
    for document, influence in documents:
        log_likelihood = document.log_likelihood.cpu()
        scored = document.scored
        for label, key in influence.key.items():
            own.append(
                {
                    "evaluator": evaluator,
                    "set": document.set,
                    "document": document.name,
                    "text_sha256": text_sha256(document.text),
                    "thresholds": label,
                    **thresholds[label]._asdict(),
                    "tokens": int(scored.sum()),
                    "perplexity": float(long_perplexity(log_likelihood, scored)),
                    "key_tokens": int(key.sum()),
                    "longppl": float(long_perplexity(log_likelihood, key)) if key.any() else math.nan,
                    **influence.bits[label].numbers(),
                    **{name: getattr(influence.bits[label], name) for name in _UNITS},
                    **settings,
                }
            )
    # Processes take turns with the documents.
    rows = sorted(chain.from_iterable(gathered(own)), key=lambda row: (row["set"], row["document"]))
    dry_run = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
    if not trainer.is_global_zero or dry_run or not rows or not trainer.loggers:
        return
    folder = run_folder(trainer)
    named = None not in (trainer.loggers[0].name, trainer.loggers[0].version)
    if named and not is_remote(folder) and importlib.util.find_spec("pyarrow") is not None:
        import pyarrow.parquet  # part of the data modules, which a run may not need

        with atomic_file(folder / "documents" / f"{stage}-{evaluator}-step-{trainer.global_step}.parquet") as stream:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)

"""Common parts of the studies: texts, question sheets and evaluators' scores, and storage of results."""

import io
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.real_models.anatomy import choose_examples, compare_evaluators, describe_key_tokens, describe_texts
from benchmarks.real_models.correlate import GAMMA, SYSTEMS, EvaluatorScores, correlate_systems, measure_system
from benchmarks.real_models.extend import (
    GEMMA_LENGTH,
    GEMMA_METHODS,
    LENGTH,
    METHODS,
    QWEN_LENGTH,
    QWEN_METHODS,
    compare_methods,
    key_spans_by_pieces,
    measure_method,
    position_ranges,
)
from benchmarks.real_models.fine_tune import (
    CPU_SCALE,
    GPU_SCALE,
    MODEL,
    Arm,
    Costs,
    Examination,
    Scale,
    compare_weightings,
    training_rows,
)
from benchmarks.real_models.questions import QuestionSheet, make_sheets
from benchmarks.real_models.systems import LoadedSystem, System, reuse_scores, score_system
from benchmarks.real_models.tables import tabulate_anatomy, tabulate_correlate, tabulate_extend, tabulate_fine_tune
from benchmarks.real_models.texts import (
    LONG_BOOKS,
    Text,
    read_books,
    read_exam_texts,
    read_texts,
    read_validation_books,
)
from benchmarks.results import FOLDER, LIBRARIES, describe_machine, read_commit
from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.functional.windows import ShortContext
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.influence_transfer import compute_influence, make_transfer
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator, score_text
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.utilities.files import write_atomically, write_json
from lightning_modules.utilities.identity import combined_hash
from lightning_modules.utilities.locks import exclusive

TOKENS = 4096
"""Tokens of each text, of the first evaluator."""

CHARACTERS = 15_000
"""Characters of each question sheet: about `TOKENS` tokens."""

LONG_CHARACTERS = 68_000
"""Characters of the sheets of ``extend``: about 16k tokens."""

CONTEXT_LENGTH, STRIDE = 512, 512

EVALUATORS = ("gemma-3-270m", "qwen2.5-coder-0.5b")
SHEETS = 3  # of each task

SUBSET = (0, 1, 12, 13, 18, 19)
"""The first two reports, books and papers, which are scored with other settings as well."""

log = logging.getLogger(__name__)

Measured = TypeVar("Measured", System, Arm, Costs)


@dataclass(frozen=True)
class Study:
    """Folders of a study: models (``fetch``), data, and what was scored, so that a run resumes.

    ``kept`` has what takes hours and is small, evaluators' scores and the numbers of each system, for other machines.
    """

    models: Path
    data: Path
    work: Path
    kept: Path = FOLDER / "real"
    device: str = "cpu"

    def evaluator(
        self, name: str, *, context_length: int = CONTEXT_LENGTH, stride: int = STRIDE, dtype: str = "auto"
    ) -> ScoredModel:
        """Return an evaluator, whose scores are kept in the cache of longce."""
        settings: dict[str, Any] = {"context_length": context_length, "stride": stride, "dtype": dtype}
        return open_evaluator(EvaluatorConfig(str(self.models / f"{name}.gguf"), **settings), device=self.device)

    @cached_property
    def texts(self) -> list[Text]:
        """The 24 texts."""
        return read_texts(self.data, self.evaluator(EVALUATORS[0]), TOKENS)

    @cached_property
    def sheets(self) -> list[QuestionSheet]:
        """The 12 question sheets."""
        return make_sheets(self.data / "haystack" / "2944.txt", characters=CHARACTERS, sheets=SHEETS)

    def score_texts(self, evaluator: ScoredModel, texts: Sequence[Text]) -> dict[str, TokenScores]:
        """Return an evaluator's scores of texts by name; those in the cache are not computed again."""
        scores = {}
        for text in texts:
            started = time.process_time()
            scores[text.name] = evaluator.scores(text.text, name=text.name)
            if (seconds := time.process_time() - started) > 1:
                log.info("%s, %s: %.0f CPU s", Path(evaluator.name).stem, text.name, seconds)
        evaluator.release()
        return scores

    def kept_scores(
        self, name: str, texts: Sequence[Text], *, context_length: int = CONTEXT_LENGTH
    ) -> dict[str, TokenScores]:
        """Return an evaluator's scores in float32; those that an earlier run has kept are not computed again."""
        evaluator = self.evaluator(name, dtype="float32", context_length=context_length, stride=context_length)
        file = self.kept / f"{name}-{context_length}.npz"
        arrays = read_arrays(file)
        scores = {}
        for text in texts:
            key = text_sha256(text.text)
            if key not in arrays:
                computed = evaluator.scores(text.text, name=text.name)
                log.info("%s, %s is scored.", name, text.name)
                arrays = add_arrays(file, {key: torch.stack([computed.long, computed.short]).numpy()})
            batch = evaluator.encode(text.text, name=text.name)
            long, short = torch.from_numpy(arrays[key])
            tokens = {"token_ids": batch["input_ids"][0], "offsets": batch["offsets"][0]}
            scores[text.name] = TokenScores(key, name, context_length, context_length, **tokens, long=long, short=short)
        evaluator.release()
        return scores

    def correlate(self) -> None:
        """Measure all systems, those that an earlier run has kept excepted, and correlate metrics with accuracies."""
        evaluators = [EvaluatorScores(name, self.kept_scores(name, self.texts)) for name in EVALUATORS]

        for evaluator in evaluators:
            system = System(evaluator.name, "as it is")
            reuse_scores(system, self.texts, evaluator.scores, self.work / "float32")

        def measure(system: System) -> dict[str, Any]:
            score_system(system, self.models, self.texts, self.sheets, self.work / "float32")
            return measure_system(system, self.texts, self.sheets, evaluators, self.work / "float32")

        found = self._measure_each("correlate", SYSTEMS, measure)
        results = [found[system.path] for system in SYSTEMS]
        numbers = {"systems": results, "correlations": correlate_systems(results, EVALUATORS)}
        title = "Accuracy on long-context questions against LongPPL and perplexity of real systems"
        self.keep("correlate", title, numbers, tabulate_correlate(numbers), self.texts)

    def anatomy(self) -> None:
        """Describe the key tokens of both evaluators, compare them with each other and with other settings; keep it."""
        found = {name: self.score_texts(self.evaluator(name), self.texts) for name in EVALUATORS}
        tables = {name: describe_texts(self.texts, scores) for name, scores in found.items()}
        own, other = found.values()
        chosen = [self.texts[number] for number in SUBSET]
        first = EVALUATORS[0]
        settings = {
            "float32": self.score_texts(self.evaluator(first, dtype="float32"), chosen),
            "K = 1,024": self.score_texts(self.evaluator(first, context_length=2 * CONTEXT_LENGTH), chosen),
            "4 bits": self._score_rounded(4, chosen),
            "3 bits": self._score_rounded(3, chosen),
        }
        stability = {name: compare_evaluators(chosen, own, scores) for name, scores in settings.items()}
        for alpha in (1.0, 3.0):
            stability[f"alpha = {alpha:g}"] = compare_evaluators(chosen, own, own, other_alpha=alpha)
        stability["the other evaluator"] = compare_evaluators(chosen, own, other)
        numbers = {
            "evaluators": {name: describe_key_tokens(table) for name, table in tables.items()},
            "agreement": compare_evaluators(self.texts, own, other),
            "stability": stability,
            "examples": choose_examples(tables[first], self.texts),
        }
        title = "Which tokens of real text are key"
        self.keep("anatomy", title, numbers, tabulate_anatomy(numbers), self.texts)

    def extend(self) -> None:
        """Score long books and passkeys by each method of context extension, and keep the numbers."""
        tokenizer = LoadedSystem(METHODS[0], self.models).tokenizer
        books = read_books(self.data, LONG_BOOKS, tokenizer, 2 * LENGTH)
        essays = self.data / "haystack" / "3020.txt"
        sheets = make_sheets(essays, characters=LONG_CHARACTERS, sheets=2)[:2]
        evaluator = self.kept_scores(EVALUATORS[0], books)
        title = "SmolLM2 beyond its 8,192 positions, without training"
        methods = partial(self._extend, "extend", title, METHODS, position_ranges(LENGTH))
        methods(books, sheets, lambda book, tokens: find_key_tokens(evaluator[book.name], tokens).mask)

    def extend_gemma(self) -> None:
        """Score a long book by Gemma with methods of context extension, and keep the numbers."""
        title = "Gemma 3 beyond its 32,768 positions, without training"
        self._extend_beyond_evaluator("extend_gemma", title, GEMMA_METHODS, position_ranges(GEMMA_LENGTH))

    def extend_qwen(self) -> None:
        """Score the same book by Qwen, and keep the numbers."""
        title = "Qwen2.5 beyond its 32,768 positions, without training"
        self._extend_beyond_evaluator("extend_qwen", title, QWEN_METHODS, position_ranges(QWEN_LENGTH))

    def _extend_beyond_evaluator(
        self, study: str, title: str, methods: Sequence[System], ranges: Mapping[str, tuple[int, int]]
    ) -> None:
        """Score a book of twice Gemma's number of positions, with Gemma's key tokens."""
        evaluator = self.evaluator(EVALUATORS[0], dtype="float32")
        books = read_books(self.data, LONG_BOOKS[2:3], evaluator.tokenizer, 2 * GEMMA_LENGTH)

        @cache
        def find_spans(book: Text) -> Tensor:
            offsets = evaluator.encode(book.text, name=book.name)["offsets"][0]
            return key_spans_by_pieces(partial(evaluator.scores, name=book.name), book.text, offsets)

        def find_keys(book: Text, tokens: Tokens) -> Tensor:
            return find_key_tokens(find_spans(book), tokens).mask

        self._extend(study, title, methods, ranges, books, [], find_keys)

    def _extend(
        self,
        study: str,
        title: str,
        methods: Sequence[System],
        ranges: Mapping[str, tuple[int, int]],
        books: Sequence[Text],
        sheets: Sequence[QuestionSheet],
        find_keys: Callable[[Text, Tokens], Tensor],
    ) -> None:
        def measure(method: System) -> dict[str, Any]:
            score_system(method, self.models, books, sheets, self.work / "float32")
            names = [sheet.name for sheet in sheets]
            return measure_method(method, books, find_keys, names, self.work / "float32", ranges)

        found = self._measure_each(study, methods, measure)
        numbers = compare_methods({method.name: found[method.path] for method in methods})
        self.keep(study, title, numbers, tabulate_extend(numbers), books)

    def fine_tune(self) -> None:
        """Train by each weighting, tuned on other books, and keep what the trained models score."""
        self._fine_tune(CPU_SCALE, "SmolLM2 fine-tuned on books by each weighting")

    def fine_tune_8k(self) -> None:
        """Train on rows of 8,192 tokens, which is for a GPU."""
        self._fine_tune(GPU_SCALE, "SmolLM2 fine-tuned on rows of 8,192 tokens")

    def _fine_tune(self, scale: Scale, title: str) -> None:
        tokenizer = LoadedSystem(System(MODEL, "as it is"), self.models).tokenizer
        books = [file.read_text(encoding="utf-8") for file in sorted((self.data / "pg19/train").glob("*.txt"))]
        batches = cache(lambda seed: training_rows(books, tokenizer, seed, scale.steps, scale.length))
        first = self.evaluator(scale.evaluators[0])
        held_out = read_exam_texts(self.data, first, scale.exam_tokens)
        tuning_texts = read_validation_books(self.data, first, scale.exam_tokens)
        sheets = make_sheets(self.data / "haystack" / "2944.txt", characters=scale.exam_characters, sheets=1)
        numbers = compare_weightings(
            scale,
            self.models,
            batches,
            partial(self._stored_weights, scale, tokenizer),
            Examination(tuning_texts, self._exam_scores(scale, scale.evaluators[:1], tuning_texts), []),
            Examination(held_out, self._exam_scores(scale, scale.evaluators, held_out), sheets),
            partial(self._measure_each, scale.study),
            device=self.device,
        )
        self.keep(scale.study, title, numbers, tabulate_fine_tune(numbers), [*held_out, *tuning_texts])

    def _exam_scores(
        self, scale: Scale, evaluators: Sequence[str], texts: Sequence[Text]
    ) -> dict[str, dict[str, TokenScores]]:
        return {name: self.kept_scores(name, texts, context_length=scale.exam_k) for name in evaluators}

    def _stored_weights(
        self, scale: Scale, tokenizer: PreTrainedTokenizerFast, batches: Sequence[PackedBatch]
    ) -> list[Tensor]:
        """Return the LongCE weights of training rows by the first evaluator, which the work folder keeps."""
        name = scale.evaluators[0]
        file = self.work / f"weights-{name}-{scale.k}.npz"
        evaluator = self.evaluator(name, dtype="float32")
        transfer = make_transfer(tokenizer, evaluator.tokenizer, add_special_tokens=True)
        weigh = compute_influence if transfer is None else transfer.compute_influence
        arrays = read_arrays(file)
        keys = [combined_hash({"ids": repr(batch["input_ids"].tolist())}) for batch in batches]
        for key, batch in zip(keys, batches, strict=True):
            if key not in arrays:
                backbone = evaluator.backbone()
                with torch.no_grad():
                    moved = batch_to(batch, backbone.device)
                    weights = weigh(moved, backbone, ShortContext(scale.k, scale.k), gamma=GAMMA).cpu()
                if not weights.isfinite().all():
                    raise FloatingPointError(f"Weights of '{name}' are not finite: its file is damaged.")
                arrays = add_arrays(file, {key: weights.numpy()})
        evaluator.release()
        return [torch.from_numpy(arrays[key]) for key in keys]

    def _measure_each(
        self, study: str, systems: Sequence[Measured], measure: Callable[[Measured], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Return the numbers of systems by their path; those that an earlier run has kept are not measured again."""
        file = self.kept / f"{study}.json"
        found = _read_kept(file)
        for system in systems:
            if system.path not in found:
                numbers = measure(system) | {"commit": read_commit(), "machine": describe_machine()}
                file.parent.mkdir(parents=True, exist_ok=True)
                with exclusive(file):  # another process may have kept others meanwhile
                    found = _read_kept(file) | {system.path: numbers}
                    write_json(file, found)
                log.info("%s is measured.", system.path)
        return found

    def _score_rounded(self, bits: int, texts: Sequence[Text]) -> dict[str, TokenScores]:
        """Return the scores of the first evaluator with rounded weights, which the cache of longce does not know."""
        system = System(EVALUATORS[0], f"evaluator {bits} bits", bits=bits)
        loaded = LoadedSystem(system, self.models, dtype="auto")
        folder = self.work / str(loaded.backbone.model.dtype).removeprefix("torch.") / loaded.system.path
        scores = {}
        for text in texts:
            file = folder / f"{text.name.replace(' ', '_')}.safetensors"
            if not file.exists():
                short_context = ShortContext(CONTEXT_LENGTH, STRIDE)
                computed = score_text(text.text, loaded.backbone, loaded.tokenizer, short_context, name=text.name)
                file.parent.mkdir(parents=True, exist_ok=True)
                computed.save(file)
            scores[text.name] = TokenScores.load(file)
        return scores

    def keep(
        self, name: str, title: str, numbers: dict[str, Any], tables: list[dict[str, Any]], texts: Sequence[Text]
    ) -> None:
        """Write the raw numbers and tables of a study, with how they came about, to ``benchmarks/results``."""
        result = {
            "title": title,
            "command": f"python -m benchmarks.real_models {name} --models .. --data .. --work ..",
            "commit": read_commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": None,
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}},
            "data": combined_hash({text.name: text.text for text in texts}),
            "remark": "Protocol: benchmarks/real_models/PROTOCOL.md. Verdicts: docs/real.md.",
            "output": tables,
            "numbers": numbers,
        }
        file = FOLDER / f"real_{name}.json"
        write_json(file, result)
        sys.stdout.write(f"{file}\n")


def read_arrays(file: Path) -> dict[str, NDArray[np.float32]]:
    """Read a file of `add_arrays`; empty if it does not exist."""
    if not file.exists():
        return {}
    with np.load(file) as arrays:
        return dict(arrays)


def add_arrays(file: Path, added: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Add named arrays to a compressed file, atomically, and return all of them."""
    buffer = io.BytesIO()
    file.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(file):  # another process may have added others meanwhile
        arrays = read_arrays(file) | added
        np.savez_compressed(buffer, **arrays)
        write_atomically(file, buffer.getvalue())
    return arrays


def _read_kept(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else {}

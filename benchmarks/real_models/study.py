"""What the studies share: texts, question sheets and evaluators' scores, and how a result is kept."""

import logging
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.real_models.anatomy import choose_examples, compare_evaluators, describe_key_tokens, describe_texts
from benchmarks.real_models.correlate import SYSTEMS, EvaluatorScores, correlate_systems, measure_system
from benchmarks.real_models.extend import METHODS, TARGET, measure_methods
from benchmarks.real_models.questions import QuestionSheet, make_sheets
from benchmarks.real_models.systems import LoadedSystem, System, score_system
from benchmarks.real_models.tables import tabulate_anatomy, tabulate_correlate, tabulate_extend
from benchmarks.real_models.texts import LONG_BOOKS, Text, read_books, read_texts
from benchmarks.results import FOLDER, LIBRARIES, ROOT, describe_machine
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.evaluator import Evaluator, score_text
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.files import write_json
from lightning_modules.utilities.identity import combined_hash

TOKENS = 4096
"""Tokens of each text, of the first evaluator."""

CHARACTERS = 15_000
"""Characters of the question sheets: about as many tokens."""

LONG_CHARACTERS = 68_000
"""Characters of the sheets of ``extend``: about 16k tokens."""

CONTEXT_LENGTH, STRIDE = 512, 512
EVALUATORS = ("gemma-3-270m", "qwen2.5-coder-0.5b")
SHEETS = 3  # of each task

SUBSET = (0, 1, 12, 13, 18, 19)
"""The first two reports, books and papers, which are scored with other settings as well."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Study:
    """Folders of a study: models (``fetch``), data, and what was scored, so that a run resumes."""

    models: Path
    data: Path
    work: Path

    def evaluator(self, name: str, *, context_length: int = CONTEXT_LENGTH, dtype: str = "auto") -> Evaluator:
        """Return an evaluator, whose scores are kept in the cache of longce."""
        settings: dict[str, Any] = {"context_length": context_length, "stride": STRIDE, "dtype": dtype}
        return Evaluator(EvaluatorConfig(str(self.models / f"{name}.gguf"), **settings))

    @cached_property
    def texts(self) -> list[Text]:
        """The 24 texts."""
        return read_texts(self.data, self.evaluator(EVALUATORS[0]), TOKENS)

    @cached_property
    def sheets(self) -> list[QuestionSheet]:
        """The 12 question sheets."""
        return make_sheets(self.data / "haystack" / "2944.txt", characters=CHARACTERS, sheets=SHEETS)

    def score_texts(self, evaluator: Evaluator, texts: Sequence[Text]) -> dict[str, TokenScores]:
        """Return an evaluator's scores of texts by name; those in the cache are not computed again."""
        scores = {}
        for text in texts:
            started = time.process_time()
            scores[text.name] = evaluator.scores(text.text, name=text.name)
            if (seconds := time.process_time() - started) > 1:
                log.info("%s, %s: %.0f CPU s", Path(evaluator.name).stem, text.name, seconds)
        evaluator.release()
        return scores

    def correlate(self) -> None:
        """Score all systems, and keep their metrics, accuracies and correlations."""
        for system in SYSTEMS:
            score_system(system, self.models, self.texts, self.sheets, self.work)
        evaluators = [EvaluatorScores(name, self.score_texts(self.evaluator(name), self.texts)) for name in EVALUATORS]
        results = [measure_system(system, self.texts, self.sheets, evaluators, self.work) for system in SYSTEMS]
        numbers = {"systems": results, "correlations": correlate_systems(results, EVALUATORS)}
        title = "Accuracy on long-context questions against LongPPL and perplexity of real systems"
        self.keep("correlate", title, numbers, tabulate_correlate(numbers))

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
        self.keep("anatomy", "Which tokens of real text are key", numbers, tabulate_anatomy(numbers))

    def extend(self) -> None:
        """Score long books and passkeys by each method of context extension, and keep the numbers."""
        tokenizer = LoadedSystem(METHODS[0], self.models).tokenizer
        books = read_books(self.data, LONG_BOOKS, tokenizer, TARGET)
        essays = self.data / "haystack" / "3020.txt"
        sheets = make_sheets(essays, characters=LONG_CHARACTERS, sheets=2)[:2]
        for method in METHODS:
            score_system(method, self.models, books, sheets, self.work)
        evaluator = self.score_texts(self.evaluator(EVALUATORS[0]), books)
        numbers = measure_methods(books, evaluator, [sheet.name for sheet in sheets], self.work)
        self.keep("extend", "SmolLM2 beyond its 8,192 positions, without training", numbers, tabulate_extend(numbers))

    def _score_rounded(self, bits: int, texts: Sequence[Text]) -> dict[str, TokenScores]:
        """Return the scores of the first evaluator with rounded weights, which the cache of longce does not know."""
        loaded = LoadedSystem(System(EVALUATORS[0], f"evaluator {bits} bits", bits=bits), self.models)
        scores = {}
        for text in texts:
            file = self.work / loaded.system.path / f"{text.name.replace(' ', '_')}.safetensors"
            if not file.exists():
                sizes = {"context_length": CONTEXT_LENGTH, "stride": STRIDE}
                computed = score_text(text.text, loaded.backbone, loaded.tokenizer, name=text.name, **sizes)
                file.parent.mkdir(parents=True, exist_ok=True)
                computed.save(file)
            scores[text.name] = TokenScores.load(file)
        return scores

    def keep(self, name: str, title: str, numbers: dict[str, Any], tables: list[dict[str, Any]]) -> None:
        """Write the raw numbers and tables of a study, with how they came about, to ``benchmarks/results``."""
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
        result = {
            "title": title,
            "command": f"python -m benchmarks.real_models {name} --models .. --data .. --work ..",
            "commit": commit.stdout.strip(),
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": None,
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}},
            "data": combined_hash({text.name: text.text for text in self.texts}),
            "remark": "Protocol and verdicts: docs/real.md.",
            "output": tables,
            "numbers": numbers,
        }
        file = FOLDER / f"real_{name}.json"
        write_json(file, result)
        sys.stdout.write(f"{file}\n")

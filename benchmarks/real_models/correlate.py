"""Whether LongPPL predicts the accuracy of real systems on long-context questions, and perplexity does not.

Figure 2 and Tables 1 and 6 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, with small models. The protocol,
with hypotheses and decision rules, is in `benchmarks/real_models/PROTOCOL.md`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.real_models.questions import QuestionSheet
from benchmarks.real_models.systems import System, read_answers, read_scores
from benchmarks.real_models.texts import Text
from lightning_modules.functional import long_perplexity, merge_spans, transfer_influence
from lightning_modules.functional.text_bits import add_bits, text_bits
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens, key_spans
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.statistics import compare_correlations, correlate_values, score_interval

GAMMA = 5.0
THRESHOLDS = [(alpha, beta) for alpha in (1.0, 2.0, 3.0) for beta in (-1.0, -2.0, -3.0)]

_SMOLLM2, _GEMMA, _QWEN, _QWEN_LARGE = "smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"


def _limit(original: int, window: int) -> dict[str, Any]:
    return {
        "method": "streaming_llm",
        "original_length": original,
        "target_length": 2 * original,
        "sinks": 4,
        "window": window,
    }


def _stretch(method: str, original: int, factor: int, **options: Any) -> dict[str, Any]:
    return {"method": method, "original_length": original, "target_length": factor * original, **options}


SYSTEMS = (
    System(_SMOLLM2, "as it is"),
    System(_SMOLLM2, "last 256 tokens", _limit(8192, 256)),
    System(_SMOLLM2, "last 512 tokens", _limit(8192, 512)),
    System(_SMOLLM2, "last 1024 tokens", _limit(8192, 1024)),
    System(_SMOLLM2, "last 2048 tokens", _limit(8192, 2048)),
    System(_SMOLLM2, "LM-Infinite 512", {"method": "lm_infinite", "original_length": 512, "target_length": 8192}),
    System(_SMOLLM2, "LM-Infinite 1024", {"method": "lm_infinite", "original_length": 1024, "target_length": 8192}),
    System(_SMOLLM2, "PI 2", _stretch("pi", 8192, 2)),
    System(_SMOLLM2, "YaRN 4", _stretch("yarn", 8192, 4)),
    System(_SMOLLM2, "Self-Extend 8", _stretch("self_extend", 8192, 4, window=512, group=8)),
    System(_SMOLLM2, "4 bits", bits=4),
    System(_SMOLLM2, "3 bits", bits=3),
    System(_GEMMA, "as it is"),
    System(_GEMMA, "4 bits", bits=4),
    System(_GEMMA, "3 bits", bits=3),
    System(_QWEN, "as it is"),
    System(_QWEN, "last 1024 tokens", _limit(32768, 1024)),
    System(_QWEN_LARGE, "as it is"),
)
"""Systems with a limited or needlessly extended context, or coarsely rounded weights, which hurt words, not reach."""


class EvaluatorScores(NamedTuple):
    """An evaluator's scores of all texts, by the text's name."""

    name: str
    scores: dict[str, TokenScores]


def measure_system(
    system: System,
    texts: Sequence[Text],
    sheets: Sequence[QuestionSheet],
    evaluators: Sequence[EvaluatorScores],
    folder: Path,
) -> dict[str, Any]:
    """Return every metric and the accuracies of a system, from what `score_system` stored."""
    stored = {text.name: read_scores(system, text, folder) for text in texts}
    result: dict[str, Any] = {"model": system.model, "system": system.name, "metrics": {}, "accuracy": {}}
    result["metrics"] |= _measure_all_tokens(texts, stored)
    for evaluator in evaluators:
        result["metrics"][evaluator.name] = _measure_key_tokens(texts, stored, evaluator)
    right: list[bool] = []
    groups: list[str] = []
    for sheet in sheets:
        answers = read_answers(system, sheet.name, folder)
        result["accuracy"].setdefault(sheet.name.rpartition(" ")[0], []).append(sum(answers) / len(answers))
        right += answers
        groups += [sheet.name] * len(answers)
    result["right"] = right
    result["accuracy_all"] = sum(right) / len(right)
    result["accuracy_interval"] = score_interval([float(answer) for answer in right], groups)
    return result


def _measure_all_tokens(texts: Sequence[Text], stored: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Return perplexity and bits per byte over all scored tokens."""
    values = torch.cat([stored[text.name]["log_likelihood"][1:] for text in texts]).double()
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    bits = add_bits(_text_bits(text, stored[text.name], nothing, None) for text in texts)
    return {"perplexity": math.exp(-float(values.mean())), "bits_per_byte": bits.numbers()["bits_per_byte"]}


def _measure_key_tokens(
    texts: Sequence[Text], stored: dict[str, dict[str, Tensor]], evaluator: EvaluatorScores
) -> dict[str, Any]:
    """Return LongPPL and its relatives by one evaluator."""
    found: dict[str, Any] = {}
    # 1. LongPPL by the rule of the paper, and with other thresholds.
    for alpha, beta in THRESHOLDS:
        masks, values = [], []
        for text in texts:
            scores, own = evaluator.scores[text.name], stored[text.name]
            tokens = Tokens(own["token_ids"].long(), own["offsets"].long())
            mask = find_key_tokens(scores, tokens, alpha=alpha, beta=beta).mask.clone()
            mask[0] = False
            masks.append(mask)
            values.append(own["log_likelihood"])
        key, values_of_all = torch.cat(masks), torch.cat(values)
        name = "longppl" if (alpha, beta) == (2.0, -2.0) else f"longppl alpha {alpha:g} beta {beta:g}"
        found[name] = float(long_perplexity(values_of_all.clamp(max=0), key))
        found[f"key_tokens{name.removeprefix('longppl')}"] = int(key.sum())
    # 2. Metrics that are comparable between tokenizers: bits of the key spans, per byte and per evaluator token.
    kinds: dict[str, Callable[[TokenScores], Tensor]] = {
        "": key_spans,
        " LSD only": lambda scores: _spans(scores, scores.long - scores.short > 2.0),
        " LCL only": lambda scores: _spans(scores, scores.long > -2.0),
    }
    for suffix, spans_of in kinds.items():
        documents = []
        for text in texts:
            scores = evaluator.scores[text.name]
            documents.append(_text_bits(text, stored[text.name], spans_of(scores), scores.offsets))
        numbers = add_bits(documents).numbers()
        found[f"longppl_per_evaluator_token{suffix}"] = numbers["longppl_per_evaluator_token"]
        found[f"key_bits_per_byte{suffix}"] = numbers["key_bits_per_byte"]
    # 3. Soft LongPPL: every token counts by the evaluator's soft influence.
    weighted = total = 0.0
    for text in texts:
        scores, own = evaluator.scores[text.name], stored[text.name]
        weights = transfer_influence(scores.soft_influence(gamma=GAMMA), scores.offsets, own["offsets"])
        weights[0] = 0.0
        weighted += float((weights * own["log_likelihood"].double()).sum())
        total += float(weights.sum())
    found["soft_longppl"] = math.exp(-weighted / total)
    return found


def _spans(scores: TokenScores, mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[0] = False
    return merge_spans(scores.offsets[mask])


def _text_bits(text: Text, own: dict[str, Tensor], spans: Tensor, evaluator_offsets: Tensor | None) -> Any:
    scored = torch.ones(len(own["log_likelihood"]), dtype=torch.bool)
    scored[0] = False
    return text_bits(text.text, own["log_likelihood"], own["offsets"].long(), scored, spans, evaluator_offsets)


def collect_metrics(results: Sequence[dict[str, Any]], evaluators: Sequence[str]) -> dict[str, list[float]]:
    """Return the logarithm of each metric of all systems; those of an evaluator begin with its name."""
    metrics = {
        name: [math.log(result["metrics"][name]) for result in results] for name in ("perplexity", "bits_per_byte")
    }
    for evaluator in evaluators:
        for name in results[0]["metrics"][evaluator]:
            if not name.startswith("key_tokens"):
                values = [math.log(result["metrics"][evaluator][name]) for result in results]
                metrics[f"{evaluator}: {name}"] = values
    return metrics


def correlate_systems(results: Sequence[dict[str, Any]], evaluators: Sequence[str]) -> dict[str, Any]:
    """Return correlations of each metric with accuracy: over all systems, and within the models that have several."""
    accuracy = [result["accuracy_all"] for result in results]
    metrics = collect_metrics(results, evaluators)
    found: dict[str, Any] = {"over all": {}, "within": {}, "against perplexity": {}}
    for name, values in metrics.items():
        found["over all"][name] = {
            kind: correlate_values(values, accuracy, kind)._asdict() for kind in ("spearman", "pearson")
        }
    for evaluator in evaluators:
        for name in ("longppl", "longppl_per_evaluator_token", "key_bits_per_byte", "soft_longppl"):
            pair = metrics[f"{evaluator}: {name}"], metrics["perplexity"]
            found["against perplexity"][f"{evaluator}: {name}"] = compare_correlations(*pair, accuracy)._asdict()
    models = [result["model"] for result in results]
    for model in dict.fromkeys(models):
        chosen = [index for index, each in enumerate(models) if each == model]
        if len(chosen) >= 3 and len({accuracy[index] for index in chosen}) > 1:
            found["within"][model] = {
                name: correlate_values([values[i] for i in chosen], [accuracy[i] for i in chosen])._asdict()
                for name, values in metrics.items()
            }
    found["twenty questions"] = _compare_with_few_questions(results, metrics, evaluators)
    return found


def _compare_with_few_questions(
    results: Sequence[dict[str, Any]], metrics: dict[str, list[float]], evaluators: Sequence[str], draws: int = 1000
) -> dict[str, float]:
    """Compare LongPPL with 20 random questions: which predicts the accuracy on the other ones better (Spearman)?"""
    right = np.array([result["right"] for result in results], dtype=np.float64)
    draw = np.random.default_rng(0)
    names = {f"{evaluator}: longppl": metrics[f"{evaluator}: longppl"] for evaluator in evaluators}
    found: dict[str, list[float]] = {name: [] for name in ("20 questions", *names)}
    for _ in range(draws):
        order = draw.permutation(right.shape[1])
        few, rest = pd.Series(right[:, order[:20]].mean(1)), pd.Series(right[:, order[20:]].mean(1))
        found["20 questions"].append(few.corr(rest, method="spearman"))
        for name, values in names.items():
            found[name].append(pd.Series(values).corr(rest, method="spearman"))
    return {name: float(np.nanmean(values)) for name, values in found.items()}

"""Score models on the documents of the paper, one result file per model and evaluator."""

import hashlib
import logging
import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.reproduction.ngrams import repeated_ngram_spans
from benchmarks.reproduction.tables.options import MeasureOptions
from benchmarks.reproduction.tables.published import NamedModel
from benchmarks.reproduction.tables.results import ITSELF, DocumentResult, Result, reason, save_times
from datamodules.sources.documents import Document
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import span_token_mask
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens, transfer_soft_influence
from lightning_modules.scoring.score import find_device
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator
from lightning_modules.scoring.token_scores import TokenScores, text_sha256

THRESHOLDS = ((2.0, -2.0), (2.0, -1.0), (1.0, -2.0), (1.0, -1.0), (2.0, -math.inf))
"""alpha and beta of Table 2; the last drops the criterion of LCL (Figure 9)."""

log = logging.getLogger(__name__)


def select_documents(
    source: Iterable[Document], tokenizer: PreTrainedTokenizerFast, *, count: int, min_tokens: int, max_tokens: int
) -> list[Document]:
    """Return the first documents of a source that are long enough, cut to the largest length.

    Args:
        source: Documents.
        tokenizer: Counts the tokens, without special tokens.
        count: Documents to take.
        min_tokens: Shorter documents are skipped.
        max_tokens: Tokens to keep.

    Raises:
        ValueError: If there are too few long documents, or the lengths contradict each other.
    """
    if not 1 <= min_tokens <= max_tokens:
        raise ValueError(f"`min_tokens` must be from 1 to `max_tokens`, got {min_tokens} and {max_tokens}.")
    texts: list[Document] = []
    for document in source:
        offsets = tokenizer.backend_tokenizer.encode(document.text, add_special_tokens=False).offsets
        if len(offsets) >= min_tokens:
            end = len(document.text) if len(offsets) <= max_tokens else offsets[max_tokens - 1][1]
            texts.append(document._replace(text=document.text[:end]))
        if len(texts) == count:
            return texts
    raise ValueError(
        f"Only {len(texts)} of the documents have {min_tokens:,} tokens, but {count} are needed: lower `documents` or"
        " `min_tokens`, or name other data."
    )


def threshold_name(alpha: float, beta: float) -> str:
    """Return the name of a key-token measure in results."""
    return f"alpha={alpha:g} beta={beta:g}" if math.isfinite(beta) else f"alpha={alpha:g} without LCL"


def influences(document: PackedBatch, scores: TokenScores, *, gamma: float) -> dict[str, Tensor]:
    """Compute every influence of the tables for the tokens of a model from the scores of the evaluator.

    Args:
        document: Batch of one document, in tokens of the model.
        scores: Scores of the same text by the evaluator.
        gamma: Largest soft influence.

    Returns:
        ``[1, T]`` weights by measure, 0 where a token is not scored: ``perplexity``, ``ngram``, ``soft`` and one for
        each pair of thresholds.
    """
    tokens, scored = document_tokens(document), document["labels"].ne(IGNORE_INDEX)
    found = {
        "perplexity": scored,
        "ngram": span_token_mask(tokens.offsets, repeated_ngram_spans(document["text"][0])) & scored,
        "soft": transfer_soft_influence(scores, tokens, gamma=gamma) * scored,
    }
    for alpha, beta in THRESHOLDS:
        found[threshold_name(alpha, beta)] = find_key_tokens(scores, tokens, alpha=alpha, beta=beta).mask & scored
    return found


def weighted_sums(log_likelihood: Tensor, weights: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return for each ``[1, T]`` influence its product with the log-likelihoods, in nats, and its sum, in float64."""
    exact = log_likelihood.double()
    return {name: (float((exact * weight).sum()), float(weight.double().sum())) for name, weight in weights.items()}


class Measuring:
    """Measures models on documents, and writes a result file for each.

    Args:
        texts: The documents.
        output: Folder of results.
        options: Measurement settings.
    """

    def __init__(self, texts: Sequence[Document], output: Path, options: MeasureOptions) -> None:
        self.texts, self.output, self.options = texts, output, options
        self.device = find_device(options.device)
        hashes = "".join(text_sha256(document.text) for document in texts)
        self.settings = {
            "documents": len(texts),
            "documents_sha256": hashlib.sha256(hashes.encode()).hexdigest(),
            **{name: getattr(options, name) for name in ("context_length", "stride", "gamma", "dtype")},
        }

    def measure(
        self, pending: Sequence[tuple[NamedModel, Sequence[str]]], evaluators: Mapping[str, NamedModel]
    ) -> None:
        """Measure what is pending, and write each result as soon as it is done.

        Evaluators run first, one at a time; their scores are stored on disk and serve all models. A failure is recorded
        with its reason, and the next one continues.

        Args:
            pending: Models, each with the names of the evaluators whose results are missing.
            evaluators: By name, those that are not the model itself.
        """
        wanted = dict.fromkeys(name for _, names in pending for name in names if name != ITSELF)
        loaded = {name: self._load_evaluator(evaluators[name]) for name in wanted}
        for model, names in pending:
            own = {ITSELF: self._load_evaluator(model)} if ITSELF in names else {}
            for result in self._measure_model(model, {name: (loaded | own)[name] for name in names}):
                result.save(self.output)
                if result.failure is not None:
                    log.error("%s by %s: %s", result.model, result.evaluator, result.failure)

    def _load_evaluator(self, named: NamedModel) -> ScoredModel | str:
        """Return an evaluator that has scored all documents, or the reason why it failed."""
        try:
            evaluator = open_evaluator(
                replace(self.options, evaluator=named.path).evaluator_config(), device=self.device
            )
            times: list[float | None] = []
            for each in tqdm(self.texts, desc=f"evaluator {named.name}", unit="document", disable=None):
                stored = evaluator.path(text_sha256(each.text)).is_file()
                started = time.perf_counter()
                evaluator.scores(each.text, name=each.name)
                times.append(None if stored else time.perf_counter() - started)
            evaluator.release()
        except Exception as error:  # a model's own code may raise anything, and others must continue
            return reason(error)
        save_times(self.output, named.name, self.settings, times)
        return evaluator

    def _measure_model(self, model: NamedModel, loaded: Mapping[str, ScoredModel | str]) -> list[Result]:
        """Measure a model by the key tokens of several evaluators, or record why one of them could not be used."""
        working = {name: evaluator for name, evaluator in loaded.items() if isinstance(evaluator, ScoredModel)}
        try:
            identity = model_identity(self.options.loading(model.path))
            documents = self._score(model, working) if working else {}
        except Exception as error:
            return [Result(model.name, name, self.settings, failure=reason(error)) for name in loaded]
        made_by = {"model_path": model.path, "model": identity, **_machine(self.device)}
        results = []
        for name, evaluator in loaded.items():
            result = Result(model.name, name, self.settings, made_by, documents.get(name, []))
            if isinstance(evaluator, ScoredModel):
                result.made_by = made_by | {"evaluator_path": evaluator.name, "evaluator": evaluator.identity}
            else:
                result.failure = f"evaluator: {evaluator}"
            results.append(result)
        return results

    def _score(self, model: NamedModel, loaded: Mapping[str, ScoredModel]) -> dict[str, list[DocumentResult]]:
        """Score each document once for all evaluators."""
        scored = ScoredModel(self.options.loading(model.path), device=self.device)
        found: dict[str, list[DocumentResult]] = {name: [] for name in loaded}
        for each in tqdm(self.texts, desc=model.name, unit="document", disable=None):
            document = encode_document(each.text, scored.tokenizer, name=each.name)
            started = time.perf_counter()
            log_likelihood = scored.log_likelihood(document).unsqueeze(0)
            seconds = time.perf_counter() - started
            for key, evaluator in loaded.items():
                weights = influences(document, evaluator.scores(each.text, name=each.name), gamma=self.options.gamma)
                sums = weighted_sums(log_likelihood, weights)
                found[key].append(DocumentResult(each.name, document["labels"].numel(), seconds, sums))
        return found


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}

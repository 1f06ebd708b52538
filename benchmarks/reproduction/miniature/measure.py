"""Measure every model: two likelihoods of every token of the documents, and answers to questions about them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.reproduction.miniature.settings import Miniature
from benchmarks.reproduction.ngrams import repeated_ngram_spans
from datamodules.packing.evaluation_documents import document_row
from datamodules.packing.sequences import collate_rows
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import (
    key_token_mask,
    long_perplexity,
    merge_spans,
    soft_influence,
    span_token_mask,
)
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.scoring.evaluator import score_text

_TOKENS_PER_PASS = 8192


@dataclass(frozen=True)
class Tokens:
    """Log-likelihoods of every token of the documents under a model.

    Attributes:
        long: ``[D, T]`` float32 log-likelihoods given everything before the token, in nats.
        short: ``[D, T]`` float32 log-likelihoods given the short context, equal to ``long`` where it is missing.
    """

    long: Tensor
    short: Tensor

    def save(self, path: Path) -> None:
        """Write the file into a folder that is not published yet."""
        save_file({"long": self.long.contiguous(), "short": self.short.contiguous()}, path)

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Read the file."""
        return cls(**load_file(path))


@dataclass(frozen=True)
class Masks:
    """``[D, T]`` bool masks of the kinds of tokens in the documents; False where a token is not scored.

    Attributes:
        scored: All but the first token of each document.
        covered: Tokens with a short context.
        far: Answers last mentioned farther back than any short context reaches.
        near: Other answers.
        local: Local words.
        recurring: Words of n-grams (n > 2) that occurred earlier in the document.
    """

    scored: Tensor
    covered: Tensor
    far: Tensor
    near: Tensor
    local: Tensor
    recurring: Tensor


METRICS = {
    "longppl": "LongPPL",
    "perplexity": "PPL",
    "longppl_soft": "LongPPL, soft influence",
    "longppl_without_lcl": "LongPPL without LCL",
    "longppl_self": "LongPPL, evaluated by itself",
    "perplexity_ngrams": "PPL of recurring N-grams",
    "perplexity_answers": "PPL of far answers",
    "perplexity_others": "PPL of all other tokens",
}
"""Metrics of experiment A and their names in the report."""


class Examination:
    """Documents and questions, tokenized once for all models.

    Args:
        corpus: Source of documents and questions.
        settings: Their number, and the short context.
    """

    def __init__(self, corpus: Any, settings: Miniature) -> None:
        self.settings = settings
        self.tokenizer = corpus.tokenizer()
        self.short_length = settings.shortest.sequence_length
        length = settings.fine_tuning.sequence_length
        evaluation = settings.evaluation
        records = list(corpus.documents(evaluation.documents, length))
        self.texts = [record.text for record in records]
        self.documents = _stacked(self.texts, self.tokenizer)
        self.short_documents = _stacked(
            [record.text for record in corpus.documents(evaluation.documents, self.short_length)], self.tokenizer
        )
        self.reach = settings.context_length + settings.stride
        self.masks = self._masks(records)
        self._corpus = corpus
        self._questions: dict[int, list[PackedBatch]] = {}
        self._answers: dict[int, list[Tensor]] = {}

    def tokens(self, backbone: Backbone) -> Tokens:
        """Compute long and short log-likelihoods under the model, as `longce score` does."""
        sizes = {"context_length": self.settings.context_length, "stride": self.settings.stride}
        with eval_mode(backbone):
            scores = [score_text(text, backbone, self.tokenizer, **sizes) for text in self.texts]
        return Tokens(torch.stack([score.long for score in scores]), torch.stack([score.short for score in scores]))

    def right_answers(self, backbone: Backbone, length: int) -> list[float]:
        """Return the fraction of right answers to questions of a length, by depth of the fact.

        An answer is right if each of its tokens is the likeliest given the preceding ones.
        """
        return [
            _share_right(backbone, batch, answers)
            for batch, answers in zip(self.questions(length), self._answers[length], strict=True)
        ]

    def short_perplexity(self, backbone: Backbone) -> float:
        """Return the perplexity of documents as long as the shortest training sequences."""
        with torch.inference_mode(), eval_mode(backbone):
            log_likelihood = backbone(self.short_documents)
        return float(long_perplexity(log_likelihood, self.short_documents["labels"].ne(IGNORE_INDEX)))

    def loss_by_context(self, backbone: Backbone) -> list[float]:
        """Return the mean loss in nats of the same last tokens of all documents, by number of preceding tokens."""
        contexts = self.settings.evaluation.contexts
        length = self.documents["input_ids"].shape[1]
        targets = length - max(contexts)
        losses = []
        with torch.inference_mode(), eval_mode(backbone):
            for context in contexts:
                log_likelihood = backbone(_tail(self.documents, targets + context))[:, -targets:]
                losses.append(-float(log_likelihood.double().mean()))
        return losses

    def questions(self, length: int) -> list[PackedBatch]:
        """Return questions of a length by depth; in long ones the fact is beyond any short context."""
        if length not in self._questions:
            evaluation = self.settings.evaluation
            distance = self.reach if length > self.reach + 8 * evaluation.depths else 0
            by_depth = self._corpus.questions(evaluation.questions, length, depths=evaluation.depths, distance=distance)
            self._questions[length] = [_stacked([r.text for r in part], self.tokenizer) for part in by_depth]
            self._answers[length] = [
                _last_words(batch, part) for batch, part in zip(self._questions[length], by_depth, strict=True)
            ]
        return self._questions[length]

    def _masks(self, records: Sequence[Any]) -> Masks:
        scored, positions = self.documents["labels"].ne(IGNORE_INDEX), self.documents["position_ids"]

        def token_mask(spans: Sequence[Tensor]) -> Tensor:
            rows = zip(self.documents["offsets"], spans, strict=True)
            return torch.stack([span_token_mask(offsets, row) for offsets, row in rows])

        def mask(spans: list[list[tuple[int, int]]]) -> Tensor:
            return token_mask([merge_spans(torch.tensor(row).reshape(-1, 2).long()) for row in spans]) & scored

        answers = mask([record.spans("answer") for record in records])
        far = mask([record.spans("answer", farther_than=self.reach) for record in records])
        return Masks(
            scored=scored,
            covered=scored & (positions >= self.reach),  # the first window sees all that the long pass sees
            far=far,
            near=answers & ~far,
            local=mask([record.spans("local") for record in records]),
            recurring=token_mask([repeated_ngram_spans(text) for text in self.texts]) & scored,
        )


def token_metrics(model: Tokens, evaluator: Tokens, masks: Masks, settings: Miniature) -> dict[str, float]:
    """Compute every metric of experiment A for one model.

    Args:
        model: Likelihoods of the documents under the model.
        evaluator: The same under the evaluator.
        masks: Kinds of tokens.
        settings: Thresholds.

    Returns:
        Values by name; NaN without tokens to average over.
    """
    thresholds = {"alpha": settings.alpha, "beta": settings.beta}
    influences = {
        "longppl": masks.scored & key_token_mask(evaluator.long, evaluator.short, **thresholds),
        "perplexity": masks.scored,
        "longppl_soft": masks.scored * soft_influence(evaluator.long, evaluator.short, gamma=settings.gamma),
        "longppl_without_lcl": masks.scored
        & key_token_mask(evaluator.long, evaluator.short, alpha=settings.alpha, beta=-math.inf),
        "longppl_self": masks.scored & key_token_mask(model.long, model.short, **thresholds),
        "perplexity_ngrams": masks.recurring,
        "perplexity_answers": masks.far,
        "perplexity_others": masks.scored & ~masks.far,
        "perplexity_local": masks.local,
    }
    return {name: float(long_perplexity(model.long, influence)) for name, influence in influences.items()}


def _share_right(backbone: Backbone, batch: PackedBatch, answers: Tensor) -> float:
    """Return the fraction of rows in which all tokens of the ``[B, T]`` mask are the likeliest."""
    rows = max(_TOKENS_PER_PASS // answers.shape[1], 1)
    right = 0
    with torch.inference_mode(), eval_mode(backbone):
        for tokens, asked in zip(batch["input_ids"].split(rows), answers[:, 1:].split(rows), strict=True):
            hidden = backbone.decoder(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            wrong = torch.zeros_like(asked)
            wrong[asked] = backbone.logits(hidden[asked]).argmax(-1) != tokens[:, 1:][asked]
            right += int((~wrong.any(dim=1)).sum())
    return right / len(answers)


def _last_words(batch: PackedBatch, records: Sequence[Any]) -> Tensor:
    """Return ``[B, T]`` bool: tokens of the answer that ends each document."""
    starts = torch.tensor([record.spans("answer")[-1][0] for record in records])
    return batch["offsets"][..., 0] >= starts[:, None]


def _stacked(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> PackedBatch:
    """Stack documents of equal length into one batch."""
    rows = [document_row(text, tokenizer, name="document", add_special_tokens=True) for text in texts]
    if len({len(row["input_ids"]) for row in rows}) != 1:
        raise ValueError("The corpus must return documents of the requested length, all of the same length.")
    return collate_rows(rows)


def _tail(batch: PackedBatch, length: int) -> PackedBatch:
    """Cut documents to their last tokens, as if they began there."""
    rows = len(batch["input_ids"])
    labels = batch["labels"][:, -length:].clone()
    labels[:, 0] = IGNORE_INDEX
    return PackedBatch(
        input_ids=batch["input_ids"][:, -length:],
        labels=labels,
        position_ids=torch.arange(length).expand(rows, -1),
        document_boundaries=[[0, length]] * rows,
    )

"""The evaluator: a frozen model that measures the effect of the long context on each token of a text."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.identity import check_same_model, describe_model, model_identity
from lightning_modules.models.loading.load import check_model, load_scorer
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.lockstep import any_rank, lockstep
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.checks import check_log_likelihood, warn_of_chance
from lightning_modules.scoring.config import EvaluatorConfig, tokenizer_name
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.token_scores import FORMAT, TokenScores, text_sha256
from lightning_modules.utilities.files import default_cache_dir, writable_folder

log = logging.getLogger(__name__)


def score_text(
    text: str,
    backbone: Scorer,
    tokenizer: PreTrainedTokenizerFast,
    *,
    context_length: int = 4096,
    stride: int = 1024,
    add_special_tokens: bool = True,
    name: str = "document",
    evaluator: str = "",
    beta: float | None = None,
) -> TokenScores:
    """Compute the long and short log-likelihoods of all tokens of a text, in main memory.

    ``name`` is the document's name in messages, and ``evaluator`` the model's name in the scores. With ``beta``, short
    log-likelihoods are skipped that key tokens at this threshold or above do not need. Special tokens are added by
    default, as the authors do for evaluators.
    """
    batch = encode_document(text, tokenizer, name=name, add_special_tokens=add_special_tokens)
    backbone.check_batch(batch)
    backbone.check_length(batch["input_ids"].shape[1])
    scorer = DocumentScorer(backbone, evaluator, context_length, stride)
    return scorer.score(batch_to(batch, backbone.device), beta=beta)[0]


class Evaluator:
    """Scores texts with a frozen model and caches the scores; the model is loaded when a text has no stored scores.

    Args:
        config: The model and how it scores. If it is sharded, all processes must request scores equally often; a
            process without a text calls `join` instead.
    """

    def __init__(self, config: EvaluatorConfig) -> None:
        self.config = config
        self.name = config.evaluator
        self.is_served = is_served(self.name)
        cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir() / "token_scores"
        self.cache_dir = writable_folder(cache)
        self._loading = config.loading(self.name, revision=config.revision)
        tokenizer = tokenizer_name(self.name, config.tokenizer, "`--evaluator_tokenizer`, or `tokenizer` in YAML,")
        check_model(self._loading)
        self.tokenizer = load_tokenizer(
            tokenizer,
            revision=config.revision if config.tokenizer is None else None,  # it is the model's
            trust_remote_code=config.trust_remote_code,
            trimmed_offsets=config.key_token_rule == "authors",
        )
        self.identity = model_identity(self._loading)
        self._scores: dict[str, TokenScores] = {}  # by hash of the text
        self._provenance: dict[str, Provenance] = {}  # by type of device
        self._backbone: Scorer | None = None

    def scores(
        self, text: str, *, device: torch.device | str = "cpu", name: str = "document", beta: float | None = None
    ) -> TokenScores:
        """Return the scores of a text, from memory, from disk, or computed with the model.

        With ``beta``, only what key tokens at this threshold or above need is computed. By default the scores can be
        used for any threshold and for soft influence.
        """
        sha256 = text_sha256(text)
        scores = self._scores.get(sha256)
        # 1. Scores down to `floor` serve every beta at or above it; complete ones have a floor of -inf.
        if scores is None or scores.floor > (-math.inf if beta is None else beta):
            scores = self._read_stored(sha256, device)
            if scores is None and beta is not None:
                scores = self._read_stored(sha256, device, beta)
        # 2. All processes enter, because another one may have a text to score.
        with self._lockstep(device, has_text=scores is None):
            if scores is None:
                scores = self._compute_and_store(text, device, name, beta)
        self._scores[sha256] = scores
        return scores

    def encode(self, text: str, *, name: str = "document", max_tokens: int | None = None) -> PackedBatch:
        """Return a text in the evaluator's tokens as a batch of one; for the arguments see `encode_document`."""
        return encode_document(
            text, self.tokenizer, name=name, add_special_tokens=self.config.add_special_tokens, max_tokens=max_tokens
        )

    def cut(self, text: str, max_tokens: int, *, name: str = "document") -> str:
        """Return the text of a document's first tokens, without a character of which a part would be missing."""
        return self.encode(text, name=name, max_tokens=max_tokens)["text"][0]

    def backbone(self, device: torch.device | str = "cpu") -> Scorer:
        """Return the model, which is loaded at its first use, or the connection to its server."""
        if self._backbone is None:
            log.info("Loading the evaluator '%s'.", self.name)
            # Validation runs in inference mode, but FSDP2 cannot shard inference tensors.
            with torch.inference_mode(mode=torch.is_inference_mode_enabled() and not self.config.sharded):
                backbone = self._load_backbone(device)
            check_same_model(self.identity, self._loading)
            self._backbone = backbone
        return self._backbone

    def provenance(self, device: torch.device | str = "cpu") -> Provenance:
        """Return what identifies the evaluator on a device."""
        kind = torch.device(device).type  # dtype and attention depend on it
        if kind not in self._provenance:
            self._provenance[kind] = describe_model(
                self._loading, self.tokenizer, device=device, identity=self.identity
            )
        return self._provenance[kind]

    def join(self, *, device: torch.device | str = "cpu") -> None:
        """Take part in the forward passes of other processes if the model is sharded."""
        with self._lockstep(device, has_text=False):
            pass

    @contextmanager
    def _lockstep(self, device: torch.device | str, *, has_text: bool) -> Iterator[None]:
        """Keep a sharded model's processes in lockstep, if any of them has a text to score."""
        if self.config.sharded and any_rank(has_text, device):
            backbone = self.backbone(device)
            with torch.inference_mode(mode=False), lockstep(backbone):
                yield
        else:
            yield

    def release(self) -> None:
        """Free the model's memory, and keep the scores; a served model must be the same as at the start."""
        if self._backbone is not None:
            if self.is_served:  # a loaded model cannot change, but a server can be restarted with another one
                check_same_model(self.identity, self._loading)
            self._backbone = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def path(self, sha256: str, *, device: torch.device | str = "cpu", partial: bool = False) -> Path:
        """Return the file for the scores of the text with this hash; ``partial`` scores are for key tokens only."""
        name = (FORMAT, *self._describe_scores(sha256, device).items(), *(["key tokens only"] if partial else []))
        key = hashlib.sha256(repr(name).encode()).hexdigest()
        # Folders by the first two digits, because some file systems are slow with many files in one.
        return self.cache_dir / key[:2] / f"{key}.safetensors"

    def _describe_scores(self, sha256: str, device: torch.device | str) -> dict[str, Any]:
        """Return the fields of `TokenScores` that identify the scores of a text."""
        special = "before the text" if self.config.add_special_tokens else False
        settings = self.provenance(device)._asdict() | {"special_tokens": special}
        return {
            "text_sha256": sha256,
            "evaluator": settings.pop("identity"),
            "context_length": self.config.context_length,
            "stride": self.config.stride,
            "settings": json.dumps(settings),
        }

    def _read_stored(self, sha256: str, device: torch.device | str, beta: float | None = None) -> TokenScores | None:
        path = self.path(sha256, device=device, partial=beta is not None)
        try:
            scores = TokenScores.load(path)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            log.warning("%s It is scored again.", error)
            return None
        # Scores for key tokens may have been computed for a higher beta.
        return scores if scores.floor <= (-math.inf if beta is None else beta) else None

    def _compute_and_store(self, text: str, device: torch.device | str, name: str, beta: float | None) -> TokenScores:
        try:
            scores = score_text(
                text,
                self.backbone(device),
                self.tokenizer,
                context_length=self.config.context_length,
                stride=self.config.stride,
                add_special_tokens=self.config.add_special_tokens,
                name=name,
                evaluator=self.identity,
                beta=beta,
            )
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"The evaluator '{self.name}' ran out of memory in '{name}' ({len(text):,} characters): load it in"
                " bfloat16, or run `longce score` before training, which stores the scores in the cache."
            )
            raise
        # In the file, because other settings give other scores.
        scores.settings = self._describe_scores(scores.text_sha256, device)["settings"]
        self._check(scores, text, name, device)
        self._store(scores, name, device, partial=beta is not None)
        return scores

    def _check(self, scores: TokenScores, text: str, name: str, device: torch.device | str) -> None:
        """Raise a ``ValueError`` for impossible log-likelihoods, of which key tokens would take no notice."""
        about = {"model": self.name, "dtype": self.provenance(device).dtype, "document": name}
        # Tokens at the floor have no short log-likelihood by design; they count as possible.
        for values in (scores.long, scores.short.where(~(scores.long <= scores.floor), 0.0)):
            check_log_likelihood(values, **about, text=text, offsets=scores.offsets)
        warn_of_chance(scores.long, torch.arange(len(scores.long)) >= scores.unscored, self.name)

    def _store(self, scores: TokenScores, name: str, device: torch.device | str, *, partial: bool) -> None:
        """Store scores for later runs; failing to do so is a warning, because they are also in memory."""
        try:
            scores.save(self.path(scores.text_sha256, device=device, partial=partial))
        except OSError as error:
            log.warning(
                "The scores of '%s' could not be stored in %s (%s). Free some space, or set `cache_dir`.",
                name,
                self.cache_dir,
                error.strerror or error,
            )

    def _load_backbone(self, device: torch.device | str) -> Scorer:
        if self.config.sharded:
            from lightning_modules.training.fsdp import load_sharded_frozen  # imports Lightning

            return load_sharded_frozen(self._loading, device)
        return load_scorer(self._loading, device)

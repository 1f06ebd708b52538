"""A frozen model that scores texts: identified at the start, loaded when a text has no stored scores, freed early."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.loading.config import ModelConfig, is_served
from lightning_modules.models.loading.identity import check_same_model, describe_model, model_identity
from lightning_modules.models.loading.load import check_model, load_scorer
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.lockstep import any_rank, lockstep
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.checks import check_log_likelihood, warn_of_chance
from lightning_modules.scoring.config import EvaluatorConfig, tokenizer_name
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.records import Source
from lightning_modules.scoring.token_scores import FORMAT, TokenScores, text_sha256
from lightning_modules.utilities.files import default_cache_dir, writable_folder

log = logging.getLogger(__name__)


def score_text(
    text: str,
    backbone: Scorer,
    tokenizer: PreTrainedTokenizerFast,
    short_context: ShortContext,
    *,
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
    scorer = DocumentScorer(backbone, evaluator, short_context)
    return scorer.score(batch_to(batch, backbone.device), beta=beta)[0]


class ScoredModel:
    """A model, its tokenizer and identity; the weights are loaded when they are needed.

    It gives the log-likelihoods of documents in the long context (`log_likelihood`), and in the long and the short one
    (`scores`), which are stored if there is a ``cache_dir``.

    Args:
        loading: The model and how it is loaded.
        device: Device of the model, which may be set until the model is loaded.
        tokenizer: Hub id or local folder of the tokenizer; by default the model's own.
        option: Option for the tokenizer of a served model, named in errors.
        add_special_tokens: Whether the tokenizer adds special tokens.
        trimmed_offsets: Whether offsets of tokens stay as the tokenizer gives them, for the authors' rule.
        short_context: K and d of `scores`, in tokens.
        cache_dir: Folder for scores; None does not store them.
        sharded: Whether the weights are sharded across processes. All of them must then request scores the same number
            of times; a process without a text calls `join` instead.
    """

    def __init__(
        self,
        loading: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        tokenizer: str | None = None,
        option: str = "`model_tokenizer`",
        add_special_tokens: bool = False,
        trimmed_offsets: bool = False,
        short_context: ShortContext = ShortContext(),  # noqa: B008, it cannot be changed
        cache_dir: Path | None = None,
        sharded: bool = False,
    ) -> None:
        self.loading = loading
        self.name = str(loading.pretrained_model_name_or_path)
        self.device = device
        self.add_special_tokens = add_special_tokens
        self.short_context = short_context
        self.cache_dir = None if cache_dir is None else writable_folder(cache_dir)
        self.sharded = sharded
        named = tokenizer_name(self.name, tokenizer, option)
        self._config: PreTrainedConfig | None = check_model(loading)
        self.tokenizer = load_tokenizer(
            named,
            revision=loading.revision if named == self.name else None,  # it is the model's
            trust_remote_code=loading.trust_remote_code,
            trimmed_offsets=trimmed_offsets,
        )
        self.identity = model_identity(loading)
        self._scores: dict[str, TokenScores] = {}  # by hash of the text
        self._provenance: dict[str, Provenance] = {}  # by type of device
        self._backbone: Scorer | None = None

    @property
    def provenance(self) -> Provenance:
        """Identity of the model, and its numerics on the device."""
        kind = torch.device(self.device).type  # dtype and attention depend on it
        if kind not in self._provenance:
            self._provenance[kind] = describe_model(
                self.loading, self.tokenizer, device=self.device, identity=self.identity
            )
        return self._provenance[kind]

    @property
    def source(self) -> Source:
        """The model in a record."""
        return Source(self.name, *self.provenance, special_tokens=self.add_special_tokens)

    # -------------------------------------------------------------------------------------------------------- tokens

    def encode(self, text: str, *, name: str = "document", max_tokens: int | None = None) -> PackedBatch:
        """Return a text in the model's tokens as a batch of one; for the arguments see `encode_document`."""
        return encode_document(
            text, self.tokenizer, name=name, add_special_tokens=self.add_special_tokens, max_tokens=max_tokens
        )

    def cut(self, text: str, max_tokens: int, *, name: str = "document") -> str:
        """Return the text of a document's first tokens, without incomplete characters."""
        return self.encode(text, name=name, max_tokens=max_tokens)["text"][0]

    def read(self, texts: Mapping[str, str]) -> list[PackedBatch]:
        """Return documents, given by name, in the model's tokens, before its weights are loaded.

        Raises a ``ValueError`` for tokens that are not the model's.
        """
        if not self.add_special_tokens:
            _warn_of_left_out_token(self.tokenizer, self.name)
        documents = [self.encode(text, name=name) for name, text in texts.items()]
        if self._config is not None:
            _check_vocabulary(documents, self._config, self.name)
        return documents

    # ------------------------------------------------------------------------------------------------ log-likelihoods

    def log_likelihood(self, document: PackedBatch) -> Tensor:
        """Compute the ``[T]`` log-likelihoods of a document in its whole context, in nats and in main memory.

        Raises:
            ValueError: If the document has ids outside of the embedding, or a log-likelihood is impossible.
        """
        backbone = self.backbone()
        backbone.check_batch(document)
        with torch.no_grad():
            long = backbone(batch_to(document, backbone.device))[0].cpu()
        about = {"model": self.name, "dtype": self.provenance.dtype, "document": document["names"][0]}
        check_log_likelihood(long, **about, text=document["text"][0], offsets=document["offsets"][0])
        warn_of_chance(long, document["labels"][0].ne(IGNORE_INDEX), self.name)
        return long

    def scores(self, text: str, *, name: str = "document", beta: float | None = None) -> TokenScores:
        """Return the scores of a text, from memory, from disk, or computed with the model.

        With ``beta``, only what key tokens at this threshold or above need is computed. By default the scores can be
        used for any threshold and for soft influence. ``name`` is the document's in messages.
        """
        sha256 = text_sha256(text)
        scores = self._scores.get(sha256)
        # 1. Scores down to `floor` serve every beta at or above it; complete ones have a floor of -inf.
        if scores is None or scores.floor > (-math.inf if beta is None else beta):
            scores = self._read_stored(sha256)
            if scores is None and beta is not None:
                scores = self._read_stored(sha256, beta)
        # 2. All processes enter, because another one may have a text to score.
        with self._lockstep(has_text=scores is None):
            if scores is None:
                scores = self._compute(text, name, beta)
                self._store(scores, name, partial=beta is not None)
        self._scores[sha256] = scores
        return scores

    def _compute(self, text: str, name: str, beta: float | None) -> TokenScores:
        try:
            scores = score_text(
                text,
                self.backbone(),
                self.tokenizer,
                self.short_context,
                add_special_tokens=self.add_special_tokens,
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
        # Stored in the file, because scores depend on the settings.
        scores.settings = self._describe_scores(scores.text_sha256)["settings"]
        # Refuse impossible log-likelihoods, which would silently change the key tokens. Tokens at the floor have no
        # short log-likelihood by design; they count as possible.
        about = {"model": self.name, "dtype": self.provenance.dtype, "document": name}
        for values in (scores.long, scores.short.where(~(scores.long <= scores.floor), 0.0)):
            check_log_likelihood(values, **about, text=text, offsets=scores.offsets)
        warn_of_chance(scores.long, torch.arange(len(scores.long)) >= scores.unscored, self.name)
        return scores

    # ---------------------------------------------------------------------------------------------------------- model

    def backbone(self) -> Scorer:
        """Return the model, which is loaded at its first use, or the connection to its server."""
        if self._backbone is None:
            log.info("Loading '%s'.", self.name)
            # Validation runs in inference mode, but FSDP2 cannot shard inference tensors.
            with torch.inference_mode(mode=torch.is_inference_mode_enabled() and not self.sharded):
                backbone = self._load()
            check_same_model(self.identity, self.loading)
            self._backbone = backbone
        return self._backbone

    def _load(self) -> Scorer:
        if self.sharded:
            from lightning_modules.training.fsdp import load_sharded_frozen  # imports Lightning

            return load_sharded_frozen(self.loading, self.device)
        return load_scorer(self.loading, self.device)

    def join(self) -> None:
        """Take part in the forward passes of other processes if the model is sharded."""
        with self._lockstep(has_text=False):
            pass

    @contextmanager
    def _lockstep(self, *, has_text: bool) -> Iterator[None]:
        """Keep a sharded model's processes in lockstep, if any of them has a text to score."""
        if self.sharded and any_rank(has_text, self.device):
            backbone = self.backbone()
            with torch.inference_mode(mode=False), lockstep(backbone):
                yield
        else:
            yield

    def release(self) -> None:
        """Free the model's memory, and keep the scores; a served model must be the same as at the start."""
        if self._backbone is not None:
            if is_served(self.name):  # a loaded model cannot change, but a server can be restarted with another one
                check_same_model(self.identity, self.loading)
            self._backbone = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    # -------------------------------------------------------------------------------------------------- stored scores

    def path(self, sha256: str, *, partial: bool = False) -> Path:
        """Return the file for the scores of the text with this hash; ``partial`` scores are for key tokens only."""
        assert self.cache_dir is not None
        name = (FORMAT, *self._describe_scores(sha256).items(), *(["key tokens only"] if partial else []))
        key = hashlib.sha256(repr(name).encode()).hexdigest()
        # Folders by the first two digits, because some file systems are slow with many files in one.
        return self.cache_dir / key[:2] / f"{key}.safetensors"

    def _describe_scores(self, sha256: str) -> dict[str, Any]:
        """Return the fields of `TokenScores` that identify the scores of a text."""
        special = "before the text" if self.add_special_tokens else False
        settings = self.provenance._asdict() | {"special_tokens": special}
        return {
            "text_sha256": sha256,
            "evaluator": settings.pop("identity"),
            "context_length": self.short_context.context_length,
            "stride": self.short_context.stride,
            "settings": json.dumps(settings),
        }

    def _read_stored(self, sha256: str, beta: float | None = None) -> TokenScores | None:
        if self.cache_dir is None:
            return None
        try:
            scores = TokenScores.load(self.path(sha256, partial=beta is not None))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            log.warning("%s It is scored again.", error)
            return None
        # Scores for key tokens may have been computed for a higher beta.
        return scores if scores.floor <= (-math.inf if beta is None else beta) else None

    def _store(self, scores: TokenScores, name: str, *, partial: bool) -> None:
        """Store scores for later runs; failing to do so is a warning, because they are also in memory."""
        if self.cache_dir is None:
            return
        try:
            scores.save(self.path(scores.text_sha256, partial=partial))
        except OSError as error:
            log.warning(
                "The scores of '%s' could not be stored in %s (%s). Free some space, or set `cache_dir`.",
                name,
                self.cache_dir,
                error.strerror or error,
            )


def open_evaluator(config: EvaluatorConfig, *, device: torch.device | str = "cpu") -> ScoredModel:
    """Return the evaluator with these settings; its scores are stored."""
    return ScoredModel(
        config.loading(config.evaluator, revision=config.revision),
        device=device,
        tokenizer=config.tokenizer,
        option="`--evaluator_tokenizer`, or `tokenizer` in YAML,",
        add_special_tokens=config.add_special_tokens,
        trimmed_offsets=config.key_token_rule == "authors",
        short_context=config.short_context,
        cache_dir=Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir() / "token_scores",
        sharded=config.sharded,
    )


def _warn_of_left_out_token(tokenizer: PreTrainedTokenizerFast, model: str) -> None:
    """Warn if a tokenizer would put a special token before a text, without which some models are far worse."""
    encoded = encode_text("a", tokenizer, add_special_tokens=True)
    if encoded.added:
        log.warning(
            "'%s' is scored without the '%s' that its tokenizer puts before a text, as in the authors' code. Some"
            " models, such as Gemma, are far worse without it: see `--add_special_tokens true`.",
            model,
            tokenizer.convert_ids_to_tokens(encoded.ids[0]),
        )


def _check_vocabulary(documents: Sequence[PackedBatch], config: PreTrainedConfig, model: str) -> None:
    """Raise a ``ValueError`` for token ids outside of the model's embedding, before the evaluator scores the text."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(document["input_ids"].max()) for document in documents)
    if size is not None and largest >= size:
        raise ValueError(
            f"The tokenizer of '{model}' gives token id {largest}, but the model's embedding has {size} tokens: the"
            " tokenizer belongs to another model. Fetch the folder again."
        )

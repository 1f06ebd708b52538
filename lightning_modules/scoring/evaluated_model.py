"""The evaluated model of a command: its tokens and log-likelihoods of texts."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import check_same_model, describe_model, model_identity
from lightning_modules.models.loading.load import check_model, load_scorer
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.checks import check_log_likelihood, warn_of_chance
from lightning_modules.scoring.config import tokenizer_name

log = logging.getLogger(__name__)


class EvaluatedModel:
    """The evaluated model, which is loaded when it has to score a document; ``tokenizer`` is by default its own."""

    def __init__(self, config: ModelConfig, device: torch.device, tokenizer: str | None = None) -> None:
        self.config = config
        self.device = device
        self.name = str(config.pretrained_model_name_or_path)
        self._tokenizer_name = tokenizer_name(self.name, tokenizer, "`model_tokenizer`")
        self._backbone: Scorer | None = None  # loaded only when the evaluator has been freed

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the documents."""
        return self._load_tokenizer()

    @cached_property
    def identity(self) -> str:
        """Content of the model, which must be the same when it is loaded."""
        return model_identity(self.config)

    @cached_property
    def provenance(self) -> Provenance:
        """What identifies the model and its numbers."""
        return describe_model(self.config, self.tokenizer, device=self.device, identity=self.identity)

    def read(self, texts: Mapping[str, str], *, trimmed_offsets: bool = False, **options: Any) -> list[PackedBatch]:
        """Tokenize documents, given by name, without loading the model's weights.

        Options are those of `encode_document`.
        """
        config = check_model(self.config)
        tokenizer = self.tokenizer
        if trimmed_offsets:  # which is a part of the key-token rule, not of the model
            tokenizer = self._load_tokenizer(trimmed_offsets=True)
        if not options.get("add_special_tokens"):
            _warn_of_left_out_token(tokenizer, self.name)
        documents = [encode_document(text, tokenizer, name=name, **options) for name, text in texts.items()]
        if config is not None:
            _check_vocabulary(documents, config, self.name)
        return documents

    def _load_tokenizer(self, *, trimmed_offsets: bool = False) -> PreTrainedTokenizerFast:
        return load_tokenizer(
            self._tokenizer_name,
            revision=self.config.revision if self._tokenizer_name == self.name else None,  # it is the model's
            trust_remote_code=self.config.trust_remote_code,
            trimmed_offsets=trimmed_offsets,
        )

    def log_likelihood(self, document: PackedBatch) -> torch.Tensor:
        """Compute the ``[1, T]`` log-likelihoods of a document in nats, in main memory.

        Raises:
            ValueError: If the document has ids outside of the embedding, or a log-likelihood is impossible.
        """
        if self._backbone is None:
            identity = self.identity  # before loading, to notice files that change meanwhile
            log.info("Loading the model '%s'.", self.name)
            self._backbone = load_scorer(self.config, self.device)
            check_same_model(identity, self.config)
        self._backbone.check_batch(document)
        with torch.no_grad():
            log_likelihood = self._backbone(batch_to(document, self._backbone.device)).cpu()  # [1, T]
        text = document["text"][0]
        offsets = document["offsets"][0]
        name = document["names"][0]
        about = {"model": self.name, "dtype": self.provenance.dtype, "document": name}
        check_log_likelihood(log_likelihood[0], **about, text=text, offsets=offsets)
        warn_of_chance(log_likelihood[0], document["labels"][0].ne(IGNORE_INDEX), self.name)
        return log_likelihood


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


def _check_vocabulary(documents: list[PackedBatch], config: PreTrainedConfig, model: str) -> None:
    """Raise a ``ValueError`` for token ids outside of the model's embedding, before the evaluator scores the text."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(document["input_ids"].max()) for document in documents)
    if size is not None and largest >= size:
        raise ValueError(
            f"The tokenizer of '{model}' gives token id {largest}, but the model's embedding has {size} tokens: the"
            " tokenizer belongs to another model. Fetch the folder again."
        )

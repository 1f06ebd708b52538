"""Models and texts to measure: random Llamas on random words, or real models on a real text."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.short_context import long_and_short
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer

SHAPES = {
    "S": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
    "D": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "num_attention_heads": 8},
}
CANDIDATES, KEYS = 0.6, 0.1


class Setting(NamedTuple):
    """One setting of the table: token counts throughout."""

    shape: str
    vocabulary: int
    length: int
    context_length: int
    stride: int

    def __str__(self) -> str:
        return f"{self.shape} V={self.vocabulary} n={self.length} K={self.context_length} d={self.stride}"

    @property
    def short_context(self) -> ShortContext:
        """Return K and d."""
        return ShortContext(self.context_length, self.stride)


class Reader(NamedTuple):
    """A model with its tokenizer."""

    model: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


class Subject(NamedTuple):
    """Who reads which text. Without thresholds, they are quantiles of the scores."""

    reader: Reader
    evaluator: Reader
    text: str
    batch: PackedBatch  # the text in the model's tokens
    thresholds: tuple[float, float] | None = None

    def alpha_and_beta(self, evaluator: Reader, setting: Setting) -> tuple[float, float]:
        """Return both thresholds for the scores of an evaluator."""
        if self.thresholds is not None:
            return self.thresholds
        long, short = long_and_short(Backbone(evaluator.model), self.batch, setting.short_context)
        differs = long != short
        alpha = (long - short)[differs].quantile(1 - KEYS).item()
        return max(alpha, 0.0), long[differs].quantile(1 - CANDIDATES).item()


def random_subject(setting: Setting) -> Subject:
    """Return two random Llamas and random words."""
    tokenizer = _word_tokenizer(setting.vocabulary)
    ids = torch.randint(setting.vocabulary, (setting.length,), generator=torch.Generator().manual_seed(0))
    text = " ".join(f"w{index}" for index in ids.tolist())
    reader, evaluator = (Reader(build(setting.shape, setting.vocabulary, seed), tokenizer) for seed in range(2))
    return Subject(reader, evaluator, text, encode_document(text, tokenizer))


def build(shape: str, vocabulary: int, seed: int) -> transformers.PreTrainedModel:
    """Return a random Llama of one of the shapes."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", **SHAPES[shape], num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=1 << 18
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_document_attention()).eval()


def _word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words ``w0``, ``w1``, .., so that the length of a text in tokens is exact."""
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def load_reader(name: str) -> Reader:
    """Load a real model in float32, from a hub id, a folder or a GGUF file."""
    model = load_backbone(ModelConfig(name, dtype="float32")).base_model
    return Reader(model.eval(), load_tokenizer(name))


def real_subject(
    reader: Reader, evaluator: Reader, files: Sequence[Path], length: int, thresholds: tuple[float, float]
) -> Subject:
    """Return real models on the first tokens of the joined files; raise a ``ValueError`` if they have too few."""
    text = "\n\n".join(file.read_text() for file in files)
    batch = encode_document(text, reader.tokenizer, max_tokens=length)
    if (tokens := batch["input_ids"].shape[1]) < length - 8:  # a cut inside a character moves back
        raise ValueError(f"The text has {tokens} tokens of the model, fewer than {length}: give more with --text.")
    return Subject(reader, evaluator, batch["text"][0], batch, thresholds)

"""Settings of `longce corpus score`; importable without torch."""

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from lightning_modules.models.loading.config import LoadingOptions, ServerConfig

COLUMN_OPTIONS = ("text_column", "key_column", "token_column")
"""Options for the columns that are read of a document; they are recorded with the scores."""


def default_shard() -> str:
    """Return the shard of a process that `torchrun` started, and ``0/1`` without it."""
    return f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"


def shard_name(index: int, shards: int) -> str:
    """Return the name of the folder of a shard, of which there are several."""
    return f"shard-{index:05d}-of-{shards:05d}"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(LoadingOptions):
    """Settings of `longce corpus score`.

    Args:
        model: Hub id, local folder or server of the model that scores the documents.
        output: Folder or fsspec URL for the scores; created if needed. The same command resumes.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats.
        gamma: Largest weight of the soft-weighted benefit.
        contexts: Ascending context lengths in tokens, in which the last `stride` tokens of each document are scored as
            well, to see how far back its dependencies reach.
        per_token: Also write the long-short difference (``lsd``) and the long-context log-likelihood (``lcl``) of each
            token, as lists of this type.
        text_column: Column or field of the text; dots reach into nested fields.
        token_column: Column or field with a list of token ids of the model's tokenizer, instead of a text. They are
            read unchanged; special tokens at the start are not scored, and those at the end are left out.
        key_column: Column or field of the document's key; by default the key is file name and row number.
        columns: Further columns to copy to the scores. Values of JSON lines become text.
        max_tokens: Maximum number of tokens of a document.
        overlong: What to do with longer documents: ``cut`` scores their first tokens, ``skip`` leaves them out and
            records the reason.
        batch_tokens: Score short documents together, in batches of at most this many tokens including padding; servers
            get the documents of a batch at once. Those of similar length are chosen from up to `shard_rows` documents,
            or 256 if that is more. By default each document is scored alone.
        tokenizer: Hub id or local folder of the tokenizer; by default the model's.
        add_special_tokens: Whether the tokenizer adds special tokens to each document.
        revision: Branch, tag or commit of the model on the hub.
        context_extension: Extend the context of the model without training: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: weights in 4 or 8 bits.
        device: Device such as ``cuda:0`` or ``cpu``; ``auto`` is a GPU, or the CPU. Processes of `torchrun` get one
            each.
        shard: ``I/N`` scores only the I-th of N shards of the documents, from 0, into a separate folder in `output`.
            Other processes can score the other shards on any machine, at any time. `torchrun` sets this for its
            processes.
        engine: ``local`` scores one shard in this process; ``ray`` scores all shards as tasks of a Ray cluster, that of
            ``RAY_ADDRESS`` or of this machine.
        num_shards: Number of shards for ``ray``. A task that loses its machine restarts and resumes; several shards
            per GPU lose less of its time.
        allowed_failures: Fraction of a source's documents that may fail, from 0 to 1; a source is a file, or all text
            files of a folder. If more fail, the command still scores all documents, then prints a report and ends with
            exit status 1. Below 1, a file whose first documents have no text is refused before anything is scored.
        shard_rows: Maximum number of documents per file of scores.
        shard_minutes: Time after which a file of scores is written even if it is not full.
        server: Settings for requests to a served model.
    """

    model: str
    output: str
    context_length: int = 4096
    stride: int = 1024
    alpha: float = 2.0
    beta: float = -2.0
    gamma: float = 5.0
    contexts: list[int] = field(default_factory=list)
    per_token: Literal["float16", "float32"] | None = None
    text_column: str = "text"
    token_column: str | None = None
    key_column: str | None = None
    columns: list[str] = field(default_factory=list)
    max_tokens: PositiveInt | None = None
    overlong: Literal["cut", "skip"] = "cut"
    batch_tokens: PositiveInt | None = None
    tokenizer: str | None = None
    add_special_tokens: bool = False
    revision: str | None = None
    context_extension: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    device: str = "auto"
    shard: str = field(default_factory=default_shard)
    engine: Literal["local", "ray"] = "local"
    num_shards: PositiveInt | None = None
    allowed_failures: ClosedUnitInterval = 0.01
    shard_rows: PositiveInt = 1000
    shard_minutes: PositiveFloat = 15.0
    server: ServerConfig | None = None

    def __post_init__(self) -> None:
        index, shards = self.shard_numbers
        if index >= shards:
            raise ValueError(f"`shard` must be I/N with I from 0 to N - 1, got '{self.shard}'.")
        if self.token_column is not None and self.add_special_tokens:
            raise ValueError("`add_special_tokens` is for texts, and `token_column` is set: remove one of them.")
        if (self.engine == "ray") != (self.num_shards is not None):
            raise ValueError("`engine` 'ray' needs `num_shards`, which other engines do not use.")
        if self.engine == "ray" and shards > 1:
            raise ValueError(f"`engine` 'ray' scores all shards, and `shard` is {self.shard}: remove one of them.")

    @property
    def shard_numbers(self) -> tuple[int, int]:
        """I and N of `shard`."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if found is None:
            raise ValueError(f"`shard` must be I/N, such as 0/8, got '{self.shard}'.")
        return int(found[1]), int(found[2])

    @property
    def shard_folder(self) -> str:
        """Folder of the scores: of the shard, or of all."""
        index, shards = self.shard_numbers
        if shards == 1:
            return self.output
        return f"{self.output.rstrip('/')}/{shard_name(index, shards)}"

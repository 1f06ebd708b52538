"""Settings of an evaluator and of the commands that use one; importable without torch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import override

from lightning_modules.models.loading.config import DType, LoadingOptions, ModelConfig, ServerConfig, is_served

if TYPE_CHECKING:
    from lightning_modules.functional.windows import ShortContext

KeyTokenRule = Literal["paper", "authors"]
"""How key tokens are transferred from the evaluator's tokens to the model's."""

MAX_ALTERNATIVES = 20
"""Limit of alternatives per token: at 128k tokens, each adds more than a megabyte to the page."""


def tokenizer_name(model: str, tokenizer: str | None, option: str) -> str:
    """Return the name of a model's tokenizer; raise a ``ValueError`` for a served model without ``option``."""
    if tokenizer is None and is_served(model):
        raise ValueError(f"'{model}' is a server, which gets token ids: set {option} to its model's tokenizer.")
    return tokenizer or model  # a model's folder has its tokenizer


@dataclass(frozen=True)
class ScoringConfig(LoadingOptions):
    """Definition of key tokens, and how the evaluator is loaded.

    Args:
        evaluator: Hub id, local folder or server of the long-context model that finds key tokens. Its tokenizer may
            differ from that of the evaluated model.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats; ``-inf`` drops this condition.
        cache_dir: Folder for the evaluator's scores; by default ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        server: Settings for requests to a served model.
    """

    evaluator: str
    context_length: int = 4096  # K of the paper, in the evaluator's tokens
    stride: int = 1024  # d of the paper: a short context has K to K + d - 1 tokens
    alpha: float = 2.0  # nats; the paper's value
    beta: float = -2.0  # nats; the paper's value
    cache_dir: str | None = None
    server: ServerConfig | None = None

    def __post_init__(self) -> None:
        # Here, because these modules import torch, which the command line's help does not need.
        from lightning_modules.functional.equations import check_thresholds
        from lightning_modules.functional.windows import ShortContext

        ShortContext(self.context_length, self.stride)  # checks them
        check_thresholds(self.alpha, self.beta)

    @property
    def short_context(self) -> "ShortContext":
        """K and d."""
        from lightning_modules.functional.windows import ShortContext

        return ShortContext(self.context_length, self.stride)

    @override
    def loading(self, name: str, **settings: Any) -> ModelConfig:
        return super().loading(name, server=self.server, **settings)


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(ScoringConfig):
    """Settings of an evaluator.

    Args:
        key_token_rule: How key tokens are mapped to the model's tokens: ``paper`` (unchanged for the same tokens, else
            by Equation 9), or ``authors``, exactly as the authors' package does, to compare with published numbers.
        tokenizer: Hub id or local folder of the evaluator's tokenizer; by default the evaluator's own.
        revision: Branch, tag or commit of the evaluator on the hub.
        add_special_tokens: Whether the evaluator's tokenizer adds special tokens, as in the authors' code.
        sharded: Shard the evaluator across all processes (FSDP2) instead of loading a full copy in each, for an
            evaluator that does not fit on a device next to the trained model. Works with every strategy.
    """

    key_token_rule: KeyTokenRule = "paper"
    tokenizer: str | None = None
    revision: str | None = None
    add_special_tokens: bool = True  # unlike those of an evaluated model
    sharded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_token_rule not in (rules := get_args(KeyTokenRule)):
            raise ValueError(f"`key_token_rule` must be one of {', '.join(rules)}, got {self.key_token_rule!r}.")


@dataclass(frozen=True, kw_only=True)
class CommandConfig(ScoringConfig):
    """Settings that `longce score` and `longce inspect` share, of the evaluator and of the evaluated model.

    Args:
        max_tokens: Maximum number of the evaluator's tokens of each document, so that all models get the same text; by
            default, documents are not cut.
        revision: Branch, tag or commit of the evaluated model on the hub.
        evaluator_revision: Branch, tag or commit of the evaluator on the hub.
        add_special_tokens: Whether the model's tokenizer adds special tokens; by default not, as in the authors' code.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds special tokens, as in the authors' code.
        device: Device such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, or the CPU.
        evaluator_tokenizer: Hub id or local folder of the evaluator's tokenizer; by default the evaluator's own.
        model_tokenizer: Hub id or local folder of the evaluated model's tokenizer; by default the model's own.
        context_extension: Extend the context of the evaluated model without training, or limit its attention: arguments
            of `lightning_modules.models.context_extension.methods.ContextExtension`, such as
            ``{method: yarn, original_length: 8192, target_length: 16384}``. `longce score` compares several.
    """

    max_tokens: int | None = None  # of the evaluator, for any evaluated model
    revision: str | None = None
    evaluator_revision: str | None = None
    add_special_tokens: bool = False  # the authors' code adds them for the evaluator only
    evaluator_add_special_tokens: bool = True
    device: str = "auto"
    evaluator_tokenizer: str | None = None
    model_tokenizer: str | None = None
    context_extension: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        from lightning_modules.functional.checks import check_count

        super().__post_init__()
        if self.max_tokens is not None:
            check_count("`max_tokens`", self.max_tokens)

    def model_loading(self, model: str) -> ModelConfig:
        """Return the settings to load the evaluated model."""
        return self.loading(model, revision=self.revision, context_extension=self.context_extension)

    def evaluator_config(self, key_token_rule: KeyTokenRule = "paper") -> EvaluatorConfig:
        """Return the settings of the evaluator."""
        # The fields of both; those of special tokens and tokenizer have other names here.
        shared = {each.name: getattr(self, each.name) for each in fields(ScoringConfig)}
        return EvaluatorConfig(
            **shared,
            key_token_rule=key_token_rule,
            revision=self.evaluator_revision,
            add_special_tokens=self.evaluator_add_special_tokens,
            tokenizer=self.evaluator_tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(CommandConfig):
    """Settings of `longce score`.

    Args:
        model: Hub id, local folder or server of the model to evaluate.
        key_token_rule: How key tokens are mapped to the model's tokens: ``paper`` (unchanged for the same tokens, else
            by Equation 9), or ``authors``, exactly as the authors' package does, to compare with published numbers.
        key_tokens_only: Skip the evaluator's short pass for tokens that cannot be key, because their long-context
            log-likelihood is at most ``beta``. The stored scores then cannot serve a lower ``beta`` or soft LongPPL.
        output: Parquet file for the records of all models: a row per document with its sums and identity.
    """

    model: str
    key_token_rule: KeyTokenRule = "paper"
    key_tokens_only: bool = False  # the stored scores then end at beta
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class InspectConfig(CommandConfig):
    """Settings of `longce inspect`; the page has sliders for alpha and beta.

    Args:
        model: Hub id or local folder of a model to evaluate on the key tokens; its tokenizer may differ.
        alternatives: Number of likeliest tokens to show at each position, given the long and the short context; 0 skips
            the evaluator's second pass over the text, and at least halves the size of the page.
    """

    model: str | None = None
    alternatives: int = 5  # per token and context

    def __post_init__(self) -> None:
        from lightning_modules.functional.checks import check_count

        super().__post_init__()
        check_count("`alternatives`", self.alternatives, minimum=0, maximum=MAX_ALTERNATIVES)
        if self.context_extension is not None and self.model is None:
            raise ValueError("`context_extension` is for the evaluated model: name one (`--model`).")
        if self.alternatives and is_served(self.evaluator):
            raise ValueError("A served evaluator does not rank other tokens: set `alternatives` to 0.")


@dataclass(frozen=True)
class InfluenceConfig:
    """Settings of `longce influence`.

    Args:
        evaluator: Hub id, local folder or server of the model that computes the token weights. Each process loads a
            full copy, or sends its sequences to the server.
        evaluator_tokenizer: Hub id or local folder of the evaluator's tokenizer; by default its own. If it differs from
            the tokenizer of the training data, the evaluator scores the text and weights are mapped by characters.
        evaluator_revision: Branch, tag or commit on the hub.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds special tokens to a text.
        evaluator_dtype: Type of the weights; ``auto`` is the stored type, or float32 on a CPU that is slow in that.
        evaluator_attn_implementation: The evaluator's attention, as in transformers.
        evaluator_model_config: Values that replace those of the evaluator's config, such as ``rope_parameters``.
        evaluator_trust_remote_code: Run code from the evaluator's repository; only for repositories that you trust.
        evaluator_server: Settings for requests to a served evaluator.
        output: Folder for the weights; by default `data.influence`, or a folder in the data module's cache.
    """

    evaluator: str
    evaluator_tokenizer: str | None = None
    evaluator_revision: str | None = None
    evaluator_add_special_tokens: bool = True  # only to texts: training sequences with the same ids stay as they are
    evaluator_dtype: DType = "auto"
    evaluator_attn_implementation: str = "auto"
    evaluator_model_config: dict[str, Any] | None = None
    evaluator_trust_remote_code: bool = False
    evaluator_server: ServerConfig | None = None
    output: str | None = None

    def loading(self) -> ModelConfig:
        """Return the settings to load the evaluator."""
        return ModelConfig(
            self.evaluator,
            self.evaluator_model_config,
            revision=self.evaluator_revision,
            dtype=self.evaluator_dtype,
            attn_implementation=self.evaluator_attn_implementation,
            trust_remote_code=self.evaluator_trust_remote_code,
            server=self.evaluator_server,
        )

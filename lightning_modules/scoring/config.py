"""Settings of an evaluator, and of the commands that evaluate texts by one; importable without torch."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from jsonargparse.typing import PositiveInt

from lightning_modules.models.config import DType, ModelConfig

Rule = Literal["paper", "authors"]
"""How key tokens come from the evaluator's tokens to the model's."""

MAX_ALTERNATIVES = 20
"""At 128k tokens each takes more than a megabyte of the page."""


@dataclass(frozen=True)
class JudgingConfig:
    """Which tokens an evaluator finds key, and how it is loaded.

    Args:
        evaluator: Hub id or local folder of a model with a long context; its tokenizer may be another one than that
            of the model that is judged.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        dtype: Type of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers; ``auto`` is flash attention where it is installed.
        cache_dir: Folder of the stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the model's repository; off unless you trust it.

    Raises:
        ValueError: If a number has no meaning.
    """

    evaluator: str
    context_length: PositiveInt = 4096
    stride: PositiveInt = 1024
    alpha: float = 2.0
    beta: float = -2.0
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    cache_dir: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        from lightning_modules.functional.influence import check_thresholds
        from lightning_modules.functional.windows import check_context

        check_context(self.context_length, self.stride)
        check_thresholds(self.alpha, self.beta)

    def loading(self, name: str, revision: str | None = None) -> ModelConfig:
        """Return how a model of this name is loaded."""
        return ModelConfig(
            name,
            revision=revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(JudgingConfig):
    """Settings of an evaluator.

    Args:
        key_tokens: How key tokens come from the evaluator's tokens to the model's: ``paper`` (the same tokens as they
            are, others by Equation 9), or ``authors``, exactly as their package does, for published numbers.
        tokenizer: Hub id or local folder of the evaluator's tokenizer; by default that of the evaluator.
        revision: Branch, tag or commit of the evaluator on the hub.
        add_special_tokens: Whether the evaluator's tokenizer adds its own, as in the paper's code.
        sharded: Divide the evaluator among all processes (FSDP2) instead of loading all of it in each: for one that
            does not fit on a device beside the model in training. Works with every strategy.

    Raises:
        ValueError: If the rule is unknown.
    """

    key_tokens: Rule = "paper"
    tokenizer: str | None = None
    revision: str | None = None
    add_special_tokens: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_tokens not in get_args(Rule):
            raise ValueError(f"`key_tokens` must be one of {', '.join(get_args(Rule))}, got {self.key_tokens!r}.")


@dataclass(frozen=True, kw_only=True)
class CommandConfig(JudgingConfig):
    """What `longce score` and `longce inspect` share: settings of an evaluator and of the model that it judges.

    Args:
        max_tokens: Tokens of each document to keep; all by default.
        add_special_tokens: Whether the model's tokenizer adds its own; off, as in the code of the paper's authors.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds its own; on, as in their code.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
    """

    max_tokens: PositiveInt | None = None
    add_special_tokens: bool = False
    evaluator_add_special_tokens: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        from lightning_modules.functional.checks import check_count

        super().__post_init__()
        if self.max_tokens is not None:
            check_count("`max_tokens`", self.max_tokens)

    def evaluator_config(self, key_tokens: Rule = "paper") -> EvaluatorConfig:
        """Return the settings of the evaluator."""
        shared = {each.name: getattr(self, each.name) for each in fields(JudgingConfig)}
        special = self.evaluator_add_special_tokens
        return EvaluatorConfig(**shared, key_tokens=key_tokens, add_special_tokens=special)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(CommandConfig):
    """Settings of `longce score`.

    Args:
        model: Hub id or local folder of the model to be judged.
        key_tokens: How key tokens come from the evaluator's tokens to the model's: ``paper`` (the same tokens as they
            are, others by Equation 9), or ``authors``, exactly as their package does, for published numbers.
        key_tokens_only: Spare the evaluator's short pass tokens that cannot be key because their long log-likelihood is
            at most ``beta``. Its stored scores then serve no lower ``beta``, and no soft influence, later.
        output: JSON file to write the result to.
    """

    model: str
    key_tokens: Rule = "paper"
    key_tokens_only: bool = False
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class InspectConfig(CommandConfig):
    """Settings of `longce inspect`; in the page alpha and beta can be moved.

    Args:
        model: Hub id or local folder of a model to be judged by the key tokens; any tokenizer.
        alternatives: How many of the likeliest tokens to show at each token, given the long and the short context; 0
            saves the evaluator's second pass over the text, and half or more of the size of the page.
    """

    model: str | None = None
    alternatives: int = 5

    def __post_init__(self) -> None:
        from lightning_modules.functional.checks import check_count

        super().__post_init__()
        check_count("`alternatives`", self.alternatives, minimum=0, maximum=MAX_ALTERNATIVES)


@dataclass(frozen=True)
class InfluenceConfig:
    """Settings of `longce influence`.

    Args:
        evaluator: Hub id or local folder of the model that weighs the tokens. Each process holds all of it.
        evaluator_tokenizer: Hub id or local folder of its tokenizer; by default that of the evaluator. With the
            tokenizer of the rows, tokens are scored as they are, else by way of the text.
        evaluator_revision: Branch, tag or commit on the hub.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds its own, where texts are scored.
        evaluator_dtype: Type of the evaluator's weights; ``auto`` keeps the stored one.
        evaluator_attn_implementation: The evaluator's attention, as in transformers.
        evaluator_model_config: Values that replace those of the evaluator's config, such as ``rope_parameters``.
        evaluator_trust_remote_code: Run code from the evaluator's repository; off unless you trust it.
        output: Folder of the weights; by default `data.influence`, or one in the data module's cache.
    """

    evaluator: str
    evaluator_tokenizer: str | None = None
    evaluator_revision: str | None = None
    evaluator_add_special_tokens: bool = True
    evaluator_dtype: DType = "auto"
    evaluator_attn_implementation: str = "auto"
    evaluator_model_config: dict[str, Any] | None = None
    evaluator_trust_remote_code: bool = False
    output: str | None = None

    def loading(self) -> ModelConfig:
        """Return how the evaluator is loaded."""
        return ModelConfig(
            self.evaluator,
            self.evaluator_model_config,
            revision=self.evaluator_revision,
            dtype=self.evaluator_dtype,
            attn_implementation=self.evaluator_attn_implementation,
            trust_remote_code=self.evaluator_trust_remote_code,
        )

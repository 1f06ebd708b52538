"""Settings of an evaluator, and of the commands that judge texts by one; importable without torch."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from jsonargparse.typing import PositiveInt

from lightning_modules.models.config import DType, ModelConfig

Rule = Literal["paper", "authors"]
"""How key tokens come from the evaluator's tokens to the model's."""

MOST_ALTERNATIVES = 20
"""At 128k tokens each takes more than a megabyte of the page, and nobody reads so many."""


@dataclass(frozen=True)
class EvaluatorConfig:
    """An evaluator, how it scores texts, and which of their tokens are key.

    Args:
        evaluator: Hub id or local folder of a model with a long context; its tokenizer may be another one than that
            of the model that is judged.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        key_tokens: How key tokens come from the evaluator's tokens to the model's: ``paper`` (the same tokens as they
            are, others by Equation 9), or ``authors``, exactly as their package does, for published numbers.
        tokenizer: Hub id or local folder of the evaluator's tokenizer; by default that of the evaluator.
        revision: Branch, tag or commit of the evaluator on the hub.
        add_special_tokens: Whether the evaluator's tokenizer adds its own, as in the paper's code.
        dtype: Of the evaluator's weights; ``auto`` keeps the stored one.
        attn_implementation: Of the evaluator, as in transformers.
        cache_dir: Folder of the stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the evaluator's repository; off unless you trust it.
        sharded: Divide the evaluator among all processes (FSDP2) instead of loading all of it in each: for one that
            does not fit on a device beside the model in training. Works with every strategy.

    Raises:
        ValueError: If a number or the rule has no meaning.
    """

    evaluator: str
    context_length: PositiveInt = 4096
    stride: PositiveInt = 1024
    alpha: float = 2.0
    beta: float = -2.0
    key_tokens: Rule = "paper"
    tokenizer: str | None = None
    revision: str | None = None
    add_special_tokens: bool = True
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    cache_dir: str | None = None
    trust_remote_code: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        from lightning_modules.functional.influence import check_thresholds
        from lightning_modules.functional.windows import check_context

        check_context(self.context_length, self.stride)
        check_thresholds(self.alpha, self.beta)
        if self.key_tokens not in get_args(Rule):
            raise ValueError(f"`key_tokens` must be one of {', '.join(get_args(Rule))}, got {self.key_tokens!r}.")

    def model_config(self) -> ModelConfig:
        """Return how the evaluator is loaded."""
        return ModelConfig(
            self.evaluator,
            revision=self.revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True, kw_only=True)
class JudgingConfig:
    """What `ScoreConfig` and `InspectConfig` share.

    Args:
        evaluator: Hub id or local folder of the model that picks the key tokens; any tokenizer.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        max_tokens: Tokens of each document to keep; all by default.
        add_special_tokens: Whether the model's tokenizer adds its own; off, as in the code of the paper's authors.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds its own; on, as in their code.
        dtype: Of the weights of both; ``auto`` keeps the stored one.
        attn_implementation: Of both, as in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
        cache_dir: Folder of the evaluator's stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the models' repositories; off unless you trust it.
    """

    evaluator: str
    context_length: PositiveInt = 4096
    stride: PositiveInt = 1024
    alpha: float = 2.0
    beta: float = -2.0
    max_tokens: PositiveInt | None = None
    add_special_tokens: bool = False
    evaluator_add_special_tokens: bool = True
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    device: str = "auto"
    cache_dir: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        from lightning_modules.functional.checks import check_count

        self.evaluator_config()  # which checks what they share
        if self.max_tokens is not None:
            check_count("`max_tokens`", self.max_tokens)

    def evaluator_config(self) -> EvaluatorConfig:
        """Return the settings of the evaluator."""
        return EvaluatorConfig(
            self.evaluator,
            self.context_length,
            self.stride,
            self.alpha,
            self.beta,
            getattr(self, "key_tokens", "paper"),
            add_special_tokens=self.evaluator_add_special_tokens,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            cache_dir=self.cache_dir,
            trust_remote_code=self.trust_remote_code,
        )

    def model_config(self, model: str) -> ModelConfig:
        """Return how the model that is judged is loaded."""
        return replace(self.evaluator_config().model_config(), pretrained_model_name_or_path=model)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(JudgingConfig):
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
class InspectConfig(JudgingConfig):
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
        check_count("`alternatives`", self.alternatives, least=0, most=MOST_ALTERNATIVES)

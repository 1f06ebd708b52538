"""Read what ``longce reproduce miniature`` trains and measures, declared in its config before anything is trained."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jsonargparse
import yaml
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.functional.influence import check_gamma, check_thresholds
from lightning_modules.functional.windows import check_context
from lightning_modules.utilities.user_modules import import_object

CONFIG = Path(__file__).parents[3] / "configs" / "reproduce" / "miniature.yaml"


@dataclass(frozen=True)
class Training:
    """One training run.

    Args:
        sequence_length: Tokens per sequence.
        rope_theta: RoPE base.
        slot: Mean number of words from one event to the next.
        steps: Optimizer steps, at most.
        batch_size: Sequences per step.
        lr: Learning rate, constant after the warm-up.
        warmup: Warm-up steps.
        second_dialect: Fraction of the documents in the second dialect.
        document_rows: Sequences that a document fills.
        stop_at: Fraction of right answers at the training length that ends the run; null for all steps.
        check_every: Steps between two checks of that fraction.
    """

    sequence_length: PositiveInt
    rope_theta: PositiveFloat
    slot: PositiveInt
    steps: PositiveInt
    batch_size: PositiveInt
    lr: PositiveFloat
    warmup: PositiveInt = 1
    second_dialect: float = 0.0
    document_rows: PositiveInt = 1
    stop_at: float | None = None
    check_every: PositiveInt = 50


@dataclass(frozen=True)
class Length:
    """Training length of some models of the family, and their RoPE base."""

    sequence_length: PositiveInt
    rope_theta: PositiveFloat


@dataclass(frozen=True)
class Family:
    """Models that differ in local quality and in range; all combinations are trained.

    Args:
        second_dialect: Fractions of training documents in the dialect that is not evaluated.
        lengths: Training lengths.
        extensions: RoPE bases with which the models of the shortest sequences are also measured, untrained.
    """

    second_dialect: tuple[float, ...]
    lengths: tuple[Length, ...]
    extensions: tuple[PositiveFloat, ...] = ()


@dataclass(frozen=True)
class Objectives:
    """Runs that compare CE and LongCE on the same sequences.

    Args:
        seeds: Data seeds; both objectives see the same sequences.
        steps: Steps at which models are measured.
        cross_entropy_steps: Further steps at which CE is measured: it trains until it has used as much compute.
        learning_rates: Rates of which each objective gets its best, by accuracy at the last of ``steps``; by default
            both have that of ``fine_tuning``.
        tuning_seed: Data seed with which they are tried, from the first base model.
    """

    seeds: tuple[NonNegativeInt, ...]
    steps: tuple[PositiveInt, ...]
    cross_entropy_steps: tuple[PositiveInt, ...] = ()
    learning_rates: tuple[PositiveFloat, ...] = ()
    tuning_seed: NonNegativeInt = 9


@dataclass(frozen=True)
class Windows:
    """Short contexts of a LongCE run."""

    context_length: PositiveInt
    stride: PositiveInt


@dataclass(frozen=True)
class Evaluation:
    """Documents and questions that every model is measured on.

    Args:
        documents: Documents of the longest training length.
        questions: Questions of that length, and of the length of the base model.
        depths: Parts of equal length of the document, by which the positions of the facts are spread.
        contexts: Numbers of preceding tokens, for the loss by context.
    """

    documents: PositiveInt
    questions: PositiveInt
    depths: PositiveInt
    contexts: tuple[PositiveInt, ...]


@dataclass(frozen=True)
class Miniature:
    """The whole reproduction; see ``configs/reproduce/miniature.yaml``.

    Raises:
        ValueError: If settings contradict each other.
    """

    corpus: str
    model: dict[str, Any]
    base: Training
    evaluator: Training
    fine_tuning: Training
    family: Family
    objectives: Objectives
    evaluation: Evaluation
    corpus_arguments: dict[str, Any] = field(default_factory=dict)
    context_length: PositiveInt = 64
    stride: PositiveInt = 64
    windows: tuple[Windows, ...] = ()
    alphas: tuple[float, ...] = (2.0,)
    betas: tuple[float, ...] = (-2.0,)
    alpha: float = 2.0
    beta: float = -2.0
    gamma: float = 5.0

    def __post_init__(self) -> None:
        self._check_values()
        length = self.fine_tuning.sequence_length
        check_context(self.context_length, self.stride, length)
        for windows in self.windows:
            check_context(windows.context_length, windows.stride, length)
        if max(self.evaluation.contexts, default=0) >= length:
            raise ValueError(
                f"`evaluation.contexts` must be below the {length} tokens of a row, got {self.evaluation.contexts}."
            )
        longest = max(self.evaluator.sequence_length, *(part.sequence_length for part in self.family.lengths))
        if longest > length:
            raise ValueError(
                f"Documents have the {length} tokens of `fine_tuning.sequence_length`, and other rows {longest}:"
                " raise it, or shorten those."
            )

    def _check_values(self) -> None:
        """Check values that would otherwise be refused, or missed, only after training."""
        check_gamma(self.gamma)
        for alpha, beta in ((self.alpha, self.beta), *itertools.product(self.alphas, self.betas)):
            check_thresholds(alpha, beta)
        needed = {
            "family.second_dialect": self.family.second_dialect,
            "family.lengths": self.family.lengths,
            "objectives.seeds": self.objectives.seeds,
            "objectives.steps": self.objectives.steps,
            "evaluation.contexts": self.evaluation.contexts,
            "alphas": self.alphas,
            "betas": self.betas,
        }
        for name, values in needed.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"`{name}` must have at least one value, and none twice, got {list(values)}.")

    @property
    def shortest(self) -> Length:
        """Shortest training length of the family."""
        return min(self.family.lengths, key=lambda length: length.sequence_length)

    def load_corpus(self) -> Any:
        """Make the corpus, such as `benchmarks.reproduction.miniature.recall_corpus.RecallCorpus`.

        Raises:
            ValueError: If the class does not exist, or does not accept the arguments.
        """
        try:
            return import_object(self.corpus)(**self.corpus_arguments)
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(
                f"`corpus` must name a class that takes `text` and `corpus_arguments`, got '{self.corpus}' and"
                f" {self.corpus_arguments}: {error}."
            ) from error


def read_settings(config: str | Path | None = None, text: str | None = None) -> Miniature:
    """Read the declared experiments.

    Args:
        config: YAML file with the arguments of `Miniature`; by default that of the checkout.
        text: The argument ``text`` of the corpus.

    Raises:
        ValueError: If the file does not exist, or declares something that cannot be run.
    """
    path = Path(config or CONFIG)
    if not path.is_file():
        raise ValueError(f"No file '{path}': run `longce` from a checkout, or name a config by `--config`.")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Miniature, "miniature")
    try:
        parsed = parser.parse_object({"miniature": yaml.safe_load(path.read_text(encoding="utf-8"))})
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"'{path}': {error}") from error
    settings = cast(Miniature, parser.instantiate(parsed).miniature)
    arguments = settings.corpus_arguments | ({} if text is None else {"text": text})
    return replace(settings, corpus_arguments=arguments)

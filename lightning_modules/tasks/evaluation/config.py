"""Settings of `longce evaluate`; importable without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.models.loading.config import LoadingOptions, ServerConfig
from lightning_modules.tasks.sampling import parse_gen_kwargs

if TYPE_CHECKING:
    from lightning_modules.functional.windows import ShortContext

Mode = Literal["generate", "teacher_forced", "key_tokens"]
"""Whether the model generates its answer, or gets the right answer token by token in a single pass.

With ``key_tokens`` it gets the right answer in long and short contexts, as an evaluator of LongPPL does.
"""

Depths = int | Sequence[float] | None
"""Depths of answers: a number of evenly spaced depths, a list of depths, or None for each task's random choice."""

Truncation = Literal["middle", "left"]
"""Side that is cut from long prompts: LongBench keeps both ends, lm-evaluation-harness keeps the last tokens."""

SOURCES = ("haystack", "squad", "hotpot", "nq_open")
"""Options for the texts from which questions are generated."""

_LONGCE_OPTIONS = (*SOURCES, "depths", "documents", "seed")
_HARNESS_OPTIONS = (
    *("include_path", "num_fewshot", "fewshot_as_multiturn", "limit", "max_length", "truncation"),
    "log_samples",
)
"""Options that only longce's or only the harness's tasks read, with the same defaults in command and callback."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Settings of an evaluation on long-context tasks and tasks of lm-evaluation-harness.

    Args:
        tasks: Names of tasks or groups (``ruler``, ``longeval``, ``lost_in_the_middle``, ..), RULER's tasks with
            options (``vt(hops=8,chains=2)``), import paths of your own task classes, and for lm-evaluation-harness
            names of its tasks and groups, task files (YAML; they may run code from their folder), and the sets
            ``short`` (MMLU, ARC-C, RACE, BBH, TruthfulQA, CommonsenseQA) and ``longbench`` (its 16 English tasks).
        lengths: Lengths of prompt and answer together, in tokens.
        samples: Questions per task and length, and per depth if depths are given.
        depths: Number of evenly spaced answer depths, or a list of depths, from 0 (front) to 1 (end); by default each
            task chooses them at random.
        mode: ``generate``: the model generates its answer; ``teacher_forced``: it gets the right answer token by
            token, which takes a single pass and also gives perplexities; ``key_tokens``: the same, and also in short
            contexts, to measure how well the model, as an evaluator, separates answer tokens from the other tokens of
            the right response.
        haystack: Folder of text files to hide needles in; synthetic prose by default.
        squad: Local SQuAD file, for ``qa_1``.
        hotpot: Local HotpotQA file, for ``qa_2``.
        nq_open: Local file of *Lost in the Middle*, for ``multi_document_qa``; synthetic questions by default.
        documents: Number of passages of ``multi_document_qa``; by default the largest number that fits in the length.
        seed: Random seed of the questions.
        chat_template: Whether to wrap prompts in the tokenizer's chat template (lm-eval's ``--apply_chat_template``).
        system_instruction: Text of the system's turn; without a chat template it precedes the prompt.
        fewshot_as_multiturn: Whether few-shot examples of harness tasks are turns of a chat; by default with a chat
            template.
        gen_kwargs: Arguments of generation, such as ``temperature=0.8,top_p=0.95,top_k=50,seed=1,max_gen_toks=64``;
            they replace those of each task. Greedy by default.
        add_special_tokens: Whether the tokenizer adds special tokens before prompts without a chat template.
        include_path: Folder of additional harness tasks, which take precedence over those of the harness.
        num_fewshot: Number of few-shot examples of harness tasks; by default as each task specifies.
        limit: Number of questions per harness task, or a fraction below 1; all by default.
        max_length: Maximum length of prompt and answer in the harness, in tokens; by default from the model's config.
        truncation: Where long harness prompts lose tokens: in the ``middle``, as in LongBench, or at the ``left``, as
            in the harness.

    Raises:
        ValueError: If `tasks` or `lengths` is empty, or options contradict each other.
    """

    tasks: Sequence[str] = ("ruler_synthetic",)
    lengths: Sequence[PositiveInt] = (4096,)
    samples: PositiveInt = 20
    depths: Depths = None
    mode: Mode = "generate"
    haystack: str | None = None
    squad: str | None = None
    hotpot: str | None = None
    nq_open: str | None = None
    documents: PositiveInt | None = None
    seed: int = 0
    chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: str | dict[str, Any] | None = None
    add_special_tokens: bool = True
    include_path: str | None = None
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveFloat | None = None
    max_length: PositiveInt | None = None
    truncation: Truncation = "middle"

    def __post_init__(self) -> None:
        for name in ("tasks", "lengths"):
            value = getattr(self, name)
            if isinstance(value, str) or not value:
                raise ValueError(f"`{name}` must be a non-empty list, got {value!r}.")
        if self.fewshot_as_multiturn and not self.chat_template:
            raise ValueError("`fewshot_as_multiturn` needs turns: add `chat_template`, or remove it.")
        parse_gen_kwargs(self.gen_kwargs)

    @property
    def generation(self) -> dict[str, Any]:
        """Arguments of generation by name."""
        return parse_gen_kwargs(self.gen_kwargs)

    @property
    def as_multiturn(self) -> bool:
        """Whether few-shot examples are turns of a chat."""
        return self.chat_template if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn

    @property
    def sources(self) -> dict[str, str | None]:
        """Texts from which questions are made, by option."""
        return {name: getattr(self, name) for name in SOURCES}

    @property
    def prompting(self) -> dict[str, Any]:
        """Arguments of `Prompter`."""
        names = ("chat_template", "add_special_tokens", "system_instruction")
        return {name: getattr(self, name) for name in names}

    def check_used(self, ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Refuse options that none of the tasks reads: `ours` are longce's, `theirs` those of lm-evaluation-harness."""
        if theirs and self.mode == "key_tokens":
            raise ValueError(
                "`mode` 'key_tokens' must know the answer tokens, which tasks of lm-evaluation-harness do not mark:"
                f" remove {', '.join(theirs)}, or choose another mode."
            )
        unused: list[str] = []
        if not ours:
            unused += _LONGCE_OPTIONS
        if not theirs:
            unused += _HARNESS_OPTIONS
        given = self._list_changed(unused)
        if ours and self.generation and (self.mode != "generate" or "until" in self.generation):
            given.append("`gen_kwargs`")
        if given:
            raise ValueError(f"None of these `tasks` reads {', '.join(given)}: {', '.join(self.tasks)}. Remove it.")

    def _list_changed(self, options: Sequence[str]) -> list[str]:
        """Return those of the options that differ from their default, in backticks."""
        changed = []
        for each in fields(self):
            is_changed = getattr(self, each.name) != each.default
            if is_changed and each.name in options:
                changed.append(f"`{each.name}`")
        return changed


@dataclass(frozen=True)
class EvaluationConfig(TaskConfig, LoadingOptions):
    """Settings of `longce evaluate`.

    Args:
        model: Hub id or local folder; for teacher-forced questions also the addresses of servers.
        output: Folder for the results and the report; results already there are reused.
        revision: Branch, tag or commit of the model on the hub.
        tokenizer: Hub id or local folder of the tokenizer; by default the model's. A served model needs it.
        server: Settings for requests to a served model.
        device: Device such as ``cuda:0`` or ``cpu``; ``auto`` is the GPU of this process, or the CPU.
        log_samples: Keep the questions and answers of harness tasks.
        context_extension: Extend the model's context without training: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`. Several are compared.
        context_length: Length K of the shortest short context, in tokens, for the mode ``key_tokens``.
        stride: Number d of tokens that share one short window, for the mode ``key_tokens``.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats, for the mode ``key_tokens``.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats, for the mode ``key_tokens``.
    """

    model: str
    output: str
    revision: str | None = None
    tokenizer: str | None = None
    server: ServerConfig | None = None
    device: str = "auto"
    log_samples: bool = False
    context_extension: dict[str, Any] | None = None
    context_length: int = 4096  # K, d and thresholds of the paper
    stride: int = 1024
    alpha: float = 2.0
    beta: float = -2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "key_tokens":
            # Here, because it imports torch, which the command line's help does not need.
            from lightning_modules.functional.equations import check_thresholds

            check_thresholds(self.alpha, self.beta)
            self.make_short_context().check_sequence(min(self.lengths))
            return
        given = self._list_changed(("context_length", "stride", "alpha", "beta"))
        if given:
            raise ValueError(f"Only the mode 'key_tokens' reads {', '.join(given)}, and this is '{self.mode}'.")

    def make_short_context(self) -> "ShortContext":
        """Return K and d."""
        from lightning_modules.functional.windows import ShortContext

        return ShortContext(self.context_length, self.stride)

    @property
    def output_folder(self) -> Path:
        """Folder for the results, with ``~`` expanded."""
        return Path(self.output).expanduser()

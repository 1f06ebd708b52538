"""The class of lm-evaluation-harness for Hugging Face models, around a backbone that may be training."""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.functional import greedy_targets
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, no_autocast_cache
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.sampling import generation_options
from lightning_modules.tasks.teacher_forcing import group_rows, padded_rows
from lightning_modules.utilities.collectives import gathered, rank_and_size

Answer = TypeVar("Answer")
Request = tuple[tuple[str, str], list[int], list[int]]
"""Texts, and the tokens of the context and of its continuation."""


class _Model(NamedTuple):
    """Part of a model that `HFLM` may see: it would tie a module's weights again, and leave it in eval mode."""

    config: PretrainedConfig
    device: torch.device


class HarnessModel(HFLM):
    """`HFLM` for a model in training, with special tokens where they belong, and requests split among processes.

    Differences from `HFLM`: the tokenizer's special tokens never follow a text, and precede it once; long prompts lose
    their middle; the logits of a whole text are never stored at once. The harness sees a single process, but each
    process answers a part of the requests and gets all answers. ``truncated`` counts the prompts that lost tokens.
    """

    def __init__(self, backbone: Backbone, tokenizer: PreTrainedTokenizerFast, config: TaskConfig) -> None:
        model = _Model(backbone.base_model.config, backbone.device)
        # A copy, because `HFLM` sets a pad token.
        super().__init__(model, tokenizer=copy.deepcopy(tokenizer), backend="causal", max_length=config.max_length)
        self.backbone = backbone
        self.task_config = config
        self.truncated = 0
        self._repeats: Counter[tuple[int, ...]] = Counter()
        if self.prefix_token_id is None:
            raise ValueError(
                f"The tokenizer '{tokenizer.name_or_path}' has neither a BOS nor an EOS token, one of which a text"
                " without context follows in the harness: set `bos_token` in its tokenizer_config.json."
            )

    @property
    @override
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template has already added them
            has_prefix = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = self.task_config.add_special_tokens and not has_prefix
        return encode_text(string, self.tokenizer, add_special_tokens=add_special_tokens).ids

    @override
    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        (prompt,) = strings  # one at a time: nothing is padded
        assert left_truncate_len is not None
        ids = torch.tensor([self._truncate_prompt(self.tok_encode(prompt), left_truncate_len)])
        return ids, torch.ones_like(ids)

    def _truncate_prompt(self, prompt: list[int], length: int) -> list[int]:
        """Truncate a prompt to ``length`` tokens; an empty one becomes the prefix token."""
        if len(prompt) <= length:
            return prompt or [self.prefix_token_id]
        self.truncated += 1
        front = length // 2 if self.task_config.truncation == "middle" else 0
        return prompt[:front] + prompt[len(prompt) - (length - front) :]

    @override
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations in nats, and whether greedy decoding would have chosen them."""
        return self._split(super().loglikelihood, requests)

    @override
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts in nats, scored in disjoint windows of maximum length."""
        return self._split(self._score_texts, requests)

    @override
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to the first stop sequence, without special tokens; greedy unless a task samples."""
        for request in requests:
            tokens = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if tokens >= self.max_length:
                raise ValueError(
                    f"A task generates {tokens} tokens, which leaves no room for the prompt in `max_length` ="
                    f" {self.max_length}: remove the task, or use a model with a longer context."
                )
        self._repeats.clear()
        return self._split(super().generate_until, requests)

    def _split(self, answer: Callable[..., list[Answer]], requests: list[Instance]) -> list[Answer]:
        """Answer the requests of this process, and return those of all processes."""
        rank, processes = rank_and_size()
        # Requests with one context stay together: choices share a row, and samples of one prompt are counted.
        contexts: dict[str, int] = {}
        owners = [contexts.setdefault(request.args[0], len(contexts)) % processes for request in requests]
        own = [request for request, owner in zip(requests, owners, strict=True) if owner == rank]
        before = self.truncated
        with lockstep(self.backbone):
            answers = answer(own, disable_tqdm=True) if own else []
        digest = hashlib.sha256(repr([request.args for request in requests]).encode()).hexdigest()
        digests, all_answers, truncated = zip(*gathered((digest, answers, self.truncated - before)), strict=True)
        if len(set(digests)) > 1:
            raise ValueError(
                "Processes have loaded different questions of the same task: its data differs between machines, or its"
                " code draws questions without a seed. Use the same data on all machines."
            )
        self.truncated = before + sum(truncated)
        of_rank = list(map(iter, all_answers))
        return [next(of_rank[owner]) for owner in owners]

    def _score_texts(self, requests: list[Instance], disable_tqdm: bool) -> list[float]:
        windows: list[Request] = []
        window_texts: list[int] = []  # the text of each window
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            if tokens[:1] == [self.prefix_token_id]:  # which is given apart
                tokens = tokens[1:]
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((("", ""), *make_disjoint_window(window)))
                window_texts.append(number)
        totals = [0.0] * len(requests)
        for number, (log_likelihood, _) in zip(window_texts, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += log_likelihood
        return totals

    @override
    def _loglikelihood_tokens(self, requests: list[Request], **options: Any) -> list[tuple[float, bool]]:
        """Score continuations; those that differ only in their last token (the choices of a question) share a row."""
        backbone = self.backbone
        rows: dict[tuple[int, ...], list[int]] = {}
        starts: list[int] = []
        for index, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"A task scores a continuation of {len(continuation)} tokens, more than `max_length` ="
                    f" {self.max_length}: remove the task, or use a model with a longer context."
                )
            # The last token is predicted, but is not part of the input.
            context = self._truncate_prompt(context, self.max_length + 1 - len(continuation))
            starts.append(len(context))
            rows.setdefault((*context, *continuation[:-1]), []).append(index)
        texts = list(rows)
        lengths = list(map(len, texts))
        found: dict[int, tuple[float, bool]] = {}
        with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), lockstep(backbone) as run:
            for group in group_rows(lengths, backbone.tokens_per_pass, backbone):
                group_texts = [texts[number] for number in group]
                members: list[int] = []
                asked: list[_Continuation] = []
                for row, text in enumerate(group_texts):
                    for index in rows[text]:
                        members.append(index)
                        asked.append(_Continuation(row, starts[index], requests[index][2]))
                score = partial(_score_pass, backbone, group_texts, asked)
                log_likelihoods, is_likeliest = run(backbone.unsharded, score)
                sizes = [len(continuation.tokens) for continuation in asked]
                parts = zip(members, log_likelihoods.split(sizes), is_likeliest.split(sizes), strict=True)
                for index, values, likeliest in parts:
                    found[index] = (math.fsum(values.tolist()), bool(likeliest.all()))
        return [found[index] for index in range(len(requests))]

    @override
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], seed: int = 0, **arguments: Any
    ) -> Tensor:
        prompt = context[0].tolist()
        arguments.pop("attention_mask")
        repeat = self._repeats[tuple(prompt)]
        self._repeats[tuple(prompt)] += 1
        (new,) = generate(
            self.backbone,
            [prompt],
            max_length - len(prompt),
            end_tokens=[self.eot_token_id],  # the model's own config may name another token
            stopping=stop_sequences_criteria(self.tokenizer, stop, len(prompt), 1),
            options=generation_options(arguments),
            seed=(seed, repeat),
        )
        return torch.tensor([[*prompt, *new]])


class _Continuation(NamedTuple):
    """Tokens that continue the text of a row, and where in the row they start."""

    row: int
    start: int
    tokens: list[int]


def _score_pass(
    backbone: Backbone, texts: Sequence[Sequence[int]], asked: Sequence[_Continuation]
) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` log-likelihoods of the continuations' tokens, and whether each is the largest."""
    batch = padded_rows(texts, backbone.device)
    backbone.check_batch(batch)
    hidden_states = backbone.hidden_states(batch)
    predicting: list[Tensor] = []
    tokens: list[int] = []
    for continuation in asked:
        first = continuation.start - 1  # the preceding position predicts a token
        predicting.append(hidden_states[continuation.row, first : first + len(continuation.tokens)])
        tokens += continuation.tokens
    targets = torch.tensor(tokens, dtype=torch.int64, device=backbone.device)
    log_likelihoods, is_likeliest = greedy_targets(torch.cat(predicting), backbone.head, targets)
    return log_likelihoods.cpu(), is_likeliest.cpu()

"""Model interface for lm-evaluation-harness."""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.functional import greedy_targets
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, no_autocast_cache
from lightning_modules.models.tokenization.chat_templates import render_chat
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.sampling import make_samplers, read_sampling
from lightning_modules.tasks.teacher_forcing import group_rows, padded_rows
from lightning_modules.utilities.collectives import gathered, rank_and_size

DEFAULT_MAX_LENGTH = 2048  # tokens of a model whose config does not limit them
TOKENS_PER_PASS = 16_384  # of a pass that scores continuations, including padding

Answer = TypeVar("Answer")


class Continuation(NamedTuple):
    """Token ids to be scored, and their context of at least one token."""

    context: Sequence[int]
    tokens: Sequence[int]


class ContinuationScore(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether each of its tokens is the likeliest."""

    log_likelihood: float
    is_greedy: bool


class HarnessModel(TemplateLM):
    """Model that answers the three kinds of requests of lm-evaluation-harness with a backbone and its tokenizer.

    The answers are those of the harness's class for Hugging Face models (``HFLM``), with these differences: the logits
    of a whole text never exist, passes are filled by number of tokens, long prompts lose their middle, and questions
    are split among processes. The harness sees a single process, and every process gets all answers. ``truncated``
    counts the prompts that lost tokens.
    """

    def __init__(self, backbone: Backbone, tokenizer: PreTrainedTokenizerFast, config: TaskConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.task_config = config
        self.truncated = 0
        trained = backbone.base_model.config.get_text_config(decoder=True)
        self.max_length = config.max_length or getattr(trained, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH

    @property
    @override
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.tokenizer.eos_token_id is None else int(self.tokenizer.eos_token_id)

    @property
    @override
    def prefix_token_id(self) -> int:
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ValueError(
            f"The tokenizer '{self.tokenizer.name_or_path}' has neither a BOS nor an EOS token, one of which a text"
            " without context follows in the harness: set `bos_token` in its tokenizer_config.json."
        )

    @property
    @override
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @override
    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template has already added them
            has_prefix = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
            add_special_tokens = self.task_config.add_special_tokens and not has_prefix
        return encode_text(string, self.tokenizer, add_special_tokens=add_special_tokens).ids

    @override
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations in nats, and whether greedy decoding would have chosen them."""
        _check_same(requests)
        return list(super().loglikelihood(requests, disable_tqdm=True))

    @override
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # The last token is predicted, but is not part of the input.
        asked = [
            Continuation(self._truncate_prompt(context, self.max_length + 1 - len(tokens)), tokens)
            for _, context, tokens in requests
        ]
        return [(score.log_likelihood, score.is_greedy) for score in score_continuations(self.backbone, asked)]

    @override
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts in nats, scored in disjoint windows of maximum length."""
        _check_same(requests)
        windows: list[Continuation] = []
        window_texts: list[int] = []  # the text of each window
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)  # the prefix is given apart
            if tokens[:1] == [self.prefix_token_id]:
                tokens = tokens[1:]
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append(Continuation(*make_disjoint_window(window)))
                window_texts.append(number)
        totals = [0.0] * len(requests)
        for number, score in zip(window_texts, score_continuations(self.backbone, windows), strict=True):
            totals[number] += score.log_likelihood
        return totals

    @override
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to the first stop sequence, without special tokens; greedy unless a task samples."""
        _check_same(requests)
        arguments = [normalize_gen_kwargs(request.args[1], 256) for request in requests]
        limits = [int(each["max_gen_toks"]) for each in arguments]
        prompts = [
            self._truncate_prompt(self.tok_encode(request.args[0]), self.max_length - limit)
            for request, limit in zip(requests, limits, strict=True)
        ]
        samplers = make_samplers([read_sampling(request.args[1]) for request in requests], prompts)
        order = sorted(range(len(requests)), key=lambda index: len(prompts[index]))[own_slice()]
        stops = [[stop for stop in each["until"] if stop] for each in arguments]
        tokens = generate(
            self.backbone,
            [prompts[index] for index in order],
            [limits[index] for index in order],
            stopped=lambda number, continuation: self._has_stopped(continuation, stops[order[number]]),
            samplers=None if samplers is None else [samplers[index] for index in order],
        )
        decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        found = {}
        for index, text in zip(order, decoded, strict=True):
            found[index] = postprocess_generated_text(text, stops[index], None)
        texts = merge_answers(found)
        return [texts[index] for index in range(len(requests))]

    def _has_stopped(self, tokens: list[int], stops: Sequence[str]) -> bool:
        """Return whether the newest token is the end token or completes a stop sequence."""
        if tokens[-1] == self.tokenizer.eos_token_id:  # the model's own config may name another token
            return True
        longest = max((len(stop) for stop in stops), default=0)
        # Every token has at least one byte, and every character at most 4.
        end = str(self.tokenizer.decode(tokens[-(4 * longest + 4) :], skip_special_tokens=True)) if longest else ""
        return any(stop in end for stop in stops)

    def _truncate_prompt(self, prompt: list[int], length: int) -> list[int]:
        """Truncate a prompt to ``length`` tokens; raise a ``ValueError`` if that leaves none.

        An empty prompt becomes the prefix token, because a model needs at least one token.
        """
        if length < 1:
            raise ValueError(
                f"A task generates {self.max_length - length} tokens, which leaves no room for the prompt in"
                f" `max_length` = {self.max_length}: remove the task, or use a model with a longer context."
            )
        if len(prompt) <= length:
            return prompt or [self.prefix_token_id]
        self.truncated += 1
        front = length // 2 if self.task_config.truncation == "middle" else 0
        return prompt[:front] + prompt[len(prompt) - (length - front) :]


def _check_same(requests: Sequence[Instance]) -> None:
    """Raise a ``ValueError`` if processes do not have the same questions."""
    digest = hashlib.sha256("\0".join(repr(request.args) for request in requests).encode()).hexdigest()
    if len(set(gathered(digest))) > 1:
        raise ValueError(
            "Processes have loaded different questions of the same task: its data differs between machines, or its code"
            " draws questions without a seed. Use the same data on all machines."
        )


def score_continuations(
    backbone: Backbone, continuations: Sequence[Continuation], *, batch_tokens: int = TOKENS_PER_PASS
) -> list[ContinuationScore]:
    """Score continuations. Logits exist only at the positions that predict them, one chunk at a time.

    Continuations that differ only in their last token (the choices of a question) share a row. Passes are split among
    processes, and each process returns all scores, so all must ask for the same ones. A pass has at most
    ``batch_tokens`` tokens including padding; a longer text has its own pass. An empty continuation has log-likelihood
    0 and is greedy.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, tokens) in enumerate(continuations):
        if len(tokens):
            rows.setdefault((*context, *tokens[:-1]), []).append(index)  # the last token is only predicted
    texts = list(rows)
    found: dict[int, ContinuationScore] = {}
    with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), lockstep(backbone) as run:
        for group in group_rows([len(text) for text in texts], batch_tokens, backbone)[own_slice()]:
            batch = [texts[row] for row in group]
            members = [(row, index) for row, text in enumerate(batch) for index in rows[text]]
            asked = [(row, continuations[index]) for row, index in members]
            log_likelihoods, is_likeliest = run(backbone.unsharded, partial(_score_pass, backbone, batch, asked))
            start = 0
            for _, index in members:
                own = slice(start, start + len(continuations[index].tokens))
                total = math.fsum(log_likelihoods[own].tolist())
                found[index] = ContinuationScore(total, bool(is_likeliest[own].all()))
                start = own.stop
    found = merge_answers(found)
    return [found.get(index, ContinuationScore(0.0, True)) for index in range(len(continuations))]


def merge_answers(found: dict[int, Answer]) -> dict[int, Answer]:
    """Return the answers of all processes; all of them must call this."""
    return {index: answer for of_rank in gathered(found) for index, answer in of_rank.items()}


def own_slice() -> slice:
    """Return the slice of this process in a list of work that all processes have."""
    rank, processes = rank_and_size()
    return slice(rank, None, processes)


def _score_pass(
    backbone: Backbone, texts: Sequence[Sequence[int]], asked: Sequence[tuple[int, Continuation]]
) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` log-likelihoods of the continuations' tokens, and whether each is the largest."""
    batch = padded_rows(texts, backbone.device)
    backbone.check_batch(batch)
    hidden_states = backbone.hidden_states(batch)
    predicting = [hidden_states[row, len(c.context) - 1 :][: len(c.tokens)] for row, c in asked]
    targets = torch.tensor([token for _, continuation in asked for token in continuation.tokens])
    log_likelihoods, is_likeliest = greedy_targets(torch.cat(predicting), backbone.head, targets.to(backbone.device))
    return log_likelihoods.cpu(), is_likeliest.cpu()

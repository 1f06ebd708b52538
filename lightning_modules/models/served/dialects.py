"""What servers are asked, and how their answers are read; an answer that is not understood is refused."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

LOWEST = -5000.0
"""No model gives a token a log-likelihood below this, in nats; servers replace ``-inf`` by -9999."""

HIGHEST = 1e-4
"""Largest log-likelihood that rounding can cause, in nats."""

_QUOTED = 300  # characters of an answer in a message


class AnswerError(ValueError):
    """Raised for an answer without usable log-likelihoods; asking again would not help."""


class TokenSpan(NamedTuple):
    """Tokens that a server reads, and what it should return for them."""

    ids: NDArray[np.int32]
    scored_from: int  # index of the first token whose log-likelihood is wanted, 1 or more
    greedy: int = 0  # number of last tokens in whose places the likeliest tokens are wanted as well


class Scores(NamedTuple):
    """Log-likelihoods of a span's scored tokens in nats, and the likeliest tokens in the places of the last ones."""

    log_likelihood: NDArray[np.float32]
    greedy: NDArray[np.int32]


class Dialect(ABC):
    """Protocol of one kind of server.

    Attributes:
        name: Name in settings, and the owner that the server reports for its models.
        path: Where requests are sent.
        field: Field of the answer that has the values.
    """

    name: str
    path: str
    field: str

    @abstractmethod
    def body(self, span: TokenSpan, model: str) -> dict[str, Any]:
        """Return the JSON of the request for the scores of a span."""

    @abstractmethod
    def _find(self, span: TokenSpan, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        """Return the log-likelihoods and likeliest tokens; other answers may raise any error of their parsing."""

    def read(self, span: TokenSpan, body: bytes) -> Scores:
        """Return the scores of a span; raise an `AnswerError` if some are missing or impossible."""
        try:
            found, greedy = self._find(span, json.loads(body))
            values = np.asarray([_read_number(value) for value in found], np.float32)
            scores = Scores(values, np.asarray(list(greedy), np.int32))
            _check_scores(span, scores)
            return scores
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise AnswerError(
                f"an answer without `{self.field}` of the prompt's tokens ({type(error).__name__}: {error}), which was"
                f" {quote(body)}"
            ) from None


def _read_number(value: Any) -> float:
    # `float` would also accept booleans and text.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


class Vllm(Dialect):
    """vLLM's ``/v1/completions`` with ``prompt_logprobs``, which are the float32 log-softmax of each prompt token."""

    name, path, field = "vllm", "/v1/completions", "prompt_logprobs"

    @override
    def body(self, span: TokenSpan, model: str) -> dict[str, Any]:
        # vLLM must generate a token; it is ignored.
        settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": int(span.greedy > 0)}
        return {"model": model, "prompt": span.ids.tolist(), **settings}

    @override
    def _find(self, span: TokenSpan, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        (choice,) = answer["choices"]
        first, *entries = choice["prompt_logprobs"]
        if first is not None:
            raise ValueError("the first token has no context, so the values are shifted")
        # A token that is missing from its entry raises a KeyError: the values would belong to other tokens.
        values = [entry[str(token)]["logprob"] for token, entry in zip(span.ids[1:], entries, strict=True)]
        # Entries begin at token 1, as the values do.
        greedy = [_likeliest_of_entry(entry) for entry in entries[len(entries) - span.greedy :]]
        return values[span.scored_from - 1 :], greedy


def _likeliest_of_entry(entry: dict[str, dict[str, Any]]) -> int:
    """Return the likeliest token of vLLM's entry for one place, which has the prompt's token and maybe another."""
    if all(each["rank"] != 1 for each in entry.values()):
        raise ValueError("no token has rank 1")
    return find_greedy((each["logprob"], int(token)) for token, each in entry.items())


class Sglang(Dialect):
    """SGLang's ``/generate`` with ``return_logprob``, whose values begin one token after ``logprob_start_len``."""

    name, path, field = "sglang", "/generate", "meta_info.input_token_logprobs"

    @override
    def body(self, span: TokenSpan, model: str) -> dict[str, Any]:
        return {
            "input_ids": span.ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": span.scored_from - 1,
            "top_logprobs_num": int(span.greedy > 0),
        }

    @override
    def _find(self, span: TokenSpan, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        pairs = [(value, token) for value, token, *_ in answer["meta_info"]["input_token_logprobs"]]
        if [token for _, token in pairs] != span.ids[span.scored_from - 1 :].tolist() or pairs[0][0] is not None:
            raise ValueError("they belong to other tokens than those that were sent")
        greedy = []
        if span.greedy:
            tops = answer["meta_info"]["input_top_logprobs"][-span.greedy :]
            for own, top in zip(pairs[-span.greedy :], tops, strict=True):
                greedy.append(find_greedy([own, (top[0][0], top[0][1])]))
        return [value for value, _ in pairs[1:]], greedy


def find_greedy(candidates: Iterable[tuple[float, int]]) -> int:
    """Return the likeliest token of pairs of log-likelihood and id; of equally likely ones the first, like argmax."""
    # Pairs of the negative value and the id sort as argmax chooses.
    return min((-value, token) for value, token in candidates)[1]


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Vllm(), Sglang())}


def _check_scores(span: TokenSpan, scores: Scores) -> None:
    """Raise a ``ValueError`` if scores of a span are missing or impossible."""
    values, count = scores.log_likelihood, len(span.ids) - span.scored_from
    if (len(values), len(scores.greedy)) != (count, span.greedy) or (scores.greedy < 0).any():
        raise ValueError(f"{len(values)} values for {count} tokens, {len(scores.greedy)} greedy for {span.greedy}")
    wrong = ~((values <= HIGHEST) & (values >= LOWEST))  # NaN compares as false
    if wrong.any():
        raise ValueError(f"{values[int(wrong.argmax())]} is not a log-likelihood")


def quote(body: bytes) -> str:
    """Return the beginning of an answer for a message."""
    return repr(body[:_QUOTED].decode("utf-8", errors="replace"))

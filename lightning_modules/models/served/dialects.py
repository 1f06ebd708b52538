"""What servers are asked, and how their answers are read; an answer that is not understood is refused."""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

LONGCE_PATH = "/v1/log-likelihoods"
IDENTITY_HEADER, CHECKSUM_HEADER = "longce-identity", "longce-checksum"
LOWEST = -5000.0
"""No model gives a token a log-likelihood below this, in nats; servers replace ``-inf`` by -9999."""

HIGHEST = 1e-4
"""Largest log-likelihood that rounding can cause, in nats."""

_QUOTED = 300  # characters of an answer in a message


class AnswerError(ValueError):
    """Raised for an answer without usable log-likelihoods; asking again would not help."""


class Span(NamedTuple):
    """Tokens that a server reads, and what it should return for them."""

    ids: NDArray[np.int32]
    scored_from: int  # index of the first token whose log-likelihood is wanted, 1 or more
    greedy: int = 0  # number of last tokens in whose places the likeliest tokens are wanted as well


class Scores(NamedTuple):
    """Log-likelihoods of a span's scored tokens in nats, and the likeliest tokens in the places of the last ones."""

    log_likelihood: NDArray[np.float32]
    greedy: NDArray[np.int32]


class Request(NamedTuple):
    """An HTTP request: its path with the query, its body, and the body's content type."""

    path: str
    body: bytes
    content_type: str = "application/json"


class Dialect(ABC):
    """Protocol of one kind of server.

    Attributes:
        name: Name in settings, and the owner that the server reports for its models.
        reports_identity: Whether each answer identifies the weights, so that no probe is needed after a reconnect.
        bytes_per_token: Limit of an answer's size.
    """

    name: str
    reports_identity = False
    bytes_per_token = 1024

    @abstractmethod
    def request(self, span: Span, model: str) -> Request:
        """Return the request for the scores of a span."""

    @abstractmethod
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> Scores:
        """Return the scores of a span; raise an `AnswerError` if they are not there."""


class Longce(Dialect):
    """``longce serve``: int32 token ids in; float32 log-likelihoods and int32 likeliest tokens out."""

    name, reports_identity, bytes_per_token = "longce", True, 8

    @override
    def request(self, span: Span, model: str) -> Request:
        path = f"{LONGCE_PATH}?scored_from={span.scored_from}&greedy={span.greedy}"
        return Request(path, span.ids.astype("<i4").tobytes(), "application/octet-stream")

    @override
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> Scores:
        if headers.get(CHECKSUM_HEADER) != checksum(span, body) or len(body) % 4:
            raise AnswerError(f"an answer of {len(body)} bytes that was damaged, or belongs to another request")
        size = 4 * (len(span.ids) - span.scored_from)
        return Scores(np.frombuffer(body[:size], "<f4"), np.frombuffer(body[size:], "<i4"))


def checksum(span: Span, answer: bytes) -> str:
    """Return the checksum of a `Longce` request and its answer."""
    wanted = zlib.crc32(f"{span.scored_from} {span.greedy}".encode())
    return f"{zlib.crc32(answer, zlib.crc32(span.ids.astype('<i4').tobytes(), wanted)):08x}"


class _JsonDialect(Dialect):
    field: str  # of the answer that has the values

    @abstractmethod
    def _find(self, span: Span, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        """Return the log-likelihoods and likeliest tokens; other answers may raise any error of their parsing."""

    @override
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> Scores:
        try:
            values, greedy = self._find(span, json.loads(body))
            return Scores(np.asarray([*map(_read_number, values)], np.float32), np.asarray([*greedy], np.int32))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise AnswerError(
                f"an answer without `{self.field}` of the prompt's tokens ({type(error).__name__}: {error}), which was"
                f" {quote(body)}"
            ) from None


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


class Vllm(_JsonDialect):
    """vLLM's ``/v1/completions`` with ``prompt_logprobs``, which are the float32 log-softmax of each prompt token."""

    name, field = "vllm", "prompt_logprobs"

    @override
    def request(self, span: Span, model: str) -> Request:
        settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": int(span.greedy > 0)}
        return Request(
            "/v1/completions", json.dumps({"model": model, "prompt": span.ids.tolist(), **settings}).encode()
        )

    @override
    def _find(self, span: Span, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        (choice,) = answer["choices"]
        first, *entries = choice["prompt_logprobs"]
        if first is not None:
            raise ValueError("the first token has no context, so the values are shifted")
        # A token that is missing from its entry raises a KeyError: the values would belong to other tokens.
        values = [entry[str(token)]["logprob"] for token, entry in zip(span.ids[1:], entries, strict=True)]
        last = entries[len(entries) - span.greedy :]
        if any(all(each["rank"] != 1 for each in entry.values()) for entry in last):
            raise ValueError("no token has rank 1")
        greedy = (find_greedy((each["logprob"], int(token)) for token, each in entry.items()) for entry in last)
        return values[span.scored_from - 1 :], greedy


class Sglang(_JsonDialect):
    """SGLang's ``/generate`` with ``return_logprob``, whose values begin one token after ``logprob_start_len``."""

    name, field = "sglang", "meta_info.input_token_logprobs"

    @override
    def request(self, span: Span, model: str) -> Request:
        settings = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": span.scored_from - 1,
            "top_logprobs_num": int(span.greedy > 0),
        }
        return Request("/generate", json.dumps({"input_ids": span.ids.tolist(), **settings}).encode())

    @override
    def _find(self, span: Span, answer: Any) -> tuple[Iterable[Any], Iterable[int]]:
        pairs = [(value, token) for value, token, *_ in answer["meta_info"]["input_token_logprobs"]]
        if [token for _, token in pairs] != span.ids[span.scored_from - 1 :].tolist() or pairs[0][0] is not None:
            raise ValueError("they belong to other tokens than those that were sent")
        tops = answer["meta_info"]["input_top_logprobs"][-span.greedy :] if span.greedy else []
        last = zip(pairs[len(pairs) - span.greedy :], tops, strict=True)
        return (value for value, _ in pairs[1:]), (find_greedy([own, (top[0][0], top[0][1])]) for own, top in last)


def find_greedy(candidates: Iterable[tuple[float, int]]) -> int:
    """Return the likeliest token of pairs of log-likelihood and id; of equally likely ones the first, like argmax."""
    return min((-value, token) for value, token in candidates)[1]


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Longce(), Vllm(), Sglang())}


def check_scores(span: Span, scores: Scores) -> Scores:
    """Return the scores of a span; raise an `AnswerError` if some are missing or impossible."""
    values, count = scores.log_likelihood, len(span.ids) - span.scored_from
    if (len(values), len(scores.greedy)) != (count, span.greedy) or (scores.greedy < 0).any():
        raise AnswerError(
            f"{len(values)} log-likelihoods for {count} tokens, and {len(scores.greedy)} likeliest tokens for"
            f" {span.greedy}"
        )
    wrong = ~((values <= HIGHEST) & (values >= LOWEST))  # NaN compares as false
    if wrong.any():
        first = values[int(wrong.argmax())]
        raise AnswerError(f"{int(wrong.sum())} of {count} values that are not log-likelihoods, the first one {first}")
    return scores


def quote(body: bytes) -> str:
    """Return the beginning of an answer for a message."""
    return repr(body[:_QUOTED].decode("utf-8", errors="replace"))

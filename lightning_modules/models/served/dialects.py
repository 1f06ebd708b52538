"""What servers are asked, and how their answers are read; an answer that is not understood is refused."""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    """Tokens that a server reads, and the index of the first one whose log-likelihood is wanted (1 or more)."""

    ids: tuple[int, ...]
    scored_from: int


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
        """Return the request for the log-likelihoods of a span."""

    @abstractmethod
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> NDArray[np.float32]:
        """Return the float32 log-likelihoods of the scored tokens; raise an `AnswerError` if they are not there."""


class Longce(Dialect):
    """``longce serve``: int32 token ids in, and only the scored tokens out, as float32."""

    name, reports_identity, bytes_per_token = "longce", True, 4

    @override
    def request(self, span: Span, model: str) -> Request:
        ids = np.asarray(span.ids, dtype="<i4").tobytes()
        return Request(f"{LONGCE_PATH}?scored_from={span.scored_from}", ids, "application/octet-stream")

    @override
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> NDArray[np.float32]:
        asked = np.asarray(span.ids, dtype="<i4").tobytes()
        if headers.get(CHECKSUM_HEADER) != checksum(asked, span.scored_from, body):
            raise AnswerError(f"an answer of {len(body)} bytes that was damaged, or belongs to another request")
        return np.frombuffer(body, dtype="<f4").astype(np.float32)


def checksum(ids: bytes, scored_from: int, answer: bytes) -> str:
    """Return the checksum of a `Longce` request and its answer."""
    return f"{zlib.crc32(answer, zlib.crc32(ids, scored_from)):08x}"


class Vllm(Dialect):
    """vLLM's ``/v1/completions`` with ``prompt_logprobs``, which are the float32 log-softmax of each prompt token."""

    name = "vllm"

    @override
    def request(self, span: Span, model: str) -> Request:
        settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return Request("/v1/completions", json.dumps({"model": model, "prompt": span.ids, **settings}).encode())

    @override
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> NDArray[np.float32]:
        def entries(answer: Any) -> list[Any]:
            (choice,) = answer["choices"]
            first, *others = choice["prompt_logprobs"]
            # A token that is missing from its entry raises a KeyError: the values would belong to other tokens.
            found = [entry[str(token)]["logprob"] for token, entry in zip(span.ids[1:], others, strict=True)]
            return [first, *found]

        values = _read_json(body, entries, "`prompt_logprobs`")
        if values[0] is not None:
            raise AnswerError("a log-likelihood of the first token, which has no context: the values are shifted")
        return _as_floats(values[span.scored_from :])


class Sglang(Dialect):
    """SGLang's ``/generate`` with ``return_logprob``, whose values begin one token after ``logprob_start_len``."""

    name = "sglang"

    @override
    def request(self, span: Span, model: str) -> Request:
        settings = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": span.scored_from - 1,
        }
        return Request("/generate", json.dumps({"input_ids": span.ids, **settings}).encode())

    @override
    def read(self, span: Span, body: bytes, headers: Mapping[str, str]) -> NDArray[np.float32]:
        def entries(answer: Any) -> list[Any]:
            found = answer["meta_info"]["input_token_logprobs"]
            return [(value, token) for value, token, *_ in found]

        pairs = _read_json(body, entries, "`meta_info.input_token_logprobs`")
        if [token for _, token in pairs] != list(span.ids[span.scored_from - 1 :]) or pairs[0][0] is not None:
            raise AnswerError("log-likelihoods of other tokens than those that were sent")
        return _as_floats([value for value, _ in pairs[1:]])


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Longce(), Vllm(), Sglang())}


def check_values(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Return ``count`` log-likelihoods; raise an `AnswerError` if some are missing or impossible."""
    if len(values) != count:
        raise AnswerError(f"{len(values)} log-likelihoods for {count} tokens")
    wrong = ~((values <= HIGHEST) & (values >= LOWEST))  # NaN compares as false
    if wrong.any():
        index = int(wrong.argmax())
        raise AnswerError(
            f"{int(wrong.sum())} of {count} values that are not log-likelihoods, the first one {values[index]}"
        )
    return values


def quote(body: bytes) -> str:
    """Return the beginning of an answer for a message."""
    return repr(body[:_QUOTED].decode("utf-8", errors="replace"))


def _read_json(body: bytes, entries: Callable[[Any], list[Any]], what: str) -> list[Any]:
    """Return the values that ``entries`` finds in an answer; never an empty list."""
    try:
        if found := entries(json.loads(body)):
            return found
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass  # the message below has the answer
    raise AnswerError(f"an answer without {what} of the prompt's tokens: {quote(body)}")


def _as_floats(values: Sequence[Any]) -> NDArray[np.float32]:
    try:
        return np.asarray([float(value) for value in values], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise AnswerError(f"a value that is not a number: {error}") from error

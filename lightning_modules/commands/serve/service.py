"""The HTTP side of ``longce serve``."""

import asyncio
import hmac

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lightning_modules.commands.serve.batching import BatchingScorer
from lightning_modules.models.served.dialects import CHECKSUM_HEADER, IDENTITY_HEADER, LONGCE_PATH, Span, checksum
from lightning_modules.scoring.document_scorer import is_out_of_memory

_PATIENCE = 1.0  # seconds between checks whether a client still waits


class Service:
    """The HTTP side of a `BatchingScorer`.

    Args:
        scorer: Scores the spans of requests.
        name: Name of the model.
        identity: What identifies the model and its numerics; every answer has it.
        key: Bearer token that all requests but ``/health`` must have, if it is not empty.
        max_length: Maximum number of tokens of a document.
    """

    def __init__(self, scorer: BatchingScorer, name: str, identity: str, *, key: str, max_length: int) -> None:
        self._scorer, self._name, self._identity, self._max_length = scorer, name, identity, max_length
        self._key = f"Bearer {key}".encode() if key else None
        self._vocabulary_size = scorer.backbone.vocabulary_size
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route(LONGCE_PATH, self._log_likelihoods, methods=["POST"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._check_key(request)
        lines = [f"longce_{name}_total {value}" for name, value in sorted(self._scorer.counts.items())]
        return PlainTextResponse("\n".join([*lines, f"longce_queued_tokens {self._scorer.queued_tokens}", ""]))

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        model = {"id": self._name, "object": "model", "owned_by": "longce", "identity": self._identity}
        sizes = {"max_model_len": self._max_length, "vocabulary_size": self._vocabulary_size}
        return JSONResponse({"object": "list", "data": [model | sizes]})

    async def _log_likelihoods(self, request: Request) -> Response:
        """Answer little-endian int32 token ids with the float32 log-likelihoods from ``?scored_from=`` on.

        The int32 tokens that are the likeliest in the places of the last ``greedy=`` tokens follow.
        """
        self._check_key(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > 4 * self._max_length:
                raise HTTPException(413, f"A document may have at most {self._max_length} tokens.")
        span = self._read_span(bytes(body), request)
        self._scorer.counts["requests"] += 1
        if (future := self._scorer.submit(span)) is None:
            raise HTTPException(429, "Too many tokens are waiting.", {"Retry-After": "1"})
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([waiting], timeout=_PATIENCE))[0]:
                if await request.is_disconnected():
                    return Response(status_code=408)
            scores = waiting.result()
        except (RuntimeError, MemoryError) as error:
            status = 413 if is_out_of_memory(error) else 500
            raise HTTPException(status, f"{len(span.ids)} tokens: {type(error).__name__}") from error
        finally:
            waiting.cancel()  # the client may ask again, and the queue would fill with what nobody waits for
        answer = scores.log_likelihood.astype("<f4").tobytes() + scores.greedy.astype("<i4").tobytes()
        headers = {IDENTITY_HEADER: self._identity, CHECKSUM_HEADER: checksum(span, answer)}
        return Response(answer, media_type="application/octet-stream", headers=headers)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise HTTPException(401, "The key is missing or wrong.")

    def _read_span(self, body: bytes, request: Request) -> Span:
        try:
            ids = np.frombuffer(body, dtype="<i4")
            scored_from, greedy = (int(request.query_params.get(name, "0")) for name in ("scored_from", "greedy"))
        except ValueError:
            raise HTTPException(400, "Send token ids as int32, and `scored_from` and `greedy` as numbers.") from None
        if not (1 <= scored_from < len(ids) and 0 <= greedy <= len(ids) - scored_from):
            raise HTTPException(
                400,
                f"`scored_from` must be from 1 to {len(ids) - 1}, and `greedy` from 0 to the number of scored tokens.",
            )
        if not 0 <= ids.min() <= ids.max() < self._vocabulary_size:
            limits = f"0 to {self._vocabulary_size - 1}"
            raise HTTPException(400, f"Token ids are from {ids.min()} to {ids.max()}, but must be from {limits}.")
        return Span(ids, scored_from, greedy)

"""``longce serve``: a model's log-likelihoods over HTTP, computed by the same backbone as in this process."""

import asyncio
import hmac
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lightning_modules.batch import IGNORE_INDEX, unscored_token
from lightning_modules.commands.serve_config import ServeConfig
from lightning_modules.functional.top_tokens import with_greedy
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.identity import check_same_model, model_identity
from lightning_modules.models.loading import load_config, load_frozen
from lightning_modules.models.lockstep import any_rank
from lightning_modules.models.served.dialects import (
    CHECKSUM_HEADER,
    IDENTITY_HEADER,
    LONGCE_PATH,
    Scores,
    Span,
    checksum,
)
from lightning_modules.scoring.document_scorer import is_out_of_memory
from lightning_modules.scoring.score import find_device
from lightning_modules.tasks.teacher_forcing import group_rows, padded_rows
from lightning_modules.utilities.identity import combined_hash

_QUEUED_PASSES = 64
"""Forward passes that may wait in the queue; further requests are asked to come back."""

_MAX_LENGTH = 1 << 20
"""Limit of a document in tokens, for models without a maximum length."""

_NUMERICS = ("model_config", "context_extension", "quantization")

_PATIENCE = 1.0  # seconds between checks whether a client still waits
_IDLE_SECONDS = 0.05  # between checks for requests and signals, in which sharded processes agree on the next pass

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A span that waits for its scores."""

    span: Span
    answer: "Future[Scores]"


class BatchingScorer:
    """Collects the spans of concurrent requests, and scores spans of similar length in one forward pass.

    Args:
        backbone: The model, in eval mode.
        max_batch_tokens: Limit of a pass of several spans, with padding. On CPU, each span has its own pass.
    """

    def __init__(self, backbone: Backbone, max_batch_tokens: int) -> None:
        self.backbone = backbone
        self.max_batch_tokens = 0 if backbone.device.type == "cpu" else max_batch_tokens
        self.max_queued_tokens = _QUEUED_PASSES * max_batch_tokens
        self.counts: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()

    @property
    def queued_tokens(self) -> int:
        """Number of tokens that wait."""
        return sum(len(each.span.ids) for each in self._pending)

    def submit(self, span: Span) -> "Future[Scores] | None":
        """Return the future scores of a span, or None if too many tokens wait already."""
        with self._changed:
            if self._pending and self.queued_tokens + len(span.ids) > self.max_queued_tokens:
                return None
            self._pending.append(_Pending(span, Future()))
            self._changed.notify()
            return self._pending[-1].answer

    def run(self, is_over: Callable[[], bool]) -> None:
        """Score spans until ``is_over`` and none waits. Ranks that share weights make all passes together."""
        while True:
            group = self._take()
            finished = is_over() and not group and not self._pending
            if not self.backbone.is_sharded:
                if finished:
                    return
                if group:
                    self._score(group)
            elif any_rank(bool(group), self.backbone.device):
                self._score(group)  # without spans, a pass of one token
            elif not any_rank(not finished, self.backbone.device):
                return

    def _take(self) -> list[_Pending]:
        """Return the oldest span and those that fit into its pass, after waiting a moment for one."""
        with self._changed:
            if not self._pending:
                self._changed.wait(_IDLE_SECONDS)
            if not self._pending:
                return []
            groups = group_rows([len(each.span.ids) for each in self._pending], self.max_batch_tokens)
            indices = next(group for group in groups if 0 in group)
            taken = [self._pending[index] for index in indices]
            self._pending = [each for index, each in enumerate(self._pending) if index not in set(indices)]
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]

    def _score(self, group: list[_Pending]) -> None:
        """Score spans in one pass, and answer their requests; if memory runs out, score each by itself."""
        started = time.monotonic()
        try:
            scores = self._pass([each.span for each in group])
        except (RuntimeError, MemoryError) as error:
            failure: Exception = error
            fatal = not is_out_of_memory(error) or self.backbone.is_sharded  # others wait for this process's shard
            if fatal or len(group) == 1:
                for each in group:
                    each.answer.set_exception(failure)
            if fatal:
                raise
            scores = []
        for each, result in zip(group, scores, strict=False):
            each.answer.set_result(result)
        self.counts["passes"] += 1
        self.counts["tokens"] += sum(len(each.span.ids) for each in group)
        self.counts["scored_tokens"] += sum(len(each.log_likelihood) for each in scores)
        self.counts["busy_milliseconds"] += round(1000 * (time.monotonic() - started))
        # After the `except` block, the error no longer keeps the tensors of the failed pass alive.
        for each in group if len(group) > 1 and not scores else []:
            self._score([each])

    @torch.no_grad()
    def _pass(self, spans: list[Span]) -> list[Scores]:
        """Make a forward pass, of one token without spans, and return the scores of each span."""
        if not spans:
            self.backbone(unscored_token(self.backbone.device))
            return []
        batch = padded_rows([span.ids for span in spans], self.backbone.device)
        for row, span in enumerate(spans):
            batch["labels"][row, : span.scored_from] = IGNORE_INDEX
        places = [slice(len(span.ids) - span.greedy, len(span.ids)) for span in spans]
        first_scored, head_fn = min(span.scored_from for span in spans), partial(with_greedy, places=places)
        scores, greedy = self.backbone(batch, first_scored=first_scored, head_fn=head_fn)
        rows = zip(scores.float().cpu().numpy(), greedy.int().cpu().numpy(), spans, places, strict=True)
        return [Scores(row[span.scored_from : place.stop], likeliest[place]) for row, likeliest, span, place in rows]


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
        while not (await asyncio.wait([waiting], timeout=_PATIENCE))[0]:
            if await request.is_disconnected():  # the client may ask again, and the queue would fill with repetitions
                waiting.cancel()
                return Response(status_code=408)
        try:
            scores = waiting.result()
        except (RuntimeError, MemoryError) as error:
            status = 413 if is_out_of_memory(error) else 500
            raise HTTPException(status, f"{len(span.ids)} tokens: {type(error).__name__}") from error
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


def serve(config: ServeConfig) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C; requests that wait then are still answered.

    Under `longce launch` or torchrun, each process has its own port, counted from ``port``, and a copy of the model or,
    if ``sharded``, a shard.
    """
    key = config.read_key()
    if config.sharded and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ValueError("`sharded` needs several processes: run `longce launch --nproc_per_node N -- serve ..`.")
    rank = int(os.environ.get("RANK", "0"))
    device = find_device(config.device)
    if device.type == "cuda" and config.device == "auto":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    loading = config.loading()
    load_config(loading)
    _check_certificate(config)
    listener = _listen(config.host, config.port + rank if config.port else 0)
    identity = model_identity(loading)
    backbone = _load(config, device)
    check_same_model(identity, loading)
    numerics = {name: value for name, value in asdict(loading).items() if name in _NUMERICS}
    dtype = str(backbone.base_model.dtype)
    numerics_hash = combined_hash([numerics, dtype, backbone.attention])[:16]
    scorer = BatchingScorer(backbone, config.max_batch_tokens)
    limit = getattr(backbone.base_model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    full_identity, max_length = f"{identity}:{numerics_hash}", config.max_length or limit or _MAX_LENGTH
    app = Service(scorer, config.model, full_identity, key=key, max_length=max_length).app
    files: dict[str, Any] = {"ssl_certfile": config.certificate, "ssl_keyfile": config.certificate_key}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=60, **files))
    _serve_until_signal(server, listener, scorer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(config: ServeConfig, device: torch.device) -> Backbone:
    if not config.sharded:
        return load_frozen(config.loading(), device)
    from lightning_modules.training.fsdp import load_sharded_frozen  # imports Lightning

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return load_sharded_frozen(config.loading(), device)


def _check_certificate(config: ServeConfig) -> None:
    """Raise a ``ValueError`` for a certificate that cannot be used, before the model is loaded."""
    if config.certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.certificate_key)
        except OSError as error:
            raise ValueError(
                f"`certificate` '{config.certificate}' and `certificate_key` '{config.certificate_key}' cannot be used"
                f" ({error.strerror or error}): they must be PEM files that belong together."
            ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket at an address, before the model is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueError(
            f"The server cannot listen on {host}:{port} ({reason}): choose another `port` or `host`."
        ) from error


def _serve_until_signal(server: uvicorn.Server, listener: socket.socket, scorer: BatchingScorer) -> None:
    """Answer requests in another thread, and score in this one, until a signal."""

    def stop(*_: object) -> None:
        server.should_exit = True  # no further requests are accepted, and those that wait are answered

    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in signals]
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    scheme, (host, port) = "https" if server.config.ssl_certfile else "http", listener.getsockname()[:2]
    _log.info("Serving at %s://%s:%d (Ctrl-C stops it).", scheme, f"[{host}]" if ":" in host else host, port)
    try:
        scorer.run(lambda: not thread.is_alive())
    finally:
        stop()
        thread.join(timeout=60)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)

"""Scorer of token ids on servers, in place of a model in this process."""

import asyncio
import functools
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, max_token_id
from lightning_modules.models.config import ModelConfig, ServerConfig
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.served.dialects import AnswerError, Scores, Span
from lightning_modules.models.served.endpoint import Endpoint, Unavailable
from lightning_modules.utilities.errors import IncompleteError

Result = TypeVar("Result")

_MAX_ATTEMPTS = 4  # for a request that may be the reason why servers fail
_MAX_DELAY = 30.0  # seconds between attempts to reach a server

_log = logging.getLogger(__name__)


@dataclass
class _Job:
    """A span to score, with its place in the result and the number of attempts that failed because of it."""

    index: int
    span: Span
    attempts: int = 0


class RemoteScorer(Scorer):
    """Computes log-likelihoods like a `Backbone`, with a model on one or several servers.

    Only token ids are sent. Servers take the next span when they have finished one, so that faster ones score more. A
    span that a server does not answer is scored by another one, or by the same when it is back and has the same model.

    Args:
        addresses: ``http(s)://HOST:PORT`` of one or several servers of the same model.
        config: How they are asked.

    Attributes:
        identity: What identifies the model, beginning with ``served:``.
    """

    device = torch.device("cpu")
    log_likelihood_dtype = torch.float32
    tokens_per_pass = 2**19  # all are answered before the next ones are sent

    def __init__(self, addresses: Sequence[str], config: ServerConfig) -> None:
        super().__init__()
        addresses = [address.strip().rstrip("/") for address in addresses]
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"A server is named twice in '{','.join(addresses)}': name each once.")
        self._config, self._process = config, os.getpid()
        self._endpoints = [Endpoint(address, config) for address in addresses]
        self._answered = time.monotonic()  # when a server last did
        try:
            self._run(self._connect())
        except BaseException:
            self._run(self._close())
            raise
        self.identity = self._endpoints[0].identity

    def forward(self, batch: PackedBatch, *, first_scored: int = 1) -> Tensor:
        """Compute ``[B, T]`` float32 log-likelihoods in nats like `Backbone.forward`, without gradient."""
        del first_scored  # each span begins at its own first scored token
        return self.with_greedy(batch, [slice(0, 0)] * len(batch["labels"]))[0]

    def with_greedy(self, batch: PackedBatch, places: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Compute `lightning_modules.functional.top_tokens.with_greedy`; places end with a scored document.

        Raises:
            AnswerError: If a server refuses a document, or has no usable values for it.
            IncompleteError: If no server answers for `ServerConfig.patience` seconds.
            ValueError: If a server has another model than before, or does not accept the key.
        """
        ids, scored = batch["input_ids"].cpu(), batch["labels"].ne(IGNORE_INDEX).cpu()
        found: list[tuple[int, int, int]] = []
        spans: list[Span] = []
        for row, boundaries in enumerate(batch["document_boundaries"]):
            for start, stop in pairwise(boundaries):
                if len(wanted := scored[row, start:stop].nonzero()):
                    first, last = start + int(wanted[0]), start + int(wanted[-1]) + 1
                    self.check_length(last - start)
                    found.append((row, first, last))
                    tokens = ids[row, start:last].numpy().astype(np.int32)
                    is_wanted = places[row].stop == last
                    spans.append(Span(tokens, first - start, is_wanted * (last - max(first, places[row].start))))
        values, greedy = torch.zeros(scored.shape), torch.zeros_like(ids)
        for (row, first, last), answer in zip(found, self._run(self._score(spans)), strict=True):
            values[row, first:last] = torch.tensor(answer.log_likelihood)
            greedy[row, last - len(answer.greedy) : last] = torch.tensor(answer.greedy)
        device = batch["labels"].device
        return values.masked_fill(~scored, 0.0).to(device), greedy.to(device)

    def windows_per_pass(self, window_length: int) -> int:
        """Return the number of windows that are sent together; they wait for each other before the next are sent."""
        return 1024

    def check_batch(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` for ids outside of the served model's embedding."""
        sizes = [endpoint.vocabulary_size for endpoint in self._endpoints if endpoint.vocabulary_size]
        if sizes and max_token_id(batch) >= min(sizes):
            raise ValueError(
                f"Token id {max_token_id(batch)} is beyond the embedding of {min(sizes)} tokens of the model on"
                f" {self._endpoints[0].address}: name the tokenizer of that model."
            )

    def check_length(self, longest: int) -> None:
        """Raise a ``ValueError`` for a document that is longer than a server accepts."""
        limits = [endpoint.max_length for endpoint in self._endpoints if endpoint.max_length is not None]
        if limits and longest > min(limits):
            raise ValueError(
                f"A document of {longest} tokens is longer than the {min(limits)} that the server accepts: shorten"
                " documents with `max_tokens`, or start the server with a larger maximum length."
            )

    def verify(self) -> None:
        """Raise a ``ValueError`` if a server has another model than before."""
        try:
            self._run(self._verify())
        except ValueError:
            _connect.cache_clear()  # the next use of the address starts again, for example in a notebook
            raise

    def report(self) -> str:
        """Return how much each server has scored, as text."""
        lines = [
            f"{each.address}: {each.requests:,} requests, {each.tokens:,} tokens, {each.repeated:,} requests repeated"
            for each in self._endpoints
        ]
        return "\n".join(lines)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work in the loop's thread; a failure or Ctrl-C cancels what has not finished."""
        if self._process != os.getpid():
            raise RuntimeError("A forked process cannot share the connections of its parent: connect in the fork.")
        future = asyncio.run_coroutine_threadsafe(work, _event_loop(os.getpid()))
        try:
            return future.result()
        except BaseExceptionGroup as group:  # of requests that failed together
            raise group.exceptions[0] from None
        finally:
            future.cancel()

    async def _connect(self) -> None:
        found = await asyncio.gather(*(endpoint.connect() for endpoint in self._endpoints), return_exceptions=True)
        missing = {each: error for each, error in zip(self._endpoints, found, strict=True) if error is not None}
        for error in missing.values():
            if not isinstance(error, Unavailable):
                raise error
        ready = [endpoint for endpoint in self._endpoints if endpoint not in missing]
        reasons = "; ".join(f"{endpoint.address}: {error}" for endpoint, error in missing.items())
        if not ready:
            raise ValueError(
                f"No server answers ({reasons}): start it, wait until it has loaded its model, and check its address."
            )
        if missing:
            _log.warning("Some servers do not answer, and are used when they do (%s).", reasons)
        for other in self._endpoints:
            if other in missing:
                other.expect(ready[0])
            elif other.identity != ready[0].identity:
                raise ValueError(
                    f"The servers {ready[0].address} and {other.address} have different models ({ready[0].identity} and"
                    f" {other.identity}): name servers of one model."
                )
            other.check_same(ready[0].probe, f"{ready[0].address} does")
        ready[0].check_earlier_run()

    async def _close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _verify(self) -> None:
        """Verify all servers; one that does not answer is verified when it is back, and one must answer."""
        self._answered, failures = time.monotonic(), 0
        while True:
            for endpoint in self._endpoints:
                try:
                    await endpoint.verify()
                    endpoint.failed = False
                except Unavailable as error:
                    endpoint.failed, reason = True, error
            if not all(endpoint.failed for endpoint in self._endpoints):
                return
            self._check_patience(endpoint, reason)
            failures += 1
            await asyncio.sleep(_delay(failures))

    async def _score(self, spans: Sequence[Span]) -> list[Scores]:
        """Return the log-likelihoods of spans in their order; the longest are scored first, so that none is last."""
        answers: dict[int, Scores] = {}
        queue: asyncio.Queue[_Job] = asyncio.Queue()
        for index, span in sorted(enumerate(spans), key=lambda pair: -len(pair[1].ids)):
            queue.put_nowait(_Job(index, span))
        self._answered = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [  # the first ones take the longest spans: not always those of the same server
                group.create_task(self._work(endpoint, queue, answers))
                for _ in range(min(self._config.concurrency, len(spans)))
                for endpoint in random.sample(self._endpoints, len(self._endpoints))
            ]
            await queue.join()
            for task in tasks:
                task.cancel()
        return [answers[index] for index in range(len(spans))]

    async def _work(self, endpoint: Endpoint, queue: asyncio.Queue[_Job], answers: dict[int, Scores]) -> None:
        """Score spans of the queue on a server, one after another."""
        failures = 0
        while True:
            if endpoint.failed:
                await self._recover(endpoint, failures)
            job = await queue.get()
            try:
                answers[job.index] = await endpoint.score(job.span)
                self._answered, failures = time.monotonic(), 0
                continue
            except Unavailable as error:
                reason, failures = error, failures + 1
                endpoint.repeated += 1
                job.attempts += reason.blamed
                if job.attempts >= _MAX_ATTEMPTS:
                    raise AnswerError(
                        f"The server {endpoint.address} failed {job.attempts} times with {len(job.span.ids)} tokens:"
                        f" {reason}."
                    ) from None
                queue.put_nowait(job)  # for any server
            finally:
                queue.task_done()
            if reason.answered:
                self._check_patience(endpoint, reason)
                await asyncio.sleep(_delay(failures) if reason.delay is None else min(reason.delay, _MAX_DELAY))
            else:
                endpoint.failed = True

    async def _recover(self, endpoint: Endpoint, failures: int) -> None:
        """Wait until a server is back with the same model; the other tasks of this server wait as well."""
        async with endpoint.recovery:
            while endpoint.failed:
                try:
                    await endpoint.verify()
                    endpoint.failed = False
                except Unavailable as reason:
                    if all(each.failed for each in self._endpoints):  # others may be busy with long documents
                        self._check_patience(endpoint, reason)
                    failures += 1
                    await asyncio.sleep(_delay(failures))

    def _check_patience(self, endpoint: Endpoint, reason: Unavailable) -> None:
        """Raise an error if no server has answered for too long."""
        if (waited := time.monotonic() - self._answered) > self._config.patience:
            raise IncompleteError(
                f"No server has answered for {waited:.0f} s (`server.patience`). The last was {endpoint.address}:"
                f" {reason}. What is scored is kept: run the same command again when servers are back."
            )


def _delay(failures: int) -> float:
    """Return the seconds to wait after failures in a row; random, so that clients do not ask all at once."""
    return min(_MAX_DELAY, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process, which runs in its own thread: a notebook's thread already runs one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"served models of {process}", daemon=True).start()
    return loop


@functools.cache
def _connect(addresses: str, config: ServerConfig, process: int) -> RemoteScorer:
    return RemoteScorer(addresses.split(","), config)


def connect(config: ModelConfig) -> RemoteScorer:
    """Return the scorer of a served model; there is one for each model in a process, and none survives a fork."""
    return _connect(str(config.pretrained_model_name_or_path), config.server or ServerConfig(), os.getpid())

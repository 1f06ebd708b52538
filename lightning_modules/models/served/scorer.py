"""Scorer of token ids on servers, in place of a model in this process."""

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.models.loading.config import ModelConfig, ServerConfig
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.served.dialects import Scores, TokenSpan

if TYPE_CHECKING:  # imports httpx2, which older versions of huggingface_hub do not require
    from lightning_modules.models.served.endpoint import Endpoint

Result = TypeVar("Result")


class RemoteScorer(Scorer):
    """Computes log-likelihoods like a `Backbone`, with a model on one or several servers.

    Only token ids are sent. A server gets the next span when it has finished one, so that faster servers score more. A
    request without an answer is repeated until ``patience`` for that server ends.

    Args:
        addresses: ``http(s)://HOST:PORT`` of one or several servers of the same model.
        config: Settings for requests.

    Attributes:
        identity: Identity of the model, beginning with ``served:``.
    """

    device = torch.device("cpu")
    log_likelihood_dtype = torch.float32
    tokens_per_pass = 2**19  # all are answered before the next ones are sent

    def __init__(self, addresses: Sequence[str], config: ServerConfig) -> None:
        super().__init__()
        from lightning_modules.models.served.endpoint import Endpoint

        self._config = config
        self._process = os.getpid()
        self._endpoints = [Endpoint(address.strip().rstrip("/"), config) for address in addresses]
        try:
            self._run(self._connect())
        except BaseException:
            self._run(self._close())
            raise
        self.identity = self._endpoints[0].identity

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute ``[B, T]`` float32 log-likelihoods in nats like `Backbone.forward`, without gradient."""
        return self.with_greedy(batch, [slice(0, 0)] * len(batch["labels"]))[0]

    def with_greedy(self, batch: PackedBatch, places: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Compute `lightning_modules.functional.top_tokens.with_greedy`; places end with a scored document.

        Raises:
            AnswerError: If a server refuses a document, or has no usable values for it.
            IncompleteError: If a server does not answer for `ServerConfig.patience` seconds.
            ValueError: If a server has another model than before, or does not accept the key.
        """
        ids = batch["input_ids"].cpu()
        scored = batch["labels"].ne(IGNORE_INDEX).cpu()
        found: list[tuple[int, int, int]] = []
        spans: list[TokenSpan] = []
        for row, boundaries in enumerate(batch["document_boundaries"]):
            for start, stop in pairwise(boundaries):
                wanted = scored[row, start:stop].nonzero()
                if len(wanted) == 0:
                    continue
                # Tokens after the last scored one need not be sent.
                first = start + int(wanted[0])
                last = start + int(wanted[-1]) + 1
                self.check_length(last - start)
                tokens = ids[row, start:last].numpy().astype(np.int32)
                greedy = last - max(first, places[row].start) if places[row].stop == last else 0
                found.append((row, first, last))
                spans.append(TokenSpan(tokens, first - start, greedy))
        values = torch.zeros(scored.shape)
        greedy = torch.zeros_like(ids)
        for (row, first, last), answer in zip(found, self._run(self._score(spans)), strict=True):
            values[row, first:last] = torch.tensor(answer.log_likelihood)
            greedy[row, last - len(answer.greedy) : last] = torch.tensor(answer.greedy)
        device = batch["labels"].device
        return values.masked_fill(~scored, 0.0).to(device), greedy.to(device)

    def windows_per_pass(self, window_length: int) -> int:
        """Return the number of windows that are sent together; they wait for each other before the next are sent."""
        return 1024

    def check_batch(self, batch: PackedBatch) -> None:
        """Do nothing: vLLM and SGLang do not report the size of the embedding, and refuse other ids themselves."""

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
        lines = []
        for server in self._endpoints:
            answered = f"{server.requests:,} requests, {server.tokens:,} tokens"
            lines.append(f"{server.address}: {answered}, {server.repeated:,} requests repeated")
        return "\n".join(lines)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work in the loop's thread; a failure or Ctrl-C cancels unfinished work."""
        if self._process != os.getpid():  # a fork would mix its requests with those of its parent on the same sockets
            raise RuntimeError("A forked process cannot share the connections of its parent: connect in the fork.")
        future = asyncio.run_coroutine_threadsafe(work, _event_loop(os.getpid()))
        try:
            return future.result()
        except BaseExceptionGroup as group:  # of requests that failed together
            raise group.exceptions[0] from None
        finally:
            future.cancel()

    async def _connect(self) -> None:
        await asyncio.gather(*(endpoint.connect() for endpoint in self._endpoints))
        first = self._endpoints[0]
        for other in self._endpoints[1:]:
            if other.identity != first.identity:
                raise ValueError(
                    f"The servers {first.address} and {other.address} have different models ({first.identity} and"
                    f" {other.identity}): name servers of one model."
                )
            other.check_same(first.probe, f"{first.address} does")
        first.check_earlier_run()

    async def _close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _verify(self) -> None:
        await asyncio.gather(*(endpoint.verify() for endpoint in self._endpoints))

    async def _score(self, spans: Sequence[TokenSpan]) -> list[Scores]:
        """Return the scores of spans in their order; the longest are scored first, so that none is last."""
        answers: dict[int, Scores] = {}
        longest_first = sorted(range(len(spans)), key=lambda index: -len(spans[index].ids))
        # One iterator for all tasks of all servers: each takes the next span when it has finished one.
        waiting = iter(longest_first)

        async def work(endpoint: "Endpoint") -> None:
            for index in waiting:
                answers[index] = await endpoint.score(spans[index])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._config.concurrency, len(spans))):
                for endpoint in self._endpoints:
                    group.create_task(work(endpoint))
        await self._verify()  # a server may have been restarted with another model in the meantime
        return [answers[index] for index in range(len(spans))]


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

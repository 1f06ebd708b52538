"""A model on a server: its log-likelihoods, and whether it is still the same model."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_modules.models.loading.config import ServerConfig
from lightning_modules.models.served.client import Client, Unavailable, quote
from lightning_modules.models.served.dialects import DIALECTS, AnswerError, Scores, TokenSpan
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import default_cache_dir, write_atomically
from lightning_modules.utilities.identity import combined_hash

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

TOLERANCE = 0.1
"""Maximum mean difference of two probes of one model, in nats: servers in bfloat16 round differently in each batch.
Probes of unrelated models differ by more than 1."""

_CAUSAL_TOLERANCE = 0.25  # largest difference of a value that a later token must not change, in nats
_PROBE = np.asarray([3 + (7 * index * index + 31 * index) % 250 for index in range(48)], dtype=np.int32)
"""Token ids that every vocabulary has. The log-likelihoods of this text differ widely between models."""

_MAX_ATTEMPTS = 4  # for a request that may be the reason why the server fails
_MAX_DELAY = 30.0  # seconds between attempts
_PARSING_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Endpoint:
    """A server, whose model is requested when it is first used.

    Attributes:
        identity: Identity of the served model, which does not depend on its address.
        max_length: Limit of a document in tokens, if the server reports one.
        probe: ``[47]`` log-likelihoods of a fixed text.
        requests, tokens, repeated: Numbers of answered requests, of tokens read for them, and of unanswered requests.
    """

    identity: str
    max_length: int | None
    probe: NDArray[np.float32]

    def __init__(self, address: str, config: ServerConfig) -> None:
        self.address = address
        self.requests = self.tokens = self.repeated = 0
        self._config = config
        self._client = Client(address, config)
        self.close = self._client.close
        self._last_answer = 0.0  # time of the last answer, or of the first failure of a request

    async def connect(self) -> None:
        """Ask the server for its model, and check that its values are log-likelihoods of the right tokens."""
        try:
            # 1. The model that the server reports. 2. The model that it really runs. 3. Whether its values are right.
            self.identity = await self._describe()
            self.probe = await self._probe()
            await self._check_causality()
        except Unavailable as error:
            raise ValueError(
                f"No server answers at {self.address} ({error.reason}): start it, wait until it has loaded its model,"
                " and check its address."
            ) from None

    async def score(self, span: TokenSpan) -> Scores:
        """Return the scores of a span, and ask again while the server does not answer.

        Raises:
            AnswerError: If the server refuses the span, fails four times because of it, or has no usable values for it.
            IncompleteError: If the server does not answer for `ServerConfig.patience` seconds.
            ValueError: If the server does not accept the key, has another model, or has no scores of the fixed text.
        """
        try:
            scores = await self._ask_again(lambda: self._score(span), len(span.ids))
        except AnswerError:
            await self.verify()  # if the server has no answer to the fixed text either, the span is not the reason
            raise
        self.requests += 1
        self.tokens += len(span.ids)
        return scores

    async def verify(self) -> None:
        """Raise a ``ValueError`` if the server has another model than before; ask again while it does not answer."""
        await self._ask_again(self._verify)

    def check_same(self, probe: Sequence[float] | NDArray[np.float32], when: str) -> None:
        """Raise a ``ValueError`` if another probe, such as one of an earlier run, is not of the same model."""
        # A mean, because single tokens of a model in bfloat16 may differ by more than the tolerance.
        difference = float(np.abs(np.asarray(probe) - self.probe).mean())
        if not difference <= TOLERANCE:  # also for NaN
            raise self._client.refuse(
                f"scores a fixed text {difference:.2g} nats differently than {when}, more than the rounding of one"
                f" model ({TOLERANCE:g}), although both are called '{self._model}': the model at this address has"
                " changed. Restore it, or set `server.claim` to the new model"
            )

    def check_earlier_run(self) -> None:
        """Compare the probe with that of the first run that used this model, and keep that of the first run."""
        path = default_cache_dir() / "served" / f"{combined_hash(self.identity)}.json"
        try:
            self.check_same(json.loads(path.read_bytes()), "in an earlier run")
        except (OSError, json.JSONDecodeError):
            try:
                write_atomically(path, json.dumps(self.probe.tolist()).encode())
            except OSError as error:
                _log.warning("The probe of %s cannot be stored in %s (%s).", self.address, path.parent, error.strerror)

    async def _ask_again(self, attempt: Callable[[], Awaitable[Result]], tokens: int = 0) -> Result:
        """Repeat an attempt, for a span of ``tokens`` or the model, until it succeeds or the patience ends."""
        failures = blamed = 0
        while True:
            try:
                # After several failures, the probe shows whether the server fails or the span is too large for it.
                if tokens and blamed >= _MAX_ATTEMPTS:
                    await self._verify()
                    raise AnswerError(f"The server {self.address} failed {blamed} times with {tokens} tokens.")
                return await attempt()
            except Unavailable as error:
                if failures == 0:  # this request alone may have taken longer than the patience
                    self._last_answer = time.monotonic()
                failures += 1
                blamed += error.blamed
                self.repeated += 1
                waited = time.monotonic() - self._last_answer
                if waited > self._config.patience:
                    raise IncompleteError(
                        f"The server {self.address} has not answered for {waited:.0f} s (`server.patience`):"
                        f" {error.reason}. Finished scores are kept: run the same command again when the server is"
                        " back, or without its address."
                    ) from None
                delay = error.delay
                if delay is None:  # random, so that clients do not ask all at once
                    delay = 0.1 * 2 ** min(failures, 10) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(_MAX_DELAY, delay))

    async def _verify(self) -> None:
        identity = await self._describe()
        if identity != self.identity:
            raise self._client.refuse(f"has another model than before ({identity} instead of {self.identity})")
        # The name may stay the same although the weights change.
        try:
            probe = await self._probe()
        except AnswerError as error:  # ends the command, because it is not the fault of a document
            raise ValueError(f"{error} It answered the same request before: restore the server.") from None
        self.check_same(probe, "earlier")

    async def _describe(self) -> str:
        """Read the model that the server runs from its list of models, and return its identity."""
        body = await self._client.send("GET", "/v1/models")
        try:
            models = {str(model["id"]): model for model in json.loads(body)["data"]}
        except _PARSING_ERRORS:
            raise self._client.refuse(
                f"answered GET /v1/models, a request for a list of models, with {quote(body)}"
            ) from None
        name = self._config.model
        if name is None and len(models) == 1:
            (name,) = models
        if name not in models:
            raise self._client.refuse(f"has the models {', '.join(sorted(models))}: set `server.model` to one of them")
        model = models[name]
        dialect = self._config.dialect
        if dialect == "auto":
            dialect = model.get("owned_by")
        if dialect not in DIALECTS:
            raise self._client.refuse(
                f"reports in GET /v1/models that its models are owned by {dialect!r}, but log-likelihoods of prompt"
                f" tokens are supported only by {', '.join(DIALECTS)}. Use one of them, or set `server.dialect` if the"
                " server is one of them"
            )
        self._model = name
        self._dialect = DIALECTS[dialect]
        length = model.get("max_model_len")
        # One token of the limit is for the token that has to be generated.
        self.max_length = length - 1 if isinstance(length, int) else None
        return f"served:{combined_hash([dialect, name, model.get('root'), self._config.claim])}"

    async def _check_causality(self) -> None:
        """Raise a ``ValueError`` unless each value depends on its token and the preceding ones, and on no others."""
        half = len(_PROBE) // 2
        # Three other last tokens: one alone could have nearly the same log-likelihood by chance.
        changed = [await self._probe(last) for last in _PROBE[[3, 8, 15]]]
        # Requests to SGLang for some of the values differ from those for all values.
        tail = (await self._score(TokenSpan(_PROBE, half))).log_likelihood
        before = max(float(np.abs(values[:-1] - self.probe[:-1]).max()) for values in changed)
        own = max(float(abs(values[-1] - self.probe[-1])) for values in changed)
        if before > _CAUSAL_TOLERANCE or own < 1e-4 or np.abs(tail - self.probe[half - 1 :]).mean() > TOLERANCE:
            raise self._client.refuse(
                f"gives values of other tokens: when the last of {len(_PROBE)} tokens changes, its value changes by"
                f" {own:.2g} nats and those before it by up to {before:.2g}. Use another server"
            )

    async def _probe(self, last: np.int32 = _PROBE[-1]) -> NDArray[np.float32]:
        """Return ``[47]`` log-likelihoods of the fixed text, with another last token."""
        return (await self._score(TokenSpan(np.append(_PROBE[:-1], last), 1))).log_likelihood

    async def _score(self, span: TokenSpan) -> Scores:
        path = self._dialect.path
        body = await self._client.send("POST", path, self._dialect.body(span, self._model), len(span.ids))
        self._last_answer = time.monotonic()
        try:
            return self._dialect.find(span, json.loads(body))
        except _PARSING_ERRORS as error:
            raise self._client.refuse(
                f"was asked POST {path} for {len(span.ids) - span.scored_from} of {len(span.ids)} tokens, and sent an"
                f" answer without `{self._dialect.field}` of the prompt's tokens ({type(error).__name__}: {error}),"
                f" which was {quote(body)}",
                AnswerError,
            ) from None

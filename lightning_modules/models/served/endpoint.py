"""One server of log-likelihoods: requests, what their failures mean, and whether it still serves the same model."""

import asyncio
import ipaddress
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx2
import numpy as np
from numpy.typing import NDArray

from lightning_modules.models.loading.config import ServerConfig, is_served, read_key
from lightning_modules.models.served.dialects import (
    DIALECTS,
    AnswerError,
    Dialect,
    Scores,
    TokenSpan,
    quote,
)
from lightning_modules.models.served.transfer import BadReplyError, Unavailable, request
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import default_cache_dir, write_atomically
from lightning_modules.utilities.identity import combined_hash

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

TOLERANCE = 0.1
"""Mean difference of two probes, in nats, up to which they are of one model: servers in bfloat16 round differently in
each batch. Probes of unrelated models differ by more than 1."""

_CAUSAL_TOLERANCE = 0.25  # largest difference of a value that a later token must not change, in nats
_PROBE = np.asarray([3 + (7 * index * index + 31 * index) % 250 for index in range(48)], dtype=np.int32)
"""Token ids that every vocabulary has. Values of such a text are far apart for different models."""

_BUSY = {408, 425, 429, 502, 503, 504}  # statuses of a server that cannot answer at the moment
_OF_THE_REQUEST = {400, 413, 422}  # .. that refuse one request, such as a document that is too long
_MAX_ATTEMPTS = 4  # for a request that may be the reason why the server fails
_MAX_DELAY = 30.0  # seconds between attempts
_LIST_SECONDS = 60.0  # for a list of models
_REPLY_BYTES = 4 * 2**20  # of a reply, whatever was asked
_TOKEN_BYTES = 1024  # of a reply for each token of the request; vLLM's has about 80 and the texts of two tokens


class Endpoint:
    """A server, which is asked for its model when it is first used.

    Attributes:
        identity: What identifies the served model, without its address.
        max_length: Limit of a document in tokens, if the server reports one.
        probe: ``[47]`` log-likelihoods of a fixed text.
        last_answer: Time of the last answer, or of the first failure of a request; the patience begins there.
        requests, tokens, repeated: Numbers of answered requests, of tokens read for them, and of unanswered requests.
    """

    dialect: Dialect
    identity: str
    probe: NDArray[np.float32]

    def __init__(self, address: str, config: ServerConfig) -> None:
        self.address, self._config = _check_address(address, config), config
        self._key = read_key(config.key_variable)
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        # Proxies and certificates of the environment are for other machines.
        self._client = httpx2.AsyncClient(
            base_url=self.address,
            headers=headers,
            timeout=httpx2.Timeout(config.timeout, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=config.concurrency + 1),
            trust_env=not _is_loopback(self.address),
        )
        self.max_length: int | None = None
        self.close = self._client.aclose
        self.last_answer = time.monotonic()
        self._is_unverified = False
        self.requests = self.tokens = self.repeated = 0
        self._model = ""
        self._verification = asyncio.Lock()

    async def connect(self) -> None:
        """Ask the server for its model, and check that its values are log-likelihoods of the tokens they should be."""
        try:
            # 1. What the server says it runs. 2. What it really runs. 3. Whether its values are what they should be.
            self.identity = await self._describe()
            self.probe = await self._probe()
            await self._check_causality()
        except Unavailable as error:
            raise ValueError(
                f"No server answers at {self.address} ({error.reason}): start it, wait until it has loaded its model,"
                " and check its address."
            ) from None
        self._is_unverified = False

    async def score(self, span: TokenSpan) -> Scores:
        """Return the scores of a span, and ask again while the server does not answer.

        Raises:
            AnswerError: If the server refuses the span, fails four times because of it, or has no usable values for it.
            IncompleteError: If the server does not answer for `ServerConfig.patience` seconds.
        """

        async def attempt() -> Scores:
            scores = await self._score(span)
            # A new connection may lead to another model: the server may have been restarted behind the same address.
            async with self._verification:
                if self._is_unverified:
                    await self.verify()
            return scores

        scores = await self._ask_again(attempt, len(span.ids))
        self.requests, self.tokens = self.requests + 1, self.tokens + len(span.ids)
        return scores

    async def verify_patiently(self) -> None:
        """Verify the model like `verify`, and ask again while the server does not answer."""
        self.last_answer = time.monotonic()
        await self._ask_again(self.verify)

    async def _ask_again(self, attempt: Callable[[], Awaitable[Result]], tokens: int = 0) -> Result:
        """Repeat an attempt, for a span of ``tokens`` or the model, until it succeeds or the patience ends."""
        blamed = failures = 0
        while True:
            try:
                # After several failures, either the server fails or the span is too much for it. The probe tells.
                if tokens and blamed >= _MAX_ATTEMPTS:
                    await self.verify()
                    raise AnswerError(f"The server {self.address} failed {blamed} times with {tokens} tokens.")
                return await attempt()
            except Unavailable as error:
                if tokens and failures == 0:  # this request alone may have taken longer than the patience
                    self.last_answer = time.monotonic()
                blamed, failures = blamed + error.blamed, failures + 1
                await self._wait(error, failures)

    async def verify(self) -> None:
        """Raise a ``ValueError`` if the server has another model than before."""
        self._is_unverified = False
        try:
            if (identity := await self._describe()) != self.identity:
                raise self._refuse(f"has another model than before ({identity} instead of {self.identity})")
            # The name may stay the same while the weights behind it change.
            self.check_same(await self._probe(), "earlier")
        except BaseException:
            self._is_unverified = True
            raise

    def check_same(self, probe: Sequence[float] | NDArray[np.float32], when: str) -> None:
        """Raise a ``ValueError`` if another probe, such as one of an earlier run, is not of the same model."""
        # A mean, because single tokens of a model in bfloat16 may differ by more than the tolerance.
        difference = float(np.abs(np.asarray(probe) - self.probe).mean())
        if not difference <= TOLERANCE:  # also for NaN
            raise self._refuse(
                f"scores a fixed text {difference:.2g} nats differently than {when}, more than the rounding of one"
                f" model ({TOLERANCE:g}), although both are called '{self._model}': the model behind the address has"
                " changed. Restore it, or set `server.claim` to what it is now"
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

    async def _wait(self, error: Unavailable, failures: int) -> None:
        """Wait before the next attempt; raise an error if the server has not answered for too long."""
        self.repeated += 1
        waited = time.monotonic() - self.last_answer
        if waited > self._config.patience:
            raise IncompleteError(
                f"The server {self.address} has not answered for {waited:.0f} s (`server.patience`): {error.reason}."
                " What is scored is kept: run the same command again when it is back, or without its address."
            ) from None
        # Random, so that clients do not ask all at once.
        delay = 0.1 * 2 ** min(failures, 10) * random.uniform(0.5, 1.0)
        await asyncio.sleep(min(_MAX_DELAY, delay if error.delay is None else error.delay))

    async def _describe(self) -> str:
        """Read what the server runs from its list of models, and return its identity."""
        body = await self._send("GET", "/v1/models")
        try:
            models = {str(model["id"]): model for model in json.loads(body)["data"]}
            # Without a name, the first of the list; several are refused below.
            chosen = models[self._config.model or next(iter(models))]
        except (ValueError, TypeError, LookupError, StopIteration, RecursionError):
            wanted = f" with '{self._config.model}'" if self._config.model else ""
            raise self._refuse(
                f"was asked GET /v1/models for a list of models{wanted}, and answered {quote(body)}"
            ) from None
        if len(models) > 1 and self._config.model is None:
            raise self._refuse(f"has the models {', '.join(sorted(models))}: set `server.model` to one of them")
        owner, self._model = chosen.get("owned_by"), str(chosen["id"])
        name = self._config.dialect if self._config.dialect != "auto" else owner
        if name not in DIALECTS:
            raise self._refuse(
                f"was asked GET /v1/models, and says that its models are owned by {owner!r}, but log-likelihoods of a"
                f" prompt's tokens can be read only from {', '.join(DIALECTS)}. Use one of them, or set"
                " `server.dialect` if it is one"
            )
        self.dialect = DIALECTS[name]
        length = chosen.get("max_model_len")
        # One token of the limit is for the token that has to be generated.
        self.max_length = length - 1 if isinstance(length, int) else None
        return f"served:{combined_hash([name, self._model, chosen.get('root'), self._config.claim])}"

    async def _check_causality(self) -> None:
        """Raise a ``ValueError`` unless each value depends on its token and the preceding ones, and on no others."""
        half = len(_PROBE) // 2
        # Three other last tokens: one alone could have nearly the same log-likelihood by chance.
        changed = [await self._probe(last) for last in _PROBE[[3, 8, 15]]]
        # SGLang is asked for a part of the values in another way than for all.
        tail = (await self._score(TokenSpan(_PROBE, half))).log_likelihood
        before = max(float(np.abs(values[:-1] - self.probe[:-1]).max()) for values in changed)
        own = max(float(abs(values[-1] - self.probe[-1])) for values in changed)
        if before > _CAUSAL_TOLERANCE or own < 1e-4 or np.abs(tail - self.probe[half - 1 :]).mean() > TOLERANCE:
            raise self._refuse(
                f"gives values of other tokens: when the last of {len(_PROBE)} tokens changes, its value changes by"
                f" {own:.2g} nats and those before it by up to {before:.2g}. Use another server"
            )

    async def _probe(self, last: np.int32 = _PROBE[-1]) -> NDArray[np.float32]:
        """Return ``[47]`` log-likelihoods of the fixed text, with another last token."""
        return (await self._score(TokenSpan(np.append(_PROBE[:-1], last), 1))).log_likelihood

    async def _score(self, span: TokenSpan) -> Scores:
        path = self.dialect.path
        answer = await self._send("POST", path, self.dialect.body(span, self._model), len(span.ids))
        self.last_answer = time.monotonic()
        try:
            return self.dialect.read(span, answer)
        except AnswerError as error:
            message = f"was asked POST {path} for {len(span.ids) - span.scored_from} of {len(span.ids)} tokens"
            raise AnswerError(str(self._refuse(f"{message}, and sent {error}"))) from None

    async def _send(self, method: str, path: str, content: dict[str, Any] | None = None, tokens: int = 0) -> bytes:
        """Return the body of an answer with status 200; raise what other answers mean."""
        # A list of models is ready at once, also in a server that is busy.
        seconds = self._config.timeout if tokens else min(self._config.timeout, _LIST_SECONDS)
        options = {"json": content, "extensions": {"trace": self._note_connection}}
        try:
            status, wait, body = await request(
                self._client, method, path, seconds=seconds, max_bytes=_REPLY_BYTES + _TOKEN_BYTES * tokens, **options
            )
        except BadReplyError as error:
            refusal = self._refuse(f"sent a reply to {method} {path} that {error}. Use another server")
            raise AnswerError(str(refusal)) if tokens else refusal from None
        if status == 200:
            return body
        answer = f"answered {method} {path} with status {status}"
        if status in _BUSY:
            raise Unavailable(answer, delay=float(wait) if wait.isdecimal() else None)
        if status >= 500:
            raise Unavailable(self._hide_key(f"{answer}: {quote(body)}"), blamed=True)
        if status in _OF_THE_REQUEST:
            raise AnswerError(str(self._refuse(f"{answer}: {quote(body)}")))
        said = "" if status in (401, 403) else f": {quote(body)}"  # which may repeat parts of the key
        raise self._refuse(
            f"{answer}{said}. Check the address, `server.dialect` and the key in the environment variable"
            f" {self._config.key_variable}"
        )

    def _refuse(self, message: str) -> ValueError:
        return ValueError(self._hide_key(f"The server {self.address} {message}."))

    def _hide_key(self, text: str) -> str:
        """Return a text without the key, which a server may repeat in its answer."""
        return text.replace(self._key, "***") if self._key else text

    async def _note_connection(self, event: str, _: object) -> None:
        if event == "connection.connect_tcp.started":
            self._is_unverified = True


def _check_address(address: str, config: ServerConfig) -> str:
    """Return the address of a server; raise a ``ValueError`` for one that is not safe to use."""
    try:
        url = httpx2.URL(address if is_served(address) else "")
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if not url.host or not 0 < (url.port or 80) < 2**16:
        raise ValueError(f"The address of a server must be http(s)://HOST:PORT, got '{address}'.")
    if url.scheme == "http" and not _is_loopback(address) and not config.allow_http:
        raise ValueError(
            f"The server '{address}' is on another machine, and http:// sends texts and keys unencrypted: use https://,"
            " or set `server.allow_http` to true in a network that you trust."
        )
    return address


def _is_loopback(address: str) -> bool:
    host = httpx2.URL(address).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

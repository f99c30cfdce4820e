"""HTTP requests to one engine server: JSON in both directions, a timeout for every request, and
errors that name the server and request.

    Unreachable          the request was never sent
    ReplyLostError       the request was sent, and no complete answer arrived in time
    ServerStatusError    status 5xx
    RequestRefusedError  status 4xx
    EngineStateConflict  status 409: the engine lacks the weights that a delta builds on

This module also has what the clients of all engine software share, and the checks of a server
before it is used (it answers, and serves what the policy needs). All errors of the checks are
ConfigErrors.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import msgspec

from ramify.errors import (
    ConfigError,
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
    Unreachable,
)
from ramify.http_client.http_transport import (
    HttpConnectionPool,
    HttpRequestTarget,
    Method,
    route_to,
)
from ramify.inference.base import CachePressure
from ramify.inference.http.engine_client import (
    EngineClient,
    EngineServerInfo,
    parse_kv_cache_pressure,
)
from ramify.inference.http.engine_process import EngineProcess, engine_exit_status
from ramify.inference.http.inference_spec import InferenceSpec

_CONNECT_S = 10.0
_MAX_BODY_BYTES = 1 << 30
"""Maximum bytes of a response. It is large because responses may contain the log-probabilities of
many tokens."""


class EngineStateConflict(RequestRefusedError):
    """Raised when the state of an engine server does not permit a request.

    For example, it may lack the weights that an update builds on.
    """


class EngineHttpClient:
    """An HTTP client for one engine server.

    It belongs to the event loop of its first request. Proxy settings are ignored, because engines
    are in the user's own network.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._pool = HttpConnectionPool(connect_s=_CONNECT_S, max_body_bytes=_MAX_BODY_BYTES)
        self._routes: dict[tuple[str, str], HttpRequestTarget] = {}
        self._is_closed = False

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self._ask("POST", path, body, timeout_s)

    async def close(self) -> None:
        """Close all connections to the engine server.

        Later requests raise Unreachable.
        """
        self._is_closed = True
        await self._pool.close()

    async def _ask(
        self, method: Method, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        where = f"{method} {self.url}{path}"
        if self._is_closed:
            raise Unreachable(f"{where}: the connection to this engine was closed")
        route = self._routes.get((method, path))
        if route is None:
            route = route_to(f"{self.url}{path}", self._headers, method, through_proxy=False)
            self._routes[method, path] = route
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._pool.prepare_exchange(method, route, data) as exchange,
            ):
                answer = await exchange.read()
        except TimeoutError:
            raise ReplyLostError(f"{where}: no answer within {timeout_s:g} s") from None
        if answer.status != 200:
            raise _error(where, answer.status, answer.body)
        return _object(where, answer.body)


def _object(where: str, payload: bytes) -> dict[str, Any]:
    if not payload.strip():
        return {}
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"text": payload.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"found": value}


def _error(where: str, status: int, payload: bytes) -> ModelError:
    text = f"{where} answered {status}: {_error_message(payload)}"
    if status == 409:
        return EngineStateConflict(text)
    if status == 429:
        return RateLimited(text)
    return ServerStatusError(text) if status >= 500 else RequestRefusedError(text)


def _error_message(payload: bytes) -> str:
    """Return the message of a server's error response in one line of at most 300 characters."""
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = payload[:2000].decode("utf-8", "replace")
    while isinstance(value, dict):
        value = next(
            (value[name] for name in ("error", "message", "detail") if value.get(name)), str(value)
        )
    return " ".join(str(value).split())[:300]


class BaseEngineClient:
    """The base class of all clients for engine servers, whatever software the servers run."""

    def __init__(self, url: str, spec: InferenceSpec, key: str = "") -> None:
        self._api = EngineHttpClient(url, key)
        self.url = self._api.url
        self._spec = spec

    async def check_health(self) -> None:
        await self._api.get("/health", self._spec.probe_s)

    async def pressure(self) -> CachePressure | None:
        metrics = await self._api.get("/metrics", self._spec.probe_s)
        return parse_kv_cache_pressure(str(metrics.get("text", "")))

    async def fingerprint(self) -> str | None:
        return None

    async def close(self) -> None:
        await self._api.close()

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._api.post(path, body or {}, self._spec.update_s)


def next_reply_seed(seed: int, affinity: str, num_ids: int) -> int:
    """Return the sampling seed for a model call's next reply.

    It depends on the length of the prompt. Engines restart their random numbers with each request,
    so each turn of the call needs another seed.
    """
    text = f"{seed}|{affinity}|{num_ids}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) >> 1


_POLL_S = 0.1
_FLAGS = {
    ("vllm", 1): "--enable-sleep-mode",
    ("vllm", 2): "--enable-sleep-mode",
    ("sglang", 2): "--enable-memory-saver",
    ("sglang", 1): "--enable-memory-saver and --enable-weights-cpu-backup",
}
"""(software, sleep level) -> flags with which the server must be started."""


async def wait_until_up(
    server: EngineClient, process: EngineProcess | None, wait_s: float, restarts: int
) -> None:
    """Wait until an engine server is up and passes its health check.

    If its ``process`` is killed in the meantime, restart it, at most ``restarts`` times. Raises
    ConfigError if the server does not answer within ``wait_s`` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        if process is not None:
            await asyncio.to_thread(process.check_port_user)  # before the key is sent there
        try:
            return await server.check_health()
        except ModelError as error:
            ended = await engine_exit_status(process)
            if process is not None and ended is not None:
                if ended >= 0 or not restarts:
                    reason = await asyncio.to_thread(process.exit_reason)
                    raise ConfigError(
                        f"the engine at {server.url} did not answer: {reason} (in {process.log})"
                    ) from None
                restarts -= 1
                await process.restart()  # the next try may succeed
                if process.url != server.url:
                    raise ConfigError(
                        f"the engine at {server.url} is gone: it was restarted at {process.url}"
                    ) from None
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no engine answers: {error}; is the server up, and is inference.engine "
                    "correct?"
                ) from None
        await asyncio.sleep(_POLL_S)


async def check_engine_fits_policy(
    server: EngineClient, software: str, *, vocabulary: int, dtype: str, window: int, level: int = 0
) -> None:
    """Raise ConfigError if an engine server does not fit the policy.

    Its vocabulary size, dtype (such as ``float32``) and context window in tokens are compared. If
    ``level`` is above 0, the server must also support that sleep level.
    """
    try:
        facts = await server.facts()
        _check_level(server.url, software, level, facts)
        fits = facts.vocabulary == vocabulary
        if facts.vocabulary is None:
            fits = await server.is_in_vocabulary(
                vocabulary - 1
            ) and not await server.is_in_vocabulary(vocabulary)
    except ModelError as error:
        raise ConfigError(
            f"the engine does not speak the protocol of '{software}': {error}"
        ) from None
    if not fits:
        raise ConfigError(
            f"the engine at {server.url} has another vocabulary "
            f"({facts.vocabulary or 'found by probing'}) than the policy ({vocabulary}): serve "
            "the policy's own checkpoint"
        )
    _check_numbers(server.url, facts, dtype, window)


def _check_level(url: str, software: str, level: int, facts: EngineServerInfo) -> None:
    if level and level not in facts.levels:
        raise ConfigError(
            f"the engine at {url} cannot sleep at level {level} while the trainer learns "
            "(inference.sleep=learn): start it "
            f"with {_FLAGS.get((software, level), 'support for it')}, or set inference.sleep=never"
        )


def _check_numbers(url: str, facts: EngineServerInfo, dtype: str, window: int) -> None:
    if facts.dtype and facts.dtype != dtype:
        raise ConfigError(
            f"the engine at {url} computes in {facts.dtype} and the policy in {dtype}: serve it "
            f"with --dtype {dtype}, or set "
            f"policy.dtype={facts.dtype}"
        )
    if facts.window is not None and facts.window < window:
        raise ConfigError(
            f"the engine at {url} has a window of {facts.window} tokens and the policy one of "
            f"{window}: serve it with the "
            "policy's (--max-model-len)"
        )
    if facts.logprobs_mode not in ("", "processed_logprobs"):
        raise ConfigError(
            f"the engine at {url} returns {facts.logprobs_mode}, not log-probabilities of the "
            "sampled distribution: start it with --logprobs-mode processed_logprobs"
        )

"""Checks of a server before it is used: it answers, and it serves what the policy needs. All errors
are ConfigErrors."""

from __future__ import annotations

import asyncio
import time

from ramify.errors import ConfigError, ModelError
from ramify.inference.http.engine_process import EngineProcess, status_of
from ramify.inference.http.engine_server import EngineServer, ServerInfo

_POLL_S = 0.1
_FLAGS = {
    ("vllm", 1): "--enable-sleep-mode",
    ("vllm", 2): "--enable-sleep-mode",
    ("sglang", 2): "--enable-memory-saver",
    ("sglang", 1): "--enable-memory-saver and --enable-weights-cpu-backup",
}
"""(software, sleep level) -> the flags that it must be started with."""


async def until_up(
    server: EngineServer, process: EngineProcess | None, wait_s: float, restarts: int
) -> None:
    """Return once ``server`` answers. ``process`` is the process that was started for it; if it is
    killed before it answers, it is started again up to ``restarts`` times."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await server.healthy()
        except ModelError as error:
            ended = await status_of(process)
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
                        f"the engine at {server.url} was started again at {process.url}"
                    ) from None
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no engine answers: {error}; is the server up, and is inference.engine "
                    "correct?"
                ) from None
        await asyncio.sleep(_POLL_S)


async def check(
    server: EngineServer, software: str, *, vocabulary: int, dtype: str, window: int, level: int = 0
) -> None:
    """Compare what ``server`` reports with the policy's vocabulary (number of ids), dtype (such as
    ``float32``) and window (tokens). If ``level`` is above 0, it must be able to sleep at that
    level."""
    try:
        facts = await server.facts()
        _check_level(server.url, software, level, facts)
        fits = facts.vocabulary == vocabulary
        if facts.vocabulary is None:
            fits = await server.takes_id(vocabulary - 1) and not await server.takes_id(vocabulary)
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


def _check_level(url: str, software: str, level: int, facts: ServerInfo) -> None:
    if level and level not in facts.levels:
        raise ConfigError(
            f"the engine at {url} cannot sleep at level {level} while the trainer learns "
            "(inference.sleep=learn): start it "
            f"with {_FLAGS.get((software, level), 'support for it')}, or set inference.sleep=never"
        )


def _check_numbers(url: str, facts: ServerInfo, dtype: str, window: int) -> None:
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
            f"the engine at {url} returns {facts.logprobs_mode}, which are not those of the "
            "distribution that was sampled from: start it with --logprobs-mode processed_logprobs"
        )

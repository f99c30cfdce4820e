"""A scripted model for tests: a client that returns prepared replies and failures instead of
calling a model.

    client = ScriptedClient(["```repl\nx = 1\n```", rate_limited(0.1), "FINAL(2)"])
    client = ScriptedClient(lambda messages: f"{len(messages)} messages so far", latency_s=0.05)

Pass it wherever a client is expected; nothing is patched. ``served`` is the usage that a real model
would have charged, dropped replies included, so a test can compare it with what a run reports. With
``ids=ScriptedByteTokenizer()`` it returns the exact token ids of prompt and reply, as an inference
engine does for training: one id per UTF-8 byte, with a marker before and after each message.

    [user "hi"]                  ->  257 104 105 260   258     prompt; 258 starts the reply
    reply "ok"                   ->  111 107 260               sampled ids, with the end marker
    [user "hi", "ok", user "?"]  ->  257 104 105 260   258 111 107 260   257 63 260   258
"""

from __future__ import annotations

import asyncio
import inspect
import time
from pathlib import Path

import msgspec

from ramify.clients.base import ASSUMED_WINDOW, Price, PromptRenderer, Request
from ramify.clients.providers import FREE
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    RamifyError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
    Unreachable,
)
from ramify.testing.reply_script import (
    Lines,
    Script,
    ScriptedFailure,
    ScriptRule,
    Step,
    cut,
    dropped,
    html,
    malformed,
    no_choices,
    no_usage,
    rate_limited,
    refused,
    server_error,
    stalled,
    step_outcome,
    unreachable,
)
from ramify.types.message import Message, Reply, Usage, VersionSpan

_BEGINS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
NUM_IDS = 261


class ScriptedByteTokenizer:
    """A byte-level tokenizer that adds token ids to scripted replies, like those that an inference
    engine returns.

    ``version`` is the policy version that the replies report.

    Example:
        client = testing.ScriptedClient(["FINAL(2)"], ids=testing.ScriptedByteTokenizer())
    """

    def __init__(self, version: int = 0, logprob: float = -0.5, *, keeps_ids: bool = True) -> None:
        """Create a tokenizer for scripted replies of the policy version ``version``.

        With ``keeps_ids=False``, each request tokenizes the whole conversation again. The token ids
        then differ from the sampled ones, as on servers that handle only text.
        """
        self.version = version
        self._logprob = logprob
        self._keeps_ids = keeps_ids

    @property
    def rendering(self) -> PromptRenderer:
        """The renderer that converts a client's prompts to byte-level token ids."""
        return PromptRenderer(self._prompt_ids, self._keeps_ids, _token_text)

    def with_token_ids(self, reply: Reply, request: Request) -> Reply:
        """Return a copy of ``reply`` with its token ids and those of its prompt."""
        token_ids = (*_content_ids(reply.message), END)
        return msgspec.structs.replace(
            reply,
            prompt_ids=self._prompt_ids(request),
            token_ids=token_ids,
            logprobs=(self._logprob,) * len(token_ids),
            versions=(VersionSpan(0, len(token_ids), self.version),),
        )

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        known = request.known if self._keeps_ids else None
        ids = [] if known is None else [*known.ids]
        for message in request.messages[0 if known is None else known.num_messages :]:
            text = _content_ids(message)
            if message.role == "assistant" and not self._keeps_ids:
                text = [32, *text]
            ids += [_BEGINS[message.role], *text, END]
        return (*ids, _BEGINS["assistant"])


def _token_text(id: int) -> str:
    return bytes([id]).decode(errors="replace") if id < min(_BEGINS.values()) else ""


def _content_ids(message: Message) -> list[int]:
    return list(message.content.encode("utf-8", "surrogatepass"))


__all__ = [
    "ScriptRule",
    "ScriptedByteTokenizer",
    "ScriptedClient",
    "ScriptedFailure",
    "Step",
    "cut",
    "dropped",
    "html",
    "malformed",
    "no_choices",
    "no_usage",
    "rate_limited",
    "refused",
    "server_error",
    "stalled",
    "unreachable",
]


class ScriptedClient:
    """A model client for tests that answers from a script instead of calling a model.

    See ``reply_script.py`` for the forms of a script.

    >>> client = testing.ScriptedClient(["42"])
    >>> with ramify.RLM(client) as rlm:
    ...     rlm.completion("What is six times seven?").answer
    '42'
    """

    def __init__(
        self,
        script: Lines | Script,
        name: str = "scripted:test",
        window: int = 128_000,
        price: Price | None = None,
        latency_s: float = 0.0,
        ids: ScriptedByteTokenizer | None = None,
        vision: bool | None = None,
    ) -> None:
        """Create a client that answers from ``script``.

        ``ids`` adds token ids to each reply for which the script gives none.

        ``vision=False`` makes the client behave like a model that cannot read pictures. A script
        finds the pictures of a request in ``messages[-1].pictures``, and their bytes with
        ``requests[-1].read_picture(digest)``.
        """
        self.name = name
        self.window = window
        self.price = price
        self.vision = vision
        self.served = Usage()
        """Total token usage of all requests that the model processed, whether or not the reply
        arrived."""
        self.requests: list[Request] = []
        """All requests, in order of arrival."""
        self.in_flight = 0
        self.most_in_flight = 0
        self._script = script if isinstance(script, Script) else Script(script, name)
        self._latency_s = latency_s
        self._ids = ids
        self.rendering = None if ids is None else ids.rendering

    @classmethod
    def load(
        cls, path: str | Path, *, window: int = ASSUMED_WINDOW, price: Price | None = None
    ) -> ScriptedClient:
        """Create a client from a script file.

        The client's name is ``scripted:PATH``.
        """
        return cls(Script.load(path), name=f"scripted:{path}", window=window, price=price)

    async def complete(self, request: Request) -> Reply:
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        started = time.perf_counter()
        try:
            answer = await self._next(request)
            outcome, usage = step_outcome(answer, request.messages, request.sampling.max_tokens)
            self._refuse_overlong(usage)
            self.served += usage
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
            reply = await self._reply_or_fail(outcome)
        finally:
            self.in_flight -= 1
        if self._ids is not None and reply.token_ids is None:
            reply = self._ids.with_token_ids(reply, request)
        model = reply.model or self.name.partition(":")[2]
        seconds = reply.seconds or time.perf_counter() - started
        return msgspec.structs.replace(reply, model=model, seconds=seconds)

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    async def _next(self, request: Request) -> Step:
        try:
            step = self._script.tell(request.messages)
            if isinstance(step, str) or not inspect.isawaitable(step):
                return step
            return await step
        except RamifyError:
            raise
        except Exception as error:
            # The script is the caller's own code: another attempt would meet the same fault.
            raise ConfigError(
                f"{self.name}: its script raised {error!r:.200}: repair the function that gives "
                "the replies"
            ) from error

    def _refuse_overlong(self, usage: Usage) -> None:
        if usage.input_tokens > self.window:
            error = RequestRefusedError(
                f"{self.name}: the prompt has {usage.input_tokens} tokens and the window "
                f"{self.window}: shorten it"
            )
            error.too_long = True
            raise error

    async def _reply_or_fail(self, step: Reply | ScriptedFailure) -> Reply:
        if isinstance(step, Reply):
            return step
        if step.fail == "no_usage":
            return Reply(Message("assistant", step.text))
        if step.fail == "stalled":
            await asyncio.Event().wait()
        raise _error(self.name, step)


def _error(name: str, step: ScriptedFailure) -> ModelError:
    match step.fail:
        case "rate_limited":
            return RateLimited(f"{name}: 429, rate limited", step.retry_after_s)
        case "server_error":
            return ServerStatusError(f"{name}: {step.status or 500}, {step.text}")
        case "refused":
            refused = RequestRefusedError(f"{name}: {step.status or 400}, {step.text}")
            refused.needs_key = step.status in (401, 402, 403)
            return refused
        case "unreachable":
            return Unreachable(f"{name}: connection refused")
        case "dropped" | "cut":
            return ReplyLostError(f"{name}: the connection closed before the reply was whole")
        case "html":
            error = MalformedResponse(f"{name}: answered HTML instead of JSON")
            error.may_be_paid = False
            return error
        case "no_choices":
            return MalformedResponse(f"{name}: a reply without choices")
        case _:
            return MalformedResponse(f"{name}: a reply that is not JSON: {step.text[:60]!r}")


def connect(
    name: str, *, window: int | None = None, price: Price | None = None, **_connection: object
) -> ScriptedClient:
    """Return a client that answers from a script file.

    Its name is ``scripted:PATH``.
    """
    path = name.partition(":")[2]
    return ScriptedClient.load(path, window=window or ASSUMED_WINDOW, price=price or FREE)

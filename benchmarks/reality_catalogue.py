"""A catalogue of provider misbehaviours, and the figures of ``reality.py`` about them.

Each case is one way in which a real provider answered wrongly: truncated, filtered, refused, empty,
broken or contradictory. Every case runs twice: a direct answer, and a turn of a session. The
provider misbehaves either forever or once. The right answer is ``TRUTH``; what a misbehaving reply
contains is a part of it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from engine import Figure
from reality_providers import SANDBOX, SCAFFOLD, run_fast

from ramify import RLM, Limits, RamifyError
from ramify.cli.parser import ExitCode, exit_of
from ramify.clients.loopback import LoopbackExchange, LoopbackServer

TRUTH = "It is 42, as the second table says."
HALF = "It is 4"
encode = msgspec.json.encode


TURN = f"```repl\nFINAL({TRUTH!r})\n```"
HALF_TURN = TURN[: TURN.index(HALF) + len(HALF)]
"""A turn that answers, and its first half."""


class Misbehaviour(NamedTuple):
    """One way to answer a request. ``body`` makes the body from the text of the reply."""

    name: str
    body: Callable[[str], Any]
    status: int = 200
    headers: Mapping[str, str] = {}
    kind: str = "application/json"
    is_dropped: bool = False

    def answer(self, exchange: LoopbackExchange, text: str) -> None:
        body = self.body(text)
        data = body if isinstance(body, bytes) else encode(body)
        if self.is_dropped:
            exchange.drop(data)
        else:
            exchange.send(self.status, data, self.headers, self.kind)


Maker = Callable[..., dict[str, Any]]


def chat(text: Any, finish: Any = "stop", usage: Any = None, **message: Any) -> dict[str, Any]:
    """A chat completion."""
    usage = usage or {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    wire = {"role": "assistant", "content": text, **message}
    choice = {"index": 0, "message": wire, "finish_reason": finish}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": usage}


def response(
    text: Any, status: Any = "completed", reason: str = "", usage: Any = None, output: Any = None
) -> dict[str, Any]:
    """A response of the responses API."""
    usage = usage or {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18}
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    details = {"reason": reason} if reason else None
    return {
        "id": "r",
        "object": "response",
        "model": "m",
        "status": status,
        "output": [item] if output is None else output,
        "incomplete_details": details,
        "error": None,
        "usage": usage,
    }


def message(
    text: Any, stop: Any = "end_turn", usage: Any = None, content: Any = None
) -> dict[str, Any]:
    """A message of Anthropic's API."""
    blocks = [{"type": "text", "text": text}] if content is None else content
    usage = usage or {"input_tokens": 9, "output_tokens": 9}
    head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**head, "content": blocks, "stop_reason": stop, "usage": usage}


FUNCTION = {"name": "lookup", "arguments": "{}"}
TOOL = {"tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "lookup", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "id": "1", "name": "lookup", "input": {}}
REFUSAL_ITEM = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "refusal", "refusal": "I cannot"}],
}


def http_misbehaviours(whole: Maker) -> list[Misbehaviour]:
    """Misbehaviours below the API level: of servers, gateways and networks."""
    page = b"<html><body>Welcome</body></html>"
    events = b'data: {"choices": [{"delta": {"content": "It is 4"}}]}\n\ndata: [DONE]\n\n'

    def failed(text: str, **more: Any) -> Any:
        return {"type": "error", "error": {"type": "x", "message": text, **more}}

    def status(number: int, text: str, headers: Mapping[str, str] = {}) -> Misbehaviour:
        return Misbehaviour(f"status {number}: {text}", lambda _: failed(text), number, headers)

    return [
        Misbehaviour("a web page", lambda _: page, kind="text/html"),
        Misbehaviour("a web page named JSON", lambda _: page),
        Misbehaviour("a web page with status 502", lambda _: page, 502, kind="text/html"),
        Misbehaviour("an empty body", lambda _: b""),
        Misbehaviour("half of a body", lambda text: encode(whole(text))[:-20]),
        Misbehaviour("a connection that closes", lambda _: b"", is_dropped=True),
        Misbehaviour("a body cut off", lambda text: encode(whole(text))[:90], is_dropped=True),
        Misbehaviour("an event stream", lambda _: events, kind="text/event-stream"),
        Misbehaviour("a list", lambda _: []),
        Misbehaviour("null", lambda _: b"null"),
        Misbehaviour("an error with status 200", lambda _: {"error": {"message": "overloaded"}}),
        Misbehaviour("a moved address", lambda _: b"", 302, {"Location": "/elsewhere"}),
        status(401, "no such key"),
        status(402, "payment required"),
        status(403, "not allowed"),
        status(404, "no such model"),
        status(408, "timeout"),
        status(413, "too large"),
        status(429, "slow down", {"retry-after": "2"}),
        status(429, "You exceeded your current quota"),
        status(500, "broken"),
        status(503, "overloaded"),
        status(529, "overloaded"),
    ]


CHAT = [
    Misbehaviour("length", lambda text: chat(text, "length")),
    Misbehaviour("MAX_TOKENS", lambda text: chat(text, "MAX_TOKENS")),
    Misbehaviour("length without text", lambda _: chat("", "length")),
    Misbehaviour("content_filter", lambda text: chat(text, "content_filter")),
    Misbehaviour("SAFETY", lambda text: chat(text, "SAFETY")),
    Misbehaviour("a refusal", lambda _: chat(None, refusal="I cannot")),
    Misbehaviour(
        "a refusal part", lambda _: chat([{"type": "refusal", "refusal": "I cannot help"}])
    ),
    Misbehaviour("finish null", lambda text: chat(text, None)),
    Misbehaviour("an unknown finish", lambda text: chat(text, "odd_reason")),
    Misbehaviour("finish error", lambda text: chat(text, "error")),
    Misbehaviour("an empty text", lambda _: chat("")),
    Misbehaviour("a null text", lambda _: chat(None)),
    Misbehaviour("a blank text", lambda _: chat(" \n ")),
    Misbehaviour("only reasoning", lambda text: chat(None, reasoning_content=text)),
    Misbehaviour("a tool call", lambda _: chat(None, "tool_calls", **TOOL)),
    Misbehaviour("a tool call after words", lambda text: chat("Let me see", "tool_calls", **TOOL)),
    Misbehaviour("an old function call", lambda _: chat(None, "stop", function_call=FUNCTION)),
    Misbehaviour("no choices", lambda _: {**chat(""), "choices": []}),
    Misbehaviour("null choices", lambda _: {**chat(""), "choices": None}),
    Misbehaviour("a text that is a number", lambda _: chat(4)),
    Misbehaviour(
        "the limit reached without a finish",
        lambda text: _without_finish(chat(text, usage=_chat_usage(9, 8192))),
    ),
]
RESPONSES = [
    Misbehaviour("incomplete", lambda text: response(text, "incomplete", "max_output_tokens")),
    Misbehaviour("filtered", lambda text: response(text, "incomplete", "content_filter")),
    Misbehaviour("incomplete without reason", lambda text: response(text, "incomplete")),
    Misbehaviour("failed", lambda text: response(text, "failed")),
    Misbehaviour("in progress", lambda text: response(text, "in_progress")),
    Misbehaviour("queued", lambda text: response(text, "queued")),
    Misbehaviour("status null", lambda text: response(text, None)),
    Misbehaviour("a refusal", lambda _: response("", output=[REFUSAL_ITEM])),
    Misbehaviour("no output", lambda _: response("", output=[])),
    Misbehaviour("an empty text", lambda _: response("")),
    Misbehaviour("a function call", lambda _: response("", output=[CALL_ITEM])),
    Misbehaviour(
        "an incomplete message",
        lambda text: response("", output=[{**response(text)["output"][0], "status": "incomplete"}]),
    ),
    Misbehaviour("only reasoning", lambda _: response("", output=[{"type": "reasoning"}])),
]
MESSAGES = [
    Misbehaviour("max_tokens", lambda text: message(text, "max_tokens")),
    Misbehaviour("the window is full", lambda t: message(t, "model_context_window_exceeded")),
    Misbehaviour("refusal", lambda text: message(text, "refusal")),
    Misbehaviour("pause_turn", lambda text: message(text, "pause_turn")),
    Misbehaviour("stop null", lambda text: message(text, None)),
    Misbehaviour("an unknown stop", lambda text: message(text, "odd_reason")),
    Misbehaviour("no blocks", lambda _: message("", content=[])),
    Misbehaviour("an empty text", lambda _: message("")),
    Misbehaviour("null blocks", lambda _: {**message(""), "content": None}),
    Misbehaviour("a tool call", lambda _: message("", "tool_use", content=[TOOL_USE])),
    Misbehaviour(
        "only thinking",
        lambda t: message("", content=[{"type": "thinking", "thinking": t, "signature": "s"}]),
    ),
    Misbehaviour("no usage", lambda text: {**message(text, "max_tokens"), "usage": None}),
]
HIDDEN_BY_LITELLM = ("finish null", "an unknown finish", "the limit reached without a finish")
"""LiteLLM reports these replies as complete, so its clients cannot detect them."""


def _without_finish(body: dict[str, Any]) -> dict[str, Any]:
    del body["choices"][0]["finish_reason"]
    return body


def _chat_usage(given: Any, produced: Any, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": given, "completion_tokens": produced, **more}


class Api(NamedTuple):
    """One API: the naming of its models, a correct reply, and its misbehaviours."""

    model: Callable[[int], str]
    """Name of the model behind a port."""
    whole: Maker
    cases: list[Misbehaviour]


def _apis() -> dict[str, Api]:
    apis = {
        "chat": Api(lambda port: f"openai:m@http://127.0.0.1:{port}/v1", chat, CHAT),
        "responses": Api(
            lambda port: f"openai:m@http://127.0.0.1:{port}/v1/responses", response, RESPONSES
        ),
    }
    if importlib.util.find_spec("anthropic"):
        apis["messages"] = Api(
            lambda port: f"anthropic:m@http://127.0.0.1:{port}", message, MESSAGES
        )
    if importlib.util.find_spec("litellm"):
        known = [case for case in CHAT if case.name not in HIDDEN_BY_LITELLM]
        name = "litellm:openai/m@http://127.0.0.1:{}/v1"
        apis["litellm"] = Api(lambda port: name.format(port), chat, known)
    return apis


async def _outcome_of(
    api: Api, case: Misbehaviour, is_direct: bool, times: float
) -> tuple[int, Any]:
    """Return the exit code and the answer of a run whose first ``times`` replies misbehave."""
    num_asked = 0

    def handle(exchange: LoopbackExchange) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= times:
            case.answer(exchange, HALF if is_direct else HALF_TURN)
        else:
            text = TRUTH if is_direct else TURN
            exchange.send(200, encode(api.whole(text)))

    server = LoopbackServer(handle)
    await server.start()
    limits = Limits(patience_s=60.0, max_turns=4)
    options: dict[str, Any] = {} if is_direct else {"scaffold": SCAFFOLD, "sandbox": SANDBOX}
    try:
        async with RLM(api.model(server.port), limits=limits, **options) as rlm:
            result = await rlm.start("text", "What is it?")
            return exit_of(result.stop, result.answer), result.answer
    except RamifyError:
        return ExitCode.ERROR, None
    finally:
        await server.close()


def misbehaviours(quick: bool) -> Iterator[Figure]:
    """Yield figures of every case of the catalogue, over every API."""
    logging.getLogger("ramify").setLevel(logging.ERROR)
    os.environ.update(ANTHROPIC_API_KEY="sk-none", OPENAI_API_KEY="sk-none")
    apis = _apis()
    cases = [(name, case) for name, api in apis.items() for case in api.cases]
    cases += [(name, case) for name, api in apis.items() for case in http_misbehaviours(api.whole)]
    wrong = []
    for name, case in cases:
        for is_direct in (True, False):
            for times in (1, 1e9):
                code, answer = run_fast(_outcome_of(apis[name], case, is_direct, times))
                if code == ExitCode.ANSWERED and answer != TRUTH:
                    wrong.append((name, case.name, is_direct, times, answer))
    for each in wrong:
        print("wrong:", *each)
    yield Figure("cases in the catalogue of misbehaviours", len(cases), "cases", {}, least=60)
    yield Figure("cases with exit code 0 and a wrong answer", len(wrong), "cases", {}, floor=0)


USAGES: tuple[Mapping[str, Any], ...] = (
    _chat_usage(9, 9, prompt_tokens_details={"cached_tokens": 5000}),
    _chat_usage(-9, 9),
    _chat_usage(9, -9),
    _chat_usage(9, 9, total_tokens=1),
    _chat_usage(9, 9, completion_tokens_details={"reasoning_tokens": 10**9}),
    _chat_usage(0, 0),
    _chat_usage(10**12, 9),
    _chat_usage(9, 10**12),
    _chat_usage("9", 9),
    _chat_usage(9.5, 9),
    _chat_usage(True, True),
    _chat_usage(None, None, total_tokens=18),
    {"total_tokens": -1},
    {},
)
MAX_TOKENS = 50_000
MAX_CALLS = 20


async def _overspends(usage: Mapping[str, Any]) -> bool:
    """True if a run whose server reports ``usage`` exceeds a limit, as recorded or in fact."""
    num_asked = 0

    def handle(exchange: LoopbackExchange) -> None:
        nonlocal num_asked
        num_asked += 1
        body = msgspec.json.decode(exchange.body)
        is_root = body["messages"][0]["role"] == "system"
        text = "```repl\nllm_query_batched(['x'] * 3)\n```" if is_root else "fine"
        exchange.send(200, encode(chat(text, usage=dict(usage))))

    server = LoopbackServer(handle)
    await server.start()
    limits = Limits(max_tokens=MAX_TOKENS, max_calls=MAX_CALLS, max_cost=0.05, max_turns=50)
    model = f"openai:gpt-4.1-mini@http://127.0.0.1:{server.port}/v1"
    async with RLM(model, limits=limits, scaffold=SCAFFOLD, sandbox=SANDBOX) as rlm:
        result = await rlm.start("text", "?")
    await server.close()
    is_booked = 0 <= result.usage.total_tokens <= MAX_TOKENS and 0 <= (result.cost or 0) <= 0.05
    return not (is_booked and result.usage.calls <= MAX_CALLS and num_asked <= MAX_CALLS)


def usages(quick: bool) -> Iterator[Figure]:
    """Yield figures of usage reports that contradict themselves."""
    over = [usage for usage in USAGES if run_fast(_overspends(usage))]
    for usage in over:
        print("over a limit:", usage)
    name = f"self-contradictory usages that take a run past a limit, of {len(USAGES)}"
    yield Figure(name, len(over), "usages", {}, floor=0)

"""Simulated providers that fail as real ones do, and the figures of ``reality.py`` about them.

An outage begins when the provider receives a given request and lasts 60 s of the fast clock. It
refuses connections, resets them, or answers every request with the same bad answer.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from figures import Figure

from ramify import RLM, Limits, SandboxSpec, Scaffold, Stop
from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest

T = TypeVar("T")
SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
SCAFFOLD = Scaffold(
    name="reality", system="You drive a session; FINAL ends it. {{tools}}{{limits}}", direct_chars=0
)
FOREVER_S = 1e6


class FastSelector(selectors.DefaultSelector):
    """A selector that waits a fraction of the requested time."""

    speed = 1.0

    def select(self, timeout: float | None = None) -> Any:
        return super().select(timeout if timeout is None else timeout / self.speed)


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock runs ``speed`` times as fast as the real one: every timer of a run
    (retries, rate limits, timeouts, the deadline) is that much shorter."""

    def __init__(self, speed: float) -> None:
        selector = FastSelector()
        selector.speed = self._speed = speed
        super().__init__(selector)

    def time(self) -> float:
        return super().time() * self._speed


def run_fast(work: Coroutine[Any, Any, T], speed: float = 200.0) -> T:
    """Run ``work`` on a ``FastLoop``."""
    with asyncio.Runner(loop_factory=lambda: FastLoop(speed)) as runner:
        return runner.run(work)


def chat_body(text: str, finish: str = "stop") -> bytes:
    """A chat completion that contains ``text``."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return msgspec.json.encode({"choices": [choice], "usage": usage, "model": "m"})


Answer = Callable[[PendingMockRequest], None]
EVENTS = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\ndata: [DONE]\n\n'
DOWN: dict[str, Answer | None] = {
    "refused connections": None,
    "resets": lambda exchange: exchange.drop(),
    "half a body": lambda exchange: exchange.drop(b'{"choices": [{"mess'),
    "503": lambda exchange: exchange.send(503, b"overloaded"),
    "529": lambda exchange: exchange.send(529, b'{"error": {"message": "Overloaded"}}'),
    "429": lambda exchange: exchange.send(429, b"slow down", {"retry-after": "20"}),
    "408": lambda exchange: exchange.send(408, b""),
    "web page": lambda exchange: exchange.send(200, b"<html>", content_type="text/html"),
    "broken JSON": lambda exchange: exchange.send(200, b'{"choices": [{"message": {"con'),
    "empty choices": lambda exchange: exchange.send(200, b'{"choices": []}'),
    "event stream": lambda exchange: exchange.send(200, EVENTS, content_type="text/event-stream"),
}
"""Form of an outage -> how the server answers during it; None if it does not listen."""


class FailingServer:
    """A chat completions server that has an outage of ``outage_s`` from its request number
    ``at``."""

    def __init__(
        self, reply: Callable[[list[Any]], str], at: int, form: str, outage_s: float
    ) -> None:
        self.replies: Counter[bytes] = Counter()
        """Number of replies that were sent to each prompt."""
        self._reply = reply
        self._at = at
        self._form = form
        self._outage_s = outage_s
        self._up_again_s = 0.0
        self._num_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = MockHttpServer(self._handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.port}/v1"

    async def __aenter__(self) -> FailingServer:
        await self._http.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*self._tasks)
        await self._http.close()

    def _handle(self, exchange: PendingMockRequest) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._num_requests == self._at:
            self._up_again_s = now_s + self._outage_s
        self._num_requests += 1
        if now_s >= self._up_again_s:
            messages = msgspec.json.decode(exchange.body)["messages"]
            self.replies[msgspec.json.encode(messages)] += 1
            return exchange.send(200, chat_body(self._reply(messages)))
        answer = DOWN[self._form]
        if answer is not None:
            return answer(exchange)
        if not self._tasks:
            self._tasks.add(asyncio.ensure_future(self._restart()))
        return None

    async def _restart(self) -> None:
        await self._http.close()
        await asyncio.sleep(self._outage_s)
        await self._http.start()


NUM_CALLS = 36
CELLS = (
    f"found = llm_query_batched([f'item {{i}}' for i in range({NUM_CALLS - 12})])",
    "more = [llm_query(f'single {i}') for i in range(12)]",
    "total = sum(len(text) for text in found + more)",
    "FINAL(total)",
)
NUM_REQUESTS = NUM_CALLS + len(CELLS)
RIGHT = sum(len(f"re: item {i}") for i in range(NUM_CALLS - 12)) + sum(
    len(f"re: single {i}") for i in range(12)
)


def model(messages: list[Any]) -> str:
    """A root that runs ``CELLS``, and sub-calls that repeat their prompt."""
    if messages[0]["role"] != "system":
        return f"re: {messages[-1]['content']}"
    turn = sum(message["role"] == "assistant" for message in messages)
    return f"```repl\n{CELLS[turn]}\n```"


async def _run_with_outage(at: int, form: str, outage_s: float) -> bool:
    """True if the run gives the right answer and no prompt is answered twice."""
    async with FailingServer(model, at, form, outage_s) as server:
        limits = Limits(max_seconds=FOREVER_S, max_concurrency=4)
        name = f"openai:m@{server.url}"
        async with RLM(name, scaffold=SCAFFOLD, sandbox=SANDBOX, limits=limits) as rlm:
            result = await rlm.start("text", "How long are the replies?")
        is_right = (result.stop, result.answer) == (Stop.FINAL, RIGHT)
        return is_right and set(server.replies.values()) == {1}


def outages(quick: bool) -> Iterator[Figure]:
    """Yield the figure of a 60 s outage at each request of a run."""
    forms = list(DOWN)
    cases = [(at, forms[at % len(forms)]) for at in range(NUM_REQUESTS)]
    cases += [] if quick else [(at, form) for form in forms for at in (0, 1, 20, 39)]
    wrong = [case for case in cases if not run_fast(_run_with_outage(*case, 60.0))]
    name = f"outages of 60 s after which a run is wrong or pays twice, of {len(cases)}"
    yield Figure(name, len(wrong), "runs", {}, floor=0)
    for at, form in wrong:
        print(f"wrong: {form} at request {at}")

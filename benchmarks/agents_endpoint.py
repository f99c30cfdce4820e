"""CPU time of the endpoint through which agents ask a model, beyond that of the model.

    another process: 64 agents ── HTTP ──▶ endpoint ──▶ engine double      CPU time of this process
    this process:    the same requests   ─────────────▶ engine double      CPU time of this process

The engine double answers at once with token ids, so the difference is what the endpoint itself
costs: HTTP, JSON, keys, the formats of the APIs, the memory of token ids, and in a run also its
record. Each agent holds a conversation of several turns, whose prompts have about 2,000 tokens.
Both sides are measured alternately, several times, and the least CPU time of each counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from figures import Figure

NUM_AGENTS = 64
NUM_TURNS = 4
PROMPT = " ".join(f"row {number}: red {number % 7}" for number in range(400))
"""About 2,000 tokens of a usual tokenizer."""
REPLY = "The rows with red are counted in the next step, " * 4
NUM_PROMPT_IDS = 2000
PATHS = {"chat completions": "chat/completions", "responses": "responses", "messages": "messages"}
FLOOR_MS = 2.0


def figures(quick: bool) -> Iterator[Figure]:
    found = asyncio.run(_measured(3 if quick else 8))
    for name, (through_ms, direct_ms) in found.items():
        yield Figure(
            f"CPU time of the endpoint per request, {NUM_AGENTS} agents: {name}",
            round(through_ms - direct_ms, 3),
            "ms",
            {"the engine double directly": round(direct_ms, 3)},
            FLOOR_MS,
        )


async def _measured(num_repeats: int) -> dict[str, tuple[float, float]]:
    """Name of each measurement -> (CPU time per request through the endpoint, and directly), in
    ms."""
    times: dict[str, list[float]] = {}
    num_requests = NUM_AGENTS * NUM_TURNS
    async with contextlib.AsyncExitStack() as stack:
        engine, policy_url, key = await stack.enter_async_context(_served_policy())
        seats_url, keys = await stack.enter_async_context(_seats(engine))
        measurements: dict[str, Callable[[], Awaitable[float]]] = {}
        measurements["direct"] = lambda: _directly(engine)
        for name, path in PATHS.items():
            driver = await stack.enter_async_context(_Driver(policy_url, path, [key] * NUM_AGENTS))
            measurements[f"serve-policy, {name}"] = driver.run
        # Each run answers the same conversation again, as an agent that samples it again.
        driver = await stack.enter_async_context(
            _Driver(seats_url, PATHS["chat completions"], keys)
        )
        measurements["a rollout's seat, chat completions"] = driver.run
        for _ in range(num_repeats):
            for name, measure in measurements.items():
                times.setdefault(name, []).append(await measure())
    least = {name: 1000 * min(values) / num_requests for name, values in times.items()}
    direct = least.pop("direct")
    return {name: (value, direct) for name, value in least.items()}


async def _directly(engine: Any) -> float:
    from ramify.clients.base import Request, Sampling
    from ramify.types.message import Message

    async def agent(number: int) -> None:
        messages = [Message("user", f"{number} {PROMPT}")]
        for turn in range(NUM_TURNS):
            sampling = Sampling(200, temperature=1.0, logprobs=True)
            reply = await engine.complete(Request(tuple(messages), sampling))
            messages += [reply.message, Message("user", f"Turn {turn}?")]

    began = time.process_time()
    await asyncio.gather(*map(agent, range(NUM_AGENTS)))
    return time.process_time() - began


class EngineDouble:
    """A model that answers at once with token ids."""

    name = "local:double"
    window = 100_000
    version = 0

    def __init__(self) -> None:
        from ramify.clients.base import Price, PromptRenderer

        self.price = Price(0.0, 0.0)
        self.rendering = PromptRenderer(self._prompt, True, str)
        self._prompt_ids = tuple(range(NUM_PROMPT_IDS))
        self._token_ids = tuple(range(50))
        self._logprobs = tuple(-0.5 for _ in range(50))

    async def complete(self, request: Any) -> Any:
        from ramify.types.message import Message, Reply, Usage, VersionSpan

        prompt_ids = self._prompt(request)
        await asyncio.sleep(0)
        return Reply(
            Message("assistant", REPLY),
            usage=Usage(len(prompt_ids), 50, calls=1),
            model="double",
            prompt_ids=prompt_ids,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            versions=(VersionSpan(0, 50, 0),),
        )

    async def stream(self, request: Any) -> AsyncGenerator[Any, None]:
        yield await self.complete(request)

    async def close(self) -> None:
        pass

    def _prompt(self, request: Any) -> tuple[int, ...]:
        num_ids = NUM_PROMPT_IDS + 60 * (len(request.messages) // 2)
        known = request.known.ids if request.known is not None else self._prompt_ids
        return (*known, *range(max(num_ids - len(known), 1)))


@contextlib.asynccontextmanager
async def _served_policy() -> AsyncIterator[tuple[EngineDouble, str, str]]:
    from ramify.serve.policy_server import PolicyServer

    engine: Any = EngineDouble()
    async with PolicyServer(engine, name="double") as server:
        yield engine, server.url, server.key


@contextlib.asynccontextmanager
async def _seats(engine: Any) -> AsyncIterator[tuple[str, list[str]]]:
    """Runs whose agents are outside: yields the address, and one key for each run."""
    from ramify import RLM, Limits
    from ramify.engine.external_conversations import RunModelClient
    from ramify.evaluate.agent_model_server import AgentModelAccess, AgentModelServer
    from ramify.tasks.base import RolloutInitialState

    keys: list[str] = []
    is_over, all_there = asyncio.Event(), asyncio.Event()

    async with RLM(engine, limits=Limits(max_turns=10_000)) as rlm, AgentModelServer() as endpoint:

        async def conduct(conversations: RunModelClient) -> str:
            with endpoint.temporary_seat_key(AgentModelAccess(conversations, "agent")) as key:
                keys.append(key)
                if len(keys) == NUM_AGENTS:
                    all_there.set()
                await is_over.wait()
            return "done"

        runs = [
            rlm.start(RolloutInitialState(conduct=conduct), f"play {number}")
            for number in range(NUM_AGENTS)
        ]
        try:
            await all_there.wait()
            yield endpoint.url(), keys
        finally:
            is_over.set()
            for run in runs:
                await run


class _Driver:
    """Another process with all agents, which hold their conversations when they are asked to."""

    def __init__(self, url: str, path: str, keys: list[str]) -> None:
        self._given = {"url": url, "path": path, "keys": keys}
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> _Driver:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._says(json.dumps(self._given))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def run(self) -> float:
        """CPU time of this process, in seconds, while all conversations were held."""
        began = time.process_time()
        await self._says("go")
        return time.process_time() - began

    async def _says(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        answer = await self._process.stdout.readline()
        if answer.strip() != b"done":
            raise RuntimeError(f"the agents failed: {answer.decode()}")


# --- in the other process -------------------------------------------------------------------------


async def _drive() -> None:
    import aiohttp

    given = json.loads(sys.stdin.readline())
    connector = aiohttp.TCPConnector(limit=NUM_AGENTS)
    async with aiohttp.ClientSession(connector=connector) as http:
        print("done", flush=True)
        num_runs = 0
        while await asyncio.to_thread(sys.stdin.readline):
            agents = (_agent(http, given, number, num_runs) for number in range(NUM_AGENTS))
            try:
                await asyncio.gather(*agents)
                print("done", flush=True)
            except Exception as error:  # noqa: BLE001 (the measuring process reports it)
                print(f"{type(error).__name__}: {error}".replace("\n", " ")[:2000], flush=True)
            num_runs += 1


async def _agent(http: Any, given: dict[str, Any], number: int, num_run: int) -> None:
    path = given["path"]
    headers = {"Authorization": f"Bearer {given['keys'][number]}"}
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"{number} {num_run} {PROMPT}"}]
    for turn in range(NUM_TURNS):
        body: dict[str, Any] = {"model": "any", "temperature": 1.0}
        body |= {"input": talk} if path == "responses" else {"messages": talk}
        body["max_output_tokens" if path == "responses" else "max_tokens"] = 200
        async with http.post(f"{given['url']}/{path}", json=body, headers=headers) as response:
            answer = await response.json()
        if response.status != 200:
            raise RuntimeError(str(answer))
        talk += _reply(path, answer)
        talk.append({"role": "user", "content": f"Turn {turn}?"})


def _reply(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The reply as an agent sends it back."""
    if path == "responses":
        return list(answer["output"])
    if path == "messages":
        return [{"role": "assistant", "content": answer["content"]}]
    return [answer["choices"][0]["message"]]


if __name__ == "__main__":
    asyncio.run(_drive())

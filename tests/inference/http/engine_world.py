"""Engines with one policy, each in its own server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web

from ramify.clients.base import Request, Sampling
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import LazyExportWeight, to_lazy_weights
from ramify.models.load import Policy
from ramify.serve.policy_server import PolicyServer
from ramify.types.message import Message
from tests.inference.helpers import ENGINE_KEY, policy
from tests.shown import heard

USER = Message("user", "count rows of 'red'\nlen 812")


class World:
    """A trainer's policy, servers of copies of it, and the client over them."""

    def __init__(
        self,
        trained: Policy,
        servers: list[PolicyServer],
        locals: list[LocalClient],
        said: list[str],
    ) -> None:
        self.trained, self.servers, self.locals, self.said = trained, servers, locals, said
        self.engines: HttpEngineClient

    def sources(self) -> list[LazyExportWeight]:
        return to_lazy_weights(self.trained.model.named_parameters(), torch.float32)

    async def train(self, version: int) -> None:
        """Change the trainer's weights and give them to the engines."""
        with torch.no_grad():
            for parameter in self.trained.model.parameters():
                parameter += 0.02 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(version)
                )
        await self.engines.update(self.sources(), version)


@asynccontextmanager
async def world(num: int = 2, engine: str = "ramify", **options: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        locals, servers = [], []
        for _ in range(num):
            locals.append(LocalClient(policy(), slots=8))
            stack.push_async_callback(locals[-1].close)
            servers.append(
                PolicyServer(locals[-1], name="mine", key=ENGINE_KEY, weight_transfer=True)
            )
            await stack.enter_async_context(servers[-1])
        urls = tuple(each.url.removesuffix("/v1") for each in servers)
        made = World(policy(), servers, locals, [])
        spec = InferenceSpec(
            urls=urls, **{"engine": engine, "probe_s": 60.0, "restarts": 0, **options}
        )
        stack.enter_context(heard(made.said.append, made.said.append))
        made.engines = HttpEngineClient(made.trained, spec, name="ramify:test")
        await made.engines.start(Path("unused"), lambda _: None)
        stack.push_async_callback(made.engines.close)
        yield made


def engine_session() -> aiohttp.ClientSession:
    """Session whose requests present the key of the engines, as the trainer's do."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {ENGINE_KEY}"})


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def request(seed: int | None = 7, max_tokens: int = 12, *messages: Message, **more: Any) -> Request:
    return Request(
        messages or (USER,),
        Sampling(max_tokens, 1.0, seed=seed, logprobs=True),
        affinity="0",
        **more,
    )


async def other_server(answers: dict[str, Any]) -> tuple[web.AppRunner, str]:
    async def answer(http: web.Request) -> web.Response:
        return web.json_response(answers[http.path])

    app = web.Application()
    for path in answers:
        app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

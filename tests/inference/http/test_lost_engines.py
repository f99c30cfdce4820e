"""An engine that is lost and returns: waiting requests, the weights that it gets, and when it is
given up.

The servers are real, in this process, on loopback; one that returns has its initial weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ramify.actors.child_process import ProcessHandle
from ramify.actors.launcher import RoleInstanceId, free_port
from ramify.errors import ServerStatusError, TrainError
from ramify.http_server.access import ListenAddress
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.models.weights import fingerprint
from ramify.serve.policy_server import PolicyServer
from ramify.types.message import VersionSpan
from tests.inference.helpers import ENGINE_KEY, policy
from tests.inference.http.engine_world import World, request, run, world
from tests.shown import heard


@asynccontextmanager
async def restarted_server(made: World, which: int) -> AsyncIterator[LocalClient]:
    """Start a new server at the address of one that has stopped."""
    port = int(made.servers[which].url.rpartition(":")[2].removesuffix("/v1"))
    local = LocalClient(policy(), slots=8)
    async with PolicyServer(
        local,
        name="mine",
        address=ListenAddress(port=port),
        key=ENGINE_KEY,
        weight_transfer=True,
    ):
        yield local
    await local.close()


async def stop(made: World, which: int) -> None:
    await made.servers[which].__aexit__(None, None, None)
    for _ in range(50):  # clients see that their connections have closed
        await asyncio.sleep(0)


def test_requests_wait_for_the_only_engine_and_use_the_newest_weights() -> None:
    async def test() -> None:
        async with world(1, restarts=1, return_s=60.0) as made:
            await made.train(1)
            made.engines.availability.on_return = lambda: _rejoin(made, 1)
            asked = request(3, 40)
            expected = await made.engines.complete(asked)
            made.locals[0].pause()
            flying = asyncio.ensure_future(made.engines.complete(asked))
            while not made.locals[0].engine.num_steps:
                await asyncio.sleep(0.001)
            await stop(made, 0)
            late = asyncio.ensure_future(made.engines.complete(asked))
            while made.engines.up_to_date_urls:  # the new server must not answer for the old one
                await asyncio.sleep(0.001)
            async with restarted_server(made, 0) as local:
                replies = [await flying, await late]
                assert fingerprint(local.policy.model) == fingerprint(made.trained.model)
                assert [reply.token_ids for reply in replies] == [expected.token_ids] * 2
                assert [reply.versions for reply in replies] == [expected.versions] * 2
                assert made.engines.engine_count_metrics() == {
                    "engines": 1.0,
                    "engines_lost": 1.0,
                    "engines_back": 1.0,
                }
                assert made.said[0].endswith("no engine is left; waiting for it for at most 60 s")
                assert "an engine is back, with version 1 of the weights" in made.said[1]
                await made.engines.close()

    run(test)


async def _rejoin(made: World, version: int) -> None:
    assert await made.engines.update_returned_engines(made.sources(), version)


@pytest.mark.parametrize("weight_sync", ["shared", "gloo"])
def test_weight_update_includes_returned_engines(weight_sync: str) -> None:
    async def test() -> None:
        never = (
            {"timeout_s": 3000.0} if weight_sync == "gloo" else {}
        )  # no wait for the lost member of its group
        async with world(
            2, weight_sync=weight_sync, weight_sync_options=never, restarts=2, return_s=60.0
        ) as made:
            await stop(made, 1)
            async with restarted_server(made, 1) as local:
                await made.train(1)  # it is back already, but lacks the base of the update
                assert made.said[0].endswith("was this engine restarted?: sending all weights")
                await stop(made, 0)
                asked = [made.engines.complete(request(seed, 4)) for seed in range(4)]
                assert {reply.versions for reply in await asyncio.gather(*asked)} == {
                    (VersionSpan(0, 4, 1),)
                }
                async with restarted_server(made, 0) as other:
                    while not made.engines.availability.ready:
                        await asyncio.sleep(0.01)
                    await made.train(2)
                    for each in (local, other):
                        assert each.version == 2
                        assert fingerprint(each.policy.model) == fingerprint(made.trained.model)
                    await made.engines.close()

    run(test)


def test_unnoticed_engine_restart_is_detected_before_sampling() -> None:
    async def test() -> None:
        async with world(1, restarts=1, return_s=60.0) as made:
            await made.train(1)
            made.engines.availability.on_return = lambda: _rejoin(made, 1)
            expected = await made.engines.complete(request(3, 40))
            await stop(made, 0)
            async with restarted_server(made, 0):
                assert (await made.engines.complete(request(3, 40))).token_ids == expected.token_ids
                assert (
                    "answers with version 0 of the weights, but was given version 1" in made.said[0]
                )
                await made.engines.close()

    run(test)


class EnginesInThisLoop:
    """A launcher of engines that run in this test's event loop. A renewed slot has another address,
    as after the loss of a machine, and an engine started there waits for ``may_come``."""

    address = "127.0.0.1"
    where = "engine 0"

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = self.address
        self.servers: list[PolicyServer] = []
        self.may_come = asyncio.Event()

    def address_of(self, member: RoleInstanceId) -> str:
        return self._host

    def free_port(self, member: RoleInstanceId) -> int:
        return free_port(self._host)

    def ensure_slot(self, member: RoleInstanceId) -> None:
        self._host = "127.0.0.2"

    def start(
        self,
        member: RoleInstanceId,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> ProcessHandle:
        port = int(command[command.index("--port") + 1])
        asyncio.run_coroutine_threadsafe(self._serve(self._host, port), self._loop)
        return self

    async def _serve(self, host: str, port: int) -> None:
        if self.servers:
            await self.may_come.wait()
        local = LocalClient(policy(), slots=8)
        server = PolicyServer(
            local,
            name="mine",
            address=ListenAddress(host, port),
            key=ENGINE_KEY,
            weight_transfer=True,
        )
        await server.__aenter__()
        self.servers.append(server)

    def poll(self) -> None:
        return None

    def exit_reason(self) -> str:
        return ""

    def end(self, grace_s: float = 0.0) -> None: ...

    def close(self) -> None: ...


def test_sampling_client_finds_a_moved_engine_once_it_has_the_newest_weights(
    tmp_path: Path,
) -> None:
    """A client that only samples loses the engine; the client that updates the weights restarts it
    at another address."""
    said: list[str] = []

    async def test() -> None:
        launcher = EnginesInThisLoop()
        trained, asked = policy(), []
        ours = HttpEngineClient(trained, InferenceSpec(probe_s=60.0), name="ours")
        world = World(trained, [], [], said)
        world.engines = ours
        await ours.start(tmp_path, lambda _: None, launcher)
        ours.availability.on_return = lambda: _rejoin(world, 1)
        await world.train(1)

        async def tell(url: str) -> None:
            await ours.handle_reported_loss(url, "them")
            launcher.may_come.set()
            while not ours.up_to_date_urls:
                await asyncio.sleep(0)  # wait until it can be used
            theirs.set_usable_urls(ours.up_to_date_urls)

        theirs = HttpEngineClient(
            policy(),
            InferenceSpec(urls=ours.up_to_date_urls, probe_s=60.0),
            name="theirs",
        )
        await theirs.start(
            tmp_path,
            lambda _: None,
            gone=lambda url: asked.append(asyncio.ensure_future(tell(url))),
        )
        theirs.record_external_update(1)
        expected = await theirs.complete(request(3, 20))
        first = ours.up_to_date_urls[0]
        await launcher.servers[0].__aexit__(None, None, None)
        again = await theirs.complete(request(3, 20))
        assert (again.token_ids, again.versions) == (expected.token_ids, expected.versions)
        (moved,) = ours.up_to_date_urls
        assert (theirs.up_to_date_urls, moved == first) == ((moved,), False)
        assert len(asked) == 1
        ends = [line for line in said if not line.endswith("the run brings it back")]
        assert ends[0].startswith(f"{first} no longer answers; the failed request: by them")
        assert ends[1:3] == [
            f"the engine of {first} was started again at {moved}",
            f"an engine is back, with version 1 of the weights; now there are {moved}",
        ]
        await theirs.close()
        await ours.close()
        await launcher.servers[1].__aexit__(None, None, None)

    with heard(said.append, said.append):
        run(test)


def test_engine_that_does_not_return_is_given_up() -> None:
    async def test() -> None:
        async with world(1, restarts=2, return_s=0.3) as made:
            await stop(made, 0)
            with pytest.raises(
                ServerStatusError,
                match=r"no engine is left: .* did not come back: no engine answers",
            ):
                await made.engines.complete(request())
            assert [told.rpartition("; ")[2] for told in made.said] == [
                "waiting for it for at most 0.3 s",
                "it is tried again",
                "it is given up",
            ]
            with pytest.raises(
                TrainError,
                match=r"version 1 of the weights cannot be sent, since no engine is left",
            ):
                await made.train(1)

    run(test)

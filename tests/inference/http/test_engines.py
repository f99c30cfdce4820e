"""Several HTTP engines as one client: routing, weight updates during sampling, and lost engines.

The servers are real, in this process, on loopback; all start from the same weights.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web

from ramify.clients.base import Request, Sampling
from ramify.errors import ConfigError, Refused, ServerFailed, TrainError
from ramify.inference.base import CachePressure
from ramify.inference.http.engine_server import combined_pressure, pressure_text, read_pressure
from ramify.inference.http.http_engines import HttpEngines
from ramify.inference.http.inference_spec import InferenceSpec, check_version
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import WeightPiece, WeightSource, source, sources
from ramify.models.load import Policy, from_config
from ramify.models.weights import fingerprint, fingerprint_of
from ramify.serve.policy import PolicyServer
from ramify.train.backends.lora import attach, merged, unmerged
from ramify.types.message import Message, VersionSpan
from tests.inference.helpers import WINDOW, pauses, policy
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
        self.engines: HttpEngines

    def sources(self) -> list[WeightSource]:
        return sources(self.trained.model.named_parameters(), torch.float32)

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
            servers.append(PolicyServer(locals[-1], name="mine", port=0, weight_transfer=True))
            await stack.enter_async_context(servers[-1])
        urls = tuple(each.url.removesuffix("/v1") for each in servers)
        made = World(policy(), servers, locals, [])
        spec = InferenceSpec(
            urls=urls, **{"engine": engine, "probe_s": 60.0, "restarts": 0, **options}
        )
        stack.enter_context(heard(made.said.append, made.said.append))
        made.engines = HttpEngines(made.trained, spec, name="ramify:test")
        await made.engines.start(Path("unused"), lambda _: None)
        stack.push_async_callback(made.engines.close)
        yield made


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def request(seed: int | None = 7, max_tokens: int = 12, *messages: Message, **more: Any) -> Request:
    return Request(
        messages or (USER,),
        Sampling(max_tokens, 1.0, seed=seed, logprobs=True),
        affinity="0",
        **more,
    )


def test_http_engine_gives_the_same_reply_as_the_embedded_engine() -> None:
    async def test() -> None:
        async with world() as made:
            local = LocalClient(made.trained)
            for asked in (
                request(),
                request(3, 30),
                msgspec.structs.replace(request(), affinity="0.2.1"),
            ):
                ours, theirs = await local.complete(asked), await made.engines.complete(asked)
                assert (theirs.prompt_ids, theirs.token_ids) == (ours.prompt_ids, ours.token_ids)
                assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-6)
                assert (theirs.message, theirs.finish, theirs.versions) == (
                    ours.message,
                    ours.finish,
                    ours.versions,
                )
            cut = Request((USER,), Sampling(12, 0.8, 0.9, seed=2, top_k=5), affinity="0")
            assert (await made.engines.complete(cut)).kept == (await local.complete(cut)).kept
            ids = [5, 9, 11, 4]
            assert await made.engines.logprobs(ids) == pytest.approx(
                await local.logprobs(ids), abs=1e-6
            )
            with pytest.raises(Refused, match="leaves no room for a reply"):
                await made.engines.complete(request(7, 5, Message("user", "long " * WINDOW)))
            await local.close()

    run(test)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_our_server_speaks_the_vllm_and_sglang_protocols(engine: str) -> None:
    async def test() -> None:
        async with world(engine=engine) as made:
            local = LocalClient(made.trained)
            reply = await made.engines.complete(request(7, 12))
            assert reply.prompt_ids is not None
            assert reply.token_ids is not None
            ids = [*reply.prompt_ids, *reply.token_ids]
            assert (await local.logprobs(ids))[-12:] == pytest.approx(reply.logprobs, abs=1e-5)
            assert await made.engines.logprobs(ids) == pytest.approx(
                await local.logprobs(ids), abs=1e-6
            )
            assert await made.engines.pressure() == CachePressure(0.0, 0, 0)
            await made.train(1)
            assert {fingerprint(each.policy.model) for each in made.locals} == {
                fingerprint(made.trained.model)
            }
            assert [each.version for each in made.locals] == [1, 1]
            assert (await made.engines.complete(request())).versions == (VersionSpan(0, 12, 1),)
            await local.close()

    run(test)


def test_engines_merge_adapters_bit_exactly_even_after_a_restart() -> None:
    async def test() -> None:
        async with world(weight_sync="delta") as made:
            attach(made.trained.model, rank=2, alpha=4.0)

            async def update(version: int) -> None:
                with torch.no_grad():
                    for parameter in made.trained.model.parameters():
                        if parameter.requires_grad:
                            parameter += 0.1 * torch.randn(parameter.shape)
                named = unmerged(made.trained.model)
                await made.engines.update(
                    [source(*each[:2], torch.float32, each[2]) for each in named], version
                )
                expected = fingerprint_of(merged(made.trained.model))
                assert {fingerprint(local.policy.model) for local in made.locals} == {expected}

            await update(1)
            await update(2)
            with torch.no_grad():
                made.locals[0].policy.model.get_parameter(
                    "model.layers.0.mlp.up_proj.weight"
                ).zero_()
            await update(3)  # a merged weight is written in full
            async with aiohttp.ClientSession() as asking:
                url = made.servers[1].url.removesuffix("/v1")
                async with asking.post(f"{url}/shutdown_weight_transfer_engine", json={}) as answer:
                    assert answer.status == 200
            await update(4)
            assert made.said[-1].endswith("was this engine restarted?: sending all weights")

    run(test)


def test_cache_pressure_is_read_from_server_metrics() -> None:
    said = """# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 8.75e-01
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 2.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
vllm:num_preemptions_total{engine="1"} 12.0
"""
    assert read_pressure(said) == CachePressure(0.875, 5, 12)
    assert read_pressure(
        'sglang:token_usage{x="1"} 0.5\nsglang:num_queue_reqs 4\n'
    ) == CachePressure(0.5, 4, 0)
    assert read_pressure("# nothing of a cache\nvllm:num_requests_waiting 3\n") is None
    assert read_pressure(pressure_text(CachePressure(0.5, 4, 7))) == CachePressure(0.5, 4, 7)
    assert combined_pressure(
        [None, CachePressure(0.5, 4, 7), CachePressure(0.7, 1, 2)]
    ) == CachePressure(0.7, 5, 9)
    assert combined_pressure([None]) is None


def test_tree_stays_at_its_server_and_trees_are_distributed() -> None:
    async def test() -> None:
        async with world(3) as made:
            asked = [
                msgspec.structs.replace(request(seed, 4), affinity=call)
                for seed in range(9)
                for call in ("0", "0.1")
            ]
            await asyncio.gather(*map(made.engines.complete, asked))
            steps = [each.engine.num_computed for each in made.locals]
            assert min(steps) > 0
            where = {seed: made.engines._fleet.trees[seed].url for seed in range(9)}
            assert sorted(list(where.values()).count(url) for url in set(where.values())) == [
                3,
                3,
                3,
            ]
            first = await made.engines.complete(request(0, 4))
            assert first.usage.cached_tokens == len(first.prompt_ids or ()) - 1
            assert made.engines._fleet.trees[0].url == where[0]

    run(test)


@pytest.mark.parametrize("weight_sync", ["shared", "file", "gloo", "delta"])
def test_every_engine_has_the_trainers_weights_after_a_sync(weight_sync: str) -> None:
    async def test() -> None:
        async with world(weight_sync=weight_sync) as made:
            for version in (1, 2):
                await made.train(version)
                assert await made.engines.fingerprint() == fingerprint(made.trained.model)
                assert (made.engines.version, made.locals[1].version) == (version, version)
            local = LocalClient(made.trained)
            assert (await made.engines.complete(request())).token_ids == (
                await local.complete(request())
            ).token_ids
            await local.close()

    run(test)


@pytest.mark.parametrize("engine", ["ramify", "vllm", "sglang"])
def test_reply_in_progress_continues_with_the_new_weights(engine: str) -> None:
    """Each part has the log-probabilities under its own weights, given the ids before it."""

    async def test() -> None:
        async with world(1, engine) as made:
            old = LocalClient(policy())
            seed = 0
            while (await old.complete(request(seed, 60))).finish != "length":
                seed += 1
            stands = pauses(made.locals[0], after=9)  # until the update is over
            long = asyncio.ensure_future(made.engines.complete(request(seed, 60)))
            while not stands.is_set():
                await asyncio.sleep(0)
            await made.train(1)
            reply = await long
            assert reply.prompt_ids is not None
            assert reply.token_ids is not None
            assert [span.version for span in reply.versions or ()] == [0, 1]
            new = LocalClient(made.trained)
            ids, given = [*reply.prompt_ids, *reply.token_ids], len(reply.prompt_ids)
            for span, client in zip(reply.versions or (), (old, new), strict=True):
                scored = (await client.logprobs(ids))[given - 1 :]
                assert scored[span.start : span.end] == pytest.approx(
                    (reply.logprobs or ())[span.start : span.end], abs=1e-4
                )
            assert len(reply.token_ids) == 60 or reply.finish == "stop"
            for client in (old, new):
                await client.close()

    run(test)


def test_lost_server_is_reported_and_its_trees_move() -> None:
    async def test() -> None:
        async with world(2) as made:
            await asyncio.gather(*(made.engines.complete(request(seed, 4)) for seed in range(4)))
            made.locals[0].pause()  # so that it is lost in the middle of replies
            asked = [
                asyncio.ensure_future(made.engines.complete(request(seed, 100)))
                for seed in range(4)
            ]
            while sum(each.done() for each in asked) < 2:
                await asyncio.sleep(0.001)
            await made.servers[0].__aexit__(None, None, None)
            replies = await asyncio.gather(*asked)
            assert all(
                len(reply.token_ids or ()) == 100 or reply.finish == "stop" for reply in replies
            )
            (told,) = made.said
            assert made.servers[0].url.removesuffix("/v1") in told
            assert "the failed request: POST http" in told
            assert "/v1/completions" in told
            assert told.endswith("continuing with 1 of 2 engines")
            await made.train(1)
            assert made.locals[1].version == 1
            await made.servers[1].__aexit__(None, None, None)
            with pytest.raises(
                ServerFailed,
                match=r"no engine is left: http.* no longer answers; the failed request",
            ) as caught:
                await made.engines.complete(request())
            assert not caught.value.transient
            with pytest.raises(
                TrainError,
                match=r"version 2 of the weights cannot be sent, since no engine is left: .* the last good one is version 1",
            ):
                await made.train(2)

    run(test)


@pytest.mark.parametrize("weight_sync", ["gloo", "shared"])
def test_update_continues_without_a_lost_server(weight_sync: str) -> None:
    async def test() -> None:
        never = (
            {"timeout_s": 3000.0} if weight_sync == "gloo" else {}
        )  # the others do not wait for the lost one
        async with world(weight_sync=weight_sync, weight_sync_options=never) as made:
            await made.train(1)
            await made.servers[1].__aexit__(None, None, None)
            await made.train(2)
            assert made.locals[0].version == 2
            assert fingerprint(made.locals[0].policy.model) == fingerprint(made.trained.model)
            assert len(made.said) == 1

    run(test)


def test_engines_compute_with_the_shared_weights_of_the_trainer() -> None:
    """The next version is invisible until it is complete; weights that one engine takes in another
    way do not reach the others."""

    async def test() -> None:
        async with world() as made:
            for version in (1, 2, 3):
                await made.train(version)
            first = fingerprint(made.trained.model)
            assert (
                len({next(each.policy.model.parameters()).data_ptr() for each in made.locals}) == 2
            )  # mapped twice
            weight_sync = made.engines._sync._weight_sync
            with torch.no_grad():
                for parameter in made.trained.model.parameters():
                    parameter += 1.0
            (chunk,) = weight_sync.chunks(made.sources(), 4, whole=False)
            assert chunk.info["stays"]
            assert [fingerprint(each.policy.model) for each in made.locals] == [first, first]
            whole = {
                name: tensor + 1
                for name, tensor in made.locals[0].policy.model.state_dict().items()
            }
            await made.locals[0].take(
                lambda: (WeightPiece(name, tensor) for name, tensor in whole.items())
            )
            assert fingerprint(made.locals[0].policy.model) != first
            assert fingerprint(made.locals[1].policy.model) == first

    run(test)


def test_restarted_engine_gets_all_weights() -> None:
    async def test() -> None:
        async with world(weight_sync="delta") as made:
            await made.train(1)
            base = made.servers[1].url.removesuffix("/v1")
            info = made.engines._sync._weight_sync.open(1)[0]
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{base}/init_weight_transfer_engine", json={"init_info": info}
                ) as answer,
            ):
                assert answer.status == 200
            await made.train(2)
            assert await made.engines.fingerprint() == fingerprint(made.trained.model)
            assert "builds on the weights" in made.said[0]
            assert made.said[0].endswith("sending all weights")

    run(test)


def test_torn_weight_file_stops_at_the_last_good_version(tmp_path: Path) -> None:
    """The server then answers requests with the error that its weights are incomplete."""
    from ramify.inference.weight_sync.file_sync import FileSync

    class Tearing(FileSync):
        def _write(self, given: Any, version: int) -> None:
            super()._write(given, version)
            if version == 2:
                path = tmp_path / "v000002/model-00001.safetensors"
                path.write_bytes(path.read_bytes()[:-100])

    async def test() -> None:
        async with world(
            1, weight_sync="file", weight_sync_options={"folder": str(tmp_path)}
        ) as made:
            made.engines._sync._weight_sync = Tearing(folder=str(tmp_path))
            await made.train(1)
            with pytest.raises(
                TrainError,
                match=r"did not accept version 2 .*00001.safetensors is torn: .* the last good one is version 1",
            ):
                await made.train(2)
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{made.servers[0].url}/completions", json={"prompt": [5]}) as answer,
            ):
                assert (answer.status, "half of the weights are new" in await answer.text()) == (
                    503,
                    True,
                )
            await made.train(3)  # a complete version repairs it
            assert await made.engines.fingerprint() == fingerprint(made.trained.model)

    run(test)


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


@pytest.mark.parametrize(
    ("engine", "version", "says"),
    [
        (
            "vllm",
            {"version": "0.11.0"},
            r"is vllm 0\.11\.0, and only versions from 0\.29 to before 0\.33",
        ),
        (
            "vllm",
            {"version": "0.32.0"},
            r"has no route /pause: start vLLM with VLLM_SERVER_DEV_MODE=1",
        ),
        ("ramify", {"version": "0.32.0"}, "is not a `ramify serve-policy`"),
        (
            "ramify",
            {"version": "9", "ramify_protocol": 2},
            "speaks protocol 2 .ramify 9., but this is protocol 3",
        ),
        (
            "ramify",
            {"version": "1", "ramify_protocol": 3, "weight_transfer": False},
            "does not take weights: start it with",
        ),
        (
            "sglang",
            {"version": "0.4.1"},
            r"is sglang 0\.4\.1, and only versions from 0\.5\.23",
        ),
    ],
)
def test_incompatible_server_is_refused(engine: str, version: dict[str, Any], says: str) -> None:
    async def test() -> None:
        runner, url = await other_server(
            {
                "/health": {},
                "/version": version,
                "/server_info": version,
                "/openapi.json": {"paths": {}},
            }
        )
        engines = HttpEngines(policy(), InferenceSpec(engine=engine, urls=(url,)), name="x")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=says):
            await engines.start(Path("unused"), lambda _: None)
        await runner.cleanup()

    run(test)


@pytest.mark.parametrize("engine", ["ramify", "vllm"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 400}, r"has another vocabulary \(320\) than the policy \(400\)"),
        ({"max_position_embeddings": 512}, r"has a window of 256 tokens and the policy one of 512"),
        (
            "bfloat16",
            r"computes in float32 and the policy in bfloat16: serve it with --dtype bfloat16",
        ),
    ],
)
def test_engine_with_another_model_is_refused(engine: str, change: Any, says: str) -> None:
    async def test() -> None:
        if isinstance(change, dict):
            config = msgspec.json.decode(json.dumps(policy().config.to_dict()))
            wanted = policy().config.__class__.from_dict({**config, **change})
            other = from_config(wanted, policy().tokenizer, 0)
        else:
            other = policy()
            other.model.to(getattr(torch, change))
        local = LocalClient(policy())
        async with PolicyServer(local, name="mine", port=0, weight_transfer=True) as server:
            engines = HttpEngines(other, InferenceSpec(engine=engine, urls=(server.url,)), name="x")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=says):
                await engines.start(Path("unused"), lambda _: None)
        await local.close()

    run(test)


def test_unreachable_engine_and_port_in_use_are_reported() -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            spec = InferenceSpec(urls=(f"http://127.0.0.1:{port}",), probe_s=0.2)
            with pytest.raises(
                ConfigError, match=r"no engine answers: GET http.*/health: cannot be reached"
            ):
                await HttpEngines(policy(), spec, name="x").start(Path("unused"), lambda _: None)
            taken.listen()
            with pytest.raises(
                ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*: choose another port"
            ):
                HttpEngines(policy(), InferenceSpec(ports=(port,)), name="x")

    run(test)


def test_engine_process_that_fails_to_start_is_reported(tmp_path: Path) -> None:
    async def test(*command: str) -> None:
        engines = HttpEngines(policy(), InferenceSpec(command=command), name="x")
        await engines.start(tmp_path, lambda folder: folder.mkdir(exist_ok=True))

    with pytest.raises(
        ConfigError, match="inference 0 cannot be started: no-such-program: No such file"
    ):
        asyncio.run(test("no-such-program"))
    with pytest.raises(
        ConfigError,
        match=r"did not answer: process \d+ on .* ended with status 3; its log ends: no model \(in .*server-0.log\)",
    ):
        asyncio.run(test("sh", "-c", "echo no model; exit 3"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num": 0}, "num=0"),
        ({"ports": (1, 2)}, "inference.ports has 2 entries for 1 servers"),
        ({"num": 2, "ports": (7, 7)}, "each server needs a different port"),
        ({"urls": ("localhost:8000",)}, "'localhost:8000' is not an address"),
        ({"urls": ("http://a",), "num": 2}, "with urls no server is started"),
        ({"engine": "sglang", "weight_sync": "shared"}, "SGLang takes weights from files"),
        (
            {"engine": "vllm", "weight_sync": "delta", "weight_sync_options": {"places": True}},
            "vLLM takes whole layers",
        ),
        ({"request_s": 0}, "must be positive"),
    ],
)
def test_invalid_inference_spec_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        InferenceSpec(**fields)


def test_supported_engine_versions_are_accepted() -> None:
    for engine, good in (("vllm", "0.32.0"), ("vllm", "0.32.1+cpu"), ("sglang", "0.5.23")):
        check_version(engine, "x", good)
    with pytest.raises(ConfigError, match="of no version"):
        check_version("vllm", "x", "")


def test_engines_with_different_weights_are_an_error() -> None:
    async def test() -> None:
        async with world() as made:
            with torch.no_grad():
                next(made.locals[1].policy.model.parameters())[0, 0] += 1
            with pytest.raises(TrainError, match="the engines have different weights"):
                await made.engines.fingerprint()
            found: Sequence[str | None] = [
                await each.fingerprint() for each in made.engines.engines
            ]
            assert found[0] == fingerprint(made.trained.model) != found[1]

    run(test)

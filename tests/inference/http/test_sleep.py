"""Engines that release their memory while the trainer learns: the order of requests, the memory
that they hold, waiting requests, and their state before and after a run.

The servers are real, on loopback, and speak all three protocols; a proxy records the requests.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web

from ramify.errors import ConfigError, ServerStatusError, TrainError
from ramify.inference.http.engine_process import engine_command
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.models.weights import fingerprint
from ramify.serve.policy_server import PolicyServer
from ramify.types.message import VersionSpan
from tests.inference.helpers import ENGINE_KEY, policy
from tests.inference.http.engine_world import World, engine_session, other_server, request, run
from tests.shown import heard

UPDATE = {
    "ramify": ["/update_weights"],
    "vllm": [
        "/pause?mode=abort",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/flush_cache"],
}
"""Requests of an update between waking the weights and waking the KV cache."""
ROUTES = (
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/v1/completions",
)
AFTER = {"ramify": [], "vllm": ["/resume"], "sglang": ["/continue_generation"]}


@asynccontextmanager
async def recording_proxy(url: str, seen: list[str]) -> AsyncIterator[str]:
    """Yield the address of a proxy for ``url``; ``seen`` collects the POST requests, with the tags
    of their bodies."""

    async def pass_on(http: web.Request) -> web.Response:
        body = await http.read()
        if http.method == "POST":
            tags = msgspec.json.decode(body or b"{}").get("tags")
            seen.append(http.path_qs + (f" {','.join(tags)}" if tags else ""))
        headers = {"Content-Type": "application/json"}
        if "Authorization" in http.headers:
            headers["Authorization"] = http.headers["Authorization"]
        async with session.request(
            http.method, url + http.path_qs, data=body or None, headers=headers
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


class SleepWorld(World):
    """``World`` of one engine; ``seen`` has the requests to it."""

    seen: list[str]
    url: str


@asynccontextmanager
async def sleep_world(
    engine: str = "ramify", wait_s: float = 60.0, **options: Any
) -> AsyncIterator[SleepWorld]:
    async with AsyncExitStack() as stack:
        local = LocalClient(policy(), slots=8)
        stack.push_async_callback(local.close)
        server = PolicyServer(
            local, name="mine", key=ENGINE_KEY, weight_transfer=True, wait_s=wait_s
        )
        await stack.enter_async_context(server)
        made = SleepWorld(policy(), [server], [local], [])
        made.seen = []
        made.url = await stack.enter_async_context(
            recording_proxy(server.url.removesuffix("/v1"), made.seen)
        )
        fields = {
            "engine": engine,
            "urls": (made.url,),
            "sleep": "learn",
            "probe_s": 60.0,
            "restarts": 0,
            **options,
        }
        stack.enter_context(heard(made.said.append, made.said.append))
        made.engines = HttpEngineClient(made.trained, InferenceSpec(**fields), name="test")
        await made.engines.start(Path("unused"), lambda _: None)
        stack.push_async_callback(made.engines.close)
        yield made


async def fetch_json(url: str, body: Any = None) -> tuple[int, Any]:
    async with engine_session() as session:
        asked = session.get(url) if body is None else session.post(url, json=body)
        async with asked as answer:
            return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("engine", "level", "asleep", "weights", "cache"),
    [
        (
            "ramify",
            1,
            ["/sleep?level=1&mode=abort"],
            "/wake_up?tags=weights",
            "/wake_up?tags=kv_cache",
        ),
        (
            "vllm",
            2,
            ["/sleep?level=2&mode=abort"],
            "/wake_up?tags=weights",
            "/wake_up?tags=kv_cache",
        ),
        (
            "sglang",
            2,
            ["/pause_generation", "/release_memory_occupation weights,kv_cache"],
            "/resume_memory_occupation weights",
            "/resume_memory_occupation kv_cache",
        ),
    ],
)
def test_update_wakes_weights_first_and_kv_cache_last(
    engine: str, level: int, asleep: list[str], weights: str, cache: str
) -> None:
    async def test() -> None:
        async with sleep_world(engine, sleep_level=level) as made:
            local = made.locals[0]
            await made.train(1)
            expected = await made.engines.complete(request(3, 8))
            awake = local.device_memory_usage()
            made.seen.clear()
            assert await made.engines.sleep()
            assert await made.engines.sleep()  # a sleeping engine is left alone
            assert made.seen == asleep
            held = local.device_memory_usage()
            assert held["weights"] == (0 if level == 2 else awake["weights"])
            assert held["kv_cache"] < awake["kv_cache"] / 4
            status, content = await fetch_json(f"{made.url}/health")
            assert (status, content["asleep"]) == (200, ["kv_cache", "scheduling", "weights"])
            assert content["held_bytes"] == held
            made.seen.clear()
            await made.engines.update(made.sources(), 2)
            assert made.seen == [weights, *UPDATE[engine], cache, *AFTER[engine]]
            assert fingerprint(local.policy.model) == fingerprint(made.trained.model)
            assert local.device_memory_usage() == awake
            reply = await made.engines.complete(request(3, 8))
            assert (reply.token_ids, reply.versions) == (
                expected.token_ids,
                (VersionSpan(0, 8, 2),),
            )

    run(test)


def test_request_to_sleeping_engine_waits_for_next_weights() -> None:
    async def test() -> None:
        async with sleep_world(sleep_level=2) as made:
            made.locals[0].pause()
            flying = asyncio.ensure_future(made.engines.complete(request(3, 8)))
            while made.locals[0].engine.is_idle:
                await asyncio.sleep(0.001)
            await made.engines.sleep()  # ends it in the middle
            later = asyncio.ensure_future(made.engines.complete(request(3, 8)))
            elsewhere = asyncio.ensure_future(
                fetch_json(f"{made.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
            )
            while "/v1/completions" not in made.seen[-1]:
                await asyncio.sleep(0.001)
            assert not any(each.done() for each in (flying, later, elsewhere))
            await made.train(1)
            replies = await asyncio.gather(flying, later)
            assert {reply.versions for reply in replies} == {(VersionSpan(0, 8, 1),)}
            assert (await elsewhere)[0] == 200

    run(test)


def test_engine_with_dropped_weights_answers_only_after_new_ones() -> None:
    async def test() -> None:
        async with sleep_world(wait_s=0.05, sleep_level=2) as made:
            asked = f"{made.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 2}
            await made.engines.sleep()
            status, content = await fetch_json(*asked)
            assert (status, content["error"]["message"]) == (
                503,
                "the engine did not become ready within 0.05 s: the server sleeps (kv_cache, scheduling, "
                "weights): POST /wake_up",
            )
            status, content = await fetch_json(f"{made.url}/start_weight_update", {})
            assert (
                status,
                "the weights are asleep: wake them first" in content["error"]["message"],
            ) == (
                400,
                True,
            )
            await fetch_json(f"{made.url}/wake_up", {})
            says = "the server dropped its weights while it slept, and 24 tensors have not been sent since (model.embed"
            for status, content in (
                await fetch_json(*asked),
                await fetch_json(f"{made.url}/fingerprint"),
            ):
                assert status in (400, 503)
                assert says in content["error"]["message"]
            await made.train(1)
            assert (await fetch_json(*asked))[0] == 200

    run(test)


@pytest.mark.parametrize(("level", "share"), [(1, 0.0), (2, 1.0)])
def test_delta_is_enough_if_sleep_kept_the_weights(level: int, share: float) -> None:
    async def test() -> None:
        async with sleep_world(sleep_level=level, weight_sync="delta") as made:
            await made.train(1)
            await made.engines.sleep()
            await made.engines.update(made.sources(), 2)
            carried: Any = made.engines.sync.weight_sync
            total = sum(parameter.nbytes for parameter in made.trained.model.parameters())
            assert carried.num_bytes == share * total
            assert fingerprint(made.locals[0].policy.model) == fingerprint(made.trained.model)

    run(test)


def test_delta_to_dropped_weights_is_replaced_by_all_weights() -> None:
    async def test() -> None:
        async with sleep_world(weight_sync="delta") as made:
            await made.train(1)
            for version, says in (
                (2, "dropped its weights while it slept"),
                (3, "and only a part of it was sent"),
            ):
                await fetch_json(f"{made.url}/sleep?level=2", {})  # by another client
                await fetch_json(f"{made.url}/wake_up", {})
                with torch.no_grad():  # no change at first, then one value
                    next(made.trained.model.parameters())[0, 0] += version - 2
                await made.engines.update(made.sources(), version)
                assert says in made.said[-1]
                assert made.said[-1].endswith("sending all weights")
                assert fingerprint(made.locals[0].policy.model) == fingerprint(made.trained.model)

    run(test)


def test_external_engine_is_left_awake_and_woken_if_found_asleep() -> None:
    async def test() -> None:
        async with sleep_world() as made:
            asked = (
                f"{made.url}/v1/completions",
                {"prompt": [5, 6], "max_tokens": 2, "temperature": 0},
            )
            assert (
                made.engines.fleet.spec.effective_sleep_level == 1
            )  # so that it has weights in any case
            before = await fetch_json(*asked)
            await made.engines.sleep()
            await made.engines.close()  # as after an error in the middle of learning
            assert (await fetch_json(*asked))[1]["choices"] == before[1]["choices"]
            await fetch_json(f"{made.url}/sleep?level=1", {})  # the trainer is killed now
            spec = InferenceSpec(urls=(made.url,), probe_s=60.0)
            asks = HttpEngineClient(
                made.trained, msgspec.structs.replace(spec, sleep="never"), name="asks"
            )
            await asks.start(Path("unused"), lambda _: None, gone=lambda _: None)
            assert (
                made.locals[0].device_memory_usage()["kv_cache"] < 1 << 20
            )  # a client that only samples wakes no engine
            await asks.close()
            made.engines = HttpEngineClient(made.trained, spec, name="next")
            await made.engines.start(Path("unused"), lambda _: None)
            assert (await fetch_json(f"{made.url}/is_sleeping"))[1] == {"is_sleeping": False}
            assert (await fetch_json(*asked))[1]["choices"] == before[1]["choices"]
            await made.engines.close()

    run(test)


def test_sleep_without_any_engine_left_is_an_error() -> None:
    async def test() -> None:
        async with sleep_world() as made:
            await made.servers[0].__aexit__(None, None, None)
            with pytest.raises(
                ServerStatusError, match=r"no engine is left: .* the failed request: POST .*/sleep"
            ):
                await made.engines.sleep()
            with pytest.raises(
                TrainError, match="version 1 of the weights cannot be sent, since no engine is left"
            ):
                await made.engines.update(made.sources(), 1)

    run(test)


def test_invalid_sleep_requests_are_refused() -> None:
    async def test() -> None:
        async with sleep_world() as made:
            for path, body, says in (
                ("/sleep?level=3", {}, "level=3: give 0, 1 or 2"),
                ("/sleep?mode=now", {}, "mode='now': give abort, wait, keep"),
                ("/wake_up?tags=cache", {}, "give some of weights, kv_cache"),
                (
                    "/release_memory_occupation",
                    {"tags": "weights"},
                    "give some of weights, kv_cache",
                ),
            ):
                status, content = await fetch_json(f"{made.url}{path}", body)
                assert (status, says in content["error"]["message"]) == (400, True), content
            assert (await fetch_json(f"{made.url}/is_sleeping"))[1] == {"is_sleeping": False}
            assert (await made.engines.complete(request())).token_ids
            await fetch_json(f"{made.url}/sleep?level=0", {})  # only requests wait
            assert (await fetch_json(f"{made.url}/health"))[1]["asleep"] == ["scheduling"]
            await fetch_json(f"{made.url}/wake_up", {})
            assert (await made.engines.complete(request())).token_ids

    run(test)


@pytest.mark.parametrize(
    ("engine", "level", "answers", "says"),
    [
        (
            "vllm",
            1,
            {
                "/version": {"version": "0.32.0"},
                "/v1/models": {"data": [{"id": "m", "max_model_len": 256}]},
                "/server_info": {"vllm_config": {"model_config": {"enable_sleep_mode": False}}},
                "/openapi.json": {"paths": {path: {} for path in ROUTES}},
            },
            "cannot sleep at level 1 .*: start it with --enable-sleep-mode, or",
        ),
        (
            "sglang",
            2,
            {"/server_info": {"version": "0.5.23", "enable_memory_saver": False}},
            "--enable-memory-saver, or",
        ),
        (
            "sglang",
            1,
            {
                "/server_info": {
                    "version": "0.5.23",
                    "enable_memory_saver": True,
                    "enable_weights_cpu_backup": False,
                }
            },
            "--enable-memory-saver and --enable-weights-cpu-backup, or",
        ),
    ],
)
def test_server_started_without_sleep_support_is_refused(
    engine: Any, level: Any, answers: dict[str, Any], says: str
) -> None:
    async def test() -> None:
        runner, url = await other_server({"/health": {}, **answers})
        spec = InferenceSpec(engine=engine, urls=(url,), sleep="learn", sleep_level=level)
        with pytest.raises(ConfigError, match=says):
            await HttpEngineClient(policy(), spec, name="x").start(Path("unused"), lambda _: None)
        await runner.cleanup()

    run(test)


@pytest.mark.parametrize(
    ("engine", "fields", "options"),
    [
        ("vllm", {}, ["--enable-sleep-mode"]),
        ("sglang", {}, ["--enable-memory-saver"]),
        ("sglang", {"sleep_level": 1}, ["--enable-memory-saver", "--enable-weights-cpu-backup"]),
        ("ramify", {}, []),
    ],
)
def test_started_engines_get_sleep_options(
    engine: Any, fields: dict[str, Any], options: list[str]
) -> None:
    def of(sleep: Any) -> list[str]:
        spec = InferenceSpec(engine=engine, sleep=sleep, **fields)
        return engine_command(spec, Path("folder"), 1, "float32", 256)

    assert of("learn") == [*of("never"), *options]
    assert of("auto") == of("never")  # not decided yet


def test_sleep_level_follows_from_the_spec() -> None:
    assert InferenceSpec(sleep="learn").effective_sleep_level == 2  # it ends with the run
    assert InferenceSpec(sleep="learn", urls=("http://n1:1",)).effective_sleep_level == 1
    assert InferenceSpec(sleep="learn", weight_sync="delta").effective_sleep_level == 1
    assert (
        InferenceSpec(sleep="learn", weight_sync="delta", sleep_level=2).effective_sleep_level == 2
    )
    assert (
        InferenceSpec(sleep_level=2).effective_sleep_level
        == InferenceSpec(sleep="never").effective_sleep_level
        == 0
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read in /proc")
def test_sleep_returns_memory_to_the_operating_system() -> None:
    """Three matrices of 35 MB: the memory that an engine reports matches the kernel's figure."""
    layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    local = LocalClient(
        policy(
            hidden_size=512, intermediate_size=17_000, num_key_value_heads=4, head_dim=128, **layer
        )
    )
    num_bytes = 3 * 512 * 17_000 * 4

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def test() -> None:
        before, awake = local.device_memory_usage()["weights"], resident()
        await local.sleep(("kv_cache", "weights"), keep=False)
        assert (before > num_bytes, local.device_memory_usage()["weights"]) == (True, 0)
        assert awake - resident() > num_bytes * 0.5  # other work of this process changes it, too
        await local.close()

    run(test)


def test_sleeping_weights_are_kept_or_dropped() -> None:
    """Dropped weights are on the meta device, where they use no memory."""
    from ramify.inference.local.offloaded_weights import OffloadedWeights

    model = policy().model
    before = {name: each.clone() for name, each in model.state_dict().items()}
    resting = OffloadedWeights(model)
    resting.release_memory(keep=True)  # in main memory already
    assert (resting.is_released, resting.num_bytes > 0) == (False, True)
    resting.release_memory(keep=False)
    assert (resting.is_released, resting.num_bytes, resting.missing_names) == (True, 0, [])
    resting.wake()
    assert len(resting.missing_names) == len(dict(model.named_parameters()))
    held = model.state_dict()
    for name, each in before.items():
        assert torch.equal(held[name].copy_(each), each)
        resting.mark_received(model.get_parameter(name))
    assert resting.missing_names == []
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]

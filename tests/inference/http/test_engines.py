"""Several HTTP engines as one client: routing, weight updates during sampling, and lost engines.

The servers are real, in this process, on loopback; all start from the same weights.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.clients.base import Request, Sampling
from ramify.errors import RequestRefusedError, ServerStatusError, TrainError
from ramify.inference.base import CachePressure
from ramify.inference.http.engine_client import (
    combine_kv_cache_pressure,
    format_kv_cache_prometheus,
    parse_kv_cache_pressure,
)
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import WeightUpdateTensor, to_lazy_weight
from ramify.models.weights import fingerprint, tensors_fingerprint
from ramify.train.backends.lora import attach, base_tensors_and_adapters, merged_weights
from ramify.types.message import Message, VersionSpan
from tests.inference.helpers import WINDOW, pauses, policy
from tests.inference.http.engine_world import USER, engine_session, request, run, world


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
                # in float32, processors add products in different orders
                assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
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
            with pytest.raises(RequestRefusedError, match="leaves no room for a reply"):
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
                named = base_tensors_and_adapters(made.trained.model)
                await made.engines.update(
                    [to_lazy_weight(*each[:2], torch.float32, each[2]) for each in named], version
                )
                expected = tensors_fingerprint(merged_weights(made.trained.model))
                assert {fingerprint(local.policy.model) for local in made.locals} == {expected}

            await update(1)
            await update(2)
            with torch.no_grad():
                made.locals[0].policy.model.get_parameter(
                    "model.layers.0.mlp.up_proj.weight"
                ).zero_()
            await update(3)  # a merged weight is written in full
            async with engine_session() as asking:
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
    assert parse_kv_cache_pressure(said) == CachePressure(0.875, 5, 12)
    assert parse_kv_cache_pressure(
        'sglang:token_usage{x="1"} 0.5\nsglang:num_queue_reqs 4\n'
    ) == CachePressure(0.5, 4, 0)
    assert parse_kv_cache_pressure("# nothing of a cache\nvllm:num_requests_waiting 3\n") is None
    assert parse_kv_cache_pressure(
        format_kv_cache_prometheus(CachePressure(0.5, 4, 7))
    ) == CachePressure(0.5, 4, 7)
    assert combine_kv_cache_pressure(
        [None, CachePressure(0.5, 4, 7), CachePressure(0.7, 1, 2)]
    ) == CachePressure(0.7, 5, 9)
    assert combine_kv_cache_pressure([None]) is None


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
            where = {seed: made.engines.fleet.trees[seed].url for seed in range(9)}
            assert sorted(list(where.values()).count(url) for url in set(where.values())) == [
                3,
                3,
                3,
            ]
            first = await made.engines.complete(request(0, 4))
            assert first.usage.cached_tokens == len(first.prompt_ids or ()) - 1
            assert made.engines.fleet.trees[0].url == where[0]

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
            assert re.search("the failed request: POST.* \\(?http", told)
            assert "/v1/completions" in told
            assert told.endswith("continuing with 1 of 2 engines")
            await made.train(1)
            assert made.locals[1].version == 1
            await made.servers[1].__aexit__(None, None, None)
            with pytest.raises(
                ServerStatusError,
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
            weight_sync = made.engines.sync.weight_sync
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
            await made.locals[0].receive_weights(
                lambda: (WeightUpdateTensor(name, tensor) for name, tensor in whole.items())
            )
            assert fingerprint(made.locals[0].policy.model) != first
            assert fingerprint(made.locals[1].policy.model) == first

    run(test)


def test_restarted_engine_gets_all_weights() -> None:
    async def test() -> None:
        async with world(weight_sync="delta") as made:
            await made.train(1)
            base = made.servers[1].url.removesuffix("/v1")
            info = made.engines.sync.weight_sync.open(1)[0]
            async with (
                engine_session() as http,
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
    from ramify.inference.weight_sync.file_sync import FileWeightSync

    class Tearing(FileWeightSync):
        def _write(self, given: Any, version: int) -> None:
            super()._write(given, version)
            if version == 2:
                path = tmp_path / "v000002/model-00001.safetensors"
                path.write_bytes(path.read_bytes()[:-100])

    async def test() -> None:
        async with world(
            1, weight_sync="file", weight_sync_options={"folder": str(tmp_path)}
        ) as made:
            made.engines.sync.weight_sync = Tearing(folder=str(tmp_path))
            await made.train(1)
            with pytest.raises(
                TrainError,
                match=r"did not accept version 2 .*00001.safetensors is torn: .* the last good one is version 1",
            ):
                await made.train(2)
            async with (
                engine_session() as http,
                http.post(f"{made.servers[0].url}/completions", json={"prompt": [5]}) as answer,
            ):
                assert (answer.status, "half of the weights are new" in await answer.text()) == (
                    503,
                    True,
                )
            await made.train(3)  # a complete version repairs it
            assert await made.engines.fingerprint() == fingerprint(made.trained.model)

    run(test)

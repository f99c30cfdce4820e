"""A run's self-checks detect the faults they are meant for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify import RLM
from ramify.clients.base import Request
from ramify.errors import TrainError
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import to_lazy_weights
from ramify.models.load import Policy, from_config
from ramify.serve.policy_server import PolicyServer
from ramify.tasks.base import items_of
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import pack
from ramify.train.engine_consistency_checks import (
    CanaryTolerance,
    EngineConsistencyChecks,
    TokenIdHashingClient,
)
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.preflight import first_prompt
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Group
from tests.inference.helpers import ENGINE_KEY
from tests.train.small import assemble, small


@pytest.fixture(scope="module")
def made() -> PreparedTrainingRun:
    return assemble(small())


@pytest.fixture(scope="module")
def engine(made: PreparedTrainingRun) -> Iterator[LocalClient]:
    client = LocalClient(made.serving)
    yield client
    asyncio.run(client.close())


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def check(made: PreparedTrainingRun, client: Any, model: Any = None) -> EngineConsistencyChecks:
    prompt = first_prompt(made.scaffold, made.run, made.task, items_of(made.task, "validation")[0])
    return EngineConsistencyChecks(
        TokenIdHashingClient(client), (model or made.policy.model).named_parameters, prompt
    )


def test_canary_passes_if_engine_and_trainer_have_the_same_weights(
    made: PreparedTrainingRun, engine: LocalClient
) -> None:
    checked = check(made, engine)
    asyncio.run(checked.check_engines(SingleBackend(made.policy), at_once))
    assert 0 < checked.worst < 1e-5


def test_different_weights_in_the_engine_are_detected(made: PreparedTrainingRun) -> None:
    other = from_config(made.policy.config, made.policy.tokenizer, seed=5)
    client = LocalClient(other, name="local:other")
    try:
        with pytest.raises(TrainError, match="the engine has other weights"):
            asyncio.run(check(made, client).check_engines(SingleBackend(made.policy), at_once))
    finally:
        asyncio.run(client.close())


def test_stale_engine_cache_is_detected(made: PreparedTrainingRun) -> None:
    """The engine shares the trainer's weights but was not notified of a change: the fingerprints
    agree, the canary does not."""
    policy = from_config(made.policy.config, made.policy.tokenizer, seed=6)
    client = LocalClient(policy, name="local:stale")
    checked = check(made, client, policy.model)

    async def run() -> None:
        await checked.check_engines(SingleBackend(policy), at_once)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter += 0.05 * torch.ones_like(parameter)
        with pytest.raises(
            TrainError,
            match=r"the canary's log-probabilities differ by .* the engine's cache is stale",
        ):
            await checked.check_engines(SingleBackend(policy), at_once)
        await client.update(policy.model, 1)
        await checked.check_engines(SingleBackend(policy), at_once)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(client.close())


def test_broken_weights_are_not_blamed_on_the_engine(made: PreparedTrainingRun) -> None:
    """A learning rate that is far too high breaks the weights, and rounding grows with them."""
    policy = from_config(made.policy.config, made.policy.tokenizer, seed=6)
    client = LocalClient(policy, name="local:broken")

    async def run() -> None:
        checked = check(made, client, policy.model)
        await checked.check_engines(SingleBackend(policy), at_once)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter *= 1e3
        with pytest.raises(TrainError, match=r"update has broken its weights: lower the stage's"):
            await checked.check_engines(SingleBackend(policy), at_once)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(client.close())


class OldMatrixEngine:
    """An engine without a fingerprint that samples correctly but scores with an old output matrix;
    its samples are almost certain and hide the fault."""

    name, window, price, version = "old", 512, None, 3

    def __init__(self, client: LocalClient, old: LocalClient) -> None:
        self._client = client
        self.old = old
        self.complete = client.complete

    async def fingerprint(self) -> None: ...

    async def logprobs(self, ids: Any) -> list[float]:
        return await self.old.logprobs(ids)


def test_old_output_matrix_is_detected_even_if_samples_hide_it(
    made: PreparedTrainingRun, engine: LocalClient
) -> None:
    old = LocalClient(
        from_config(made.policy.config, made.policy.tokenizer, seed=5), name="local:old"
    )
    checked = check(made, OldMatrixEngine(engine, engine))  # type: ignore[arg-type]

    async def run() -> None:
        await checked.check_engines(SingleBackend(made.policy), at_once)
        assert checked.good_version == 3
        checked.seen.client.old = old  # type: ignore[attr-defined]
        with pytest.raises(
            TrainError,
            match=r"the last good version is 3.*at scored token \d+ the engine gives -\d+\.\d+ and the trainer -\d+\.\d+",
        ):
            await checked.check_engines(SingleBackend(made.policy), at_once)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(old.close())


class UnchangedEngine(LocalClient):
    """An engine that accepts new weights but keeps answering with its first ones."""

    async def receive_weights(self, pieces: Any, version: int | None = None) -> None:
        for _ in pieces():
            pass
        await super().receive_weights(lambda: iter(()), version)


def changed(policy: Policy, by: float, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=drawn)


@pytest.mark.parametrize("kind", [LocalClient, UnchangedEngine])
def test_ineffective_weight_sync_is_detected_even_if_canary_is_too_coarse(
    made: PreparedTrainingRun, kind: type[LocalClient]
) -> None:
    """vLLM's protocol has no fingerprint, and in bf16 the canary allows 0.3. Steps so small that
    bf16 rounds them away do not count."""
    trained, served = (
        from_config(made.policy.config, made.policy.tokenizer, seed=6) for _ in range(2)
    )
    served.model.to(torch.bfloat16)
    prompt = [Message("user", "count rows of 'red' in a table with more columns than any other")]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each.detach().bfloat16()) for name, each in trained.model.named_parameters())

    async def run() -> None:
        client = kind(served, slots=2)
        async with PolicyServer(
            client, name="mine", key=ENGINE_KEY, weight_transfer=True
        ) as server:
            spec = InferenceSpec(engine="vllm", urls=(server.url.removesuffix("/v1"),), restarts=0)
            engines = HttpEngineClient(served, spec, name="vllm:test")
            await engines.start(Path("unused"), lambda _: None)
            checked, version = (
                EngineConsistencyChecks(
                    TokenIdHashingClient(engines), weights, prompt, CanaryTolerance(0.3)
                ),
                0,
            )

            async def step(by: float) -> None:
                nonlocal version
                changed(trained, by, version)
                version += 1
                await engines.update(
                    to_lazy_weights(trained.model.named_parameters(), torch.bfloat16), version
                )
                await checked.check_engines(SingleBackend(trained), at_once)

            try:
                await checked.check_engines(SingleBackend(trained), at_once)
                for _ in range(3):
                    await step(1e-8)
                if kind is LocalClient:
                    for _ in range(3):
                        await step(2e-4)
                else:
                    expected = (
                        r"as at version 0, bit for bit, although \d+\.\d% .* version 4; "
                        "the last good version is 0"
                    )
                    with pytest.raises(TrainError, match=expected):
                        await step(2e-4)
                assert checked.worst < 0.1
            finally:
                await engines.close()
        await client.close()

    asyncio.run(run())


def test_canary_does_not_wait_for_a_lost_engine(made: PreparedTrainingRun) -> None:
    """A lost engine is checked after it rejoins with new weights, so this check is skipped."""

    async def run() -> None:
        local = LocalClient(made.policy, slots=2)
        server = PolicyServer(local, name="mine", key=ENGINE_KEY, weight_transfer=True)
        await server.__aenter__()
        engines = HttpEngineClient(
            made.policy, InferenceSpec(urls=(server.url.removesuffix("/v1"),)), name="http:test"
        )
        await engines.start(Path("unused"), lambda _: None)
        checked = EngineConsistencyChecks(
            TokenIdHashingClient(engines),
            made.policy.model.named_parameters,
            [Message("user", "count rows")],
        )
        await server.__aexit__(None, None, None)
        await engines.handle_reported_loss(server.url.removesuffix("/v1"), "this test")
        assert engines.up_to_date_urls == ()
        await checked.check_engines(SingleBackend(made.policy), at_once)
        assert checked.good_version is None
        await engines.close()
        await local.close()

    asyncio.run(run())


def roll_out(made: PreparedTrainingRun, seen: TokenIdHashingClient) -> list[Group]:
    async def run() -> list[Group]:
        run = made.run
        async with RLM(seen, limits=run.limits, scaffold=made.scaffold, sandbox=run.sandbox) as rlm:
            rollouts = TaskRolloutRunner(rlm, made.task, RolloutOptions(group=2))
            return await rollouts.groups([items_of(made.task, "train")[0]], 0)

    return asyncio.run(run())


def test_trajectory_ids_must_match_those_the_engine_saw(
    made: PreparedTrainingRun, engine: LocalClient
) -> None:
    checked = check(made, engine)
    groups = roll_out(made, checked.seen)
    checked.check_ids_from_engine(groups)
    with pytest.raises(
        TrainError,
        match=r"step=0/group=0/rollout=0/call=0/turn=0: the engine was never given these \d+ ids",
    ):
        checked.check_ids_from_engine(groups)  # the ids of earlier steps are forgotten
    groups = roll_out(made, checked.seen)
    turns = groups[0].trajectories[1].root.turns
    reply = turns[0].reply
    assert reply.prompt_ids is not None
    changed = msgspec.structs.replace(
        reply, prompt_ids=(reply.prompt_ids[0] + 1, *reply.prompt_ids[1:])
    )
    turns[0] = msgspec.structs.replace(turns[0], reply=changed)
    with pytest.raises(TrainError, match="rollout=1/call=0/turn=0"):
        checked.check_ids_from_engine(groups)


def test_lost_or_doubled_loss_weight_is_detected(
    made: PreparedTrainingRun, engine: LocalClient
) -> None:
    rows = made.rows[:6]
    batches = pack(rows)
    check(made, engine).check_packed_loss_weights(rows, batches)
    with pytest.raises(TrainError, match=r"weight of .* in 'ce', but their sequences"):
        check(made, engine).check_packed_loss_weights(rows[1:], batches)
    with pytest.raises(TrainError, match="in 'ce'"):
        check(made, engine).check_packed_loss_weights([*rows, rows[0]], batches)


def test_replies_without_ids_are_not_audited(made: PreparedTrainingRun) -> None:
    class Plain:
        name, window, price, version = "plain", 100, None, 0

        async def complete(self, request: Request) -> Reply:
            return Reply(Message("assistant", "hello"))

        async def close(self) -> None: ...

    seen = TokenIdHashingClient(Plain())  # type: ignore[arg-type]
    asyncio.run(seen.complete(Request((Message("user", "?"),))))
    assert not seen.has_seen(())

"""Models by depth: frozen models answer within their budgets and are never trained."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.clients.base import Request, Sampling
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import Limits
from ramify.errors import ConfigError, RequestRefusedError
from ramify.testing.reply_script import server_error
from ramify.testing.scripted_client import ScriptedClient
from ramify.testing.scripted_server import ScriptedServer
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.call_depth_models import DepthSpec, FrozenModelBudget, ModelsByCallDepth
from ramify.train.config import (
    CoTrainedPolicySpec,
    EvaluateSpec,
    PolicySpec,
    RlSpec,
    Run,
    Schedule,
    TaskSpec,
)
from ramify.train.data.sft_data import read as read_trajectories
from ramify.train.metrics import read_metrics
from ramify.train.placement.placement_spec import PlacementSpec, RoleSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.message import Message
from tests.shown import train
from tests.train.small import assemble, small, weights_of

MODEL = "openai:gpt-5-mini"
"""A model with a known price."""
FROZEN, POLICY = DepthSpec(model=MODEL), DepthSpec()


@contextlib.contextmanager
def served(script: Any, latency_s: float = 0.0) -> Iterator[ScriptedServer]:
    """Run a scripted server in another thread."""
    loop, server = asyncio.new_event_loop(), ScriptedServer(script, latency_s=latency_s)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_of(depths: Sequence[DepthSpec], frozen: FrozenModelBudget, **changes: Any) -> Run:
    return small(
        task=TaskSpec(name="tests.train.small:even"),
        warmup=None,
        depths=tuple(depths),
        frozen=frozen,
        limits=Limits(
            max_turns=2,
            max_depth=len(depths) - 1,
            max_reply_tokens=64,
            max_reasoning_tokens=0,
            max_seconds=300,
        ),
        evaluate=EvaluateSpec(num=1, final=()),
        schedule=Schedule(evaluate_every=None, save_rollouts_every=1, keep_last=9),
        rl=RlSpec(
            steps=2,
            sample=RolloutBatchSpec(items=1),
            rollout=RolloutOptions(group=2, concurrency=4),
            algorithm=DrGRPO(credit="per_role"),
            optim=OptimizerSpec(lr=1e-3),
        ),
        **changes,
    )


def test_policy_below_slow_and_failing_frozen_models_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen root with frozen children, whose own children are the policy. One request in ten
    fails, and every reply is delayed."""
    numbers = itertools.count(1)

    def script(messages: Sequence[Message]) -> Any:
        if next(numbers) % 10 == 0:
            return server_error()
        return "A=rlm_query_batched(['a','b'],['xx','yy'])\nFINAL(str(A))"

    frozen = FrozenModelBudget(step_cost=0.01, run_cost=0.05)
    run = run_of([FROZEN, FROZEN, msgspec.structs.replace(POLICY, temperature=0.9)], frozen)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with served(script, latency_s=0.02) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        state = train(run, tmp_path)
        answered = server.answered
    rows = [row.values for row in read_metrics(tmp_path) if "reward" in row.values]
    assert len(rows) == run.rl.steps  # type: ignore[union-attr]
    assert all(0 < row["frozen/cost"] <= 0.01 for row in rows)
    assert rows[-1]["frozen/calls_total"] <= answered
    assert rows[-1]["frozen/cost_total"] <= 0.05
    assert sum(row.get(f"frozen/{MODEL}/failed", 0) for row in rows) > 0
    trees = [
        tree
        for step in range(state.step - 1, state.step + 1)
        for tree in read_trajectories(tmp_path / f"rollouts/step-{step:06d}.jsonl")
    ]
    calls = [call for tree in trees for call in tree.calls if call.turns]
    models = {(call.depth, call.model) for call in calls}
    assert models == {(0, MODEL), (1, MODEL), (2, "local:small")}
    learned = {place.split("/")[0] for tree in trees for place in tree.metadata["advantages"]}
    assert {place.count(".") for place in learned} == {2}
    for call in calls:
        ids = [turn.reply.token_ids for turn in call.turns]
        assert all(each is None for each in ids) == (call.depth < 2)
    folder = tmp_path / "checkpoints"
    before, after = (weights_of(folder / f"step-{state.step - n:06d}") for n in (2, 0))
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_frozen_budgets_hold_under_concurrent_requests() -> None:
    request = Request((Message("user", "x" * 40),), Sampling(max_tokens=100))

    async def spent(frozen: FrozenModelBudget) -> tuple[int, int, dict[str, float]]:
        async with ScriptedServer(lambda _: "y" * 40, latency_s=0.01) as server:
            urls, keys = {"openai": server.url}, {"openai": "sk-test"}
            pool = RateLimitedClientPool(max_attempts=1, base_urls=urls, keys=keys)
            models = ModelsByCallDepth([POLICY, FROZEN], frozen, ScriptedClient(["-"]), pool=pool)
            assert models.take_step_metrics() == {}  # as in the steps of SFT
            asked = [models.clients[1].complete(request) for _ in range(40)]
            replies = await asyncio.gather(*asked, return_exceptions=True)
            await models.close()
            refused = sum(isinstance(reply, RequestRefusedError) for reply in replies)
            return server.answered, refused, models.take_step_metrics()

    answered, refused, values = asyncio.run(spent(FrozenModelBudget(step_calls=7)))
    assert (answered, refused, values["frozen/calls"]) == (7, 33, 7.0)
    answered, refused, values = asyncio.run(
        spent(FrozenModelBudget(run_cost=0.001, step_cost=0.01))
    )
    assert 0 < values["frozen/cost_total"] <= 0.001
    assert (answered + refused, values["frozen/exhausted"]) == (40, 1.0)
    assert answered > 4


def test_resumed_run_keeps_its_spent_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")

    async def refused() -> str:
        before = {"frozen/cost_total": 0.5, "frozen/calls_total": 9.0}
        policy = ScriptedClient(["-"])
        models = ModelsByCallDepth([POLICY, FROZEN], FrozenModelBudget(run_calls=9), policy, before)
        with pytest.raises(RequestRefusedError) as error:
            await models.clients[1].complete(Request((Message("user", "x"),), Sampling()))
        await models.close()
        return str(error.value)

    assert "the budget of the frozen models" in asyncio.run(refused())


WORKERS = PlacementSpec(rollouts=RoleSpec(count=1))


def two_policies(
    policy: PolicySpec | None = None, lr: float = 1e-3, rate: float = 1e-3, **more: Any
) -> Run:
    """Return a run with one policy for roots and another for children."""
    spec = CoTrainedPolicySpec(policy=policy, optim=OptimizerSpec(lr=lr))
    depths = [POLICY, DepthSpec(model="children")]
    run = run_of(depths, FrozenModelBudget(), policies={"children": spec}, **more)
    assert run.rl is not None
    rl = msgspec.structs.replace(run.rl, optim=OptimizerSpec(lr=rate))
    return msgspec.structs.replace(run, rl=rl)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DepthSpec(model=""), "a depth has no model: give depths 'policy'"),
        (lambda: run_of([FROZEN, FROZEN], FrozenModelBudget()), "nothing would be trained"),
        (
            lambda: run_of([POLICY, DepthSpec(model="children")], FrozenModelBudget()),
            "unknown policy 'children': give one of policy, or 'provider:model'",
        ),
        (
            lambda: run_of(
                [POLICY, POLICY], FrozenModelBudget(), policies={"kids": CoTrainedPolicySpec()}
            ),
            r"policies\.kids answers no depth up to limits\.max_depth=1",
        ),
        (
            lambda: run_of([POLICY, FROZEN], FrozenModelBudget(), placement=WORKERS),
            "rollout workers cannot share the budget of openai:gpt-5-mini",
        ),
        (
            lambda: assemble(run_of([DepthSpec(scaffold="tiny")], FrozenModelBudget())),
            "the root's scaffold is the run's: set scaffold=tiny",
        ),
        (
            lambda: assemble(run_of([POLICY, DepthSpec(scaffold="retool")], FrozenModelBudget())),
            "the scaffold 'retool' of depth 1 has the protocol retool, and the run's has notebook",
        ),
        (
            lambda: assemble(two_policies(compute=TrainerComputeSpec(backend="fsdp"))),
            r"policies cannot be combined with compute\.backend=fsdp",
        ),
        (
            lambda: assemble(two_policies(lr=0.0, rate=0.0)),
            r"rl\.optim\.lr=0 must be a positive number: nothing would be learned, since no other",
        ),
        (
            lambda: assemble(two_policies(policy=PolicySpec(shape={"model_type": "qwen3"}))),
            r"policies\.children\.policy has no path",
        ),
        (lambda: FrozenModelBudget(step_cost=0.0), r"frozen\.step_cost=0 must be above 0"),
        (
            lambda: assemble(
                run_of([POLICY, DepthSpec(model="openai:unknown")], FrozenModelBudget(run_cost=1.0))
            ),
            r"openai:unknown has no known price, so frozen\.step_cost and frozen\.run_cost",
        ),
    ],
)
def test_invalid_depths_and_budgets_are_rejected(
    make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with pytest.raises(ConfigError, match=message):
        make()

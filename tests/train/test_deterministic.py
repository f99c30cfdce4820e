"""Deterministic runs: bit-identical at any concurrency, and between engine and trainer."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, TrainError
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.config import LoraSpec, Run
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.engine_consistency_checks import EngineConsistencyChecks, TokenIdHashingClient
from ramify.train.execute import train
from ramify.train.losses import PpoClip
from ramify.train.losses.total_loss import LossSpec
from tests.train.backends.small import policy as small_policy
from tests.train.backends.small import tree
from tests.train.backends.test_precision import PROMPT, at_once
from tests.train.small import assemble, small, weights_of

FIXED = TrainerComputeSpec(precision="fp32", deterministic=True)


def run_of(concurrency: int, precision: Any = "fp32", **changes: Any) -> Run:
    run = small(deterministic=True, compute=TrainerComputeSpec(precision=precision), **changes)
    assert run.rl is not None
    rollout = msgspec.structs.replace(run.rl.rollout, concurrency=concurrency, group=6)
    rl = msgspec.structs.replace(run.rl, rollout=rollout, steps=2)
    return msgspec.structs.replace(run, rl=rl)


def measured(run: Run, out: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return the metrics except for times and batch sizes, and the trained weights."""
    rows: list[dict[str, float]] = []
    train(run, out, listener=lambda row: rows.append(dict(row.values)))
    skipped = ("cpu/", "time/", "time_cpu/", "batch", "concurrency", "tokens_per_s")
    kept = [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(skipped) and not name.endswith("_s")
        }
        for row in rows
    ]
    return kept, weights_of(out)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_is_bit_identical_at_any_concurrency(precision: str, tmp_path: Path) -> None:
    metrics, weights = measured(run_of(1, precision), tmp_path / "1")
    others, other_weights = measured(run_of(12, precision), tmp_path / "12")
    assert metrics == others
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    # Before a step's first update, sampler and trainer are bit-identical.
    assert [row["mismatch_max"] for row in metrics if "mismatch_max" in row] == [0.0, 0.0]


def test_adapter_logprobs_match_between_engine_and_trainer(tmp_path: Path) -> None:
    run = run_of(12)
    policy = msgspec.structs.replace(run.policy, lora=LoraSpec(rank=2))
    metrics, _ = measured(msgspec.structs.replace(run, policy=policy), tmp_path)
    assert [row["mismatch_max"] for row in metrics if "mismatch_max" in row] == [0.0, 0.0]


# --- engine


def sampled(policy: Policy, sizes: list[int], *, at_a_time: int, slots: int) -> list[Any]:
    """Return ids and log-probabilities of replies to prompts of ``sizes`` with a common prefix."""
    client = LocalClient(
        policy, name="x", slots=slots, prefill_tokens=48, fixed_shapes=torch.float32
    )
    shared = [(7 * index) % 61 for index in range(120)]

    async def one(number: int, size: int, turn: asyncio.Semaphore) -> Any:
        async with turn:
            ids = [*shared[:size], number % 61]
            found = await client.sample(ids, Sampling(12, 0.8, seed=number, logprobs=True))
            return found.sampled_ids, found.logprobs

    async def all_of_them() -> list[Any]:
        turn = asyncio.Semaphore(at_a_time)
        return await asyncio.gather(*(one(*each, turn) for each in enumerate(sizes)))

    try:
        return asyncio.run(all_of_them())
    finally:
        asyncio.run(client.close())


class NoText:
    """A placeholder renderer, for prompts given as ids."""

    name, stop_ids, unstable = "none", (), ""


def test_replies_are_bit_identical_in_any_batch() -> None:
    policy = small_policy()
    policy.renderer = NoText()  # type: ignore[assignment]
    sizes = [random.Random(1).randrange(1, 110) for _ in range(24)]
    alone = sampled(policy, sizes, at_a_time=1, slots=1)
    assert sampled(policy, sizes, at_a_time=24, slots=24) == alone
    assert sampled(policy, sizes, at_a_time=9, slots=5) == alone


# --- trainer


def logprobs_and_gradient(
    compute: TrainerComputeSpec, packing: PackingSpec
) -> tuple[dict[Any, float], torch.Tensor]:
    """Return ((sequence, token, kind of entry) -> log-probability, and the gradient)."""
    policy = small_policy()
    backend = SingleBackend(policy, compute=compute)
    batches = pack(tree(), packing)
    found = {
        (batch.sequences[owner], token, weight != 0): value
        for batch, column in zip(batches, backend.logprobs(batches), strict=True)
        for (owner, token), weight, value in zip(
            batch.owners.tolist(), batch.streams["rl"], column.tolist(), strict=True
        )
    }
    backend.forward_backward(batches, LossSpec(policy=PpoClip(), entropy=0.01))
    gradient = torch.cat([each.grad.flatten() for each in policy.model.parameters()])  # type: ignore[union-attr]
    return found, gradient


def test_logprobs_do_not_depend_on_packing_and_gradients_match() -> None:
    logprobs, gradient = logprobs_and_gradient(FIXED, PackingSpec())
    assert logprobs_and_gradient(FIXED, PackingSpec(share=False, max_tokens=1))[0] == logprobs
    usual, expected = logprobs_and_gradient(TrainerComputeSpec(precision="fp32"), PackingSpec())
    assert max(abs(usual[key] - value) for key, value in logprobs.items()) < 1e-5
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_canary_reports_different_rounding_in_deterministic_runs() -> None:
    """Here the engine computes with other tensor shapes than the trainer."""
    made = assemble(small())
    client = LocalClient(made.policy, name="local:other")
    limits = made.precision.canary_limits(run_of(1))
    check = EngineConsistencyChecks(
        TokenIdHashingClient(client), made.policy.model.named_parameters, PROMPT, limits
    )
    try:
        with pytest.raises(
            TrainError, match=r"\(allowed: 0\), and by .* \(allowed: 0\).*deterministic=false$"
        ):
            asyncio.run(check.check_engines(SingleBackend(made.policy, compute=FIXED), at_once))
    finally:
        asyncio.run(client.close())


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"compute": TrainerComputeSpec(recompute=True)}, r"compute\.recompute=true"),
        ({"compute": TrainerComputeSpec(compile=True)}, r"compute\.compile=true"),
        ({"compute": TrainerComputeSpec(backend="fsdp")}, r"compute\.backend=fsdp"),
    ],
)
def test_nondeterministic_options_are_rejected(changes: Any, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^deterministic=true cannot be combined with {option}"):
        assemble(small(deterministic=True, **changes))


def test_unsupported_architecture_is_rejected() -> None:
    run = small(deterministic=True)
    shape = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512}
    policy = msgspec.structs.replace(run.policy, shape=shape)
    with pytest.raises(
        ConfigError, match=r"^deterministic=true is not supported for GPT2LMHeadModel"
    ):
        assemble(msgspec.structs.replace(run, policy=policy))

"""Engine and trainer give the same log-probabilities, and a forest the same as its rows.

For each shape and precision: replies of the embedded engine are scored by the trainer, and one
group is learnt as a forest and as rows. fp32 differs by rounding; bf16 is bounded by the tolerance
that training itself uses (``train.precision``).
"""

from __future__ import annotations

import asyncio
import math

import msgspec
import numpy as np
import torch
import trees
from kit import VOCABULARY, Kit

from ramify.clients.base import Sampling
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import pack
from ramify.train.losses import PpoClip
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, TokenSequence

LOSS = LossSpec(policy=PpoClip())
ROUNDING = 2.0**-5
"""For bf16: largest difference as a share of the largest log-probability, as in training."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(kit: Kit) -> None:
    for shape in ("0.6B", "1.7B", "MoE"):
        for precision in DTYPES:
            with kit.figure(f"{shape} {precision}: engine and trainer"):
                kit.need(f"{shape} in {precision}", 24 * _billions(kit, shape))
                engine_and_trainer(kit, shape, precision)
            with kit.figure(f"{shape} {precision}: forest and rows"):
                forest_and_rows(kit, shape, precision)


def _billions(kit: Kit, shape: str) -> float:
    config = kit.config(shape)
    return float(config.num_hidden_layers * 12 * config.hidden_size**2 / 1e9 + 0.2)


def engine_and_trainer(kit: Kit, shape: str, precision: str) -> None:
    """The largest difference of a log-probability over 16 replies, two of them to each prompt."""
    # A token of a random model has about the log-probability of a uniform choice, at most twice.
    most = 1e-3 if precision == "fp32" else ROUNDING * 2 * math.log(kit.config(shape).vocab_size)
    expected = kit.expect("a difference", 0, most, "nats", "rounding in another order")
    num, length, new = (4, 24, 16) if kit.quick else (16, 256, 128)
    rng = np.random.default_rng(0)
    given = [rng.integers(4, VOCABULARY, length).tolist() for _ in range(num // 2)] * 2
    replies = asyncio.run(_sampled(kit.policy(shape, DTYPES[precision]), given, new))
    rows = [_row(f"{index}", ids, logprobs) for index, (ids, logprobs) in enumerate(replies)]
    backend = _backend(kit, shape, precision)
    batches = pack(rows, backend.packing)
    off = worst = 0.0
    for batch, column in zip(batches, backend.logprobs(batches), strict=True):
        sampled = batch.streams["sampler_logprobs"]
        off = max(off, float(np.abs(column - sampled).max()))
        worst = max(worst, float(np.abs(sampled).max()))
    floor = 1e-3 if precision == "fp32" else ROUNDING * worst
    kit.add(
        f"{shape} {precision}: engine and trainer, largest difference of a logprob",
        off,
        "nats",
        floor=floor,
        expected=expected,
    )


async def _sampled(
    policy: Policy, given: list[list[int]], num: int
) -> list[tuple[list[int], list[float]]]:
    client = LocalClient(policy, slots=len(given))
    ended = await asyncio.gather(
        *(client.sample(ids, Sampling(num, 1.0, seed=7), str(n)) for n, ids in enumerate(given))
    )
    await client.close()
    return [(list(each.ids), list(each.logprobs)) for each in ended]


def _row(name: str, ids: list[int], logprobs: list[float]) -> TokenSequence:
    mask = np.arange(len(ids)) >= len(ids) - len(logprobs)
    column = np.zeros(len(ids), np.float32)
    column[mask] = logprobs
    return TokenSequence(
        name=name,
        token_ids=np.array(ids),
        mask=mask,
        sampler_logprobs=column,
        advantages=mask.astype(np.float32),
        rl=mask.astype(np.float32),
    )


def _backend(kit: Kit, shape: str, precision: str) -> SingleBackend:
    return SingleBackend(kit.policy(shape), compute=TrainerComputeSpec(precision=precision))  # type: ignore[arg-type]


def forest_and_rows(kit: Kit, shape: str, precision: str) -> None:
    """Loss and gradient of eight siblings, packed as a forest and as rows."""
    most = 1e-4 if precision == "fp32" else 0.05
    expected = kit.expect("relative differences", 0, most, "", "the same sums in another order")
    rows = trees.group(4 if kit.quick else 8, 4 if kit.quick else 8, 64 if kit.quick else 512)
    backend = _backend(kit, shape, precision)
    alone = msgspec.structs.replace(backend.packing, share=False)
    sides = {
        "forest": pack(rows, msgspec.structs.replace(backend.packing, max_tokens=1 << 20)),
        "rows": pack(rows, alone),
    }
    losses, gradients = {}, {}
    for name, batches in sides.items():
        losses[name] = backend.forward_backward(batches, LOSS)["loss"]
        gradients[name] = _norm_free(backend)
    scale = max(abs(losses["rows"]), 1e-3)
    kit.add(
        f"{shape} {precision}: loss of forest and rows, relative difference",
        abs(losses["forest"] - losses["rows"]) / scale,
        "",
        expected=expected,
        against={"fewer tokens": _tokens(sides["rows"]) / _tokens(sides["forest"])},
    )
    kit.add(
        f"{shape} {precision}: gradient of forest and rows, relative difference",
        _difference(gradients["forest"], gradients["rows"]),
        "",
        expected=expected,
    )


def _norm_free(backend: SingleBackend) -> list[torch.Tensor]:
    found = [
        p.grad.clone()
        for p in backend.trained_parameters_and_optimizer[0].values()
        if p.grad is not None
    ]
    backend.clear_gradient()
    return found


def _difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Norm of the difference relative to the norm, over all parameters."""
    difference = sum(float((a - b).double().pow(2).sum()) for a, b in zip(one, other, strict=True))
    norm = sum(float(b.double().pow(2).sum()) for b in other)
    return float((difference / norm) ** 0.5)


def _tokens(batches: list[Batch]) -> int:
    return sum(len(batch) for batch in batches)

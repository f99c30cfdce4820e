"""Estimate the memory, communication and training time of every device mesh that a model allows.

A mesh is an arrangement of the trainer's ranks. The figures are the memory of a rank, the bytes
that it sends in a step, and the seconds of learning.

    a batch          2 gathers of each layer's weights, 1 of what is outside; gradients once
                     (``shard``), then summed over copies (``replicas``)
    a layer, tensor  7 sums of its hidden states (2 forward, 5 backward: one for each of q, k, v,
                     gate and up), ``2 (t - 1) / t`` of their bytes each
    a layer, experts 4 exchanges of each token's chosen copies

    seconds = max(products, gathers and gradients) + sums of hidden states + exchanges

Gathering weights overlaps with computing products; exchanges inside layers do not. A rollout is
never divided between ranks, so if there are more groups of ranks than rollouts, some are idle, and
every group waits for the one with the most work. Sampling, and sending weights to engines, are
estimated in ``step_time_estimate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.extras.cluster import memory_estimates
from ramify.extras.cluster.model_and_device_specs import (
    DeviceEfficiency,
    DeviceHardwareSpec,
    ModelParameterCounts,
    num_experts,
)
from ramify.extras.cluster.step_compute_work import (
    StepTokenCounts,
    forward_flop_per_token,
    forward_pass_equivalents,
)
from ramify.train.backends.mesh import DeviceMeshSizes, check_model
from ramify.train.config import Run

NODE_GPUS = 8
"""Number of GPUs connected by the fast links of a machine."""
NODE_GB_PER_S, NETWORK_GB_PER_S = 200.0, 25.0
"""Bandwidth of a rank in 10^9 bytes per second, within a machine and between machines."""


class RankCommunicationBytes(msgspec.Struct, frozen=True):
    """How many bytes one trainer rank sends in a training step, by purpose."""

    shard: float
    """Bytes of gathered weights and reduced gradients."""
    replicas: float
    """Bytes of gradients summed over copies of the model."""
    tensor: float
    """Bytes of hidden states and logits within a ``tensor`` group."""
    experts: float
    """Bytes of tokens sent to experts and back."""

    @property
    def total(self) -> float:
        return self.shard + self.replicas + self.tensor + self.experts


class TrainerMeshEstimate(msgspec.Struct, frozen=True):
    """The estimated memory use and training speed with one device mesh.

    A mesh is one way to arrange the trainer's ranks.
    """

    fields: dict[str, int]
    """Field of ``compute.shard`` -> its value for this mesh."""
    memory: int
    """Memory in bytes of the rank that needs the most."""
    fits: bool
    seconds: float
    """Seconds of learning in one step."""
    sent: RankCommunicationBytes
    idle: float
    """Fraction of the ranks' time without work, from 0 to 1."""


def estimate_meshes(
    run: Run,
    shape: ModelParameterCounts,
    config: Any,
    ranks: int,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
    shares: DeviceEfficiency,
) -> list[TrainerMeshEstimate]:
    """Return an estimate for every mesh that the given number of ranks can form.

    Meshes that fit into memory come first, and within each of the two groups the fastest comes
    first.
    """
    found = [
        _estimate(run, shape, sizes, device, tokens, shares) for sizes in _sizes(run, config, ranks)
    ]
    return sorted(found, key=lambda each: (not each.fits, each.seconds, each.memory))


def _sizes(run: Run, config: Any, ranks: int) -> Iterator[DeviceMeshSizes]:
    """Yield the dimensions of each device mesh that the model and the number of ranks allow.

    Tensor parallelism never extends beyond one machine.
    """
    shard = run.compute.shard
    for tensor in (each for each in _divisors(ranks) if each <= NODE_GPUS):
        for replicas in _divisors(ranks // tensor):
            for experts in {1, *(e for e in _divisors(ranks // replicas) if e % tensor == 0)}:
                if experts > 1 and not num_experts(config):
                    continue
                try:
                    sizes = DeviceMeshSizes.from_rank_count(ranks, replicas, tensor, experts)
                    check_model(config, sizes, shard.tensor_plan, shard.expert_plan)
                except ConfigError:
                    continue
                yield sizes


def _estimate(
    run: Run,
    shape: ModelParameterCounts,
    sizes: DeviceMeshSizes,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
    shares: DeviceEfficiency,
) -> TrainerMeshEstimate:
    ranks = sizes.replicas * sizes.shard * sizes.tensor
    fields = {"ranks": ranks, "replicas": sizes.replicas, "tensor": sizes.tensor}
    fields |= {"experts": sizes.experts} if shape.experts else {}
    shard = msgspec.structs.replace(run.compute.shard, **{"experts": 1, **fields})
    run = msgspec.structs.replace(run, compute=msgspec.structs.replace(run.compute, shard=shard))
    estimates = [
        memory_estimates.estimate_rank_memory(run, shape, device, ranks, rank)
        for rank in (0, min(1, ranks - 1))
    ]
    most = max(each.total for each in estimates)
    sent = sent_bytes(run, shape, sizes, device, tokens)
    return TrainerMeshEstimate(
        fields,
        most,
        all(each.fits for each in estimates),
        learning_seconds(run, shape, sizes, device, tokens, shares, sent),
        sent,
        1 - tokens.num_learnt_tokens / max(1.0, sizes.num_batches * _most_tokens(sizes, tokens)),
    )


def learning_seconds(
    run: Run,
    shape: ModelParameterCounts,
    sizes: DeviceMeshSizes,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
    shares: DeviceEfficiency,
    sent: RankCommunicationBytes | None = None,
) -> float:
    """Estimate how many seconds a training step spends on learning with a given device mesh.

    The estimate includes communication and waiting.
    """
    flop = forward_pass_equivalents(run) * forward_flop_per_token(shape, tokens.tokens_per_rollout)
    products = _most_tokens(sizes, tokens) * flop / sizes.tensor
    products_s = products / (device.tflops * 1e12 * shares.train)
    if run.compute.backend != "fsdp":
        return products_s
    sent = sent or sent_bytes(run, shape, sizes, device, tokens)
    fits_node = sizes.shard * sizes.tensor <= NODE_GPUS
    ranks = sizes.replicas * sizes.shard * sizes.tensor
    within, between = (_link_bytes_per_s(device, each) for each in (True, ranks <= NODE_GPUS))
    gathers_s = sent.shard / _link_bytes_per_s(device, fits_node) + sent.replicas / between
    experts_s = sent.experts / _link_bytes_per_s(device, sizes.experts <= NODE_GPUS)
    return max(products_s, gathers_s) + sent.tensor / within + experts_s


def sent_bytes(
    run: Run,
    shape: ModelParameterCounts,
    sizes: DeviceMeshSizes,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
) -> RankCommunicationBytes:
    """Estimate the number of bytes that one trainer rank sends per training step on a device
    mesh."""
    itemsize = memory_estimates.compute_dtype_bytes(run, device)
    most = _most_tokens(sizes, tokens)
    batches = math.ceil(most / max(1, memory_estimates.max_batch_tokens(run, shape, device)))
    backward = batches if run.compute.shard.gather == "layer" else 1
    dense, experts = shape.parameters - shape.experts, shape.experts
    trained = shape.num_trained_parameters / shape.parameters
    along_experts = sizes.num_expert_shards if sizes.experts > 1 else sizes.shard
    reduces = 2 if device.is_cpu else 1  # gloo sums on every rank, and then keeps a part
    shard = replicas = 0.0
    for parameters, outside, along, split in (
        (dense, shape.outside, sizes.shard, sizes.tensor),
        (experts, 0, along_experts, max(sizes.experts, sizes.tensor)),
    ):
        part, others = parameters / split, (along - 1) / along
        gathers = (2 * parameters - outside) / split
        shard += others * (
            backward * gathers * itemsize
            + reduces * backward * part * trained * memory_estimates.FP32
        )
        rows = part * trained * memory_estimates.FP32 / along
        replicas += backward * 2 * (sizes.replicas - 1) / sizes.replicas * rows
    hidden = most * shape.width * itemsize
    num_sums = (7 + 2 * run.compute.recompute) * shape.layers + 2
    tensor = 2 * (sizes.tensor - 1) / sizes.tensor * num_sums * hidden
    logits = (
        tokens.sampled / max(1.0, tokens.num_learnt_tokens) * most * shape.vocabulary * itemsize
    )
    tensor += (sizes.tensor - 1) / sizes.tensor * logits
    copies = most / sizes.tensor * shape.experts_per_token * shape.width * itemsize
    exchanges = 4 * (sizes.experts - 1) / sizes.experts * shape.layers * copies
    return RankCommunicationBytes(shard, replicas, tensor, exchanges)


def _most_tokens(sizes: DeviceMeshSizes, tokens: StepTokenCounts) -> float:
    """Return how many tokens per step the busiest group of trainer ranks processes."""
    rollouts = max(1, round(tokens.rollouts))
    return max(
        tokens.num_learnt_tokens / sizes.num_batches,
        math.ceil(rollouts / sizes.num_batches) * tokens.num_learnt_tokens / rollouts,
    )


def _link_bytes_per_s(device: DeviceHardwareSpec, is_near: bool) -> float:
    """Return a trainer rank's bandwidth in bytes per second, within or between machines."""
    near = device.gb_per_s / 4 if device.is_cpu else NODE_GB_PER_S
    return 1e9 * (near if is_near or device.is_cpu else NETWORK_GB_PER_S)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

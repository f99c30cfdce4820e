"""Estimate the duration of each part of a training step from device speeds or a measured run.

    sampling    prompts read and tokens sampled, by all engines together
    learning    the passes of the trainer, by all ranks together
    sync        sending the weights to the engines

    step = sampling + learning + sync                    max_staleness = 0: sequential
    step = max(sampling, learning) + sync                otherwise: concurrent

In a forward pass, a token costs 2 FLOP per weight that multiplies it, and 4 per pair of tokens and
element of the heads. A backward pass costs twice that, and recomputation of layers costs another
forward pass. Sampling reads all weights, and the cache of all slots, for every token. The tokens of
a step are measured, or assumed and reported as such (``StepTokenCounts.assumed``).

Waiting for the slowest rollout of a step, for tools and for other models is not included; it is
simulated by ``ramify cluster simulate`` (``simulate.py``).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec

from ramify.errors import ConfigError
from ramify.extras.cluster.memory_estimates import max_concurrent_sequences, weight_itemsize
from ramify.extras.cluster.model_and_device_specs import (
    DeviceEfficiency,
    DeviceHardwareSpec,
    ModelParameterCounts,
)
from ramify.extras.cluster.step_compute_work import (
    StepTokenCounts,
    forward_flop_per_token,
    forward_pass_equivalents,
)
from ramify.extras.cluster.trainer_mesh_estimates import learning_seconds, sent_bytes
from ramify.train.config import Run
from ramify.train.metrics import read_metrics

LINK_GB_PER_S = 10.0
"""Bandwidth between trainer and engines in 10^9 bytes per second."""


class MeasuredThroughput(msgspec.Struct, frozen=True):
    """The measured sampling and training speeds of a run, in tokens per second."""

    tokens: StepTokenCounts
    learnt_per_s: float
    """Tokens per second that one trainer rank learns from."""
    sampled_per_s: float
    """Tokens per second that one engine samples, with everything that rollouts wait for included.
    """
    why: str


class StepSeconds(msgspec.Struct, frozen=True):
    """The estimated duration of each part of a training step, in seconds."""

    sampling: float
    learning: float
    sync: float
    step: float
    why: dict[str, str]
    """Part of the step -> where its number comes from."""


def read_measured_speeds(folder: Path, ranks: int, engines: int) -> MeasuredThroughput:
    """Read the measured speeds and the tokens per step from the metrics of a finished run.

    The first step is left out. Speeds are per trainer rank and per engine. Raises ConfigError if no
    step was measured.
    """
    rows = [
        row.values
        for row in read_metrics(folder)
        if row.stage == "rl" and "work_s" in row.values and "learn_s" in row.values
    ]
    rows = rows[1:] or rows
    if not rows:
        raise ConfigError(
            f"{folder} has no step of reinforcement learning in its metrics.jsonl: give the folder "
            "of a run that has one"
        )

    def mean(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in rows)

    sampled, learnt = mean("sampled_tokens"), mean("packed_tokens")
    if not learnt:
        raise ConfigError(
            f"no step of {folder} trained the policy, apart from the first, which is not counted: "
            "give a longer run"
        )
    why = f"measured over {len(rows)} {'step' if len(rows) == 1 else 'steps'} of {folder}"
    tokens = StepTokenCounts(
        sampled,
        max(0.0, learnt - sampled),
        mean("sampled_tokens") / max(mean("length_mean"), 1),
        why,
    )
    return MeasuredThroughput(
        tokens,
        learnt / max(mean("learn_s"), 1e-9) / ranks,
        sampled / max(mean("work_s"), 1e-9) / engines,
        why,
    )


def estimate_step_seconds(
    run: Run,
    shape: ModelParameterCounts,
    ranks: int,
    engines: int,
    devices: tuple[DeviceHardwareSpec, DeviceHardwareSpec],
    tokens: StepTokenCounts,
    *,
    shares: DeviceEfficiency,
    link_gb_per_s: float = LINK_GB_PER_S,
    from_run: MeasuredThroughput | None = None,
) -> StepSeconds:
    """Estimate the seconds of one reinforcement-learning step.

    ``devices`` holds the trainer's device, then the engines' device.
    """
    trainer, engine = devices
    if from_run is not None:
        learning = (
            tokens.num_learnt_tokens / (from_run.learnt_per_s * ranks)
            if from_run.learnt_per_s
            else 0.0
        )
        sampling = (
            tokens.sampled / (from_run.sampled_per_s * engines) if from_run.sampled_per_s else 0.0
        )
        why = dict.fromkeys(("learning", "sampling"), from_run.why)
    else:
        learning, why_learning = _estimate_learning(run, shape, ranks, trainer, tokens, shares)
        sampling, why_sampling = _estimate_sampling(run, shape, engines, engine, tokens, shares)
        why = {"learning": why_learning, "sampling": why_sampling}
    num_bytes = shape.parameters * weight_itemsize(run, engine)
    sync = num_bytes / (link_gb_per_s * 1e9)
    why["sync"] = f"{num_bytes / 1e9:.3g} GB at {link_gb_per_s:g} GB/s"
    is_apart = run.rl is not None and run.rl.sample.max_staleness > 0
    step = (max(sampling, learning) if is_apart else sampling + learning) + sync
    why["step"] = "sampling beside learning" if is_apart else "sampling, then learning"
    return StepSeconds(sampling, learning, sync, step, why)


def _estimate_learning(
    run: Run,
    shape: ModelParameterCounts,
    ranks: int,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
    shares: DeviceEfficiency,
) -> tuple[float, str]:
    sizes = run.compute.shard.mesh(ranks)
    took = learning_seconds(run, shape, sizes, device, tokens, shares)
    groups = min(sizes.num_batches, max(1, round(tokens.rollouts)))
    why = (
        f"{tokens.num_learnt_tokens:.3g} tokens, {forward_pass_equivalents(run):g} "
        "forward passes' worth of "
        f"{forward_flop_per_token(shape, tokens.tokens_per_rollout):.3g} FLOP each, on "
        f"{groups * sizes.tensor} of {ranks} x {device.name} at {device.tflops:g} TFLOP/s x "
        f"{shares.train:g}"
    )
    if run.compute.backend == "fsdp" and ranks > 1:
        sent = sent_bytes(run, shape, sizes, device, tokens)
        why += f"; a rank sends {sent.total / 1e9:.3g} GB"
    return took, why


def _estimate_sampling(
    run: Run,
    shape: ModelParameterCounts,
    engines: int,
    device: DeviceHardwareSpec,
    tokens: StepTokenCounts,
    shares: DeviceEfficiency,
) -> tuple[float, str]:
    """Estimate the sampling time of one training step in seconds, and describe the estimate in
    words.

    Reading prompts is limited by FLOP/s. Generation is limited by memory bandwidth or by FLOP/s,
    whichever takes longer.
    """
    products = device.tflops * 1e12 * shares.prefill
    reading = (
        tokens.given
        * forward_flop_per_token(shape, tokens.tokens_per_rollout / 2)
        / (engines * products)
    )
    concurrency = run.rl.rollout.concurrency if run.rl is not None else 1
    at_once = max(
        1.0,
        min(
            max_concurrent_sequences(run, device), concurrency / engines, tokens.rollouts / engines
        ),
    )
    itemsize = weight_itemsize(run, device)
    cached = at_once * tokens.tokens_per_rollout / 2 * shape.cache_bytes_per_token(itemsize)
    by_bandwidth = (shape.products * itemsize + cached) / (device.gb_per_s * 1e9 * shares.decode)
    by_products = at_once * forward_flop_per_token(shape, tokens.tokens_per_rollout / 2) / products
    token_s = max(by_bandwidth, by_products)
    drawing = tokens.sampled / engines / at_once * token_s
    return reading + drawing, (
        f"{tokens.sampled:.3g} tokens, {at_once:g} at once in each of {engines} x {device.name}: "
        f"{at_once / token_s:.3g} tokens/s, bound by "
        f"{'bandwidth' if by_bandwidth >= by_products else 'products'}; "
        f"{tokens.given:.3g} read before"
    )

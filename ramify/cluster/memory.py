"""Bytes that a process of each role holds, part by part, from the shape of the model and the knobs
of the run.

    trainer rank      weights, gradients, optimizer: its share of each (fp32); whole layers while they are computed; a second
                      model for a KL, or a critic; activations of a batch, logits of some of its entries
    engine            weights; keys and values of its slots
    sessions          what they take in main memory before they hold anything, where rollouts are; limits are said beside it
    rank 0 besides    the copy of the policy that engines are made of, and the engine itself where it is in this process

Exact where bytes follow from sizes (weights, gradients, optimizer, keys and values: tests compare
them with real ones); activations are the budget that batches are packed by. Leaves out what
libraries take for themselves (CUDA contexts, NCCL buffers: a gigabyte or two on a GPU).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from ramify.cluster.devices import DeviceSpec
from ramify.cluster.shape import ModelShape
from ramify.train.algorithms.base import needs_of
from ramify.train.config import Run

FP32 = 4
_ADAMW, _MUON = 2 * FP32, FP32
"""Bytes of state for each parameter that is trained."""
_SLOTS = {True: 128, False: 256}
"""By default, on a CPU and on a GPU (``inference/local/local_client.py``)."""
_CPU_CACHE_BYTES = 2 << 30
_SHARE_OF_VLLM = 0.9
"""Of a GPU that vLLM and SGLang take by default: what weights leave is for keys and values."""
_SHARE_OPTIONS = ("--gpu-memory-utilization", "--mem-fraction-static")
_SESSION_BYTES = 2_500_000
"""Of a session's own, before it holds anything (``docs/log.md``)."""
_ACTIVATIONS, _LOGITS = "activations, at most", "logits"
_LEARNING = ("gradients", "gathered", _ACTIVATIONS, _LOGITS)
"""Parts that are there while the trainer learns, and not while it waits for rollouts."""


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Of one process."""

    parts: dict[str, int]
    """What -> bytes."""
    room: int
    """Bytes of its device; 0 where that is not known."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def between(self) -> int:
        """What a trainer keeps while it does not learn."""
        return sum(num_bytes for name, num_bytes in self.parts.items() if name not in _LEARNING)

    @property
    def fits(self) -> bool:
        return not self.room or self.total <= self.room


def of_rank(
    run: Run, shape: ModelShape, device: DeviceSpec, ranks: int, rank: int = 0
) -> MemoryEstimate:
    """A rank of the trainer, or the trainer where it is one process."""
    shards = max(1, ranks // run.compute.shard.replicas)
    parts = {
        "weights": _share((shape.parameters + shape.adapters) * FP32, shards),
        "gradients": _share(shape.trained * FP32, shards),
        "optimizer": _share(_optimizer(run, shape), shards),
    }
    if run.compute.backend == "fsdp" and shards > 1:
        parts["gathered"] = _gathered(run, shape, device)
    parts |= _second(run, shape, shards)
    parts[_ACTIVATIONS] = max_tokens(run, shape, device) * _per_token(run, shape)
    parts[_LOGITS] = 2 * FP32 * (run.compute.max_logits or _logits(device))
    if rank == 0:
        parts |= _of_run(run, shape, device)
    return MemoryEstimate(parts, int(device.memory_gb * 1e9))


def of_engine(run: Run, shape: ModelShape, device: DeviceSpec) -> MemoryEstimate:
    """An engine that is a process of its own."""
    itemsize = itemsize_of(run, device)
    weights = shape.parameters * itemsize
    spec = run.inference
    if spec is not None and spec.engine != "ramify" and not device.is_cpu:
        kept = max(0, int(_share_of_gpu(spec.args) * device.memory_gb * 1e9) - weights)
    else:
        kept = cache_bytes(shape, device, itemsize, _slots_of(run, device), None)
    return MemoryEstimate(
        {"weights": weights, "keys and values": kept}, int(device.memory_gb * 1e9)
    )


def of_sessions(run: Run, rollout_workers: int, room_gb: float) -> MemoryEstimate:
    """The sessions of the rollouts that one runner, or the run where there is none, has at once;
    those of children come on top, and what code makes of its context, which nobody knows before.
    Main memory."""
    at_once = _at_once(run, rollout_workers)
    return MemoryEstimate(
        {f"{at_once} sessions, empty": at_once * _SESSION_BYTES}, int(room_gb * 1e9)
    )


def limits_of_sessions(run: Run, rollout_workers: int) -> Iterator[tuple[str, int]]:
    """(what, bytes; 0 where it is of the machine) that ends sessions which take more."""
    one = run.sandbox.memory_bytes
    yield "one session (sandbox.memory_bytes)", one
    if run.sandbox.provider != "jail":
        yield "all together, each at its limit", _at_once(run, rollout_workers) * one
    else:
        yield "all together (sandbox.all_memory_bytes)", run.sandbox.all_memory_bytes


def _at_once(run: Run, rollout_workers: int) -> int:
    assert run.rl is not None
    return -(-run.rl.rollout.concurrency // rollout_workers)


def itemsize_of(run: Run, device: DeviceSpec) -> int:
    """Bytes of a number of the policy as engines have it: fp32 on a CPU, and where the model is
    made from nothing."""
    dtype = run.policy.dtype
    if dtype == "auto":
        return FP32 if device.is_cpu or not run.policy.path else 2
    return 2 if dtype == "bfloat16" else FP32


def cache_bytes(
    shape: ModelShape, device: DeviceSpec, itemsize: int, slots: int, limit: int | None
) -> int:
    """Keys and values when as many sequences as there are slots fill the window, or the limit."""
    limit = limit or (_CPU_CACHE_BYTES if device.is_cpu else int(device.memory_gb * 1e9) // 3)
    token = shape.cache_bytes_per_token(itemsize)
    longest = min(shape.window, max(1, limit // token))
    return max(1, min(slots, limit // (token * longest))) * longest * token


def max_tokens(run: Run, shape: ModelShape, device: DeviceSpec) -> int:
    """Tokens of a batch, at most."""
    from ramify.train.backends.single import LEAST_TOKENS, activation_room

    room = activation_room(int(device.memory_gb * 1e9))
    return run.compute.max_tokens or max(LEAST_TOKENS, room // _per_token(run, shape))


def slots(run: Run, device: DeviceSpec) -> int:
    """Sequences that an engine decodes at once."""
    return (
        _slots_of(run, device)
        if run.inference is not None
        else run.policy.slots or _SLOTS[device.is_cpu]
    )


def _share(num_bytes: int, shards: int) -> int:
    return -(-num_bytes // shards)


def _optimizer(run: Run, shape: ModelShape) -> int:
    kinds = [stage.optim.kind for stage in (run.warmup, run.sft, run.rl) if stage is not None]
    by_muon = 0 if shape.adapters else shape.inside
    each = [
        by_muon * _MUON + (shape.trained - by_muon) * _ADAMW
        if k == "muon"
        else shape.trained * _ADAMW
        for k in kinds
    ]
    return max(each)


def _gathered(run: Run, shape: ModelShape, device: DeviceSpec) -> int:
    """Whole weights while they are computed with, and whole gradients until they are added up."""
    precision = run.compute.precision
    itemsize = {"fp32": FP32, "bf16": 2, "auto": itemsize_of(run, device)}[precision]
    if run.compute.shard.gather == "step":
        return shape.parameters * itemsize + shape.trained * FP32
    two_layers = 2 * shape.largest_layer  # one is computed while the next is on its way
    return (two_layers + shape.outside) * itemsize + (
        shape.largest_layer + shape.outside
    ) * itemsize


def _second(run: Run, shape: ModelShape, shards: int) -> Mapping[str, int]:
    """Models beside the one that is trained."""
    if run.rl is None:
        return {}
    found = {}
    needs = needs_of(run.rl.algorithm)
    if (run.rl.loss.kl_beta or "ref_logprobs" in needs.streams) and not (
        shape.adapters and run.compute.backend == "fsdp"
    ):
        found["reference"] = _share(shape.parameters * FP32, shards)
    if needs.values and run.rl.critic.model == "own":
        found["critic"] = shape.parameters * (2 * FP32 + _ADAMW)
    return found


def _of_run(run: Run, shape: ModelShape, device: DeviceSpec) -> Mapping[str, int]:
    """What rank 0's process holds because it is the run."""
    itemsize = itemsize_of(run, device)
    found = {}
    waits = run.rl is None or not run.rl.sample.max_staleness
    shares = (
        run.compute.backend == "single" and run.policy.lora is None and itemsize == FP32 and waits
    )
    if not shares:
        found["the engine's weights"] = shape.parameters * itemsize
    if run.inference is None:
        found["keys and values"] = cache_bytes(
            shape, device, itemsize, slots(run, device), run.policy.cache_bytes
        )
    return found


def _slots_of(run: Run, device: DeviceSpec) -> int:
    """As ``--slots`` of ``inference.args`` says."""
    args = run.inference.args if run.inference is not None else ()
    for name, value in pairwise(args):
        if name in ("--slots", "--max-num-seqs", "--max-running-requests") and value.isdigit():
            return int(value)
    return _SLOTS[device.is_cpu]


def _share_of_gpu(args: Sequence[str]) -> float:
    """That vLLM or SGLang takes, as its options say."""
    for name, value in pairwise(" ".join(args).replace("=", " ").split()):
        if name in _SHARE_OPTIONS and value.replace(".", "", 1).isdigit():
            return float(value)
    return _SHARE_OF_VLLM


def _per_token(run: Run, shape: ModelShape) -> int:
    from ramify.train.backends.single import activation_bytes

    return activation_bytes(shape.width, shape.mlp, shape.layers, run.compute.recompute)


def _logits(device: DeviceSpec) -> int:
    from ramify.train.backends.single import logits_at_once

    return logits_at_once(not device.is_cpu)

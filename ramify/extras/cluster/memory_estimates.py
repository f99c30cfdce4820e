"""Estimate the memory that each process of a training run needs, component by component, from the
model's shape and the run's settings.

    trainer rank    its shard of weights, gradients and optimizer state (fp32); gathered layers
                    while they are computed; a second model for a KL term or a critic; activations
                    of a batch; logits of some of its entries
    engine          weights; keys and values of its slots
    sessions        main memory of empty sessions, on the machine of the rollouts; limits are
                    listed separately
    rank 0, also    the engine if it is embedded, with its own copy of the policy; otherwise one
                    tensor on its way to engines

Figures are exact if they follow from sizes (weights, gradients, optimizer state, keys and values),
and tests compare these with real ones. For activations, the figure is the limit up to which batches
are packed. Memory that libraries reserve (CUDA contexts and NCCL buffers, one or two gigabytes on a
GPU) is not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from ramify.extras.cluster.model_and_device_specs import DeviceHardwareSpec, ModelParameterCounts
from ramify.sandbox.base import JailSpec
from ramify.train.advantages.base import needs_of
from ramify.train.config import Run

FP32 = 4
_ADAMW, _MUON = 2 * FP32, FP32
"""Bytes of optimizer state per trained parameter."""
_SLOTS = {True: 128, False: 256}
"""Default number of slots (concurrent sequences) of an engine. The key is True for an engine on a
CPU and False for one on a GPU."""
_CPU_CACHE_BYTES = 2 << 30
_SHARE_OF_VLLM = 0.9
"""Fraction of a GPU's memory that vLLM and SGLang reserve by default. Memory beyond the weights
holds keys and values."""
_SHARE_OPTIONS = ("--gpu-memory-utilization", "--mem-fraction-static")
_GATHERED_BYTES = 16 << 20
"""Total size of small tensors that are gathered at once (``backends/fsdp.py``), in bytes."""
_SESSION_BYTES = 2_500_000
"""Memory of an empty session in bytes (``docs/log-archive.md``)."""
_ACTIVATIONS, _LOGITS = "activations, at most", "logits"
_LEARNING = ("gradients", "gathered", _ACTIVATIONS, _LOGITS)
"""Memory components that exist only while the trainer learns, not while it waits for rollouts."""


class MemoryEstimate(msgspec.Struct, frozen=True):
    """The estimated memory use of one process, by component."""

    parts: dict[str, int]
    """Memory component -> its size in bytes."""
    room: int
    """Memory of the process's device in bytes; 0 if unknown."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def idle_bytes(self) -> int:
        """The number of bytes that a trainer holds in memory while it waits for rollouts."""
        return sum(num_bytes for name, num_bytes in self.parts.items() if name not in _LEARNING)

    @property
    def fits(self) -> bool:
        return not self.room or self.total <= self.room


def estimate_rank_memory(
    run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec, ranks: int, rank: int = 0
) -> MemoryEstimate:
    """Estimate the memory of one trainer rank, or of a trainer that is a single process."""
    shards = max(1, ranks // run.compute.shard.replicas)
    parts = {
        "weights": _share((shape.parameters + shape.adapters) * FP32, shards),
        "gradients": _share(shape.num_trained_parameters * FP32, shards),
        "optimizer": _share(_optimizer_bytes(run, shape), shards),
    }
    if run.compute.backend == "fsdp" and shards > 1:
        parts["gathered"] = _gathered_bytes(run, shape, device)
    parts |= _extra_model_bytes(run, shape, shards)
    parts[_ACTIVATIONS] = max_batch_tokens(run, shape, device) * _per_token(run, shape, device)
    parts[_LOGITS] = 2 * FP32 * (run.compute.max_logits or _max_logits(device))
    if rank == 0:
        parts |= _of_run(run, shape, device)
    return MemoryEstimate(parts, int(device.memory_gb * 1e9))


def estimate_engine_memory(
    run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec
) -> MemoryEstimate:
    """Estimate the memory of an inference engine that runs in a separate process."""
    itemsize = weight_itemsize(run, device)
    weights = shape.parameters * itemsize
    spec = run.inference
    if spec is not None and spec.engine != "ramify" and not device.is_cpu:
        cache = max(0, int(_share_of_gpu(spec.args) * device.memory_gb * 1e9) - weights)
    else:
        cache = kv_cache_bytes(shape, device, itemsize, _slots_of(run, device), None)
    return MemoryEstimate(
        {"weights": weights, "keys and values": cache}, int(device.memory_gb * 1e9)
    )


def estimate_sessions_memory(run: Run, rollout_workers: int, room_gb: float) -> MemoryEstimate:
    """Estimate the RAM that empty sandboxed sessions need in a rollout worker or the run's own
    process.

    The run's own process holds the sessions if there are no rollout workers. Sessions of child
    calls and the data that code creates need more, which is not included because their size is
    unknown.
    """
    at_once = _at_once(run, rollout_workers)
    return MemoryEstimate(
        {f"{at_once} sessions, empty": at_once * _SESSION_BYTES}, int(room_gb * 1e9)
    )


def sandbox_memory_limits(run: Run, rollout_workers: int) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each memory limit beyond which a session is killed.

    0 stands for a fraction of the machine's memory.
    """
    one = run.sandbox.memory_bytes
    yield "one session (sandbox.memory_bytes)", one
    if not isinstance(run.sandbox, JailSpec):
        yield "all together, each at its limit", _at_once(run, rollout_workers) * one
    else:
        yield "all together (sandbox.all_memory_bytes)", run.sandbox.all_memory_bytes


def _at_once(run: Run, rollout_workers: int) -> int:
    assert run.rl is not None
    return -(-run.rl.rollout.concurrency // rollout_workers)


def weight_itemsize(run: Run, device: DeviceHardwareSpec) -> int:
    """Return the number of bytes per parameter in an inference engine's weights.

    The rules are those of ``train/policy_dependent_defaults.py``.
    """
    dtype = run.policy.dtype
    if dtype == "auto" and run.compute.precision != "auto":
        return 2 if run.compute.precision == "bf16" else FP32
    if dtype == "auto":
        return FP32 if device.is_cpu or not run.policy.path else 2
    return 2 if dtype == "bfloat16" else FP32


def kv_cache_bytes(
    shape: ModelParameterCounts,
    device: DeviceHardwareSpec,
    itemsize: int,
    slots: int,
    limit: int | None,
) -> int:
    """Return the size in bytes of an inference engine's KV cache when it is full.

    It is full when every slot holds a sequence as long as the context window. A slot holds one of
    the concurrent sequences. The cache is never larger than ``limit``.
    """
    limit = limit or (_CPU_CACHE_BYTES if device.is_cpu else int(device.memory_gb * 1e9) // 3)
    token = shape.cache_bytes_per_token(itemsize)
    longest = min(shape.window, max(1, limit // token))
    return max(1, min(slots, limit // (token * longest))) * longest * token


def max_batch_tokens(run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec) -> int:
    """Return the maximum number of tokens in one training batch on a device.

    This is the configured number, or else as many as fit into the memory for activations.
    """
    from ramify.train.backends.activation_memory import LEAST_TOKENS, max_activation_bytes

    room = max_activation_bytes(int(device.memory_gb * 1e9))
    return run.compute.max_tokens or max(LEAST_TOKENS, room // _per_token(run, shape, device))


def max_concurrent_sequences(run: Run, device: DeviceHardwareSpec) -> int:
    """Return the maximum number of sequences that an inference engine decodes at once."""
    return (
        _slots_of(run, device)
        if run.inference is not None
        else run.policy.slots or _SLOTS[device.is_cpu]
    )


def _share(num_bytes: int, shards: int) -> int:
    return -(-num_bytes // shards)


def _optimizer_bytes(run: Run, shape: ModelParameterCounts) -> int:
    kinds = [stage.optim.kind for stage in (run.warmup, run.sft, run.rl) if stage is not None]
    by_muon = 0 if shape.adapters else shape.inside
    states = [
        by_muon * _MUON + (shape.num_trained_parameters - by_muon) * _ADAMW
        if k == "muon"
        else shape.num_trained_parameters * _ADAMW
        for k in kinds
    ]
    return max(states)


def _gathered_bytes(run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec) -> int:
    """Return the bytes of gathered weights and full gradients on one trainer rank.

    The weights are gathered from other ranks during computation. The full gradients are held until
    they are reduced.
    """
    itemsize = compute_dtype_bytes(run, device)
    shard = run.compute.shard
    experts = shape.experts // shape.layers
    layer, outside = (
        _parameters_per_rank(run, shape.largest_layer - experts, experts),
        shape.outside,
    )
    outside //= shard.tensor
    if shard.gather == "step":
        return _parameters_per_rank(
            run, shape.parameters - shape.experts, shape.experts
        ) * itemsize + (
            _parameters_per_rank(run, shape.num_trained_parameters - shape.experts, shape.experts)
            * FP32
            if not shape.adapters
            else shape.num_trained_parameters * FP32
        )
    two_layers = 2 * layer  # one is computed while the next is gathered
    return (two_layers + outside) * itemsize + (layer + outside) * itemsize


def _parameters_per_rank(run: Run, dense: int, experts: int) -> int:
    """Return the number of parameters per trainer rank under tensor and expert parallelism."""
    shard = run.compute.shard
    return dense // shard.tensor + experts // max(shard.tensor, shard.experts)


def compute_dtype_bytes(run: Run, device: DeviceHardwareSpec) -> int:
    """Return the number of bytes per element in the trainer's matrix products.

    Weights that are gathered for these products have the same size.
    """
    by_precision = {"fp32": FP32, "bf16": 2, "auto": weight_itemsize(run, device)}
    return by_precision[run.compute.precision]


def _extra_model_bytes(run: Run, shape: ModelParameterCounts, shards: int) -> Mapping[str, int]:
    """Return the memory of the run's separate reference model and critic, in bytes by name.

    Only models that the run needs are included.
    """
    if run.rl is None:
        return {}
    models = {}
    needs = needs_of(run.rl.algorithm)
    if (run.rl.loss.kl_beta or "ref_logprobs" in needs.streams) and not (
        shape.adapters and run.compute.backend == "fsdp"
    ):
        models["reference"] = _share(shape.parameters * FP32, shards)
    if needs.values and run.rl.critic.model == "own":
        models["critic"] = _share(shape.parameters * (2 * FP32 + _ADAMW), shards)
    return models


def _of_run(run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec) -> Mapping[str, int]:
    """Return the extra memory that rank 0 needs to control the run, in bytes by component."""
    itemsize = weight_itemsize(run, device)
    parts = {}
    waits = run.rl is None or not run.rl.sample.max_staleness
    is_single = run.compute.backend == "single"
    shares = is_single and run.policy.lora is None and itemsize == FP32 and waits
    reads_parts = not is_single and run.inference is not None and bool(run.policy.path)
    if reads_parts and (run.rl is None or not run.rl.signals):
        parts["one gathered tensor"] = max(_GATHERED_BYTES, shape.vocabulary * shape.width * FP32)
    elif not shares:
        parts["the engine's weights"] = shape.parameters * itemsize
        if run.policy.lora is not None and not is_single:
            parts["the frozen weights"] = shape.parameters * FP32
    if run.inference is None:
        parts["keys and values"] = kv_cache_bytes(
            shape, device, itemsize, max_concurrent_sequences(run, device), run.policy.cache_bytes
        )
    return parts


def _slots_of(run: Run, device: DeviceHardwareSpec) -> int:
    """Return how many sequences an engine decodes at once, as set in its command-line options.

    If none is set, it is the default for the device.
    """
    args = run.inference.args if run.inference is not None else ()
    for name, value in pairwise(args):
        if name in ("--slots", "--max-num-seqs", "--max-running-requests") and value.isdigit():
            return int(value)
    return _SLOTS[device.is_cpu]


def _share_of_gpu(args: Sequence[str]) -> float:
    """Return the fraction of a GPU's memory that an inference engine reserves.

    It is read from the command-line options of vLLM or SGLang.
    """
    for name, value in pairwise(" ".join(args).replace("=", " ").split()):
        if name in _SHARE_OPTIONS and value.replace(".", "", 1).isdigit():
            return float(value)
    return _SHARE_OF_VLLM


def _per_token(run: Run, shape: ModelParameterCounts, device: DeviceHardwareSpec) -> int:
    from ramify.train.backends.activation_memory import activation_bytes_per_token

    mlp = shape.mlp // run.compute.shard.tensor
    itemsize = compute_dtype_bytes(run, device)
    return activation_bytes_per_token(
        shape.width, mlp, shape.layers, run.compute.recompute, itemsize
    )


def _max_logits(device: DeviceHardwareSpec) -> int:
    from ramify.train.backends.activation_memory import max_logit_elements

    return max_logit_elements(not device.is_cpu)

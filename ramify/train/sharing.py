"""Whether the trainer and the engines share GPUs, and who uses their memory when.

    rollouts ── engines: weights, keys and values      the trainer keeps only weights and optimizer
    learning ── the trainer: gradients, activations    the engines sleep
    rollouts ── …

Decided from the recipe and from the GPUs that this process sees. It is unknown for engines that are
already running (``urls``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.placement.placement_spec import PlacementSpec

if TYPE_CHECKING:
    from ramify.train.config import Run


def sleeping(run: Run, device: str) -> InferenceSpec | None:
    """``run.inference`` with ``sleep`` set to "learn" or "never". ``device`` is the trainer's kind,
    cpu or cuda. Raises ConfigError if engines would have to sleep and to sample at the same
    time."""
    spec = run.inference
    if spec is None or spec.sleep == "never":
        return spec
    why = "inference.sleep=learn" if spec.sleep == "learn" else shared(run, device)
    staleness = run.rl.sample.max_staleness if run.rl is not None else 0
    if why and staleness:
        raise ConfigError(
            f"{why}, so engines sleep while the trainer learns, but with "
            f"rl.sample.max_staleness={staleness} they also sample meanwhile: set max_staleness "
            "to 0, give the engines separate GPUs, or, if both fit at once (`ramify cluster plan` "
            "has the sums), set inference.sleep=never"
        )
    return msgspec.structs.replace(spec, sleep="learn" if why else "never")


def shared(run: Run, device: str) -> str:
    """Why the run's engines share the trainer's GPUs, as a clause; empty if they do not."""
    inference, spec = run.inference, run.placement or PlacementSpec()
    if inference is None or inference.urls or device != "cuda":
        return ""
    trainer, engine = spec.trainer, spec.inference
    has_gpus = bool(trainer.gpus or engine.gpus)
    if has_gpus and any({"trainer", "inference"} <= set(group) for group in spec.colocate):
        return "placement.colocate has trainer and engines share GPUs"
    if spec.kind == "ray":
        one_pool = has_gpus and spec.pool_of("trainer") == spec.pool_of("inference")
        if one_pool and min(trainer.gpus, engine.gpus) > 0 and trainer.gpus + engine.gpus <= 1:
            return "placement gives trainer and engines parts of one GPU"
        return ""
    return _on_this_machine(run, inference)


def _on_this_machine(run: Run, inference: InferenceSpec) -> str:
    """The same without Ray, for processes that select their GPUs themselves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = (
        [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
        if visible
        else [str(index) for index in range(64)]
    )
    first = int(run.policy.device.partition(":")[2] or 0)
    num = 1
    if run.compute.backend == "fsdp":
        num = run.compute.shard.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(seen)
    trainer = set(seen[first : first + num])
    engines = {gpu.strip() for gpus in inference.gpus for gpu in gpus.split(",")} or set(seen[:1])
    both = sorted(trainer & engines)
    return f"trainer and engines share the GPU {both[0]} (inference.gpus)" if both else ""

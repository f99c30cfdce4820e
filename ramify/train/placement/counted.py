"""How many processes each role of a run has: what the placement says, and what the run says elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.errors import ConfigError
from ramify.train.placement.seats import counts
from ramify.train.placement.spec import PlacementSpec

if TYPE_CHECKING:
    from ramify.train.config import Run


def counted(run: Run, spec: PlacementSpec) -> dict[str, int]:
    """Role -> processes; the trainer has at least the run's own. Raises ConfigError where placement and run differ."""
    inference = run.inference
    said = {
        "trainer": run.compute.shard.ranks if run.compute.backend == "fsdp" else 1,
        "inference": inference.num if inference is not None and not inference.urls else 0,
    }
    found = counts(spec, said)
    if found["inference"] and not said["inference"]:
        raise ConfigError(
            f"placement.inference.count={found['inference']}, but the run starts no engines: give inference (an "
            "InferenceSpec), or leave the count out for the engine in the trainer's process"
        )
    return found | {"trainer": max(1, found["trainer"])}

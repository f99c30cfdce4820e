"""Which settings are simulated, and which of them gets most steps out of an hour.

    choices(…, engines=[1, 2], staleness=[0, 1])    every combination
    splits(8)                                       1 + 7, 2 + 6, …, 7 + 1 devices for engines and trainer; and all 8 for both

A device is what one engine or one rank of the trainer has to itself. On shared devices engines
stand still while the trainer learns; what handing memory over takes is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ramify.cluster.simulate import SimulationResult, SimulationSetting, simulate
from ramify.cluster.simulation_inputs import SimulationInputs
from ramify.errors import ConfigError
from ramify.progress import report_progress

MOST_ROLLOUTS = 300_000
"""Of all that is simulated at once; some hundred are played in a second."""


class DeviceSplit(NamedTuple):
    """Who has the devices."""

    engines: int
    ranks: int
    shared: bool = False


def splits(devices: int, engine_devices: int = 1) -> list[DeviceSplit]:
    """All ways to share ``devices`` out, where an engine takes ``engine_devices``. Raises
    ConfigError where there are too few."""
    if devices < engine_devices or min(devices, engine_devices) < 1:
        raise ConfigError(
            f"{devices} devices have no room for an engine of {engine_devices}: give at least as "
            "many, or an engine fewer"
        )
    most = devices // engine_devices
    apart = [DeviceSplit(num, devices - num * engine_devices) for num in range(1, most + 1)]
    return [*(each for each in apart if each.ranks), DeviceSplit(most, devices, shared=True)]


def choices(
    measured: SimulationInputs,
    found: Sequence[DeviceSplit],
    *,
    slots: Sequence[int] = (),
    staleness: Sequence[int] = (),
    items: int = 0,
    group: int = 0,
    concurrency: int = 0,
    straggler_factor: float | None = None,
    grace_steps: int | None = None,
) -> Iterator[SimulationSetting]:
    """Every combination; what is empty or 0 is as it was in the run."""
    sizes = measured.sizes
    for split, num_slots, most in itertools.product(
        found, slots or [sizes.slots], staleness or [sizes.staleness]
    ):
        yield SimulationSetting(
            engines=split.engines,
            ranks=split.ranks,
            shared=split.shared,
            slots=num_slots,
            staleness=most,
            items=items or sizes.items,
            group=group or sizes.group,
            concurrency=concurrency or sizes.concurrency,
            on_wire=sizes.on_wire,
            max_items=max(sizes.max_items, items) if sizes.max_items else 0,
            straggler_factor=sizes.straggler_factor
            if straggler_factor is None
            else straggler_factor,
            grace_steps=sizes.grace_steps if grace_steps is None else grace_steps,
            keeps=sizes.keeps,
            evaluate=sizes.evaluate,
            cache_tokens=sizes.cache_tokens,
            embedded=sizes.embedded and split == DeviceSplit(1, 1),
        )


def predict(
    measured: SimulationInputs,
    settings: Sequence[SimulationSetting],
    *,
    steps: int = 20,
    seed: int = 0,
) -> list[SimulationResult]:
    """What each comes to, over the same work. Raises ConfigError for more than is done in an hour
    or so."""
    num = sum(each.items * each.group * (steps + 2 * each.staleness + 1) for each in settings)
    if num > MOST_ROLLOUTS:
        raise ConfigError(
            f"{len(settings)} settings over {steps} steps are {num} rollouts, and {MOST_ROLLOUTS} "
            "at most are played: try "
            "fewer settings at once (engines, slots, ranks, staleness, devices), fewer steps, or "
            "fewer items and groups"
        )
    found = []
    with report_progress("simulating", len(settings), "settings") as told:
        for setting in settings:
            found.append(simulate(measured, setting, steps=steps, seed=seed))
            told.at(len(found))
    return found


def best(found: Sequence[SimulationResult]) -> SimulationResult:
    """The one with most steps per hour; of those within a hundredth of it the one whose tokens are
    freshest, then that on fewest devices."""
    most = max(each.steps_per_hour for each in found)
    near = [each for each in found if each.steps_per_hour >= 0.99 * most]
    return min(
        near,
        key=lambda each: (
            each.staleness,
            each.setting.engines + each.setting.ranks,
            -each.steps_per_hour,
        ),
    )

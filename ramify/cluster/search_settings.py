"""The settings to simulate, and the one with the most steps per hour.

    choices(…, engines=[1, 2], staleness=[0, 1])    every combination
    splits(8)                                       8 devices as 1 + 7, 2 + 6, …, 7 + 1 for engines
                                                    and trainer, or all 8 for both

One engine or one trainer rank has a device to itself. On shared devices, engines pause while the
trainer learns. Not included: the time to release and reload memory on shared devices.
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
"""Limit on the rollouts of all simulations together. A few hundred are simulated per second."""


class DeviceSplit(NamedTuple):
    """Devices of engines and of trainer ranks."""

    engines: int
    ranks: int
    shared: bool = False


def splits(devices: int, engine_devices: int = 1) -> list[DeviceSplit]:
    """Return all ways to divide ``devices`` if an engine takes ``engine_devices``. Raises
    ConfigError if there are too few."""
    if devices < engine_devices or min(devices, engine_devices) < 1:
        raise ConfigError(
            f"{devices} devices have no room for an engine of {engine_devices}: give at least as "
            "many, or give an engine fewer"
        )
    most = devices // engine_devices
    apart = [DeviceSplit(num, devices - num * engine_devices) for num in range(1, most + 1)]
    return [*(each for each in apart if each.ranks), DeviceSplit(most, devices, shared=True)]


def choices(
    measured: SimulationInputs,
    device_splits: Sequence[DeviceSplit],
    *,
    slots: Sequence[int] = (),
    staleness: Sequence[int] = (),
    items: int | None = None,
    group: int | None = None,
    concurrency: int | None = None,
    straggler_factor: float | None = None,
    grace_steps: int | None = None,
) -> Iterator[SimulationSetting]:
    """Yield every combination of the given values. A value that is empty or None is that of the
    run."""
    sizes = measured.sizes
    for split, num_slots, most in itertools.product(
        device_splits, slots or [sizes.slots], staleness or [sizes.staleness]
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
            max_items=max(sizes.max_items, items or 0) if sizes.max_items else 0,
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
    """Simulate each setting with the same work. Raises ConfigError if that would take more than
    about an hour."""
    num = sum(each.items * each.group * (steps + 2 * each.staleness + 1) for each in settings)
    if num > MOST_ROLLOUTS:
        raise ConfigError(
            f"{len(settings)} settings over {steps} steps are {num} rollouts, and at most "
            f"{MOST_ROLLOUTS} are simulated: try fewer settings at once (engines, slots, ranks, "
            "staleness, devices), fewer steps, or fewer items and groups"
        )
    results = []
    with report_progress("simulating", len(settings), "settings") as progress:
        for setting in settings:
            results.append(simulate(measured, setting, steps=steps, seed=seed))
            progress.at(len(results))
    return results


def best(results: Sequence[SimulationResult]) -> SimulationResult:
    """Return the result with the most steps per hour. Among those within one percent, prefer the
    lowest staleness, then the fewest devices."""
    most = max(each.steps_per_hour for each in results)
    near = [each for each in results if each.steps_per_hour >= 0.99 * most]
    return min(
        near,
        key=lambda each: (
            each.staleness,
            each.setting.engines + each.setting.ranks,
            -each.steps_per_hour,
        ),
    )

"""The commands ``ramify cluster plan`` and ``ramify cluster simulate``.

The first estimates what a run needs before it starts. The second predicts how fast a finished run
would be on other hardware.

    ramify cluster plan RECIPE       placement, memory of each process, seconds per step
    ramify cluster simulate RUN      a finished run's speed on other hardware; the fastest is first:

    engines  slots  ranks  stale ≤  step s  90 % ≤  steps/h  engines busy  at once  trainer busy  …

Neither command starts a run. The estimate is made in ``plan.py``; the simulation and the settings
to try are in ``simulate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.terminal_text import json_line
from ramify.errors import ConfigError
from ramify.pip_install_command import install_command

if TYPE_CHECKING:
    from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
    from ramify.extras.cluster.simulate import SimulationResult, SimulationSetting
    from ramify.extras.cluster.simulation_inputs import SimulationInputs


def plan(
    words: list[str],
    nodes: int | None = None,
    device: str | None = None,
    mfu: float | None = None,
    measured: str | None = None,
    json: bool | None = None,
) -> int:
    from ramify.extras.cluster.model_and_device_specs import DeviceEfficiency
    from ramify.extras.cluster.plan import ClusterPlanOptions, format_plan_lines, plan
    from ramify.train.recipe import load_recipe

    run = load_recipe(recipe_from_arguments(words), [word for word in words if "=" in word])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: give 1 or more")
    if mfu is not None and not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu:g}: give a fraction above 0 and at most 1")
    options = ClusterPlanOptions(
        device=device or "",
        nodes=nodes,
        shares=DeviceEfficiency(train=mfu) if mfu is not None else DeviceEfficiency(),
        measured=Path(measured) if measured else None,
    )
    cluster_plan = plan(run, options)
    if json:
        print(json_line(cluster_plan))
    else:
        print("\n".join(format_plan_lines(cluster_plan)))
    return ExitCode.ANSWERED


def recipe_from_arguments(words: list[str]) -> str:
    """Find the recipe among the arguments of the command.

    It must be the only one that is not a ``FIELD=VALUE`` override. Raises UsageError otherwise.
    """
    recipes = [word for word in words if "=" not in word]
    if len(recipes) != 1:
        raise UsageError("give exactly one recipe")
    return recipes[0]


PLAN = SubcommandSpec(
    name="cluster plan",
    about="""\
Estimate where a recipe's processes would run, how much memory each needs and how long a step takes.
Nothing is started.

FIELD=VALUE overrides a field of the recipe, as in placement.pools.main.gpus=8.""",
    run=plan,
    words="RECIPE [FIELD=VALUE…]",
    min_words=1,
    max_words=None,
    options=(
        CliOptionSpec(
            "nodes",
            int,
            "number of nodes in the recipe's pool, if it has one (default: the recipe's)",
        ),
        CliOptionSpec(
            "device",
            str,
            "device type: cpu, l4, a100, h100, … (default: h100 if a role needs GPUs, else cpu)",
            "DEVICE",
        ),
        CliOptionSpec(
            "mfu", float, "model FLOPs utilization of training, from 0 to 1 (default: 0.35)"
        ),
        CliOptionSpec(
            "measured", str, "take speeds and token counts from this run's metrics.jsonl", "RUN"
        ),
        CliOptionSpec("json", bool, "print one JSON object", has_no=False),
    ),
)
STEPS = 20


def simulate(
    words: list[str],
    engines: str | None = None,
    slots: str | None = None,
    ranks: str | None = None,
    staleness: str | None = None,
    devices: int | None = None,
    engine_devices: int | None = None,
    grace_steps: int | None = None,
    straggler_factor: float | None = None,
    concurrency: int | None = None,
    items: int | None = None,
    group: int | None = None,
    calibrate: str | None = None,
    scaling: float | None = None,
    last: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    json: bool | None = None,
) -> int:
    _check_devices(devices, engine_devices, has_counts=bool(engines or ranks))
    _check_shares(straggler_factor, grace_steps, scaling)
    _check_counts(
        engine_devices=engine_devices,
        concurrency=concurrency,
        items=items,
        group=group,
        last=last,
        steps=steps,
        devices=devices,
    )
    slot_choices, staleness_choices = _numbers("slots", slots), _numbers("staleness", staleness)
    engine_choices, rank_choices = _numbers("engines", engines), _numbers("ranks", ranks)
    _check_packages()
    from ramify.extras.cluster.simulate import (
        DeviceSplit,
        best,
        setting_combinations,
        simulate_settings,
        splits,
    )
    from ramify.extras.cluster.simulation_inputs import read_measured_run

    rate = _measure_rate(calibrate, max(slot_choices or [64])) if calibrate else None
    inputs = read_measured_run(
        Path(words[0]), last=last, rate=rate, scaling=1.0 if scaling is None else scaling
    )
    settings = list(
        setting_combinations(
            inputs,
            splits(devices, engine_devices or 1)
            if devices
            else [
                DeviceSplit(num_engines, num_ranks)
                for num_engines in engine_choices or [inputs.sizes.engines]
                for num_ranks in rank_choices or [inputs.sizes.ranks]
            ],
            slots=slot_choices,
            staleness=staleness_choices,
            items=items,
            group=group,
            concurrency=concurrency,
            straggler_factor=straggler_factor,
            grace_steps=grace_steps,
        )
    )
    predicted = simulate_settings(inputs, settings, steps=steps or STEPS, seed=seed or 0)
    if json:
        print(_as_json(inputs, predicted))
        return ExitCode.ANSWERED
    print(
        *_describe_measurements(inputs),
        *_describe_assumptions(inputs, settings, bool(calibrate)),
        sep="\n",
    )
    print("", *_table(predicted), sep="\n")
    if len(predicted) > 1:
        print(f"most steps per hour: {_describe_setting(best(predicted))}")
    return ExitCode.ANSWERED


def _check_devices(devices: int | None, engine_devices: int | None, *, has_counts: bool) -> None:
    if devices is not None and has_counts:
        raise UsageError("--devices tries every split: remove --engines and --ranks")
    if engine_devices is not None and devices is None:
        raise UsageError("--engine-devices applies to --devices: give --devices as well")


def _check_packages() -> None:
    for package in ("simpy", "numpy"):
        if find_spec(package) is None:
            raise ConfigError(
                f"ramify cluster simulate needs {package}: {install_command('cluster')}"
            )


def _check_shares(
    straggler_factor: float | None, grace_steps: int | None, scaling: float | None
) -> None:
    if straggler_factor is not None and not (
        straggler_factor == 0 or 1 <= straggler_factor < math.inf
    ):
        raise UsageError(
            f"--straggler-factor {straggler_factor:g}: give a multiple of the median that is at "
            "least 1, or 0 for never"
        )
    if grace_steps is not None and grace_steps < 0:
        raise UsageError(f"--grace-steps {grace_steps}: give 0 or more")
    if scaling is not None and not 0 < scaling < math.inf:
        raise UsageError(f"--scaling {scaling:g}: give a positive number")


def _check_counts(**counts: int | None) -> None:
    for name, number in counts.items():
        if number is not None and number < 1:
            raise UsageError(f"--{name.replace('_', '-')} {number}: give 1 or more")


def _numbers(name: str, text: str | None) -> list[int]:
    """Parse the comma-separated numbers of a command-line option into a sorted list.

    For example, ``"4,1,2"`` becomes ``[1, 2, 4]``. Raises UsageError for anything else.
    """
    if text is None:
        return []
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--{name} {text}: give numbers separated by commas: 1,2,4") from None
    least = 0 if name == "staleness" else 1
    if any(number < least for number in numbers):
        raise UsageError(f"--{name} {text}: each must be at least {least}")
    return numbers


def _measure_rate(model: str, slots: int) -> InferenceEngineSpeed:
    import asyncio

    from ramify.clients.rate_limited_requests import RateLimitedClientPool
    from ramify.extras.cluster.measured_engine_rate import measure_engine_rate

    async def run() -> InferenceEngineSpeed:
        pool = RateLimitedClientPool()
        try:
            return await measure_engine_rate(pool.client(model), slots=slots)
        finally:
            await pool.close()

    return asyncio.run(run())


def _describe_measurements(inputs: SimulationInputs) -> Iterator[str]:
    """Yield sentences that describe the measurements on which a simulation is based."""
    rate, sizes = inputs.rate, inputs.sizes
    num = sum(map(len, inputs.groups))
    yield (
        f"based on {num} rollouts in {len(inputs.groups)} groups; the run had "
        f"{sizes.items} groups of {sizes.group} per step"
    )
    speeds = ", ".join(
        f"{rate.tokens_per_s(batch):,.0f} with {batch:.0f} at once" for batch, _ in rate.points
    )
    yield (
        f"an engine samples {speeds} tokens/s, and reads a prompt token in "
        f"{1e6 * rate.prompt_token_s:.3g} µs"
    )
    yield (
        f"the trainer takes {inputs.learn_base_s:.3g} s plus {1e6 * inputs.learn_token_s:.3g} µs "
        f"per token on {sizes.ranks} rank{'s' * (sizes.ranks > 1)}; the time between steps comes "
        f"from {len(inputs.step_s)} steps"
    )


def _describe_assumptions(
    inputs: SimulationInputs, settings: Sequence[SimulationSetting], is_calibrated: bool
) -> Iterator[str]:
    """Yield one sentence for each assumption that a simulation makes."""
    sizes, host = inputs.sizes, inputs.host
    if host is not None and any(setting.embedded for setting in settings):
        yield (
            f"assumed: engine, loop and sessions share {host.cores} cores and wait for nothing "
            f"else; a request takes {1e3 * host.request_s:.3g} ms of the loop, and a session "
            f"computes for {host.session_share:.0%} of its time"
        )
    elif sizes.embedded and any(setting.embedded for setting in settings):
        yield (
            "assumed: nothing waits for a CPU core, although the engine is in the trainer's "
            "process (an older run)"
        )
    if any(not setting.embedded for setting in settings):
        yield "assumed: each engine has its own devices" + (
            f", as fast as one of the {host.cores} cores of the run"
            if host is not None and not is_calibrated
            else ""
        )
    if any(setting.ranks != sizes.ranks for setting in settings):
        yield f"assumed: twice the ranks are {2 * inputs.scaling:.3g} times as fast (--scaling)"
    if any(setting.shared for setting in settings):
        yield "assumed: handing over a shared device takes no time"
    caches = (
        "slots cache prefixes like those of the embedded engine"
        if sizes.keeps
        else "the cached share of each prompt is that of the run"
    )
    bound = (
        f", and {sizes.cache_tokens} tokens fit"
        if sizes.cache_tokens
        else ", and memory is sufficient"
    )
    yield f"assumed of caches: {caches}{bound}"
    evaluations = "none between steps"
    if sizes.evaluate:
        evaluations = (
            f"one every {sizes.evaluate} steps, {inputs.evaluate_s:.3g} s as in the run; counted "
            "only in steps/h"
        )
    yield f"assumed of evaluations: {evaluations}; no failures, and no network time"


_HEAD = (
    "engines",
    "slots",
    "ranks",
    "stale ≤",
    "step s",
    "90 % ≤",
    "steps/h",
    "engines busy",
    "at once",
    "trainer busy",
    "stale",
    "max",
    "sampled/s",
    "learnt/s",
)


def _table(predicted: Sequence[SimulationResult]) -> Iterator[str]:
    rows = [
        _HEAD,
        *(_row(result) for result in sorted(predicted, key=lambda result: -result.steps_per_hour)),
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))


def _row(result: SimulationResult) -> tuple[str, ...]:
    setting = result.setting
    return (
        str(setting.engines),
        str(setting.slots),
        f"{setting.ranks}{' shared' * setting.shared}",
        str(setting.staleness),
        f"{result.step_s:.3g}",
        f"{result.step_90_s:.3g}",
        _format_count(result.steps_per_hour),
        f"{result.engine_busy:.0%}",
        f"{result.at_once:.1f}",
        f"{result.trainer_busy:.0%}",
        f"{result.staleness:.2f}",
        str(result.staleness_max),
        f"{result.sampled_per_s:,.0f}",
        f"{result.learnt_per_s:,.0f}",
    )


def _describe_setting(result: SimulationResult) -> str:
    setting = result.setting
    where = "on the same devices" if setting.shared else "on separate devices"
    return (
        f"{setting.engines} engine{'s' * (setting.engines > 1)} with {setting.slots} slots and "
        f"{setting.ranks} rank{'s' * (setting.ranks > 1)} {where}, "
        f"staleness {setting.staleness}: {_format_count(result.steps_per_hour)}"
    )


def _format_count(number: float) -> str:
    """Format a number for display, with three significant digits below 1,000.

    From 1,000 on, it has no decimals. Large numbers get thousands separators.
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _as_json(inputs: SimulationInputs, predicted: Sequence[SimulationResult]) -> str:
    about = {
        "rate": inputs.rate,
        "sizes": inputs.sizes,
        "learn_base_s": inputs.learn_base_s,
        "learn_token_s": inputs.learn_token_s,
        "rollouts": sum(map(len, inputs.groups)),
    }
    rows = [
        {**msgspec.to_builtins(result), "steps_per_hour": result.steps_per_hour}
        for result in predicted
    ]
    return json_line({"measured": about, "predicted": rows})


SIMULATE = SubcommandSpec(
    name="cluster simulate",
    about="""\
Predict how a finished run would perform on other hardware: seconds per step, utilization and token
staleness.

RUN is the folder of a finished run that saved its rollouts (schedule.save_rollouts_every=1). Every
combination of comma-separated values is tried. Other options keep the values of the run.""",
    run=simulate,
    words="RUN",
    min_words=1,
    max_words=1,
    options=(
        CliOptionSpec("devices", int, "try every split of N devices between engines and trainer"),
        CliOptionSpec("engine_devices", int, "devices per engine (default: 1)"),
        CliOptionSpec("engines", str, "number of inference engines", "N,…"),
        CliOptionSpec("slots", str, "concurrent sequences per engine", "N,…"),
        CliOptionSpec("ranks", str, "number of trainer ranks", "N,…"),
        CliOptionSpec(
            "staleness",
            str,
            "maximum staleness of rollouts, in weight versions",
            "N,…",
        ),
        CliOptionSpec(
            "grace_steps", int, "extra steps that a slow group gets before a step waits for it"
        ),
        CliOptionSpec(
            "straggler_factor",
            float,
            "drop a group that alone delays a step beyond X times the median (0: never)",
        ),
        CliOptionSpec("concurrency", int, "maximum concurrent rollouts"),
        CliOptionSpec("items", int, "groups per step"),
        CliOptionSpec("group", int, "rollouts per group"),
        CliOptionSpec(
            "calibrate",
            str,
            "measure the engine speed of this model instead of using the run's",
            "MODEL",
        ),
        CliOptionSpec(
            "scaling", float, "efficiency of doubling the ranks; 1 is ideal (default: 1)"
        ),
        CliOptionSpec("last", int, "use only the last N saved steps of the run (default: all)"),
        CliOptionSpec("steps", int, f"steps to simulate (default: {STEPS})"),
        CliOptionSpec("seed", int, "random seed (default: 0)"),
        CliOptionSpec("json", bool, "print one JSON object", has_no=False),
    ),
)
COMMANDS = (PLAN, SIMULATE)

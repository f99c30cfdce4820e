"""``ramify cluster simulate``: what a measured run would do on other devices, as a table, best
first.

engines slots ranks  stale │  step s   90 % steps/h │ engines at once trainer │ tokens/s …
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.cluster.rate import EngineRate
    from ramify.cluster.simulate import SimulationResult, SimulationSetting
    from ramify.cluster.simulation_inputs import SimulationInputs

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
    if devices is not None and (engines or ranks):
        raise UsageError("--devices tries all splits: leave --engines and --ranks out")
    if engine_devices is not None and devices is None:
        raise UsageError("--engine-devices says how --devices are split: give --devices, too")
    if straggler_factor is not None and not (
        straggler_factor == 0 or 1 <= straggler_factor < float("inf")
    ):
        raise UsageError(
            f"--straggler-factor {straggler_factor:g}: times the median, at least 1, or 0 for never"
        )
    if grace_steps is not None and grace_steps < 0:
        raise UsageError(f"--grace-steps {grace_steps}: give 0 or more")
    for name, number in (
        ("engine-devices", engine_devices),
        ("concurrency", concurrency),
        ("items", items),
        ("group", group),
        ("last", last),
        ("steps", steps),
        ("devices", devices),
    ):
        if number is not None and number < 1:
            raise UsageError(f"--{name} {number}: give 1 or more")
    given = {
        name: _numbers(name, text)
        for name, text in (
            ("engines", engines),
            ("slots", slots),
            ("ranks", ranks),
            ("staleness", staleness),
        )
    }
    for package in ("simpy", "numpy"):
        if find_spec(package) is None:
            raise ConfigError(
                f"ramify cluster simulate needs {package}: pip install 'ramify[cluster]'"
            )
    from ramify.cluster.search_settings import DeviceSplit, best, choices, predict, splits
    from ramify.cluster.simulation_inputs import measured

    rate = _calibrated(calibrate, max(given["slots"] or [64])) if calibrate else None
    found = measured(
        Path(words[0]), last=last, rate=rate, scaling=1.0 if scaling is None else scaling
    )
    sizes = found.sizes
    pairs = [
        DeviceSplit(num, many)
        for num in given["engines"] or [sizes.engines]
        for many in given["ranks"] or [sizes.ranks]
    ]
    settings = list(
        choices(
            found,
            splits(devices, engine_devices or 1) if devices else pairs,
            slots=given["slots"],
            staleness=given["staleness"],
            items=items,
            group=group,
            concurrency=concurrency,
            straggler_factor=straggler_factor,
            grace_steps=grace_steps,
        )
    )
    predicted = predict(found, settings, steps=steps or STEPS, seed=seed or 0)
    if json:
        print(_as_json(found, predicted))
    else:
        print(
            "\n".join(
                [
                    *_about(found),
                    *_assumed(found, settings, bool(calibrate)),
                    "",
                    *_table(predicted),
                ]
            )
        )
        if len(predicted) > 1:
            print(f"most steps per hour: {_named(best(predicted))}")
    return ExitCode.ANSWERED


def _numbers(name: str, text: str | None) -> list[int]:
    """``1,2,4``"""
    if text is None:
        return []
    try:
        found = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise UsageError(f"--{name} {text}: give numbers with commas between, as 1,2,4") from None
    least = 0 if name == "staleness" else 1
    if any(each < least for each in found):
        raise UsageError(f"--{name} {text}: each must be at least {least}")
    return found


def _calibrated(model: str, slots: int) -> EngineRate:
    from ramify.clients.pool import ClientPool
    from ramify.cluster.calibrate import calibrate

    async def asked() -> EngineRate:
        pool = ClientPool()
        try:
            return await calibrate(pool.client(model), slots=slots)
        finally:
            await pool.close()

    return asyncio.run(asked())


def _about(found: SimulationInputs) -> Iterator[str]:
    rate, sizes = found.rate, found.sizes
    num = sum(map(len, found.groups))
    yield f"by {num} rollouts of {len(found.groups)} groups; the run had {_sizes(sizes.items, sizes.group)} per step"
    each = ", ".join(f"{rate.tokens_per_s(b):,.0f} with {b:.0f} at once" for b, _ in rate.points)
    yield f"an engine samples {each} tokens/s, and reads a prompt token in {1e6 * rate.prompt_token_s:.3g} µs"
    yield (
        f"the trainer takes {found.learn_base_s:.3g} s and {1e6 * found.learn_token_s:.3g} µs per "
        f"token on {sizes.ranks} "
        f"rank{'s' * (sizes.ranks > 1)}, and {len(found.step_s)} steps say what passes between two"
    )


def _assumed(
    found: SimulationInputs, settings: Sequence[SimulationSetting], is_calibrated: bool
) -> Iterator[str]:
    """What the table below rests on besides measurements, a sentence each."""
    sizes, host = found.sizes, found.host
    if host is not None and any(each.embedded for each in settings):
        yield (
            f"assumed: engine, loop and sessions share {host.cores} cores, and wait for nothing "
            "else; a request is "
            f"{1e3 * host.request_s:.3g} ms of the loop, a session computes "
            f"{host.session_share:.0%} of the time that it took"
        )
    elif sizes.embedded and any(each.embedded for each in settings):
        yield "assumed: nothing waits for a processor, though the engine is in the trainer's process (an older run)"
    if any(not each.embedded for each in settings):
        yield "assumed: each engine has devices of its own" + (
            f", as fast as one of the {host.cores} cores of the run"
            if host is not None and not is_calibrated
            else ""
        )
    if any(each.ranks != sizes.ranks for each in settings):
        yield f"assumed: twice the ranks are {2 * found.scaling:.3g} times as fast (--scaling)"
    if any(each.shared for each in settings):
        yield "assumed: handing a shared device over takes no time"
    caches = (
        "slots keep what the embedded engine's keep"
        if sizes.keeps
        else "as much of each prompt is cached as it was"
    )
    bound = (
        f", and {sizes.cache_tokens} tokens fit"
        if sizes.cache_tokens
        else ", whose memory suffices"
    )
    yield f"assumed of caches: {caches}{bound}"
    evaluations = "none between steps"
    if sizes.evaluate:
        evaluations = f"one in {sizes.evaluate} steps, {found.evaluate_s:.3g} s as in the run; counted in steps/h alone"
    yield f"assumed of evaluations: {evaluations}; no failures, and no time on the network"


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
        *(_row(each) for each in sorted(predicted, key=lambda each: -each.steps_per_hour)),
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))


def _row(each: SimulationResult) -> tuple[str, ...]:
    setting = each.setting
    return (
        str(setting.engines),
        str(setting.slots),
        f"{setting.ranks}{' shared' * setting.shared}",
        str(setting.staleness),
        f"{each.step_s:.3g}",
        f"{each.step_90_s:.3g}",
        _count(each.steps_per_hour),
        f"{each.engine_busy:.0%}",
        f"{each.at_once:.1f}",
        f"{each.trainer_busy:.0%}",
        f"{each.staleness:.2f}",
        str(each.staleness_max),
        f"{each.sampled_per_s:,.0f}",
        f"{each.learnt_per_s:,.0f}",
    )


def _named(each: SimulationResult) -> str:
    setting = each.setting
    where = "on the same devices" if setting.shared else "apart"
    return (
        f"{setting.engines} engine{'s' * (setting.engines > 1)} with {setting.slots} slots and "
        f"{setting.ranks} "
        f"rank{'s' * (setting.ranks > 1)} {where}, staleness {setting.staleness}: "
        f"{_count(each.steps_per_hour)}"
    )


def _count(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _sizes(items: int, group: int) -> str:
    return f"{items} groups of {group}"


def _as_json(found: SimulationInputs, predicted: Sequence[SimulationResult]) -> str:
    import msgspec

    about = {
        "rate": found.rate,
        "sizes": found.sizes,
        "learn_base_s": found.learn_base_s,
        "learn_token_s": found.learn_token_s,
        "rollouts": sum(map(len, found.groups)),
    }
    rows = [
        {**msgspec.to_builtins(each), "steps_per_hour": each.steps_per_hour} for each in predicted
    ]
    return msgspec.json.encode({"measured": about, "predicted": rows}).decode()


COMMAND = CommandSpec(
    name="cluster simulate",
    about="Predict how a run would do on other devices: seconds of a step, who is busy, how stale tokens are.\n\n"
    "RUN is the folder of a finished run whose rollouts were kept "
    "(schedule.save_rollouts_every=1). Numbers with commas\n"
    "between are tried in every combination; what is left out is as it was in the run.",
    run=simulate,
    words="RUN",
    min_words=1,
    max_words=1,
    options=(
        OptionSpec(
            "devices", int, "try every split of so many devices between engines and trainer"
        ),
        OptionSpec("engine_devices", int, "devices that one engine takes (default: 1)"),
        OptionSpec("engines", str, "inference engines", "N,…"),
        OptionSpec("slots", str, "sequences that an engine decodes at once", "N,…"),
        OptionSpec("ranks", str, "ranks of the trainer", "N,…"),
        OptionSpec(
            "staleness",
            str,
            "how many versions older rollouts may be than the weights that learn from them",
            "N,…",
        ),
        OptionSpec(
            "grace_steps", int, "steps more that a slow group may take before a step waits for it"
        ),
        OptionSpec(
            "straggler_factor",
            float,
            "give up what alone holds a step up, after so many times the median (0: never)",
        ),
        OptionSpec("concurrency", int, "rollouts at once"),
        OptionSpec("items", int, "groups per step"),
        OptionSpec("group", int, "rollouts of each group"),
        OptionSpec(
            "calibrate",
            str,
            "measure the speed of this model's engine in place of what the run says",
            "MODEL",
        ),
        OptionSpec(
            "scaling", float, "share of twice the speed that twice the ranks give (default: 1)"
        ),
        OptionSpec("last", int, "go by the run's last N kept steps alone (default: all)"),
        OptionSpec("steps", int, f"steps to simulate (default: {STEPS})"),
        OptionSpec("seed", int, "of what is drawn (default: 0)"),
        OptionSpec("json", bool, "print one JSON object", has_no=False),
    ),
)

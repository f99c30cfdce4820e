"""``ramify cluster``: what a recipe would take on many machines, before anything is started there.

ramify cluster plan RECIPE       who goes where, memory of each process, seconds of a step
"""

from __future__ import annotations

from pathlib import Path

from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError


def plan(
    words: list[str],
    nodes: int | None = None,
    device: str | None = None,
    mfu: float | None = None,
    measured: str | None = None,
    json: bool | None = None,
) -> int:
    import msgspec

    from ramify.build.recipe import recipe
    from ramify.cluster.devices import DeviceEfficiency
    from ramify.cluster.plan import PlanOptions, lines, plan

    run = recipe(recipe_of(words), [word for word in words if "=" in word])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: give 1 or more")
    if mfu is not None and not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu:g}: give a share above 0 and at most 1")
    options = PlanOptions(
        device=device or "",
        nodes=nodes,
        shares=DeviceEfficiency(train=mfu) if mfu is not None else DeviceEfficiency(),
        measured=Path(measured) if measured else None,
    )
    found = plan(run, options)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(lines(found)))
    return ExitCode.ANSWERED


def recipe_of(words: list[str]) -> str:
    """The one word that is no override. Raises UsageError."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) != 1:
        raise UsageError("give one recipe")
    return recipes[0]


PLAN = CommandSpec(
    name="cluster plan",
    about="Print where the processes of a recipe would go, what memory each would take and how long a step would be.\n\n"
    "Nothing is started. FIELD=VALUE overrides a field of the recipe, as in "
    "placement.pools.main.gpus=8.",
    run=plan,
    words="RECIPE [FIELD=VALUE…]",
    min_words=1,
    max_words=None,
    options=(
        OptionSpec(
            "nodes",
            int,
            "nodes of the recipe's pool, where it has one (default: as the recipe says)",
        ),
        OptionSpec(
            "device",
            str,
            "cpu, l4, a100, h100, … (default: h100 where roles ask for GPUs, else cpu)",
            "DEVICE",
        ),
        OptionSpec("mfu", float, "share of the device's speed that training gets (default: 0.35)"),
        OptionSpec("measured", str, "take speeds and tokens from this run's metrics.jsonl", "RUN"),
        OptionSpec("json", bool, "print one JSON object", has_no=False),
    ),
)
COMMANDS = (PLAN,)

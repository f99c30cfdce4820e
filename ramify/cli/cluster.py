"""``ramify cluster plan``: estimate a recipe's processes, memory and step time on many machines.

    ramify cluster plan RECIPE       placement, memory of each process, seconds per step

Nothing is started. Not here: the estimate itself (see ramify/cluster/plan.py) and ``ramify cluster
simulate`` (see simulate_command.py).
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

    from ramify.cluster.devices import DeviceEfficiency
    from ramify.cluster.plan import PlanOptions, lines, plan
    from ramify.train.recipe import load_recipe

    run = load_recipe(recipe_of(words), [word for word in words if "=" in word])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: give 1 or more")
    if mfu is not None and not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu:g}: give a fraction above 0 and at most 1")
    options = PlanOptions(
        device=device or "",
        nodes=nodes,
        shares=DeviceEfficiency(train=mfu) if mfu is not None else DeviceEfficiency(),
        measured=Path(measured) if measured else None,
    )
    cluster_plan = plan(run, options)
    if json:
        print(msgspec.json.encode(cluster_plan).decode())
    else:
        print("\n".join(lines(cluster_plan)))
    return ExitCode.ANSWERED


def recipe_of(words: list[str]) -> str:
    """Return the only word that is not a ``FIELD=VALUE`` override. Raises UsageError."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) != 1:
        raise UsageError("give one recipe")
    return recipes[0]


PLAN = CommandSpec(
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
        OptionSpec(
            "nodes",
            int,
            "number of nodes in the recipe's pool, if it has one (default: the recipe's)",
        ),
        OptionSpec(
            "device",
            str,
            "device type: cpu, l4, a100, h100, … (default: h100 if a role needs GPUs, else cpu)",
            "DEVICE",
        ),
        OptionSpec(
            "mfu", float, "model FLOPs utilization of training, from 0 to 1 (default: 0.35)"
        ),
        OptionSpec(
            "measured", str, "take speeds and token counts from this run's metrics.jsonl", "RUN"
        ),
        OptionSpec("json", bool, "print one JSON object", has_no=False),
    ),
)
COMMANDS = (PLAN,)

"""``ramify cluster``: what a recipe would take on many machines, before anything is started there.

ramify cluster plan RECIPE       who goes where, memory of each process, seconds of a step
"""

from __future__ import annotations

from pathlib import Path

from ramify.cli.exits import Exit
from ramify.cli.parser import Command, Option, UsageError


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
    from ramify.cluster.devices import Shares
    from ramify.cluster.plan import Options, lines, plan

    run = recipe(recipe_of(words), [word for word in words if "=" in word])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: give 1 or more")
    if mfu is not None and not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu:g}: give a share above 0 and at most 1")
    options = Options(
        device=device or "",
        nodes=nodes or 0,
        shares=Shares(train=mfu) if mfu is not None else Shares(),
        measured=Path(measured) if measured else None,
    )
    found = plan(run, options)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(lines(found)))
    return Exit.ANSWERED


def recipe_of(words: list[str]) -> str:
    """The one word that is no override. Raises UsageError."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) != 1:
        raise UsageError("give one recipe")
    return recipes[0]


PLAN = Command(
    name="cluster plan",
    about="Print where the processes of a recipe would go, what memory each would take and how long a step would be.\n\n"
    "Nothing is started. FIELD=VALUE overrides a field of the recipe, as in placement.pools.main.gpus=8.",
    run=plan,
    words="RECIPE [FIELD=VALUE…]",
    min_words=1,
    max_words=None,
    options=(
        Option("nodes", int, "nodes of the recipe's pool, where it has one (default: as the recipe says)"),
        Option("device", str, "cpu, l4, a100, h100, … (default: h100 where roles ask for GPUs, else cpu)", "DEVICE"),
        Option("mfu", float, "share of the device's speed that training gets (default: 0.35)"),
        Option("measured", str, "take speeds and tokens from this run's metrics.jsonl", "RUN"),
        Option("json", bool, "print one JSON object", has_no=False),
    ),
)
COMMANDS = (PLAN,)

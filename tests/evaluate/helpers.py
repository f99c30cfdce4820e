"""A small task, and models that answer it correctly as often as a test needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ramify import RLM, Limits, SandboxSpec, ScriptedClient
from ramify.clients.base import Price
from ramify.evaluate.run_evaluation import EvaluationPlan, EvaluationResult, evaluate
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring import exact
from ramify.types.message import Message

ITEMS = [
    Item(
        f"size {n}?",
        "x" * (n + 1),
        gold=n + 1,
        kind="odd" if n % 2 else "even",
        id=f"size/test/{n}",
    )
    for n in range(8)
]
TASK = DatasetTask("size", {"test": ITEMS}, exact)
SPEC = SandboxSpec(provider="process", allow_weaker=True)


def rlm(script: Any, **options: Any) -> RLM:
    limits = Limits(**{"max_seconds": 200.0, **options.pop("limits", {})})
    client = (
        script
        if isinstance(script, ScriptedClient)
        else ScriptedClient(script, price=Price(1.0, 2.0))
    )
    return RLM(client, sandbox=SPEC, limits=limits, **{"scaffold": "tiny", **options})


def number(messages: tuple[Message, ...]) -> int:
    """Return the number of the item that is asked."""
    return int(messages[0].content.removeprefix("size ").partition("?")[0])


def right(messages: tuple[Message, ...]) -> str:
    return "FINAL(len(context))"


def unless(wrong: Callable[[int], bool]) -> Callable[[tuple[Message, ...]], str]:
    """Return a model that answers wrongly for items with ``wrong(number)``."""
    return lambda messages: f"FINAL(len(context)+{int(wrong(number(messages)))})"


def plan(**fields: Any) -> EvaluationPlan:
    return EvaluationPlan(**{"model": "scripted:test", "task": "size", "items": 8, **fields})


def evaluated(
    script: Any, task: Any = TASK, *, of: EvaluationPlan | None = None, **options: Any
) -> EvaluationResult:
    given = {
        name: options.pop(name)
        for name in ("record", "on_outcome", "concurrency", "sampling", "grace_s")
        if name in options
    }
    return asyncio.run(evaluate(rlm(script, **options), task, of or plan(), **given))

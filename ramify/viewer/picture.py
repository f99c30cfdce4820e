"""A run as its page's first look: the head, and each call as one row of a table.

Ten thousand calls must reach the page within a fraction of a second, so a call is an array whose columns are named once,
texts are cut to a glance, and what a call said is left to ``transcript.py``.

    {"columns": ["id", "kind", …], "calls": [["0", "rlm", …], …], "models": […], "head": {"question": …, "limits": …}}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ramify.types.trajectory import Call
from ramify.viewer.watch import CallWatch, Watched

COLUMNS = (
    "id", "kind", "parent", "turn", "cell", "depth", "model", "started_s", "ended_s", "state", "stop", "turns", "tokens_in",
    "tokens_out", "cost", "reward", "question", "answer", "error", "spans", "fork",
)  # fmt: skip
"""``parent`` is an index of the same list or -1; ``turn`` and ``cell`` are where the parent made it; ``model`` is an index
of ``models``; ``state`` is one of ``asking``, ``running``, ``open``, ``done``; ``spans`` are of calls with a session."""
_GLANCE = 120
_MAX_ERRORS = 200


def picture(run: Watched) -> dict[str, Any]:
    """All of the run's first look."""
    return {"columns": COLUMNS, "calls": rows(run, range(len(run.trajectory.calls))), "head": head(run)}


def changes(run: Watched, changed: Iterable[int]) -> dict[str, Any]:
    """What a page that has ``picture`` needs to follow: the rows that changed, by index."""
    order = sorted(changed)
    return {"rows": list(zip(order, rows(run, order), strict=True)), "head": head(run)}


def head(run: Watched) -> dict[str, Any]:
    """What stands above the tree."""
    tree = run.trajectory
    problems = [text for text in (run.problem, run.torn) if text]
    config = tree.metadata
    return {
        "key": run.key, "id": tree.id, "question": tree.question, "task": tree.task, "path": str(run.path),
        "is_journal": run.line is None, "started_at": tree.started_at, "at_s": run.at_s, "alive": run.is_alive,
        "stop": tree.stop, "answer": glance(tree.answer, 4_000), "answered_by": tree.answered_by, "usage": fields(tree.usage),
        "cost": tree.cost, "seconds": tree.seconds or run.at_s, "context": fields(tree.context) if tree.context else None,
        "limits": config.get("limits") or {}, "sandbox": (config.get("sandbox") or {}).get("provider", ""),
        "scaffold": (config.get("scaffold") or {}).get("name", ""), "sources": (config.get("sources") or {}).get("paths", []),
        "rewards": tree.rewards, "metrics": tree.metrics, "errors": tree.errors[:_MAX_ERRORS],
        "num_errors": len(tree.errors), "problems": problems, "version": run.version,
        "raw_code": bool((config.get("scaffold") or {}).get("raw_code")), "num_calls": len(tree.calls),
    }  # fmt: skip


def rows(run: Watched, indices: Iterable[int]) -> list[list[Any]]:
    calls = run.trajectory.calls
    return [_row(run, calls[index], run.calls[calls[index].id]) for index in indices]


def _row(run: Watched, call: Call, watch: CallWatch) -> list[Any]:
    parent, at = run.calls.get(call.parent.call) if call.parent else None, call.parent
    rewards = run.trajectory.call_rewards.get(call.id) or (run.trajectory.rewards if call.parent is None else {})
    return [
        call.id, call.kind, parent.index if parent else -1, at.turn if at else -1, at.cell if at else -1, call.depth,
        call.model, round(call.started_s, 4), None if call.ended_s is None else round(call.ended_s, 4), state(call, watch),
        call.stop, len(call.turns) + (watch.pending is not None), call.usage.input_tokens, call.usage.output_tokens, call.cost,
        next(iter(rewards.values()), None), glance(call.question), glance(call.answer), glance(call.error or ""),
        [round(each, 4) for each in watch.spans] if call.kind == "rlm" else [],
        [call.fork.call, call.fork.turn] if call.fork else None,
    ]  # fmt: skip


def state(call: Call, watch: CallWatch) -> str:
    if call.stop is not None:
        return "done"
    return "asking" if watch.pending else "running" if watch.is_running else "open"


def glance(value: Any, width: int = _GLANCE) -> str:
    """``value`` as text, cut to ``width``; empty for None."""
    text = as_text(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Every field, also those that have their default."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}

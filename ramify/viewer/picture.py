"""A run as its page's first look: the head, and its calls as the columns of a table.

Ten thousand calls must reach the page within a fraction of a second, so each column is one list, or
one value where all are the same; texts are cut to a glance, those of most calls are sent when the
page stands, and what a call said is left to ``transcript.py``.

    {"num": 3, "columns": {"id": ["0", "0.0", "0.1"], "kind": ["rlm", "lm", "lm"], "cost": null, …}, "head": {…}, "texts": 3}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from ramify.viewer.run_tree import CallNode, as_text, cut
from ramify.viewer.watched_run import WatchedRun

COLUMNS: dict[str, Callable[[CallNode], Any]] = {
    "id": attrgetter("id"),
    "kind": attrgetter("kind"),
    "turn": lambda node: -1 if node.parent is None else node.parent.turn,
    "cell": lambda node: -1 if node.parent is None else node.parent.cell,
    "depth": attrgetter("depth"),
    "model": attrgetter("model"),
    "started_s": lambda node: round(node.started_s, 4),
    "ended_s": lambda node: None if node.ended_s is None else round(node.ended_s, 4),
    "state": lambda node: "done" if node.stop is not None else state(node),
    "stop": attrgetter("stop"),
    "turns": lambda node: node.num_turns + (node.asking >= 0),
    "tokens_in": attrgetter("input_tokens"),
    "tokens_out": attrgetter("output_tokens"),
    "cost": attrgetter("cost"),
    "question": attrgetter("question"),
    "answer": attrgetter("answer"),
    "error": attrgetter("error"),
    "spans": lambda node: [round(each, 4) for each in node.spans] if node.spans else None,
    "fork": lambda node: None if node.fork is None else [node.fork.call, node.fork.turn],
    "tools": lambda node: node.tools or None,
    "scores": lambda node: (_scores(node) or None) if node.marks else None,
}
"""What a page knows of each call, besides ``parent`` and ``reward``. ``turn`` and ``cell`` are
where the parent made it; ``state`` is one of ``asking``, ``running``, ``open``, ``done``; ``spans``
are of calls with a session; ``tools`` is [when, whether it failed] of each tool's answer;
``scores`` is [turn, name, number] of what was scored beside rewards."""
TEXTS = ("question", "answer")
"""Columns that are most of a picture's bytes, and that nothing but a row in sight shows."""
_MAX_ERRORS = 200


def picture(run: WatchedRun, num_texts: int | None = None) -> dict[str, Any]:
    """All of the run's first look; questions and answers of the first ``num_texts`` calls alone,
    where that is given."""
    nodes = run.tree.order
    columns = _columns(run, nodes)
    num_texts = len(nodes) if num_texts is None else min(num_texts, len(nodes))
    for name in TEXTS:
        columns[name][num_texts:] = [""] * (len(nodes) - num_texts)
    return {
        "num": len(nodes),
        "columns": {name: _same(each) for name, each in columns.items()},
        "head": head(run),
        "texts": num_texts,
    }


def texts(run: WatchedRun, first: int) -> dict[str, list[str]]:
    """What ``picture`` left out: the texts of all calls from ``first`` on."""
    return {name: [COLUMNS[name](node) for node in run.tree.order[first:]] for name in TEXTS}


def changes(run: WatchedRun, changed: Iterable[int]) -> dict[str, Any]:
    """What a page that has ``picture`` needs to follow: the calls that changed, by index, as
    columns."""
    order = sorted(changed)
    return {
        "indices": order,
        "columns": _columns(run, [run.tree.order[index] for index in order]),
        "head": head(run),
    }


def _columns(run: WatchedRun, nodes: Sequence[CallNode]) -> dict[str, list[Any]]:
    """``parent`` is an index among the calls before it, or -1."""
    known, scored = run.tree.nodes, run.tree.run.call_rewards
    parents = [known.get(node.parent.call) if node.parent else None for node in nodes]
    return {
        **{name: list(map(of, nodes)) for name, of in COLUMNS.items()},
        "parent": [
            -1 if parent is None or parent.index >= node.index else parent.index
            for parent, node in zip(parents, nodes, strict=True)
        ],
        "reward": [
            next(iter(rewards_of(run, node).values()), None)
            if node.id in scored or not node.index
            else None
            for node in nodes
        ],
    }


def _same(column: list[Any]) -> Any:
    """One value for a column that has no other."""
    first = column[0] if column else None
    is_plain = not isinstance(first, list | tuple)
    return first if is_plain and column.count(first) == len(column) else column


def _scores(node: CallNode) -> list[tuple[Any, ...]]:
    return [(mark.turn, *each) for mark in node.marks for each in mark.values.items()]


def head(run: WatchedRun) -> dict[str, Any]:
    """What stands above the tree."""
    told, at_s = run.tree.run, run.tree.at_s
    problems = [text for text in (run.problem, run.damage, run.torn) if text]
    config = told.metadata
    return {
        "key": run.key,
        "id": told.id,
        "question": told.question,
        "task": told.task,
        "path": str(run.path),
        "is_journal": run.line is None,
        "started_at": told.started_at,
        "at_s": at_s,
        "alive": run.is_alive,
        "stop": told.stop,
        "answer": cut(as_text(told.answer), 4_000),
        "answered_by": told.answered_by,
        "usage": fields(told.usage),
        "cost": told.cost,
        "seconds": told.seconds or at_s,
        "context": fields(told.context) if told.context else None,
        "limits": config.get("limits") or {},
        "sandbox": (config.get("sandbox") or {}).get("provider", ""),
        "scaffold": (config.get("scaffold") or {}).get("name", ""),
        "sources": (config.get("sources") or {}).get("paths", []),
        "rewards": told.rewards,
        "metrics": told.metrics,
        "marks": [fields(mark) for mark in told.marks if not mark.call],
        "errors": told.errors[:_MAX_ERRORS],
        "num_errors": len(told.errors),
        "problems": problems,
        "version": run.version,
        "generation": run.generation,
        "raw_code": bool((config.get("scaffold") or {}).get("raw_code")),
        "num_calls": len(run.tree.order),
    }


def rewards_of(run: WatchedRun, node: CallNode) -> dict[str, float]:
    """Of a call: its own, else those of the run where it is the first."""
    own = run.tree.run.call_rewards.get(node.id)
    return own or ({} if node.index else run.tree.run.rewards)


def state(node: CallNode) -> str:
    if node.stop is not None:
        return "done"
    return "asking" if node.asking >= 0 else "running" if node.is_running else "open"


def fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Every field, also those that have their default."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}

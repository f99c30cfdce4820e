"""Build the overview that a run's page loads first: facts about the run and a table of calls.

The facts about the run as a whole are called the head. Ten thousand calls must reach the page
within a fraction of a second. The table is therefore sent by column: each column is one list, or
one value if all values are the same. Texts are shortened, and the texts of most calls are sent only
after the page has been drawn.

    {"num": 3, "columns": {"id": ["0", "0.0", "0.1"], "kind": ["rlm", "lm", "lm"], "cost": null, …},
     "head": {…}, "texts": 3}

transcript.py sends the content of a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.store.reviews import HumanRunReview
from ramify.types.end_reason import describe_ending
from ramify.types.event import mode_and_reason
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import ContextRef, cut
from ramify.viewer.shown_sources import answer_and_citations
from ramify.viewer.watched_run import WatchedRun

COLUMNS: dict[str, Callable[[RunCallNode], Any]] = {
    "id": attrgetter("id"),
    "kind": attrgetter("kind"),
    "turn": lambda node: -1 if node.parent is None else node.parent.turn,
    "cell": lambda node: -1 if node.parent is None else node.parent.cell,
    "depth": attrgetter("depth"),
    "model": attrgetter("model"),
    "started_s": lambda node: round(node.started_s, 4),
    "ended_s": lambda node: None if node.ended_s is None else round(node.ended_s, 4),
    "state": lambda node: "done" if node.stop is not None else call_state(node),
    "stop": attrgetter("stop"),
    "turns": lambda node: node.num_turns + (node.asking >= 0),
    "tokens_in": attrgetter("input_tokens"),
    "tokens_out": attrgetter("output_tokens"),
    "cost": attrgetter("cost"),
    "question": attrgetter("question"),
    "answer": attrgetter("answer"),
    "error": attrgetter("error"),
    "reason": attrgetter("reason"),
    "failed": attrgetter("has_failed"),
    "outlier": attrgetter("outlier"),
    "telling": attrgetter("distinguishing_text"),
    "spans": lambda node: [round(at_s, 4) for at_s in node.spans] if node.spans else None,
    "fork": lambda node: None if node.fork is None else [node.fork.call, node.fork.turn],
    "tools": lambda node: node.tools or None,
    "scores": lambda node: (_scores(node) or None) if node.marks else None,
}
"""Functions that return the value of a call in each column. The columns ``parent``, ``reward``,
``advantage`` and ``gap`` are computed separately.

``turn`` and ``cell`` are the place in the parent that made the call. ``state`` is ``asking``,
``running``, ``open`` or ``done``. ``outlier`` says how a call differs from its siblings, and
``telling`` is the part of its question that distinguishes it from theirs. ``spans`` exists only for
calls with a session. ``tools`` has [time, whether it failed] for each tool answer. ``scores`` has
[turn, name, value] for each score that is not a reward.
"""
TEXTS = ("question", "answer", "telling")
"""Columns with text. They make up most of the overview's bytes, but only a few of their rows are
visible at a time.
"""
_MAX_ERRORS = 200
MAX_CITATIONS = 100
"""Maximum number of citations in the head of a run's page."""


def run_overview(run: WatchedRun, num_texts: int | None = None) -> dict[str, Any]:
    """Return the overview of a run: facts about the run as a whole, and its calls as columns.

    Only the first ``num_texts`` calls include their question and answer. None: all of them do.
    """
    nodes = run.tree.order
    num_texts = len(nodes) if num_texts is None else min(num_texts, len(nodes))
    columns = _columns(run, nodes, num_texts)
    return {
        "num": len(nodes),
        "columns": {name: _collapse_column(column) for name, column in columns.items()},
        "head": run_facts(run),
        "texts": num_texts,
    }


def question_and_answer_columns(run: WatchedRun, first: int) -> dict[str, list[str]]:
    """Return the questions and answers of all calls from index ``first`` on, as table columns.

    The overview was sent without these.
    """
    return {name: [COLUMNS[name](node) for node in run.tree.order[first:]] for name in TEXTS}


def overview_update(run: WatchedRun, changed: Iterable[int]) -> dict[str, Any]:
    """Return an update for a page with an overview: the changed calls and facts about the run.

    The changed calls are sent as columns.
    """
    order = sorted(changed)
    return {
        "indices": order,
        "columns": _columns(run, [run.tree.order[index] for index in order]),
        "head": run_facts(run),
    }


def _columns(
    run: WatchedRun, nodes: Sequence[RunCallNode], num_texts: int | None = None
) -> dict[str, list[Any]]:
    """Return the table of the calls ``nodes`` as one list for each column.

    Only the first ``num_texts`` calls include their question and answer. The column ``parent``
    holds the index of an earlier call, or -1.
    """
    told = nodes[:num_texts]
    untold = [""] * (len(nodes) - len(told))
    known, scored = run.tree.nodes, run.tree.run_data.call_rewards
    recorded = run.tree.run_data.metadata
    advantages = means_by_call(recorded.get("advantages"))
    gaps = means_by_call(recorded.get("logprob_gaps"), abs)
    parents = [known.get(node.parent.call) if node.parent else None for node in nodes]
    return {
        **{
            name: [*map(of, told), *untold] if name in TEXTS else list(map(of, nodes))
            for name, of in COLUMNS.items()
        },
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
        "advantage": [advantages.get(node.id) for node in nodes],
        "gap": [gaps.get(node.id) for node in nodes],
    }


def means_by_call(recorded: Any, size: Callable[[float], float] = float) -> dict[str, float]:
    """Return the mean of each call's per-turn values from training, keyed by call id.

    Each turn has the same weight.

    ``recorded`` maps a turn to a number, or to a list with one number per token. For example,
    ``{"0.1/2": 0.25}`` has the value of turn 2 of call 0.1. ``size`` converts each number first,
    for example to its absolute value.
    """
    by_call: dict[str, list[float]] = {}
    for place, values in recorded.items() if isinstance(recorded, dict) else ():
        numbers = [
            size(value)
            for value in (values if isinstance(values, list) else [values])
            if isinstance(value, int | float)
        ]
        if numbers:
            by_call.setdefault(place.rpartition("/")[0], []).append(fmean(numbers))
    return {call: fmean(means) for call, means in by_call.items()}


def _collapse_column(column: list[Any]) -> Any:
    """Replace a table column of identical values with that one value.

    Any other column is returned unchanged.
    """
    first = column[0] if column else None
    is_plain = not isinstance(first, list | tuple)
    return first if is_plain and column.count(first) == len(column) else column


def _scores(node: RunCallNode) -> list[tuple[Any, ...]]:
    return [(mark.turn, *score) for mark in node.marks or () for score in mark.values.items()]


def run_facts(run: WatchedRun) -> dict[str, Any]:
    """Return the facts about a run as a whole that its page shows at the top."""
    trajectory, at_s = run.tree.run_data, run.tree.calls.at_s
    problems = [text for text in (run.problem, run.damage, run.torn) if text]
    config, review = trajectory.metadata, _review(run, problems)
    mode, mode_reason = mode_and_reason(config)
    answer, citations = answer_and_citations(trajectory)
    return {
        "key": run.key,
        "id": trajectory.id,
        "question": trajectory.question,
        "task": trajectory.task,
        "path": str(run.source),
        "is_journal": run.line is None,
        "started_at": trajectory.started_at,
        "at_s": at_s,
        "alive": run.is_alive,
        "stop": trajectory.stop,
        "answer": cut(answer, 4_000),
        "citations": citations[:MAX_CITATIONS],
        "has_answer": trajectory.answer is not None,
        "ending": _ending(run),
        "mode": mode,
        "mode_reason": cut(mode_reason, 1_000),
        "gold": str(config.get("gold") or ""),
        "answered_by": trajectory.answered_by,
        "usage": struct_fields(trajectory.usage),
        "cost": trajectory.cost,
        "seconds": trajectory.seconds or at_s,
        "context": context_fields(trajectory.context),
        "limits": config.get("limits") or {},
        "sandbox": (config.get("sandbox") or {}).get("provider", ""),
        "scaffold": (config.get("scaffold") or {}).get("name", ""),
        "sources": (config.get("sources") or {}).get("paths", []),
        "num_sources": (config.get("read") or {}).get("num_items", 0),
        "num_unread": (config.get("read") or {}).get("num_problems", 0),
        "rewards": trajectory.rewards,
        "metrics": trajectory.metrics,
        "forked": _fork_origin(run),
        "marks": [struct_fields(mark) for mark in trajectory.marks if not mark.call],
        "errors": trajectory.errors[:_MAX_ERRORS],
        "num_errors": len(trajectory.errors),
        "problems": problems,
        "version": run.version,
        "generation": run.generation,
        "raw_code": bool((config.get("scaffold") or {}).get("raw_code")),
        "num_calls": len(run.tree.order),
        "review": struct_fields(review),
    }


def _review(run: WatchedRun, problems: list[str]) -> HumanRunReview:
    try:
        return run.human_review
    except StoreError as error:
        problems.append(str(error))
        return HumanRunReview()


def _fork_origin(run: WatchedRun) -> dict[str, Any] | None:
    """Return the turn at which this run was forked from another run.

    It has the other run's address if that run is in the same store. Returns None if this run does
    not continue another.
    """
    forked = run.tree.run_data.metadata.get("forked")
    if not isinstance(forked, dict):
        return None
    origin, call, turn = (str(forked.get("run")), forked.get("call", "0"), forked.get("turn", 0))
    is_here = run.source.is_run_in_store(origin)
    prefix = run.key[: len(run.key) - len(run.tree.run_data.id)]
    return {
        "run": origin,
        "key": f"{prefix}{origin}" if is_here else "",
        "call": call,
        "turn": turn,
        "edited": forked.get("edited", ""),
    }


def _ending(run: WatchedRun) -> str:
    """Return a short text that says why the run ended."""
    trajectory, order = run.tree.run_data, run.tree.order
    root = next((node for node in reversed(order) if node.parent is None), None)
    reason = trajectory.reason or (root.reason or root.error if root else "")
    if trajectory.stop is None and not order and run.problem:
        return ""
    num_turns = root.num_turns if root else 0
    return describe_ending(
        trajectory.stop, reason, num_turns, run.is_alive, num_below=max(0, len(order) - 1)
    )


def rewards_of(run: WatchedRun, node: RunCallNode) -> dict[str, float]:
    """Return the rewards of a call.

    If the first call has none, return those of the run.
    """
    call_rewards = run.tree.run_data.call_rewards.get(node.id)
    return call_rewards or ({} if node.index else run.tree.run_data.rewards)


def call_state(node: RunCallNode) -> str:
    """Return a call's state for the page: ``asking``, ``running``, ``open`` or ``done``."""
    if node.stop is not None:
        return "done"
    return "asking" if node.asking >= 0 else "running" if node.is_running else "open"


def context_fields(context: ContextRef | None) -> dict[str, Any] | None:
    """Return the data that the page shows about a context.

    The list of files is left out, since there may be thousands.
    """
    if context is None:
        return None
    short = {name: value for name, value in struct_fields(context).items() if name != "files"}
    return {**short, "by_reference": context.reference_text}


def struct_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Convert a struct to a dict of all its fields, including fields with default values."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}

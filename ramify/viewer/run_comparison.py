"""Compare several runs call by call, side by side.

Each row has the calls that answer the same question, one for each run.

    run A        run B             rows
    0            0                 0    0
    ├ 0.0 May    ├ 0.0 June   ──>  0.0  0.1    May
    └ 0.1 June   └ 0.1 May         0.1  0.0    June

Two calls can match only if their parents match. Siblings are matched by their whole question and
context, then by their shortened question, then by the words that their questions share. The page
itself compares the texts of matched calls word by word (static/compare.js).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ramify.types.run_call_node import RunCallNode
from ramify.viewer.run_overview import run_facts
from ramify.viewer.watched_run import WatchedRun

MAX_RUNS = 8
"""Maximum number of runs that are compared at once."""
_MAX_PAIRS = 40_000
"""Maximum number of pairs of questions whose words are compared."""
_ALIKE = 0.5
"""Minimum fraction of words that two questions must have in common to match."""
Row = list[RunCallNode | None]
"""One row of a comparison of runs: the matching call of each run, or None for a run that has no
such call.
"""


def overview_and_calls(run: WatchedRun) -> tuple[dict[str, Any], list[RunCallNode]]:
    """Return a run's overview and the list of its calls, for a comparison with other runs.

    ``match_calls`` compares such lists.
    """
    return run_facts(run), list(run.tree.order)


def match_calls(runs: Sequence[Sequence[RunCallNode]]) -> list[dict[str, Any]]:
    """Return the rows of a table that matches the calls of several runs.

    Returns one row for each group of matching calls, with parents before their children.

    The field ``calls`` of a row has [id, answer, cost, seconds, whether it failed, outlier, turn,
    cell] for each run, or None for a run without such a call. ``turn`` and ``cell`` locate the code
    in the parent that made the call, or are -1. The field ``same`` is true if all runs have the
    call, with the same answer.
    """
    below = [_group_by_parent(calls) for calls in runs]
    rows: list[dict[str, Any]] = []
    pending = [iter(_align_siblings([children[None] for children in below], are_roots=True))]
    while pending:
        row = next(pending[-1], None)
        if row is None:
            pending.pop()
            continue
        rows.append(_row_data(row, len(pending) - 1))
        groups = [
            children[node.id] if node is not None else []
            for node, children in zip(row, below, strict=True)
        ]
        pending.append(iter(_align_siblings(groups)))
    return rows


def _group_by_parent(calls: Sequence[RunCallNode]) -> dict[str | None, list[RunCallNode]]:
    """Group calls by the id of their parent.

    Calls without a parent in ``calls`` are grouped under None.
    """
    known = {node.id for node in calls}
    below: dict[str | None, list[RunCallNode]] = defaultdict(list)
    for node in calls:
        parent = node.parent.call if node.parent is not None else None
        below[parent if parent in known else None].append(node)
    return below


def _align_siblings(groups: Sequence[Sequence[RunCallNode]], are_roots: bool = False) -> list[Row]:
    """Arrange sibling calls of several runs in rows with one call for each run.

    ``groups`` has the siblings of each run. A call without a match gets a separate row, after the
    row of the call before it.
    """
    rows: list[Row] = []
    for run, siblings in enumerate(groups):
        found = _match_calls([_any_call(row) for row in rows], siblings, are_roots)
        inserted: dict[int, list[Row]] = defaultdict(list)
        """Index of a row, or -1 -> new rows after it."""
        last = -1
        for at, node in enumerate(siblings):
            if at in found:
                last = found[at]
                rows[last][run] = node
            else:
                row: Row = [None] * len(groups)
                row[run] = node
                inserted[last].append(row)
        rows = [
            *inserted[-1],
            *(each for i, row in enumerate(rows) for each in (row, *inserted[i])),
        ]
    return rows


def _any_call(row: Row) -> RunCallNode:
    return next(node for node in row if node is not None)


def _match_calls(
    known: Sequence[RunCallNode], siblings: Sequence[RunCallNode], are_roots: bool
) -> dict[int, int]:
    """Match each call in ``siblings`` to a call in ``known`` with the same or a similar question.

    Returns the index in ``known`` for each matched index in ``siblings``.
    """
    keys: list[Callable[[RunCallNode], Hashable]] = [
        lambda node: (node.kind, node.subject),
        lambda node: (node.kind, node.question),
    ]
    if are_roots:  # the runs themselves, which are compared whatever was asked
        keys.append(lambda node: node.parent is None)
    found: dict[int, int] = {}
    old, new = dict(enumerate(known)), dict(enumerate(siblings))
    for key in keys:
        free: dict[Hashable, deque[int]] = defaultdict(deque)
        for index, node in old.items():
            free[key(node)].append(index)
        for at, node in list(new.items()):
            if free[key(node)]:
                found[at] = free[key(node)].popleft()
                del new[at], old[found[at]]
    return found | _match_similar(old, new)


def _match_similar(
    known: dict[int, RunCallNode], siblings: dict[int, RunCallNode]
) -> dict[int, int]:
    """Match calls whose questions share at least the fraction ``_ALIKE`` of their words, starting
    with the most similar pair.

    Returns the index in ``known`` for each matched index in ``siblings``.
    """
    if not known or len(known) * len(siblings) > _MAX_PAIRS:
        return {}
    words = {index: set(node.question.lower().split()) for index, node in known.items()}
    scored = []
    for at, node in siblings.items():
        own = set(node.question.lower().split())
        for index, other in known.items():
            share = len(own & words[index]) / max(1, len(own | words[index]))
            if node.kind == other.kind and share >= _ALIKE:
                scored.append((-share, abs(at - index), at, index))
    found: dict[int, int] = {}
    taken: set[int] = set()
    for _, _, at, index in sorted(scored):
        if at not in found and index not in taken:
            found[at] = index
            taken.add(index)
    return found


def _row_data(row: Row, depth: int) -> dict[str, Any]:
    first = _any_call(row)
    return {
        "depth": depth,
        "kind": first.kind,
        "question": first.question,
        "same": None not in row
        and len({(node.answer_hash, node.stop) for node in row if node}) == 1,
        "calls": [None if node is None else _cell_data(node) for node in row],
    }


def _cell_data(node: RunCallNode) -> list[Any]:
    seconds = None if node.ended_s is None else round(node.ended_s - node.started_s, 3)
    text = node.answer or node.error or node.reason or (node.stop or "")
    place = (-1, -1) if node.parent is None else (node.parent.turn, node.parent.cell)
    return [node.id, text, node.cost, seconds, node.has_failed, node.outlier, *place]

"""Show a call's code beside that of a typical sibling, to reveal what it did differently.

    0.6  total = sum(… if row[0] == 'east')        11 of 11 siblings:  total = sum(…)

Siblings are the calls of the same kind that the same cell made. Those that failed, or whose answer
is an outlier, are left aside. The call is compared with the code that most siblings share. If all
siblings wrote different code, it is compared with the most similar one. Cells are matched in
order. The module types/sibling_outliers.py finds the calls that differ. The page marks the words
that differ (static/sibling_code.js).
"""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from typing import Any

from ramify.errors import StoreError
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import Stop
from ramify.viewer.watched_run import WatchedRun

_MAX_SIBLINGS = 16
"""Maximum number of siblings whose code is read."""
_MAX_CHARS = 20_000
"""Maximum number of characters of a cell's code that are compared."""
_Code = tuple[str, ...]
"""Code of each cell of a call, in order."""


def compare_sibling_code(run: WatchedRun, id: str) -> dict[str, Any]:
    """Compare the code of the call ``id`` with that of a typical sibling.

    Raises StoreError if there is no such call.

    In the result, ``cells`` has pairs [code of the call or None, code of the sibling or None]. The
    list is empty without a sibling to compare with. ``shared_by`` is the number of siblings,
    out of ``num_siblings``, that have exactly this code.
    """
    own = _code_of(run, id)
    codes = _codes_of_siblings(run, run.tree.nodes[id])
    if not codes or not own:
        return {"sibling": "", "shared_by": 0, "num_siblings": 0, "cells": []}
    shares = Counter(codes.values())
    most = max(shares.values())
    typical = max(
        (sibling for sibling, code in codes.items() if shares[code] == most),
        key=lambda sibling: _similarity(own, codes[sibling]) if most == 1 else 0.0,
    )
    return {
        "sibling": typical,
        "shared_by": most,
        "num_siblings": len(codes),
        "cells": _matched_cells(own, codes[typical]),
    }


def _code_of(run: WatchedRun, id: str) -> _Code:
    call = run.call_detail(id).call
    return tuple(cell.code[:_MAX_CHARS].rstrip() for turn in call.turns for cell in turn.cells)


def _codes_of_siblings(run: WatchedRun, node: RunCallNode) -> dict[str, _Code]:
    """Return the code of each sibling of a call, by the sibling's id.

    Siblings that failed or are outliers are left out.
    """
    if node.parent is None or node.kind != "rlm":
        return {}
    usual = [
        each
        for each in run.tree.order
        if each.parent == node.parent
        and each.kind == node.kind
        and each is not node
        and each.stop is Stop.FINAL
        and not each.outlier
    ]
    found = {}
    for each in usual[:_MAX_SIBLINGS]:
        try:
            code = _code_of(run, each.id)
        except StoreError:  # damaged: the page already says so
            continue
        if code:
            found[each.id] = code
    return found


def _similarity(own: _Code, other: _Code) -> float:
    return SequenceMatcher(None, "\n".join(own), "\n".join(other), autojunk=False).quick_ratio()


def _matched_cells(own: _Code, other: _Code) -> list[list[str | None]]:
    """Arrange the cells of two calls in rows that show matching cells side by side.

    Cells with the same code share a row. None marks a missing cell.
    """
    rows: list[list[str | None]] = []
    matcher = SequenceMatcher(None, own, other, autojunk=False)
    for _, start, end, other_start, other_end in matcher.get_opcodes():
        for at in range(max(end - start, other_end - other_start)):
            left = own[start + at] if start + at < end else None
            right = other[other_start + at] if other_start + at < other_end else None
            rows.append([left, right])
    return rows

"""Finds the known name that is closest to a misspelled one, for error messages such as "did you
mean …?".

A name is a candidate if it has enough letters in common with the given one
(``difflib.get_close_matches``). The candidate that takes the fewest edits wins. An edit adds, drops
or replaces a letter, or swaps two neighbours. If several candidates take equally few, the first in
the order of the known names wins, so callers put the names that are used most first.

    nearest_name("modle", ["model", "mode"])  # "model": one swap; "mode" drops one letter

The words around the suggestion are in ``errors.did_you_mean``.
"""

from __future__ import annotations

from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is closest to ``name``, or None if none is similar.

    The comparison ignores case.

    ``cutoff`` is the minimum fraction of letters that a candidate must have in common with
    ``name``, from 0 (any name) to 1. The names of a set are taken in alphabetical order.
    """
    from difflib import get_close_matches

    by_folded: dict[str, str] = {}
    for each in sorted(known) if isinstance(known, set | frozenset) else known:
        by_folded.setdefault(each.casefold(), each)
    folded = name.casefold()
    alike = set(get_close_matches(folded, by_folded, n=max(1, len(by_folded)), cutoff=cutoff))
    candidates = [each for each in by_folded if each in alike]
    # ``min`` takes the first of equals.
    close = min(candidates, key=lambda each: _num_edits(folded, each), default=None)
    return None if close is None else by_folded[close]


def _num_edits(a: str, b: str) -> int:
    """Count the edits that turn ``a`` into ``b``: letters added, dropped or replaced, and
    neighbours swapped.

    This is the Damerau-Levenshtein distance without overlapping edits.
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]

"""Find calls that differ from their siblings, and say how.

Siblings are the calls of the same kind that one code cell of a session made.

    0.0 → 30,102   0.1 → 29,877   …   0.7 → 1,414     0.7: "sheet 8 returned 1,414; its siblings
                                                      about 29,877"

Siblings are compared once their cell has run. A call may differ by an error, by the type of its
answer, or by its answer to a question that others were asked about the same context. It also
differs if its number or its length is more than three median absolute deviations from the median,
scaled to be standard deviations of a normal distribution. The page (viewer/static) shows such
calls, and call_tree.py builds the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ramify.types.run_call_node import RunCallNode, parse_number
from ramify.types.sibling_question_diff import SiblingQuestionStore

MIN_SIBLINGS = 4
"""Minimum number of siblings to compare. Fewer are compared only if they were asked the same
question."""
_MAX_SHOWN = 40
_DEVIATIONS = 3.0
_SCALE = 1.4826
"""Factor that converts a median absolute deviation to the standard deviation of a normal
distribution.
"""
_NAMES = {"number": "a number", "text": "text", "list": "a list", "dict": "a dict"}


class SiblingCallOutlierFinder:
    """Finds outliers among the calls that one code cell made.

    Calls are collected while the cell runs and compared when it has run.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int, int], list[RunCallNode]] = {}
        self._questions: dict[tuple[str, int, int, str], SiblingQuestionStore] = {}

    def add(self, node: RunCallNode, question: str) -> list[RunCallNode]:
        """Add a call to the group of calls that the same cell made.

        ``question`` is the call's complete question. Returns the earlier siblings whose
        distinguishing part (``RunCallNode.distinguishing_text``) has changed, because they share
        less text with the new question.
        """
        if (parent := node.parent) is None:
            return []
        place = (parent.call, parent.turn, parent.cell)
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = []
        asked = self._questions.get((*place, node.kind))
        if asked is None:
            asked = self._questions[*place, node.kind] = SiblingQuestionStore()
        node.siblings, node.nth = asked, len(asked)
        changed = [each for each in group if each.kind == node.kind] if asked.add(question) else []
        group.append(node)
        return changed

    def mark_outliers(self, call: str, turn: int, cell: int) -> list[RunCallNode]:
        """Compare the calls of a cell, and mark those that differ from their siblings.

        Returns the marked calls.
        """
        group = self._groups.get((call, turn, cell), ())
        kinds = {node.kind for node in group}
        marked = []
        for kind in kinds:
            siblings = [node for node in group if node.kind == kind and node.stop is not None]
            for node, how in outliers(siblings).items():
                siblings[node].outlier = f"{siblings[node].name} {how}"
                marked.append(siblings[node])
        return marked

    def mark_all_outliers(self) -> None:
        for place in self._groups:
            self.mark_outliers(*place)


def outliers(siblings: Sequence[RunCallNode]) -> dict[int, str]:
    """Find the outliers, that is, the sibling calls that differ from the others.

    Returns the index of each, with a sentence (without its subject) that says how it differs.
    """
    found = _by_question(siblings)
    if len(siblings) < MIN_SIBLINGS:
        return found
    failed = [index for index, node in enumerate(siblings) if node.has_failed]
    if 0 < len(failed) <= len(siblings) // 3:
        found |= {index: _failure(siblings[index], len(siblings)) for index in failed}
    good = [index for index in range(len(siblings)) if not siblings[index].has_failed]
    if len(good) >= MIN_SIBLINGS:
        found |= {**_by_value(siblings, good), **found}
    return found


def _failure(node: RunCallNode, count: int) -> str:
    return f"failed, unlike most of its {count - 1:,} siblings: {node.error or node.stop}"


def _by_question(siblings: Sequence[RunCallNode]) -> dict[int, str]:
    """Find calls whose answer disagrees with most siblings that had the same question and context.

    Returns a sentence about each, by its index in ``siblings``.
    """
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(siblings):
        groups.setdefault(node.subject, []).append(index)
    found = {}
    for group in groups.values() if len(groups) < len(siblings) else ():
        answers = Counter(siblings[index].answer for index in group)
        most, votes = answers.most_common(1)[0]
        if len(group) < 3 or 2 * votes <= len(group):
            continue
        for index in group:
            if siblings[index].answer != most:
                found[index] = (
                    f"returned {short_answer(siblings[index])}; {votes} of {len(group)} "
                    "with the same "
                    f"question returned {_short_text(most)}"
                )
    return found


def _by_value(siblings: Sequence[RunCallNode], good: Sequence[int]) -> dict[int, str]:
    kinds = Counter(siblings[index].answer_kind for index in good)
    usual, votes = kinds.most_common(1)[0]
    if votes < 0.75 * len(good):
        return {}
    found = {
        index: f"returned {_kind_and_value(siblings[index])}; {votes:,} siblings returned "
        f"{_NAMES.get(usual, 'nothing')}"
        for index in good
        if siblings[index].answer_kind != usual
    }
    alike = [index for index in good if siblings[index].answer_kind == usual]
    if usual == "number":
        numbers = [parse_number(siblings[index].answer) or 0.0 for index in alike]
        for at, middle in _find_outliers(numbers):
            index = alike[at]
            found[index] = (
                f"returned {short_answer(siblings[index])}; its siblings about "
                f"{_format_number(middle)}"
            )
    else:
        lengths = [float(siblings[index].answer_chars) for index in alike]
        for at, middle in _find_outliers(lengths):
            long, short = max(lengths[at], middle), min(lengths[at], middle)
            if long > 3 * short + 20:
                index = alike[at]
                found[index] = (
                    f"returned {lengths[at]:,.0f} characters; its siblings about "
                    f"{_format_number(middle)}: "
                    f"{short_answer(siblings[index])}"
                )
    return found


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.4g}"


def _kind_and_value(node: RunCallNode) -> str:
    """Describe a call's answer by its type and its beginning, such as ``text: “none found”``.

    Returns ``nothing`` for a call without an answer.
    """
    kind = _NAMES.get(node.answer_kind)
    return f"{kind}: {short_answer(node)}" if kind else "nothing"


def _find_outliers(values: Sequence[float]) -> list[tuple[int, float]]:
    """Find values that are more than three scaled median absolute deviations from the median.

    Returns the index of each such value, with the median.

    If more than half of the values are equal, that deviation is 0. Then a single value that
    differs from all others is returned, if there are more than four values.
    """
    from statistics import median

    middle = median(values)
    spread = _SCALE * median(abs(value - middle) for value in values)
    if spread == 0:
        differing = [index for index, value in enumerate(values) if value != middle]
        return [(differing[0], middle)] if len(differing) == 1 and len(values) > 4 else []
    return [
        (index, middle)
        for index, value in enumerate(values)
        if abs(value - middle) > _DEVIATIONS * spread
    ]


def short_answer(node: RunCallNode) -> str:
    return _short_text(node.answer)


def _short_text(text: str) -> str:
    number = parse_number(text)
    if number is not None:
        return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e15 else text.strip()
    line = " ".join(text.split())
    line = line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"
    return f"“{line}”" if line else "an empty answer"

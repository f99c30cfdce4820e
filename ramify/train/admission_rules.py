"""Which groups may begin, and which a step waits for: the rules of ``group_queue.py``, which
explains them, apart from how time goes by. The simulator of clusters
(``ramify/cluster/simulated_queue.py``) plays by the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ramify.train.signals.filters import num_more

_MOMENT_S = 1e-9
"""What is nearer is now: sums of floats may fall short of a moment that was waited for."""


class AdmissionRules(Protocol):
    """What of a recipe decides here; see ``stages.StepSampleSpec``."""

    @property
    def items(self) -> int: ...
    @property
    def max_items(self) -> int: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def max_token_staleness(self) -> int: ...


class StartedGroup(Protocol):
    """A group that was begun and not taken yet."""

    step: int | None
    """Steps that had made the weights when its first rollout began; None while none has."""

    @property
    def is_whole(self) -> bool:
        """All its rollouts are over, and read."""
        ...

    @property
    def has_no_signal(self) -> bool:
        """It is whole, and nothing can be learnt from it."""
        ...


G = TypeVar("G", bound=StartedGroup)


def room(rules: AdmissionRules, begun: Sequence[StartedGroup], step: int, num_steps: int) -> int:
    """How many groups may begin besides those that have, with the weights that ``step`` of
    ``num_steps`` steps made."""
    num_silent = sum(each.has_no_signal for each in begun)
    ahead = min(rules.max_staleness, num_steps - step - 1)
    free = (1 + ahead) * rules.items - (len(begun) - num_silent)
    if not rules.max_items:
        return free
    if rules.max_staleness or not begun:
        return min(free, ahead * rules.items + rules.max_items - len(begun))
    if not all(
        each.is_whole for each in begun
    ):  # round after round, each as large as should be enough
        return 0
    return num_more(rules.items, len(begun) - num_silent, len(begun), rules.max_items)


def suffice(
    rules: AdmissionRules, begun: Sequence[StartedGroup], whole: Sequence[StartedGroup], step: int
) -> bool:
    """Whether step ``step`` could go on if ``whole`` were the groups of ``begun`` that are."""
    if not rules.max_staleness and len(whole) < len(begun):
        return False
    inside = {id(each) for each in whole}
    num_loud = sum(not each.has_no_signal for each in whole)
    has_tried_all = 0 < rules.max_items <= len(whole)
    if num_loud < rules.items and not has_tried_all:
        return False
    for later in range(
        rules.max_token_staleness + 1
    ):  # those that are due in so many steps, or before
        last = step + later - rules.max_token_staleness
        due = [
            each
            for each in begun
            if not each.has_no_signal and each.step is not None and each.step <= last
        ]
        if sum(id(each) in inside for each in due) < len(due) - later * rules.items:
            return False
    return True


def too_slow(
    rules: AdmissionRules, begun: Sequence[G], left_s: Sequence[float | None], step: int
) -> tuple[list[G], float | None]:
    """(the groups that alone hold step ``step`` up, whose rollouts are to be given up; else none of
    them, and seconds until some might). ``left_s``: of each of ``begun``, until all its rollouts
    that go on are slow; None where none goes on, or one has yet to begin."""
    slow = [
        each
        for each, left in zip(begun, left_s, strict=True)
        if left is not None and left <= _MOMENT_S
    ]
    others = [each for each in begun if not any(each is one for one in slow)]
    whole = [each for each in begun if each.is_whole]
    if suffice(rules, begun, others, step) or not suffice(rules, begun, [*whole, *slow], step):
        return [], min(
            (left for left in left_s if left is not None and left > _MOMENT_S), default=None
        )
    num = next(
        num for num in range(len(slow) + 1) if suffice(rules, begun, [*whole, *slow[:num]], step)
    )
    return slow[:num], None

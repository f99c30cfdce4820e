"""Rules for which groups of rollouts may begin, and which ones a step waits for.

``group_queue.py`` explains the rules and applies them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.train.config_fields import check_optional

_MOMENT_S = 1e-9
"""Tolerance for times: a sum of floats may fall just short of the time that was waited for."""


class StepSampleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much each step of reinforcement learning samples."""

    items: int = 24
    """Items of the task per step."""
    first_item: int = 0
    """Index of the first item in the training split. After a stage with demonstrations, the default
    is the first item that was not demonstrated."""
    max_items: int | None = None
    """Dynamic sampling: the most items that a step may try until ``items`` of them have a signal;
    None: no dynamic sampling."""
    minibatches: int = 1
    """Number of optimizer steps into which a step's rollouts are split."""
    max_staleness: int = 0
    """How many steps ahead rollouts may begin. 0: each step waits for its own rollouts. With 1 or
    more, rollouts continue while the trainer learns, and switch to newer weights as they arrive;
    see ``group_queue.py``."""
    grace_steps: int = 4
    """With ``max_staleness`` above 0: how many more steps a slow rollout may take before a step
    waits for it. With 0 grace steps no token is older than ``max_staleness``, and ``max_staleness +
    1`` steps take at least as long as the slowest rollout."""
    straggler_factor: float | None = None
    """Give up a rollout that takes longer than this many times the median, if its step waits for
    nothing else; None: never."""
    pause: bool = False
    """Pause new rollouts while the policy is evaluated, so that only rollouts in progress compete
    with the evaluation."""

    @property
    def max_token_staleness(self) -> int:
        """Maximum staleness of a token, in steps, when it is learned from."""
        return self.max_staleness + self.grace_steps if self.max_staleness else 0

    def __post_init__(self) -> None:
        if self.grace_steps < 0:
            raise ConfigError(f"rl.sample: grace_steps={self.grace_steps} must be at least 0")
        check_optional("rl.sample", "no dynamic sampling", max_items=self.max_items)
        check_optional("rl.sample", "never", straggler_factor=self.straggler_factor)
        if self.straggler_factor is not None and self.straggler_factor < 1:
            raise ConfigError(
                f"rl.sample: straggler_factor={self.straggler_factor:g} is a multiple of the "
                "median: at least 1, or null for never"
            )
        if (
            self.items < 1
            or self.minibatches < 1
            or self.max_staleness < 0
            or (self.max_items is not None and self.max_items < self.items)
        ):
            raise ConfigError(
                f"rl.sample: items={self.items} and minibatches={self.minibatches} must be at "
                "least 1, "
                f"max_items={self.max_items} null or at least items, "
                f"max_staleness={self.max_staleness} not negative"
            )


class AdmissionRules(Protocol):
    """The options that these rules read, of a run or of a simulated one."""

    @property
    def items(self) -> int: ...
    @property
    def max_items(self) -> int | None: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def max_token_staleness(self) -> int: ...


class StartedGroup(Protocol):
    """A group that has begun and that no step has taken yet."""

    step: int | None
    """Number of steps behind the weights when its first rollout began; None if none has begun."""

    @property
    def is_whole(self) -> bool:
        """Whether all its rollouts are complete and their signals are computed."""
        ...

    @property
    def has_no_signal(self) -> bool:
        """Whether it is complete and nothing can be learned from it."""
        ...


G = TypeVar("G", bound=StartedGroup)


def room(rules: AdmissionRules, begun: Sequence[StartedGroup], step: int, num_steps: int) -> int:
    """How many more groups may begin with the weights after ``step`` of ``num_steps`` steps."""
    num_zero_variance = sum(group.has_no_signal for group in begun)
    ahead = min(rules.max_staleness, num_steps - step - 1)
    free = (1 + ahead) * rules.items - (len(begun) - num_zero_variance)
    if not rules.max_items:
        return free
    if rules.max_staleness or not begun:
        return min(free, ahead * rules.items + rules.max_items - len(begun))
    # Without staleness, groups begin in rounds; each round is as large as should be enough.
    if not all(group.is_whole for group in begun):
        return 0
    return num_more(rules.items, len(begun) - num_zero_variance, len(begun), rules.max_items)


def suffice(
    rules: AdmissionRules, begun: Sequence[StartedGroup], whole: Sequence[StartedGroup], step: int
) -> bool:
    """Whether step ``step`` could start if ``whole`` were the complete groups of ``begun``."""
    if not rules.max_staleness and len(whole) < len(begun):
        return False
    complete = {id(group) for group in whole}
    num_with_signal = sum(not group.has_no_signal for group in whole)
    has_tried_all = len(whole) >= (rules.max_items or float("inf"))
    if num_with_signal < rules.items and not has_tried_all:
        return False
    # Later steps must be able to take all groups in time: check each deadline in turn.
    for later in range(rules.max_token_staleness + 1):
        last = step + later - rules.max_token_staleness
        due = [
            group
            for group in begun
            if not group.has_no_signal and group.step is not None and group.step <= last
        ]
        if sum(id(group) in complete for group in due) < len(due) - later * rules.items:
            return False
    return True


def too_slow(
    rules: AdmissionRules, begun: Sequence[G], left_s: Sequence[float | None], step: int
) -> tuple[list[G], float | None]:
    """Find groups whose slow rollouts should be given up.

    Returns (the groups that alone hold up step ``step``, and None), or if there are none, ([],
    seconds until there may be some). ``left_s``: for each of ``begun``, seconds until all its
    running rollouts count as slow; None if none is running or one has yet to begin.
    """
    slow = [
        group
        for group, left in zip(begun, left_s, strict=True)
        if left is not None and left <= _MOMENT_S
    ]
    others = [group for group in begun if not any(group is slow_group for slow_group in slow)]
    whole = [group for group in begun if group.is_whole]
    if suffice(rules, begun, others, step) or not suffice(rules, begun, [*whole, *slow], step):
        return [], min(
            (left for left in left_s if left is not None and left > _MOMENT_S), default=None
        )
    num = next(
        num for num in range(len(slow) + 1) if suffice(rules, begun, [*whole, *slow[:num]], step)
    )
    return slow[:num], None


def num_more(wanted: int, kept: int, tried: int, max_tried: int) -> int:
    """How many more groups to roll out, given that ``kept`` of ``tried`` had a signal (dynamic
    sampling, DAPO 2503.14476): as many as should suffice at that rate, at least the number missing,
    and never more than ``max_tried`` in total.

    wanted 8, 2 of 8 kept, at most 32: 24 more.  6 of 8 kept: 3 more."""
    missing = wanted - kept
    if missing <= 0:
        return 0
    expected = math.ceil(missing * tried / kept) if kept else missing
    return max(0, min(expected, max_tried - tried))

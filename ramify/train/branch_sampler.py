"""Fork rollouts into several continuations during RL training.

The option ``rl.rollout.branch`` sets where they fork, into how many continuations, and within which
budget.

    BranchOptions(where=(1, 3), num=2, budget=4)        four lines of one rollout:

    t0 ┬ t1 t2 ┬ t3 …        The session is forked before turns 1 and 3. What is before a fork is
       │       └ t3 …        sampled once, and the session's variables are those of the origin.
       └ t1 t2 ┬ t3 …
               └ t3 …

The budget is divided at each fork among its continuations, so it does not depend on which of them
runs first. Whether a rollout forks depends only on what it has done before that turn: estimators
over forks are unbiased only then. ``advantages/fork_estimators.py`` learns from the lines, and
``engine/run_branching.py`` makes a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ramify.engine.limits import Limits
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.engine.live_call import LiveCall


class BranchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for forking rollouts: where they fork, into how many continuations, and how many
    branches one rollout may have.

    A branch is a path from the start of the rollout to one of its ends.

    >>> train.BranchOptions(where=(1,), num=4, budget=4).budget
    4
    """

    where: tuple[int, ...] | Literal["every", "entropy"] = (1,)
    """Turns of the root call before which the session is forked, counted from 0. ``every``: before
    each turn except the first. ``entropy``: before each turn that follows a reply less certain
    than the first one (ARPO).
    """
    num: int = 2
    """Number of continuations of a fork, including that of the original session."""
    budget: int = 4
    """Maximum number of branches (paths from the question to an end) in one rollout."""
    lines: Literal["all", "first"] = "all"
    """Which branches may fork again. ``all``: every branch. ``first``: only the first; the other
    continuations run to their end and estimate the values of the first (for ``vine``).
    """
    entropy_rise: float = 0.0
    """For ``where=entropy``: by how much a reply's mean surprisal (nats per token) must exceed
    that of the first reply.
    """

    def __post_init__(self) -> None:
        if self.num < 2 or self.budget < 2:
            raise ConfigError(
                f"rl.rollout.branch: num={self.num} and budget={self.budget} allow no fork: both "
                "must be at least 2, or set rl.rollout.branch=null"
            )
        if isinstance(self.where, tuple) and (not self.where or min(self.where) < 1):
            raise ConfigError(
                f"rl.rollout.branch.where={list(self.where)} must name turns from 1 on: "
                "rollouts of a group differ from turn 0 on (rl.rollout.group)"
            )

    def check(self, limits: Limits, max_turns: int) -> None:
        """Raise ConfigError if no rollout could ever fork within ``max_turns`` turns.

        A root call ends after at most ``max_turns`` turns.
        """
        if isinstance(self.where, tuple) and min(self.where) >= max_turns:
            raise ConfigError(
                f"rl.rollout.branch.where={list(self.where)}: a root has at most {max_turns} turns "
                f"(limits.max_turns), so it never forks: give turns from 1 to {max_turns - 1}"
            )
        if self.where == "every" and max_turns < 2:
            raise ConfigError(
                f"rl.rollout.branch: a root has at most {max_turns} turn (limits.max_turns), so it "
                "never forks: set limits.max_turns=2 or more, or rl.rollout.branch=null"
            )
        if self.where == "entropy" and max_turns < 3:
            raise ConfigError(
                f"rl.rollout.branch.where=entropy compares a second reply with the first, and a "
                f"root has at most {max_turns} turns (limits.max_turns): give turns instead, as "
                "rl.rollout.branch.where=[1]"
            )

    def widened_limits(self, limits: Limits) -> Limits:
        """Return rollout limits that are raised in proportion to the number of branches allowed.

        The limits on calls, tokens and cost are multiplied, so that each branch may use as much as
        a rollout without forks.
        """
        cost = limits.max_cost
        return msgspec.structs.replace(
            limits,
            max_calls=limits.max_calls * self.budget,
            max_tokens=limits.max_tokens * self.budget,
            max_cost=None if cost is None else cost * self.budget,
        )


class BranchSampler:
    """Decides when one rollout forks, and into how many continuations.

    All branches are kept for training, and the first one gives the rollout's answer.
    """

    is_optional = True
    """True: the rollout continues without a fork if its session cannot be forked."""

    def __init__(self, options: BranchOptions) -> None:
        self._options = options
        self._budgets: dict[str, int] = {}
        """Map the id of each call to the number of branches that may still start from it. The root
        has the whole budget."""

    def __repr__(self) -> str:
        return f"BranchSampler({self._options})"

    def width(self, call: LiveCall) -> int:
        options = self._options
        budget = self._budgets.get(call.id, 1 if call.is_branch else options.budget)
        width = min(options.num, budget)
        if width < 2 or not self._forks_before(call):
            return 1
        forks = [f"{call.id}:{call.num_forks + number}" for number in range(1, width)]
        if options.lines == "first":
            budgets = [budget - len(forks), *[1] * len(forks)]
        else:
            each, more = divmod(budget, width)
            budgets = [each + (index < more) for index in range(width)]
        self._budgets |= dict(zip([call.id, *forks], budgets, strict=True))
        return width

    def choose(self, answers: Sequence[Any]) -> int:
        return 0

    def _forks_before(self, call: LiveCall) -> bool:
        """Return True if the options let a call fork before its next turn.

        The decision depends only on earlier turns.
        """
        where, turn = self._options.where, call.num_turns_before + call.turn
        if turn < 1:
            return False
        if where == "every":
            return True
        if where == "entropy":
            surprisals = call.mean_surprisals
            known = len(surprisals) > 1 and None not in (surprisals[0], surprisals[-1])
            return known and surprisals[-1] - surprisals[0] > self._options.entropy_rise  # type: ignore[operator]
        return turn in where


def branch_sampling_arguments(options: BranchOptions | None, limits: Limits) -> dict[str, Any]:
    """Return the arguments that make a rollout fork as specified in ``options``.

    Returns no arguments if ``options`` is None. ``limits`` are those of a rollout without forks,
    and are raised to allow for the continuations.
    """
    if options is None:
        return {}
    return {"search": BranchSampler(options), "limits": options.widened_limits(limits)}

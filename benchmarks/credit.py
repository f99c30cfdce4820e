"""Bias of the objective on trees: four toy problems whose exact gradient is known.

    python benchmarks/credit.py [--quick] [--json]

Toy 1, width. The root chooses 0, 1 or 8 children with probabilities .8, .1, .1 and succeeds with
probability .50, .52, .60. The root has 20 tokens, each child 50. Each step is one group of eight
rollouts. The gradient of the expected reward in the root's three logits is π_c (p_c - mean p), as a
direction (-.500, .042, .458); the figure is the L1 distance of the mean update from it.

Toy 2, siblings. Four trees per group, each with one or eight children at random. Only the first
child's choice matters: it is right with probability .5 and the tree's reward follows it. The figure
is the mean of (weight · advantage · ±1) at that child in trees of eight children over that in trees
of one; 1 is unbiased. In its second form the children are rewarded separately.

Toy 3, m of n. The root recurses with probability q, and m of the group's eight trees then have one
child. The child is right with probability .5. The tree succeeds with probability .3 without a
child, .9 with a right and .2 with a wrong one, so root and child both decide. The gradient of the
expected reward in the logits of the two choices is q (1 - q) (.55 - .3) for the root and
q .25 (.9 - .2) for the child; in the second form a right child also has its own reward, which
makes the child's q .25 (.9 - .2 + 1). The figure is the L1 distance of the mean update's direction
from it, for q = .2 and q = .5. A second figure is by how much the child's mean signal in groups with
the same m differs from that of all children, for the m that differs most; 0 is unbiased.

Toy 4, forks. A rollout has 16 turns of 10 tokens. In each turn the policy chooses one of four
actions, with probabilities .4, .3, .2, .1 in every state. Only the last two turns, 14 and 15, decide
the reward: it is 1 if both choose action 0, and else 0. So the gradient of the expected reward is 0
in the logits of turns 0 to 13, and .4 .4 (1 - .4) = .096 in that of action 0 and -.16 π_a in those of
the actions a = 1, 2, 3 of turns 14 and 15. ``branch`` forks before turns 14 and 15, into 4 each;
``vine`` into 7 and 5. Figures: the L1 distance of the mean update from the gradient, relative to the
gradient's L1 norm; and the update's variance, summed over the 64 logits, times the sampled tokens of
a group (those of continuations that do not learn, too), over the same of ``dr_grpo`` without forks,
each scaled to the gradient. Groups have eight rollouts. Two more plans are measured without a limit:
forks far from it (before turns 4 and 8, into 2), and a reward that turns 1 and 2 decide.

All run the package's own estimators on trajectories, with the state that they carry from step to
step. At the end, presets are compared with the other trainers' code (``objectives_table.py``). Decides the
toys. Not here: what is learnt with each of them (see ``learning.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import objectives_table
from figures import Figure, show

from ramify.train.advantages.base import with_saved_state
from ramify.train.advantages.credit_assignment import (
    AdvantageFunction,
    Numbers,
    Tree,
    inherited_returns,
)
from ramify.train.advantages.fork_estimators import (
    BranchEstimator,
    EntropyBranchEstimator,
    VineEstimator,
)
from ramify.train.advantages.group_estimators import GRPO, RLOO, DrGRPO
from ramify.train.config import RlSpec
from ramify.types.fork_segment import first_segment
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, CallForkOrigin, CallSite, Group, Stop, Trajectory, Turn

CHILDREN, CHOICE, SUCCESS = (0, 1, 8), (0.8, 0.1, 0.1), (0.50, 0.52, 0.60)
ROOT_TOKENS, CHILD_TOKENS = 20, 50
MEAN = sum(map(lambda p, r: p * r, CHOICE, SUCCESS))
TRUTH = [p * (r - MEAN) for p, r in zip(CHOICE, SUCCESS, strict=True)]

DIRECT, RIGHT, WRONG = 0.3, 0.9, 0.2
"""Toy 3: the tree's probability of success without a child, with a right and with a wrong one."""
BOTH = (RIGHT + WRONG) / 2
TURNS, TURN_TOKENS, ACTIONS = 16, 10, (0.4, 0.3, 0.2, 0.1)
"""Toy 4: turns of a rollout, tokens of a turn, and the probabilities of its actions."""
ENOUGH = 2_000
"""Toy 3: children from which a mean signal is taken; its standard error is then about .04."""

Contribution = Callable[[Trajectory, str, float], None]
"""(a rollout, a call, the signed update of its first token) is added to the figure."""


def trajectory(
    name: str, num_children: int, reward: float, own: Sequence[float] = ()
) -> Trajectory:
    calls = [_call("0", ROOT_TOKENS)]
    calls += [_call(f"0.{child}", CHILD_TOKENS) for child in range(num_children)]
    by_call = {f"0.{child}": {"own": value} for child, value in enumerate(own)}
    return Trajectory(
        name, "", task="toy", calls=calls, rewards={"reward": reward}, call_rewards=by_call
    )


def _call(id: str, num: int) -> Call:
    reply = Reply(
        _SAID, prompt_ids=(1,), token_ids=_IDS[num], logprobs=_LOGPROBS[num], finish="stop"
    )
    parent = CallSite("0", 0, 0) if "." in id else None
    turns = [Turn(0, (_ASKED,), reply, reused_ids=0)]
    depth = id.count(".")
    return Call(id, "rlm", "toy", depth, id, parent=parent, turns=turns, stop=Stop.FINAL)


_SAID, _ASKED = Message("assistant", ""), Message("user", "")
_IDS = {num: tuple(range(num)) for num in (ROOT_TOKENS, CHILD_TOKENS, TURN_TOKENS)}
_LOGPROBS = {num: (-0.5,) * num for num in (ROOT_TOKENS, CHILD_TOKENS, TURN_TOKENS)}
_TURN = Turn(
    0,
    (_ASKED,),
    Reply(
        _SAID,
        prompt_ids=(1,),
        token_ids=_IDS[TURN_TOKENS],
        logprobs=_LOGPROBS[TURN_TOKENS],
        finish="stop",
    ),
)


def updates(
    algorithm: Any, groups: Iterator[list[Trajectory]], calls: Sequence[str], add: Contribution
) -> None:
    """Give ``add`` the weight times the advantage of the first token of each of ``calls``."""
    memory: dict[str, float] = {}
    for index, trajectories in enumerate(groups):
        assigned = with_saved_state(algorithm, memory).assign_advantages(
            [Group(str(index), trajectories)], {}, every_token=True
        )
        memory = assigned.memory
        for rollout in assigned.rollouts:
            for call in calls:
                if (credit := rollout.credits.get((call, 0))) is not None:
                    value = credit.rl[0] * credit.advantages[0] / assigned.denominators["rl"]
                    add(rollout.trajectory, call, value)


def width(algorithm: Any, num_groups: int, seed: int = 0) -> list[float]:
    """Toy 1: the direction of the mean update of the root's three logits, L1-normalised."""
    draw = random.Random(seed)
    update = [0.0, 0.0, 0.0]

    def groups() -> Iterator[list[Trajectory]]:
        for _ in range(num_groups):
            choices = draw.choices(range(3), CHOICE, k=8)
            yield [
                trajectory(str(choice), CHILDREN[choice], float(draw.random() < SUCCESS[choice]))
                for choice in choices
            ]

    def add(rollout: Trajectory, call: str, value: float) -> None:
        for index in range(3):
            update[index] += value * (float(int(rollout.id) == index) - CHOICE[index])

    updates(algorithm, groups(), ("0",), add)
    return normalised(update)


def normalised(update: Sequence[float]) -> list[float]:
    return [value / sum(map(abs, update)) for value in update]


def distance(direction: Sequence[float], truth: Sequence[float] = TRUTH) -> float:
    exact = normalised(truth)
    return sum(abs(ours - theirs) for ours, theirs in zip(direction, exact, strict=True))


def siblings(algorithm: Any, num_groups: int, own_rewards: bool = False, seed: int = 0) -> float:
    """Toy 2: the first child's mean signal in trees of eight children over that in trees of one."""
    draw = random.Random(seed)
    signals: dict[int, list[float]] = {1: [], 8: []}

    def groups() -> Iterator[list[Trajectory]]:
        for _ in range(num_groups):
            yield [_toy_tree(draw, own_rewards) for _ in range(4)]

    def add(rollout: Trajectory, call: str, value: float) -> None:
        signals[len(rollout.calls) - 1].append(value * (1 if rollout.id == "right" else -1))

    updates(algorithm, groups(), ("0.0",), add)
    one, eight = (sum(signals[num]) / len(signals[num]) for num in (1, 8))
    return eight / one


class Recursed(NamedTuple):
    """What toy 3 measures with one estimator."""

    direction: list[float]
    """The mean update of the root's and the child's logit, L1-normalised."""
    spread: list[float]
    """Standard deviation of the two updates over the groups, relative to the sum of the means."""
    by_number: dict[int, float]
    """m -> the child's mean signal in groups with m children over that of all children, for those
    m of which at least ``ENOUGH`` children were drawn."""


def m_of_n(algorithm: Any, num_groups: int, q: float, own: bool = False, seed: int = 0) -> Recursed:
    """Toy 3, with a child that is rewarded separately if ``own``."""
    draw = random.Random(seed)
    signals: dict[int, list[float]] = defaultdict(list)
    numbers: list[int] = []
    sums: list[list[float]] = []

    def groups() -> Iterator[list[Trajectory]]:
        for _ in range(num_groups):
            sums.append([0.0, 0.0])
            group = [_recursing_tree(draw, q, own) for _ in range(8)]
            numbers.append(sum(len(tree.calls) > 1 for tree in group))
            yield group

    def add(rollout: Trajectory, call: str, value: float) -> None:
        if call == "0":
            sums[-1][0] += value * (float(len(rollout.calls) > 1) - q)
        else:
            signal = value * (0.5 if rollout.id == "right" else -0.5)
            sums[-1][1] += signal
            signals[numbers[-1]].append(signal)

    updates(algorithm, groups(), ("0", "0.0"), add)
    both = [[each[index] for each in sums] for index in range(2)]
    means = [fmean(values) for values in both]
    whole = fmean(value for values in signals.values() for value in values)
    return Recursed(
        normalised(means),
        [stdev(values) / sum(means) for values in both],
        {num: fmean(own) / whole for num, own in sorted(signals.items()) if len(own) >= ENOUGH},
    )


def exact_m_of_n(q: float, own: bool) -> list[float]:
    return [q * (1 - q) * (BOTH - DIRECT), q * 0.25 * (RIGHT - WRONG + own)]


def _recursing_tree(draw: random.Random, q: float, own: bool) -> Trajectory:
    if draw.random() >= q:
        return trajectory("direct", 0, float(draw.random() < DIRECT))
    right = draw.random() < 0.5
    reward = float(draw.random() < (RIGHT if right else WRONG))
    return trajectory("right" if right else "wrong", 1, reward, [float(right)] if own else ())


def among_all_calls(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float = 1.0
) -> list[Numbers]:
    """The credit ``per_role`` before trees were compared with other trees, for the ablation: among
    all calls of a role and depth, so also with a call's own siblings."""
    returns = [inherited_returns(tree, gamma) for tree in trees]
    cohorts: dict[Any, list[tuple[int, str]]] = defaultdict(list)
    for index, tree in enumerate(trees):
        for id, node in tree.items():
            cohorts[node.role, node.depth].append((index, id))
    numbers: list[Numbers] = [dict.fromkeys(tree, 0.0) for tree in trees]
    for members in cohorts.values():
        lengths = [trees[index][id].num_tokens for index, id in members]
        values = baseline([returns[index][id] for index, id in members], lengths)
        for (index, id), value in zip(members, values, strict=True):
            numbers[index][id] = value
    return numbers


def _toy_tree(draw: random.Random, own_rewards: bool) -> Trajectory:
    num = draw.choice((1, 8))
    right = [draw.random() < 0.5 for _ in range(num)]
    reward = 0.0 if own_rewards else float(right[0])
    own = list(map(float, right)) if own_rewards else ()
    return trajectory("right" if right[0] else "wrong", num, reward, own)


def figures(num_groups: int) -> Iterator[Figure]:
    default = RlSpec(steps=1).algorithm
    for reduction in ("call", "token", "rollout"):
        measured = distance(width(DrGRPO(reduction=reduction), num_groups))
        yield Figure(f"toy 1, reduction {reduction}: L1 distance", measured, "", {})
    fixed = DrGRPO(rollout_tokens=100)
    yield Figure("toy 1, constant L=100: L1 distance", distance(width(fixed, num_groups)), "", {})
    direction = width(default, num_groups)
    yield Figure(
        "toy 1, the default: L1 distance",
        distance(direction),
        "",
        {"direction": ", ".join(f"{value:.3f}" for value in direction)},
        0.03,
    )
    num = num_groups // 4
    named = [
        ("the default", default),
        *(
            (f"{estimator.__name__} {credit}", estimator(credit=credit))
            for estimator in (DrGRPO, RLOO, GRPO)
            for credit in ("root", "per_role", "hierarchical", "leave_one_child_out")
        ),
    ]
    for name, algorithm in named:
        yield from _ratio(f"toy 2, {name}", siblings(algorithm, num))
        if "root" not in name:
            yield from _ratio(f"toy 2, own rewards, {name}", siblings(algorithm, num, True))
    before = DrGRPO(credit="credit:among_all_calls")
    yield Figure(
        "toy 2, DrGRPO per_role as it was: eight children / one", siblings(before, num), "", {}
    )
    yield from _recursing(num_groups)
    yield from _forks(num_groups // 40)
    yield from objectives_table.figures()


def _recursing(num_groups: int) -> Iterator[Figure]:
    """Toy 3, with limits for the default."""
    named: dict[str, Any] = {"the default": RlSpec(steps=1).algorithm}
    for estimator in (RLOO, GRPO):
        named[f"{estimator.__name__} per_role"] = estimator()
    for credit in ("root", "hierarchical", "leave_one_child_out"):
        named[f"DrGRPO {credit}"] = DrGRPO(credit=credit)
    for name, algorithm in named.items():
        is_default = name == "the default"
        for q in (0.2, 0.5):
            for own in (False, True) if is_default or "root" not in name else (False,):
                measured = m_of_n(algorithm, num_groups if is_default else num_groups // 4, q, own)
                what = f"toy 3, {name}, q = {q}" + (", own rewards" if own else "")
                yield Figure(
                    f"{what}: L1 distance",
                    distance(measured.direction, exact_m_of_n(q, own)),
                    "",
                    {
                        "spread of root and child": ", ".join(
                            f"{value:.2f}" for value in measured.spread
                        )
                    },
                    0.03 if is_default else None,
                )
                yield Figure(
                    f"{what}: largest difference of the child's signal by m",
                    max(abs(ratio - 1) for ratio in measured.by_number.values()),
                    "",
                    {f"m = {num}": ratio for num, ratio in measured.by_number.items()},
                    0.1 if is_default else None,
                )


class ForkPlan(NamedTuple):
    """Toy 4: the turns before which a rollout forks, and the number of continuations."""

    widths: dict[int, int]
    """Map a turn to its number of continuations, including that of the original line."""
    lines: str = "all"
    """``first``: only the first line forks."""


class Spread(NamedTuple):
    """What toy 4 measures with one estimator."""

    distance: float
    """L1 distance of the mean update from the gradient, over the gradient's L1 norm."""
    standard_error: float
    """Expected part of that distance that is chance."""
    variance: float
    """Variance of a group's update, summed over the logits, times the group's sampled tokens."""
    tokens: float
    """Sampled tokens of a group."""


def spread(
    algorithm: Any, plan: ForkPlan, decisive: tuple[int, int], num_groups: int, seed: int = 0
) -> Spread:
    """Toy 4: measure the update of the 64 logits if the turns ``decisive`` decide the reward."""
    draw = random.Random(seed)
    sums, squares = np.zeros((TURNS, len(ACTIONS))), np.zeros((TURNS, len(ACTIONS)))
    scale = 1 if isinstance(algorithm, RLOO) else 8 / 7
    tokens = 0
    for _ in range(num_groups):
        rollouts = [_forking_rollout(draw, str(index), plan, decisive) for index in range(8)]
        group = Group("toy", [rollout for rollout, _ in rollouts])
        assigned = algorithm.assign_advantages([group], {}, every_token=True)
        update = np.zeros_like(sums)
        chosen = {rollout.id: actions for rollout, actions in rollouts}
        for rollout in assigned.rollouts:
            actions = chosen[rollout.trajectory.id]
            for place, credit in rollout.credits.items():
                turn, action = actions[place]
                value = scale * credit.rl[0] * credit.advantages[0] / 8
                update[turn] -= value * np.array(ACTIONS)
                update[turn, action] += value
        sums += update
        squares += update**2
        tokens += sum(
            TURN_TOKENS * len(call.turns) for each in group.trajectories for call in each.calls
        )
    mean = sums / num_groups
    variance = (squares / num_groups - mean**2).clip(0)
    exact = exact_forks(decisive)
    norm = np.abs(exact).sum()
    per_group = tokens / num_groups
    return Spread(
        float(np.abs(mean - exact).sum() / norm),
        float(np.sqrt(variance / num_groups).sum() * (2 / np.pi) ** 0.5 / norm),
        float(variance.sum() * per_group),
        per_group,
    )


def exact_forks(decisive: tuple[int, int]) -> Any:
    """[16, 4] the gradient of the probability that both decisive turns choose action 0."""
    exact = np.zeros((TURNS, len(ACTIONS)))
    for turn in decisive:
        exact[turn] = -(ACTIONS[0] ** 2) * np.array(ACTIONS)
        exact[turn, 0] += ACTIONS[0] ** 2
    return exact


def _forking_rollout(
    draw: random.Random, name: str, plan: ForkPlan, decisive: tuple[int, int]
) -> tuple[Trajectory, dict[tuple[str, int], tuple[int, int]]]:
    """Return a rollout, and a mapping from (call, index in the call) to the turn of the problem and
    its action."""
    calls: list[Call] = []
    actions: dict[tuple[str, int], tuple[int, int]] = {}
    rewards: dict[str, dict[str, float]] = {}

    def run(
        id: str, fork: CallForkOrigin | None, start: int, before: dict[int, int], forks: bool
    ) -> None:
        call = Call(id, "rlm", "toy", 0, id, fork=fork, stop=Stop.FINAL)
        calls.append(call)
        taken, num_forks = dict(before), 0
        for turn in range(start, TURNS):
            if forks and turn in plan.widths and turn != start:
                for _ in range(plan.widths[turn] - 1):
                    num_forks += 1
                    own = CallForkOrigin(id, len(call.turns) - 1)
                    run(f"{id}:{num_forks}", own, turn, taken, plan.lines == "all")
            taken[turn] = draw.choices(range(len(ACTIONS)), ACTIONS)[0]
            actions[id, len(call.turns)] = (turn, taken[turn])
            call.turns.append(_TURN)
        rewards[id] = {"reward": float(all(taken[turn] == 0 for turn in decisive))}

    run("0", None, 0, {}, True)
    made = Trajectory(name, "", task="toy", calls=calls, call_rewards=rewards)
    ends = first_segment(made).path_ends()
    made.rewards = {"reward": sum(rewards[end.id]["reward"] * share for end, share in ends)}
    return made, actions


def _forks(num_groups: int) -> Iterator[Figure]:
    """Toy 4: figures of all plans, with floors for ``branch`` and ``vine`` that were chosen in
    advance."""
    late, early = (TURNS - 2, TURNS - 1), (1, 2)
    no_forks = ForkPlan({})
    blind = ForkPlan({4: 2, 8: 2})
    both = ForkPlan({14: 4, 15: 4})
    one_line = ForkPlan({14: 7, 15: 5}, "first")
    estimators = [
        ("branch", BranchEstimator(rollout_tokens=1), both, 0.5),
        ("vine", VineEstimator(rollout_tokens=1), one_line, 0.5),
        ("entropy_branch", EntropyBranchEstimator(rollout_tokens=1), both, None),
    ]
    for where, decisive in (("last turns decide", late), ("turns 1 and 2 decide", early)):
        flat = spread(DrGRPO(rollout_tokens=1), no_forks, decisive, 4 * num_groups)
        planned = [(name, each, plan, limit) for name, each, plan, limit in estimators]
        planned += [(f"{name}, turns 4 and 8", each, blind, None) for name, each, *_ in estimators]
        for name, algorithm, plan, limit in planned:
            found = spread(algorithm, plan, decisive, num_groups)
            is_limited = limit is not None and decisive == late
            yield Figure(
                f"toy 4, {where}, {name}: L1 distance",
                found.distance,
                "",
                {"expected by chance": found.standard_error},
                2 * found.standard_error if is_limited else None,
            )
            yield Figure(
                f"toy 4, {where}, {name}: variance at equal tokens",
                found.variance / flat.variance,
                "of dr_grpo's",
                {"tokens of a group": found.tokens, "of dr_grpo's": flat.tokens},
                limit if is_limited else None,
            )


def _ratio(name: str, ratio: float) -> Iterator[Figure]:
    yield Figure(f"{name}: eight children / one", ratio, "", {}, 1.05, least=0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="the same numbers: they take a few minutes"
    )
    parser.add_argument("--json", action="store_true", help="print figures as the last line")
    parser.add_argument("--groups", type=int, default=20_000, help="groups of toy 1")
    options = parser.parse_args()
    measured = list(figures(options.groups))
    show(measured)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in measured]}))
    sys.exit(any(figure.holds is False for figure in measured))


if __name__ == "__main__":
    main()

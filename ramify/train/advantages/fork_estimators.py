"""RL estimators that give each turn of a rollout its own advantage.

They compare the continuations of a forked rollout (``branch``, ``vine``, ``entropy_branch``) or
rollouts that reached the same state (``state_group``).

    group of two rollouts                        value of a segment = its path's reward, or the
                                                 mean over the continuations after it
    tree 1   ── 0.5 ──┬── 1                      branch: 0.5 - 0.25 |  1 - 0
                      └── 0                                         |  0 - 1
    tree 2   ── 0.25 ─┬── 0.5 ...                each value minus the mean of its siblings

A segment is what was sampled between two forks (``types/fork_segment.py``). The first segments of a
group's roots share the question, so they are compared like the continuations of one fork. Each of K
continuations carries 1/K of the weight before the fork, so the tokens before a fork count once and
those after it as one rollout in total. ``docs/algorithms.md`` derives that the update is then
unbiased.

A call that a turn made gets the turn's advantage and weight. Its own reward, compared with those of
the same role's calls in other trees as with ``per_role``, is added to the advantage. Where a
rollout forks is chosen by ``branch_sampler.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import total
from ramify.train.advantages.advantage_pipeline import StepAdvantageBuilder, TurnCredit, TurnCredits
from ramify.train.advantages.base import AlgorithmNeeds, OptimizerStepAdvantages
from ramify.train.advantages.credit_assignment import (
    CreditNode,
    Numbers,
    ends_in_cut_reply,
    own_advantages,
    validate_advantages,
)
from ramify.train.advantages.group_estimators import RLOO
from ramify.types.fork_segment import ForkSegment, first_segment
from ramify.types.trajectory import Call, Group, Trajectory

Trees = Sequence[Mapping[str, CreditNode]]


class TurnAdvantageEstimator(RLOO, frozen=True, kw_only=True):
    """Base class of RL estimators that give each turn of the root call its own advantage.

    ``compare`` turns the values of n attempts from the same state into advantages, by subtracting
    from each the mean of the others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.credit not in ("root", "per_role"):
            raise ConfigError(
                f"rl.algorithm.credit={self.credit} does not work with one advantage per turn: "
                "use root (a call gets its turn's advantage) or per_role (that plus its own "
                "reward)"
            )
        if self.length_weight or self.max_rollout_tokens:
            raise ConfigError(
                "rl.algorithm: length_weight and max_rollout_tokens change the reward of a whole "
                "rollout, which an estimator with one advantage per turn does not use: remove them"
            )

    def root_turn_advantages(
        self, group: Group, rewards: Mapping[str, float]
    ) -> Sequence[dict[tuple[str, int], TurnCredit]]:
        """Return the advantage and weight of each turn of the root call and its continuations.

        Each rollout has one mapping with (call id, turn index) as key.

        ``rewards`` maps each reward name to the task's weight for it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no formula: define root_turn_advantages()"
        )

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        step = StepAdvantageBuilder(groups, weights, self)
        for scored in step.groups:
            found = self.root_turn_advantages(scored.group, weights)
            rows = zip(
                scored.group.trajectories,
                found,
                self._advantages_below_root(scored.trees),
                strict=True,
            )
            scored.turns = [self._with_children(*row) for row in rows]
            scored.advantages = [dict.fromkeys(tree, 0.0) for tree in scored.trees]
        return step.spread_advantages_to_tokens(every_token)

    def _compare_values(self, values: Sequence[float]) -> Sequence[float]:
        return validate_advantages(self.compare, values, self.compare(values))

    def _advantages_below_root(self, trees: Trees) -> Sequence[Numbers]:
        """Return the advantages of all calls below the root, for each tree.

        They come from comparing the calls' own rewards with those of other calls. With
        ``credit="root"`` there are none.
        """
        if self.credit == "root":
            return [{} for _ in trees]
        return own_advantages(trees, self.compare)

    def _with_children(
        self, trajectory: Trajectory, roots: dict[tuple[str, int], TurnCredit], own: Numbers
    ) -> TurnCredits:
        """Propagate the credit of the root's turns to the turns of all descendant calls.

        ``roots`` holds the credit of the root's turns. The turns of a call get the advantage of the
        turn that made the call, times ``gamma_tree``, plus the call's own advantage in ``own``.
        """
        credits: TurnCredits = dict(roots)
        of_call: dict[str, TurnCredit] = {}
        for call in trajectory.calls:
            if call.parent is None or call.kind == "judge":
                continue
            of_parent = of_call.get(call.parent.call) or roots.get(
                (call.parent.call, call.parent.turn), _NONE
            )
            number = self.gamma_tree * of_parent.advantage + own.get(call.id, 0.0)
            of_call[call.id] = TurnCredit(number, of_parent.share)
            for index in range(len(call.turns)):
                credits[call.id, index] = of_call[call.id]
        return credits


_NONE = TurnCredit(0.0, 0.0)


class BranchEstimator(
    TurnAdvantageEstimator, frozen=True, kw_only=True, tag_field="name", tag="branch"
):
    """Compare the branches of a fork as a group (Tree-GRPO 2509.21240, TreePO 2508.17445): a
    turn's advantage is its value minus the mean value of the other branches of the same fork.

        A = V - mean of the others      branches of a fork with values 1, 0, 0: 1, -1/2, -1/2

    V is the mean of the branches after the next fork, or the reward at the end if no fork follows.
    The turns before the first fork are compared among the group's rollouts. The papers also divide
    by the standard deviation, and include a rollout's own branches in its baseline.

    Example:
        train.RlSpec(
            algorithm=train.BranchEstimator(),
            rollout=train.RolloutOptions(branch=train.BranchOptions(where=(1,), num=4)),
        )
    """

    @property
    def needs(self) -> AlgorithmNeeds:
        return msgspec.structs.replace(super().needs, branches=True)

    def root_turn_advantages(
        self, group: Group, rewards: Mapping[str, float]
    ) -> Sequence[dict[tuple[str, int], TurnCredit]]:
        trees = [first_segment(trajectory) for trajectory in group.trajectories]
        values = [
            _Values(self._rewards(trajectory, tree, rewards))
            for trajectory, tree in zip(group.trajectories, trees, strict=True)
        ]
        known = [own.of(tree) for tree, own in zip(trees, values, strict=True)]
        of_trees = self._compare_values(known)
        return [
            dict(self._credits(tree, own, known, index, of_trees[index], 1.0))
            for index, (tree, own) in enumerate(zip(trees, values, strict=True))
        ]

    def _rewards(
        self, trajectory: Trajectory, tree: ForkSegment, rewards: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the reward at the end of each branch of a forked rollout, keyed by the id of the
        branch's last call.
        """
        if not tree.continuations:
            return {tree.call.id: total(trajectory.rewards, rewards)}
        return {
            end.id: total(trajectory.call_rewards.get(end.id, {}), rewards)
            for end, _ in tree.path_ends()
        }

    def _credits(
        self,
        segment: ForkSegment,
        values: _Values,
        trees: Sequence[float],
        index: int,
        advantage: float,
        share: float,
    ) -> Iterator[tuple[tuple[str, int], TurnCredit]]:
        """Yield the advantage and the loss weight of each turn in ``segment`` and in the segments
        after it.

        A segment is what was sampled between two forks.

        ``advantage`` and ``share`` are the advantage and the weight of the turns in ``segment``.
        ``trees`` holds the values of the group's rollouts, and ``index`` is the place of this
        rollout among them.
        """
        masked = (
            self.overlong == "mask"
            and not segment.continuations
            and ends_in_cut_reply(segment.call)
        )
        for turn in range(segment.start, segment.stop):
            yield (segment.call.id, turn), TurnCredit(advantage, 0.0 if masked else share)
        if not segment.continuations:
            return
        known = [values.of(each) for each in segment.continuations]
        alone = len(known) == 1
        advantages = [advantage] if alone else self._of_fork(known, trees, index)
        for place, (each, own) in enumerate(zip(segment.continuations, advantages, strict=True)):
            part = self._share(place, len(known)) * share
            yield from self._credits(each, values, trees, index, own, part)

    def _of_fork(self, values: list[float], trees: Sequence[float], index: int) -> Sequence[float]:
        """Return the advantages of the continuations of one fork, given their ``values``."""
        return self._compare_values(values)

    def _share(self, place: int, num: int) -> float:
        """Return the share of a segment's loss weight that goes to one of the segment's
        continuations.

        ``place`` is the continuation's number among the ``num`` that follow the segment.
        """
        return 1 / num


class VineEstimator(BranchEstimator, frozen=True, kw_only=True, tag_field="name", tag="vine"):
    """Estimate state values from sampled continuations (VinePPO 2410.01679, SPO 2505.23564): a
    turn's advantage is the value after it minus the value before it.

    Only the first continuation of each fork is trained on.

        A = V(state after) - V(state before)    V: mean reward of continuations from that state

    V before a turn leaves the turn's own continuation out. All turns between two forks have the
    same advantage, as in SPO's segments. With ``rl.rollout.branch.lines=first``, the other
    continuations do not fork again, as in VinePPO.

    Example:
        train.RlSpec(
            algorithm=train.VineEstimator(),
            rollout=train.RolloutOptions(
                branch=train.BranchOptions(where="every", num=3, budget=9, lines="first")
            ),
        )
    """

    def _share(self, place: int, num: int) -> float:
        return float(place == 0)


class EntropyBranchEstimator(
    BranchEstimator, frozen=True, kw_only=True, tag_field="name", tag="entropy_branch"
):
    """Fork where the policy is uncertain (ARPO 2507.19849, AEPO 2510.14545): a turn's advantage is
    its value minus the mean value of the group's other rollouts.

    So a turn before a fork gets the mean advantage of the branches after it.

        A = V - mean over other rollouts    rollouts of value 1/2 and 0; the first forked into 1, 0:
                                            its turns before the fork 1/2, its two branches 1 and 0

    Use it with ``rl.rollout.branch.where=entropy``. The papers also divide by the standard
    deviation, and AEPO scales advantages by entropy.

    Example:
        train.RlSpec(
            algorithm=train.EntropyBranchEstimator(),
            rollout=train.RolloutOptions(branch=train.BranchOptions(where="entropy")),
        )
    """

    def _of_fork(self, values: list[float], trees: Sequence[float], index: int) -> Sequence[float]:
        others = list(trees)
        found = []
        for value in values:
            others[index] = value
            found.append(self._compare_values(others)[index])
        return found


class StateGroupEstimator(
    TurnAdvantageEstimator, frozen=True, kw_only=True, tag_field="name", tag="state_group"
):
    """Compare rollouts in equal states (GiGPO 2505.10978): a turn's advantage is the rollout's
    reward minus the mean reward of the others in the same state.

    If there are no others in that state, the group's other rollouts are used.

        A = R - mean of those in the same state     rewards 1, 0, 0; after the first turn the first
                                                    two are in the same state:
                                                    turn 0: 1, -1/2, -1/2; turn 1: 1, -1, -1/2

    Needs no forks. GiGPO adds a rollout's own advantage to that of the state, which weighs turns
    with equal states twice, divides by standard deviations, and lets a rollout be compared with
    its own later visits.

    Example:
        train.RlSpec(algorithm=train.StateGroupEstimator())
    """

    state: Literal["history", "observation"] = "history"
    """When two states count as equal. ``history``: all messages so far are the same.
    ``observation``: the messages since the model's last reply are the same.
    """

    def root_turn_advantages(
        self, group: Group, rewards: Mapping[str, float]
    ) -> Sequence[dict[tuple[str, int], TurnCredit]]:
        returns = [total(trajectory.rewards, rewards) for trajectory in group.trajectories]
        states = [self._states(trajectory.root) for trajectory in group.trajectories]
        visitors: dict[Hashable, set[int]] = defaultdict(set)
        for index, own in enumerate(states):
            for state in own:
                visitors[state].add(index)
        of_group = self._compare_values(returns)
        found = []
        for index, (trajectory, own) in enumerate(zip(group.trajectories, states, strict=True)):
            masked = self.overlong == "mask" and ends_in_cut_reply(trajectory.root)
            credits = {}
            for turn, state in enumerate(own):
                peers = [index, *sorted(visitors[state] - {index})]
                advantage = (
                    self._compare_values([returns[peer] for peer in peers])[0]
                    if len(peers) > 1
                    else of_group[index]
                )
                credits[trajectory.root.id, turn] = TurnCredit(advantage, 0.0 if masked else 1.0)
            found.append(credits)
        return found

    def _states(self, root: Call) -> list[Hashable]:
        """Return a key for each turn of the root call, which identifies the state before the turn.

        Equal keys mean equal states.
        """
        states: list[Hashable] = []
        history: tuple[Hashable, ...] = ()
        for turn in root.turns:
            new = tuple((message.role, message.content) for message in turn.prompt)
            state = new if self.state == "observation" else (*history, turn.reused, new)
            states.append(state)
            history = (*history, turn.reused, new, turn.reply.message.content)
        return states


class _Values:
    """The estimated values of all segments of one forked rollout.

    A segment is what was sampled between two forks.
    """

    def __init__(self, rewards: Mapping[str, float]) -> None:
        """Create the values of a forked rollout from the reward at the end of each branch.

        ``rewards`` is keyed by the last call of each branch.
        """
        self._rewards = rewards

    def of(self, segment: ForkSegment) -> float:
        """Return the value of a segment of a forked rollout, estimated from the branches that
        follow it.

        It is the mean value of the segment's continuations, or the final reward if there are none.
        """
        if not segment.continuations:
            return self._rewards[segment.call.id]
        return fmean(map(self.of, segment.continuations))

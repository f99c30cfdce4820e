"""The bridge from trajectories to the pure functions of this package: the tree of a rollout, its
tokens and its lengths.

Decides what a call's own reward is (the weighted sum of its named rewards; the root's is the
task's), which calls attempt the same sub-task (the same question over the same context), and that a
continuation of a call (``Call.fork``) counts as its sibling, under the same parent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ramify.tasks.base import total
from ramify.train.advantages.credit import CreditNode
from ramify.train.advantages.length import RolloutLength
from ramify.types.trajectory import Call, Trajectory, Turn


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the rollout has a usable reward. One that failed for external reasons has none and
    gives no signal."""
    return not why_unscored(trajectory)


def why_unscored(trajectory: Trajectory) -> str:
    """Why a rollout cannot be learnt from, as a predicate ("has no reward"); empty if it can."""
    if not trajectory.calls:
        return "has no call" + _last_error(trajectory)
    if not trajectory.rewards:
        return "has no reward" + _last_error(trajectory)
    everywhere = {
        "": trajectory.rewards,
        **{f" of call {id}": own for id, own in trajectory.call_rewards.items()},
    }
    for where, rewards in everywhere.items():
        for name, value in rewards.items():
            if not math.isfinite(value):
                return f"has the reward {name}={value}{where}"
    return ""


def _last_error(trajectory: Trajectory) -> str:
    return f": {trajectory.errors[-1]}" if trajectory.errors else ""


def tree_of(trajectory: Trajectory, weights: Mapping[str, float]) -> dict[str, CreditNode]:
    """Call id -> node, each parent before its children. ``weights`` are the task's, by reward
    name."""
    tree: dict[str, CreditNode] = {}
    for call in in_order(trajectory):
        rewards = trajectory.rewards if not tree else trajectory.call_rewards.get(call.id, {})
        subtask = (call.question, call.context.digest if call.context else None)
        own, num = total(rewards, weights), num_sampled(call)
        tree[call.id] = CreditNode(
            parent_of(trajectory, call), call.depth, own, call.kind, subtask, num
        )
    return tree


def in_order(trajectory: Trajectory) -> list[Call]:
    """The calls of a trajectory, the root first and every other call after its parent. Calls of
    judges are left out."""
    calls = [call for call in trajectory.calls if call.kind != "judge"]
    return sorted(calls, key=lambda call: (call.depth, call is not trajectory.root))


def parent_of(trajectory: Trajectory, call: Call) -> str | None:
    """Id of the parent of ``call``. A continuation of the root is put under the root, since the two
    have no common parent."""
    while call.parent is None and call.fork is not None:
        root = trajectory.root.id
        if call.fork.call == root:
            return root
        call = trajectory.call(call.fork.call)
    return call.parent.call if call.parent is not None else None


def sampled(call: Call) -> Iterator[tuple[int, Turn, int]]:
    """(index, turn, number of sampled tokens) for each turn of ``call`` whose exact ids and
    log-probabilities are known."""
    for index, turn in enumerate(call.turns):
        if turn.num_ids is not None and turn.reply.token_ids and turn.reply.logprobs is not None:
            yield index, turn, len(turn.reply.token_ids)


def num_sampled(call: Call) -> int:
    """Number of tokens of ``call`` that can carry policy-gradient weight."""
    return sum(num for _, _, num in sampled(call))


def was_cut_off(call: Call) -> bool:
    """Whether a limit ended the call or its last reply."""
    by_limit = call.stop is not None and call.stop.is_truncated()
    return by_limit or (bool(call.turns) and call.turns[-1].reply.finish == "length")


def length_of(trajectory: Trajectory) -> RolloutLength:
    """Sampled tokens, prompt tokens and turns of the whole tree."""
    turns = [turn for call in trajectory.calls for turn in call.turns]
    num_input = sum(len(turn.reply.prompt_ids or ()) for turn in turns)
    num_output = sum(len(turn.reply.token_ids or ()) for turn in turns)
    return RolloutLength(num_output, num_input, len(turns))

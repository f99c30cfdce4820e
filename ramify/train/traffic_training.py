"""Train on recorded traffic instead of new rollouts.

Traffic consists of the replies that a served policy gave to its users. Enable it with ``ramify
train RECIPE task.traffic=STORE``.

    STORE (``ramify serve-policy --record``) ── replies with a reward ──> groups of rollouts
                                                                          instead of new ones
    the recipe's task ── its other splits ──> evaluations, as in any run

A rollout is one recorded reply that has a reward, with the conversation before it as its prompt.
Prompt, sampled ids and log-probabilities are those of the recording, and nothing is tokenized or
sampled again. A reply has the rewards of its run (reviews included) and its call. Rewards of the
reply itself (feedback, or a scorer of turns) take precedence over these. The trainer corrects for
older weights as for any stale rollout (``losses/``): all recorded tokens count as sampled before
the first step.

A group is a random sample of replies to different prompts, since each user's prompt is answered
only once. Algorithms that compare within a group thus compare replies to different prompts.
Redacted tokens have no weight. ``serve/traffic_recorder.py`` records the traffic.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.errors import ConfigError, RamifyError, StoreError
from ramify.store.folder_store import Store
from ramify.store.traffic_policy_identity import read_identity
from ramify.tasks.base import Item, LazySequence, RolloutInitialState, Score, Task
from ramify.tasks.batch_scoring import is_batch_scored
from ramify.train.advantages.base import OptimizerStepAdvantages, TokenCredit
from ramify.types.message import VersionSpan
from ramify.types.recorded_traffic import (
    NEXT_MESSAGE,
    RECORDER,
    REDACTED,
    TEMPERATURE,
    TokenizerAndArchitecture,
    next_user_message,
)
from ramify.types.trajectory import Call, RunAnnotation, Stop, Trajectory, Turn


class RewardedReply(NamedTuple):
    """A recorded reply that has a reward and can therefore be trained on."""

    run: str
    call: str
    turn: int
    rewards: Mapping[str, float]


class RecordedTrafficTask:
    """A task whose training examples are recorded replies.

    All other splits are those of an ordinary task.
    """

    def __init__(
        self, task: Task, store: Path, *, group: int, temperature: float, seed: int = 0
    ) -> None:
        """Create a task from the recorded traffic in the folder ``store`` and the other splits of
        ``task``.

        Each training item consists of ``group`` replies. Only replies sampled at ``temperature``
        are used. Raises ConfigError if ``store`` holds no recorded traffic or too few replies with
        a reward.
        """
        identity = read_identity(store)
        if identity is None:
            raise ConfigError(
                f"task.traffic={store} is not a store of recorded traffic: give the folder of "
                "`ramify serve-policy --record`"
            )
        self.identity: TokenizerAndArchitecture = identity
        self.name = task.name
        self.weights: Mapping[str, float] = task.weights
        self.store = Store(store)
        self._task = task
        self.replies, self.skipped = _rewarded_replies(self.store, temperature)
        """The replies to train on, and counts of the other rewarded replies by the reason for
        skipping them."""
        if len(self.replies) < group:
            raise ConfigError(_too_few(store, len(self.replies), self.skipped, group, temperature))
        random.Random(f"traffic/{seed}").shuffle(self.replies)
        groups = _ReplyGroups(len(self.replies), group)
        self.splits: Mapping[str, Sequence[Item]] = {**task.splits, "train": groups}

    async def prepare(self, item: Item) -> RolloutInitialState:
        return (
            RolloutInitialState() if has_recorded_replies(item) else await self._task.prepare(item)
        )

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        return self._task.score(item, trajectory)

    def is_scored_by_step(self, item: Item) -> bool:
        return not has_recorded_replies(item) and is_batch_scored(self._task, item)

    def score_step(
        self, rollouts: Sequence[tuple[Item, Trajectory]]
    ) -> Sequence[Score | RamifyError]:
        own: Any = self._task
        scores: Sequence[Score | RamifyError] = own.score_step(rollouts)
        return scores

    def check_policy_compatible(self, identity: TokenizerAndArchitecture) -> None:
        """Check that a policy can be trained on this traffic.

        Raises ConfigError if its tokenizer or architecture differs from the recorded policy's.
        """
        if difference := self.identity.difference(identity):
            raise ConfigError(
                f"task.traffic={self.store.root} has conversations of {difference}: its token ids "
                "and log-probabilities mean nothing to this policy"
            )

    async def recorded_rollout(self, item: Item, name: str, number: int) -> Trajectory:
        """Return the recorded reply ``number`` of a task item as a rollout called ``name``.

        If the recording was deleted in the meantime, the rollout has an error and no reward.
        """
        reply = self.replies[item.metadata["replies"][number]]
        try:
            run = await asyncio.to_thread(self.store.load, reply.run)
        except StoreError as error:
            return Trajectory(name, "", task=item.id, errors=[str(error)], stop=Stop.ERROR)
        return _reply_as_rollout(run, reply, name, item.id)


class _ReplyGroups(LazySequence[Item]):
    """Training items that each consist of a group of consecutive recorded replies.

    If too few replies are left for the last group, it is filled up with the first replies, so that
    all groups have the same size.
    """

    def __init__(self, num_replies: int, group: int) -> None:
        self._num_replies = num_replies
        self._group = group

    def __len__(self) -> int:
        return -(-self._num_replies // self._group)

    def at(self, index: int) -> Item:
        first = index * self._group
        replies = [number % self._num_replies for number in range(first, first + self._group)]
        return Item(id=f"traffic/{index}", metadata={"replies": replies})


def mask_redacted_tokens(assigned: OptimizerStepAdvantages) -> None:
    """Set the loss weight of redacted tokens to 0, in place.

    The loss denominators stay the same, so that the weight of other tokens does not depend on how
    many were redacted.
    """
    for rollout in assigned.rollouts:
        for mark in rollout.trajectory.marks:
            credit = rollout.credits.get((mark.call, mark.turn))
            if REDACTED in mark.tokens and credit is not None:
                flags = mark.tokens[REDACTED]
                rollout.credits[mark.call, mark.turn] = _mask_flagged(credit, flags)


def _mask_flagged(credit: TokenCredit, flags: Sequence[float]) -> TokenCredit:
    weights = {
        name: [
            0.0 if flag else value for value, flag in zip(getattr(credit, name), flags, strict=True)
        ]
        for name in ("rl", "ce", "kd")
        if getattr(credit, name)
    }
    return msgspec.structs.replace(credit, **weights)


def has_recorded_replies(item: Item) -> bool:
    """Return True if the task item ``item`` consists of recorded replies.

    No new rollouts are sampled for such an item.
    """
    return item.id.startswith("traffic/") and "replies" in item.metadata


def _rewarded_replies(store: Store, temperature: float) -> tuple[list[RewardedReply], Counter[str]]:
    """Return the replies in ``store`` that have a reward and can be trained on.

    Also count the rewarded replies that cannot be used, by reason.
    """
    found: list[RewardedReply] = []
    skipped: Counter[str] = Counter()
    for id in sorted(store.ids()):
        run = store.load(id)
        of_run = {**run.rewards, **store.review(id).rewards}
        for call in run.calls:
            for index, turn in enumerate(call.turns):
                marks = [each for each in run.marks if (each.call, each.turn) == (call.id, index)]
                rewards = {**of_run, **run.call_rewards.get(call.id, {})}
                for mark in marks:
                    rewards |= {} if mark.by == RECORDER else mark.values
                if not rewards:
                    continue
                reason = _why_not(turn, marks, temperature)
                if reason:
                    skipped[reason] += 1
                else:
                    found.append(RewardedReply(id, call.id, index, rewards))
    return found, skipped


def _why_not(turn: Turn, marks: Sequence[RunAnnotation], temperature: float) -> str:
    """Return the reason why a reply cannot be trained on, or an empty string if it can."""
    if not turn.reply.token_ids or turn.reply.logprobs is None:
        return "have no token ids"
    sampled_at = next(
        (each.values[TEMPERATURE] for each in marks if TEMPERATURE in each.values), 1.0
    )
    if sampled_at != temperature:
        return f"were sampled at temperature {sampled_at:g}"
    flags = next((each.tokens[REDACTED] for each in marks if REDACTED in each.tokens), [])
    return "are redacted completely" if flags and all(flags) else ""


def _too_few(
    store: Path, num: int, skipped: Mapping[str, int], group: int, temperature: float
) -> str:
    others = "".join(f"; {count} more {reason}" for reason, count in skipped.items())
    if not num and not skipped:
        return (
            f"task.traffic={store} has no rewards: collect feedback (POST /v1/feedback), or score "
            "its conversations with `ramify runs score`"
        )
    return (
        f"task.traffic={store} has {num} replies with a reward that were sampled at temperature "
        f"{temperature:g}{others}: with rl.rollout.group={group} at least that many are needed; "
        "lower it, or set rl.rollout.temperature"
    )


def _reply_as_rollout(run: Trajectory, reply: RewardedReply, name: str, task: str) -> Trajectory:
    """Convert one recorded reply into a rollout that can be trained on.

    It is a single call with one turn, whose prompt is the conversation before the reply.
    """
    source = run.call(reply.call)
    turn, path = source.turns[reply.turn], run.path(source, reply.turn)
    sampled = turn.reply.token_ids or ()
    assert path is not None
    conversation = run.conversation(source, reply.turn)
    call = Call(
        "0",
        "lm",
        "traffic",
        0,
        run.question,
        turns=[
            Turn(
                0,
                tuple(conversation[:-1]),
                msgspec.structs.replace(
                    turn.reply,
                    prompt_ids=tuple(path.ids[: len(path.ids) - len(sampled)]),
                    versions=(VersionSpan(0, len(sampled), 0),),
                ),
            )
        ],
        answer=turn.reply.message.content,
        stop=Stop.MAX_TOKENS if turn.reply.finish == "length" else Stop.FINAL,
    )
    about: dict[str, Any] = {"run": reply.run, "call": reply.call, "turn": reply.turn}
    about["versions"] = [span.version for span in turn.reply.versions or ()]
    marks = [
        msgspec.structs.replace(each, call="0", turn=0)
        for each in run.marks
        if (each.call, each.turn) == (reply.call, reply.turn)
    ]
    after = next_user_message(run, source, reply.turn)
    return Trajectory(
        name,
        run.question,
        task=task,
        calls=[call],
        rewards=dict(reply.rewards),
        marks=marks,
        answer=call.answer,
        stop=call.stop,
        usage=turn.reply.usage,
        metadata={"traffic": about} | ({} if after is None else {NEXT_MESSAGE: after.content}),
    )

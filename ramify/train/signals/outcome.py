r"""Signals that are computed by rules: a rollout's outcome, its tool use and its format.

Only a rubric, which may grade the outcome, asks a model.

    outcome    a verifier decides whether a rollout is right; if it is wrong, the penalty depends on
               its tool use. This number replaces the task's reward:
               accuracy 1 -> 1
               accuracy 0 -> min(-0.6, -1 + 0.05·(k - 2)) for k tool observations: 0 -> -1.1,
               4 -> -0.9
    tool use   +1 for a turn whose code ran, -1 for a turn whose code raised, nothing for a turn
               without code
    format     0 for a turn whose reply matches, -1 for one that does not:
               pattern=r"```repl\n.*?```"     a reply with a code block
               last=r"\\boxed\{.+\}"          the last reply has a different format

A wrong answer stays below zero however many tools it used, and a right one gets no bonus. Shaping
can therefore never reward a wrong answer. Without a verifier, the task's own total reward decides
whether a rollout is right. Always evaluate on the task's reward, never on this number.

Code that runs can still be wrong, and a policy that is rewarded for running code learns to run
code. Keep the weight of the tool-use signal small, and watch how tool use correlates with the
outcome, which is reported as ``NAME/outcome_correlation``. A well-formed reply earns nothing,
since a policy that is rewarded for its format learns only the format.
"""

from __future__ import annotations

import asyncio
import re

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item, total
from ramify.tasks.scoring.rubric import Rubric
from ramify.train.signals.base import JudgeModelCaller, SignalContext, SignalScore, judge_turn_views
from ramify.types.trajectory import Call, Group, Trajectory

_ERROR = re.compile(
    r"(?:^|\n)(?:Traceback \(most recent call last\)"
    r"|\w*(?:Error|Exception)\b[^\n]{0,200}$|Timeout)",
    re.M,
)


def is_tool_turn(call: Call, turn: int) -> bool:
    """Return True if the turn used a tool: it ran code cells, made native tool calls, or is
    followed by a tool message."""
    used = call.turns[turn]
    following = call.turns[turn + 1].prompt if turn + 1 < len(call.turns) else ()
    return bool(used.cells or used.reply.message.tool_calls) or any(
        message.role == "tool" for message in following
    )


def num_observations(call: Call) -> int:
    """Return the number of turns of a call that used a tool and observed its result."""
    return sum(is_tool_turn(call, index) for index in range(len(call.turns)))


class ToolErrorSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="tools",
):
    """A signal that scores each tool-using turn by whether an error followed.

    Implements ``Signal``.

    Example:
        train.RlSpec(signals={"tools": train.ToolErrorSignal(raised=-0.5)})
    """

    ran: float = 1.0
    raised: float = -1.0

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [self._score(trajectory) for trajectory in group.trajectories]

    def _score(self, trajectory: Trajectory) -> SignalScore:
        reading = SignalScore()
        if not trajectory.calls:
            reading.abstained = "empty"
            return reading
        call = trajectory.root
        for index, step in enumerate(judge_turn_views(call)):
            if is_tool_turn(call, index):
                failed = bool(step.error or _ERROR.search(step.observed))
                reading.turns[step.place] = self.raised if failed else self.ran
        reading.counts = {
            "used": float(len(reading.turns)),
            "raised": float(sum(v < 0 for v in reading.turns.values())),
        }
        reading.abstained = "" if reading.turns else "no tool was used"
        return reading


RIGHT = 1.0
WORST, PER_CALL, FREE, CAP = -1.0, 0.05, 2, -0.6


def tool_count_shaped_reward(right: bool, num_calls: int) -> float:
    """Return a rollout's outcome, adjusted for its number of tool observations (``num_calls``).

    A right answer gets 1. A wrong one gets a negative number, which rises by 0.05 with each
    observation up to -0.6.

    Example:
        tool_count_shaped_reward(right=False, num_calls=12)    # -0.6
    """
    return RIGHT if right else min(CAP, WORST + PER_CALL * (num_calls - FREE))


class OutcomeSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="outcome",
):
    """A signal that scores a rollout's outcome with a verifier or a judge.

    It sets ``SignalScore.outcome`` and implements ``Signal``.

    Example:
        train.RlSpec(signals={"outcome": train.OutcomeSignal(verifier="math")})
    """

    verifier: str = ""
    """Name of a scorer in ``tasks.scoring.SCORERS``, or ``module:attribute``, which is called with
    (answer, item). Empty: the task's own reward is used.
    """
    rubric: Rubric | None = None
    """Rubric with which a judge model grades the answer, instead of a verifier."""
    model: str = ""
    """The judge model for a rubric, as ``provider:model``."""
    sampling: Sampling = Sampling(2048, temperature=0.0)
    passed: float = 0.5
    """Minimum score of an answer that counts as right."""
    tools: bool = True
    """Whether the outcome of a wrong answer depends on tool use. False: a wrong answer always gets
    -1.
    """
    raw: bool = False
    """Use the score unchanged, without mapping it to ±1 and without shaping."""

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        item = context.items.get(group.task)
        return list(
            await asyncio.gather(
                *(
                    self._score_outcome(trajectory, item, context)
                    for trajectory in group.trajectories
                )
            )
        )

    async def _score_outcome(
        self, trajectory: Trajectory, item: Item | None, context: SignalContext
    ) -> SignalScore:
        reading = SignalScore()
        if item is None or not trajectory.rewards:
            reading.abstained = "not scored" if item is not None else "unknown item"
            return reading
        try:
            score = await self._score(trajectory, item, context, reading)
        except RamifyError as error:
            reading.abstained = "no grade" if self.rubric is not None else "verifier failed"
            reading.counts["failed"] = 1.0
            trajectory.errors.append(f"outcome: {error}")
            return reading
        right = score >= self.passed
        num_calls = num_observations(trajectory.root) if self.tools else FREE
        reading.outcome = score if self.raw else tool_count_shaped_reward(right, num_calls)
        reading.counts["accuracy"] = float(right)
        return reading

    async def _score(
        self, trajectory: Trajectory, item: Item, context: SignalContext, reading: SignalScore
    ) -> float:
        if self.rubric is not None:
            if context.asking is None:
                raise RamifyError(
                    "a rubric needs a judge to ask, but this run has no clients for models"
                )
            ask = context.asking(trajectory, "outcome", reading)
            return await self._grade_by_rubric(self.rubric, trajectory, item, ask)
        if not self.verifier:
            return total(trajectory.rewards, context.weights)
        from ramify.tasks.scoring import SCORERS

        score = await asyncio.to_thread(SCORERS.resolve(self.verifier), trajectory.answer, item)
        return float(score)

    async def _grade_by_rubric(
        self, rubric: Rubric, trajectory: Trajectory, item: Item, ask: JudgeModelCaller
    ) -> float:
        place = (trajectory.root.id, len(trajectory.root.turns) - 1)
        reply = await ask(
            self.model, rubric.messages(item, trajectory.answer), self.sampling, place
        )
        grade = rubric.read(reply.message.content)
        if grade is None:
            raise RamifyError(
                "the judge's reply holds no grades in the requested form: "
                f"…{reply.message.content[-80:]!r}"
            )
        return grade


MAX_CHARS = 50_000
"""Number of characters at the end of a reply that are searched for the pattern."""


class FormatSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="format",
):
    """A signal that checks the format of each reply and gives one number per turn.

    Implements ``Signal``.
    """

    pattern: str
    """Regular expression that a reply must contain. A dot also matches newlines."""
    last: str = ""
    """Regular expression that the last reply of a call must contain. Empty: ``pattern`` applies to
    it too."""
    good: float = 0.0
    bad: float = -1.0

    def __post_init__(self) -> None:
        for pattern in (self.pattern, self.last):
            try:
                re.compile(pattern, re.DOTALL)
            except re.error as error:
                raise ConfigError(
                    f"format: {pattern!r} is not a regular expression: {error}"
                ) from error

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [self._score(trajectory) for trajectory in group.trajectories]

    def _score(self, trajectory: Trajectory) -> SignalScore:
        reading = SignalScore()
        if not trajectory.calls or not trajectory.root.turns:
            reading.abstained = "empty"
            return reading
        steps = judge_turn_views(trajectory.root)
        for step in steps:
            pattern = self.last if self.last and step is steps[-1] else self.pattern
            is_good = re.search(pattern, step.reply[-MAX_CHARS:], re.DOTALL) is not None
            reading.turns[step.place] = self.good if is_good else self.bad
        reading.counts["malformed"] = float(
            sum(value == self.bad for value in reading.turns.values())
        )
        return reading

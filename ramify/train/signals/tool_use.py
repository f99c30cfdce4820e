"""Tool use, turn by turn: +1 for a turn whose code ran, -1 for one whose code raised, nothing for
one without code.

Only a part of doing well: code that runs can be silently wrong, and a policy that is paid for
running code learns to run code. Its correlation with the outcome is reported beside it
(``NAME/outcome_correlation``); keep its weight small.
"""

from __future__ import annotations

import re

import msgspec

from ramify.train.signals.base import SignalContext, SignalScore
from ramify.train.signals.judge_view import steps_of
from ramify.types.trajectory import Call, Group, Trajectory

_ERROR = re.compile(
    r"(?:^|\n)(?:Traceback \(most recent call last\)|\w*(?:Error|Exception)\b[^\n]{0,200}$|Timeout)",
    re.M,
)


def has_tool(call: Call, turn: int) -> bool:
    """Whether the turn used a tool: it ran cells, or made native tool calls, or is answered by
    one."""
    found = call.turns[turn]
    following = call.turns[turn + 1].prompt if turn + 1 < len(call.turns) else ()
    return bool(found.cells or found.reply.message.tool_calls) or any(
        each.role == "tool" for each in following
    )


def num_observations(call: Call) -> int:
    """How many of the call's turns used a tool and saw what came of it."""
    return sum(has_tool(call, index) for index in range(len(call.turns)))


class ToolUseSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="tools",
):
    """Implements ``Signal``: a number per turn that used a tool."""

    ran: float = 1.0
    raised: float = -1.0

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [self._one(trajectory) for trajectory in group.trajectories]

    def _one(self, trajectory: Trajectory) -> SignalScore:
        reading = SignalScore()
        if not trajectory.calls:
            reading.abstained = "empty"
            return reading
        call = trajectory.root
        for index, step in enumerate(steps_of(call)):
            if has_tool(call, index):
                failed = bool(step.error or _ERROR.search(step.observed))
                reading.turns[step.place] = self.raised if failed else self.ran
        reading.counts = {
            "used": float(len(reading.turns)),
            "raised": float(sum(v < 0 for v in reading.turns.values())),
        }
        reading.abstained = "" if reading.turns else "no tool was used"
        return reading

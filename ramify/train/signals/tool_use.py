"""Tool use, turn by turn: +1 for a turn whose code ran, -1 for a turn whose code raised, nothing
for a turn without code.

This is only part of doing well: code that runs can still be wrong, and a policy that is rewarded
for running code learns to run code. The correlation with the outcome is reported as
``NAME/outcome_correlation``; keep the weight of this signal small.
"""

from __future__ import annotations

import re

import msgspec

from ramify.train.signals.base import SignalContext, SignalScore, steps_of
from ramify.types.trajectory import Call, Group, Trajectory

_ERROR = re.compile(
    r"(?:^|\n)(?:Traceback \(most recent call last\)"
    r"|\w*(?:Error|Exception)\b[^\n]{0,200}$|Timeout)",
    re.M,
)


def has_tool(call: Call, turn: int) -> bool:
    """Whether the turn used a tool: it ran cells, made native tool calls, or is followed by a tool
    message."""
    used = call.turns[turn]
    following = call.turns[turn + 1].prompt if turn + 1 < len(call.turns) else ()
    return bool(used.cells or used.reply.message.tool_calls) or any(
        message.role == "tool" for message in following
    )


def num_observations(call: Call) -> int:
    """Number of the call's turns that used a tool and observed the result."""
    return sum(has_tool(call, index) for index in range(len(call.turns)))


class ToolUseSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="tools",
):
    """Tool-use score for each turn that used a tool; implements ``Signal``.

    Example:
        train.RlSpec(signals={"tools": train.ToolUseSignal(raised=-0.5)})
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

"""What a judge sees of a trajectory: its turns, each with the observation that followed it.

    turn 0: reply, cells      turn 1: prompt adds "4 rows found"
        ──>  JudgedTurn(reply=reply, observed="4 rows found", error="")

Decides what counts as observed: whatever the next turn's prompt adds, since that is what the model
itself was shown. The last turn has no observation, only its cells' error.
"""

from __future__ import annotations

from ramify.tasks.base import Item
from ramify.train.signals.base import JudgedTurn, JudgeView, ModelCaller, TurnId
from ramify.types.trajectory import Call, Trajectory, Turn

NO_ITEM = Item("")


def steps_of(call: Call) -> tuple[JudgedTurn, ...]:
    """The turns of ``call`` as a judge sees them, in order."""
    turns = call.turns
    after = [*turns[1:], None]
    return tuple(
        JudgedTurn((call.id, index), _reply_text(turn), _observed(following), _error(turn))
        for index, (turn, following) in enumerate(zip(turns, after, strict=True))
    )


def view_of(
    trajectory: Trajectory,
    call: Call,
    turn: int | None = None,
    item: Item | None = None,
    ask: ModelCaller | None = None,
) -> JudgeView:
    """The view of one turn, with the turns up to it; of the finished call if ``turn`` is None."""
    steps = steps_of(call)
    last = len(steps) - 1 if turn is None else turn
    place: TurnId = (call.id, last)
    return JudgeView(trajectory, steps[: last + 1], place, item or NO_ITEM, ask)


def _reply_text(turn: Turn) -> str:
    message = turn.reply.message
    parts = [
        message.reasoning or "",
        message.content,
        *(f"{call.name}({call.arguments})" for call in message.tool_calls),
    ]
    return "\n".join(part for part in parts if part)


def _observed(following: Turn | None) -> str:
    if following is None:
        return ""
    return "\n".join(
        message.content for message in following.prompt if message.role in ("user", "tool")
    )


def _error(turn: Turn) -> str:
    return next((cell.error for cell in turn.cells if cell.error), "")

"""The reward of these agents: half for the right answer, half for having read it somewhere."""

from ramify import train


def score(run: train.AgentRun) -> dict[str, float]:
    shown = [
        message.content
        for call in run.trajectory.calls
        for turn in call.turns
        for message in turn.prompt
        if message.role in ("tool", "user")
    ]
    has_read = any(run.item.gold in text for text in shown)
    return {"right": 0.5 * (run.answer == run.item.gold), "read": 0.5 * has_read}

"""Rule-based judges for the small run."""

from __future__ import annotations

from ramify.train.signals.base import JudgeVerdict, JudgeView


class Steps:
    """Approves turns whose reply has odd length."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        return JudgeVerdict(votes=(1 if len(view.judged_turn.reply) % 2 else -1,))


class Hints:
    """Gives a hint to trajectories that sampled more odd than even ids."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        ids = [id for turn in view.trajectory.root.turns for id in turn.reply.token_ids or ()]
        if 2 * sum(id % 2 for id in ids) <= len(ids):
            return JudgeVerdict(reason="no hint is worth it")
        return JudgeVerdict(accept=True, hint="say even things, and few of them")

"""Judges of programs that are rules: hints from the errors of a rollout, or from what only the task knows; marks for turns.

    RuleJudge        what the errors said                     ``ramify.train.signals.programs:RuleJudge``
    OracleJudge      also what went wrong in silence          privileged: an upper bound, to be reported as such
    StepRules        a program that ran is +1, one that raised -1, an answer as what it rests on
    Shuffled         a control: each rollout gets the hint of another problem's

None of them asks a model. The rules themselves are in ``tasks/programs/hints.py``.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec

from ramify.tasks.programs import hints
from ramify.tasks.programs.library import Problem, Program, library
from ramify.train.signals.base import Context, Reading, Verdict, View
from ramify.types.trajectory import Group

_REMEMBERED = 64
"""Hints of other problems that ``Shuffled`` draws from."""
NOTHING = Verdict(votes=(-1,), reason="no rule was seen to be broken")


class RuleJudge(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="ramify.train.signals.programs:RuleJudge"
):  # fmt: skip
    """Implements ``Judge``: pure tool feedback. It reads what the policy itself was shown."""

    async def judge(self, view: View) -> Verdict:
        rules = hints.from_errors([step.observed or step.error for step in view.steps])
        return Verdict(True, hints.hint_text(rules), (1,)) if rules else NOTHING


class OracleJudge(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="ramify.train.signals.programs:OracleJudge"
):  # fmt: skip
    """Implements ``Judge``, with what the policy cannot know: the library's secret."""

    async def judge(self, view: View) -> Verdict:
        problem = Problem.read(view.item.question)
        if problem is None or "secret" not in view.item.metadata:
            return Verdict(reason="no problem of programs")
        said = [step.said for step in view.steps]
        rules = hints.from_facts(problem, said, library(view.item.metadata["secret"]))
        return Verdict(True, hints.hint_text(rules), (1,)) if rules else NOTHING


class StepRules(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="ramify.train.signals.programs:StepRules"
):  # fmt: skip
    """Implements ``Judge``: one vote on the view's turn. "It ran" is not "it was right": a wrong program that runs in
    silence is marked +1, which is why this signal alone helps little."""

    async def judge(self, view: View) -> Verdict:
        before = [step for step in view.steps if step.place[1] < view.place[1]]
        judged = view.step if Program.read(view.step.said) is not None else (before[-1] if before else None)
        ran = judged is not None and Program.read(judged.said) is not None and not judged.error
        return Verdict(votes=(1 if ran else -1,))


class Shuffled:
    """Implements ``HintSource``: the hints of ``source``, each given to a rollout of another problem. A control: as many
    hints, as long, and about something else."""

    def __init__(self, source: Any) -> None:
        from ramify.train.signals.hindsight import hints_of

        self._source = hints_of(source)
        self._pool: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        """(task, hint)"""

    async def hints(self, group: Group, context: Context) -> list[Any]:
        assert self._source is not None
        found = await self._source.hints(group, context)
        own = [hint for each in found for place in each.at.values() for hint in place]
        others = [hint for task, hint in self._pool if task != group.task]
        rng = random.Random(f"{context.step}/{group.task}")
        for each in found:
            if each.at and not others:
                each.at, each.reading = {}, Reading(abstained="no other problem's hint yet")
                continue
            for place in each.at:
                each.at[place] = [rng.choice(others)]
                each.reading.notes = {place: each.at[place][0]}
        self._pool.extend((group.task, hint) for hint in own)
        return found

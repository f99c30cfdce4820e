"""Judges of programs that are rules: hints from the errors of a rollout, or from what only the task
knows; marks for turns.

    RuleJudge        what the errors said                     ``ramify.train.signals.programs:RuleJudge``
    OracleJudge      also what went wrong in silence          privileged: an upper bound, to be reported as such
    StepRules        a program that ran is +1, one that raised -1, an answer as what it rests on
    Shuffled         a control: each rollout gets the hint of another problem's

None of them asks a model. The rules themselves are in ``tasks/programs/hints.py``.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from ramify.tasks.base import Item
from ramify.tasks.programs import hints
from ramify.tasks.programs.program_library import Program, ProgramProblem, library
from ramify.train.signals.base import JudgeVerdict, JudgeView, SignalContext
from ramify.train.signals.hindsight import TrajectoryHints, hints_of
from ramify.types.trajectory import Group

NOTHING = JudgeVerdict(votes=(-1,), reason="no rule was seen to be broken")


class RuleJudge(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:RuleJudge",
):
    """Implements ``Judge``: pure tool feedback. It reads what the policy itself was shown."""

    several: bool = False
    """Offer each rule alone, too, for a teacher that chooses."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        told = [hints.from_errors([step.observed or step.error]) for step in view.steps]
        rules = hints.from_errors([step.observed or step.error for step in view.steps])
        if not rules:
            return NOTHING
        last = max(index for index, named in enumerate(told) if named)
        alone = [[rule] for rule in rules] if self.several and len(rules) > 1 else []
        texts = tuple(hints.hint_text(each) for each in (rules, *alone))
        return JudgeVerdict(True, texts[0], (1,), texts, place=view.steps[last].place)


class OracleJudge(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:OracleJudge",
):
    """Implements ``Judge``, with what the policy cannot know: the library's secret."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        problem = ProgramProblem.read(view.item.question)
        if problem is None or "secret" not in view.item.metadata:
            return JudgeVerdict(reason="no problem of programs")
        said = [step.said for step in view.steps]
        rules = hints.from_facts(problem, said, library(view.item.metadata["secret"]))
        return JudgeVerdict(True, hints.hint_text(rules), (1,)) if rules else NOTHING


class StepRules(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:StepRules",
):
    """Implements ``Judge``: one vote on the view's turn. "It ran" is not "it was right": a wrong
    program that runs in silence is marked +1, which is why this signal alone helps little."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        before = [step for step in view.steps if step.place[1] < view.place[1]]
        judged = (
            view.step
            if Program.read(view.step.said) is not None
            else (before[-1] if before else None)
        )
        ran = judged is not None and Program.read(judged.said) is not None and not judged.error
        return JudgeVerdict(votes=(1 if ran else -1,))


class ShuffledHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:ShuffledHints",
):
    """Implements ``HintSource``: where ``source`` has a hint, one of as many rules about another
    problem of the same step. A control: as many hints, as long, each true, and none to the
    point."""

    source: Any

    async def hints(self, group: Group, context: SignalContext) -> list[TrajectoryHints]:
        source = hints_of(self.source)
        assert source is not None
        found = await source.hints(group, context)
        others = [item for id, item in sorted(context.items.items()) if id != group.task]
        for index, each in enumerate(found):
            for place, given in each.at.items() if others else ():
                rng = random.Random(f"{context.step}/{group.task}/{index}")
                each.at[place] = [_of_another(rng.choice(others), hint, rng) for hint in given]
                each.reading.notes = dict.fromkeys(each.reading.notes, each.at[place][0])
        return found


def _of_another(item: Item, hint: str, rng: random.Random) -> str:
    """A hint of as many rules as ``hint`` has, about ``item``."""
    problem = ProgramProblem.read(item.question)
    assert problem is not None, item.question
    words = [word for word, _ in problem.steps]
    known = library(item.metadata["secret"])
    num = max(1, hint.count("@w"))
    return hints.hint_text(
        hints.HintRule(word, known.right[word]) for word in rng.sample(words, min(num, len(words)))
    )

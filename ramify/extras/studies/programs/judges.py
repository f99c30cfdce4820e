"""Rule-based judges for the task ``programs``.

They turn a rollout's errors, or facts that the policy cannot know, into hints and votes.

    RuleHintJudge    hints at the rules that the errors revealed
    OracleJudge      also hints at mistakes that raised no error; it knows the right rules, so its
                     results are an upper bound and must be reported as such
    ProgramErrorJudge        +1 for a program that ran, -1 for one that raised;
                     an answer gets the vote of the program before it
    ShuffledHints    a control: each rollout gets a hint about a different problem

In a recipe, a judge is named by its location, such as
``ramify.extras.studies.programs.judges:RuleHintJudge``. None of them asks a model. The rules
themselves are in ``scripted_demonstrator.py``. The tag of each class is its former location, under
which checkpoints of earlier versions store it; these locations still resolve.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from ramify.extras.studies.programs.scripted_demonstrator import (
    ToyLanguageRule,
    broken_rules,
    hint_text,
    rules_from_errors,
)
from ramify.extras.studies.programs.toy_program_language import (
    ProgramWritingExercise,
    ToyProgram,
    generate_word_functions,
)
from ramify.tasks.base import Item
from ramify.train.signals.base import JudgeVerdict, JudgeView, SignalContext
from ramify.train.signals.hint_sources import HintsForTrajectory, build_hint_source
from ramify.types.trajectory import Group

NOTHING = JudgeVerdict(votes=(-1,), reason="no rule was seen to be broken")


class RuleHintJudge(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:RuleJudge",
):
    """A judge that writes hints from the rules that error messages revealed.

    It uses only what the policy itself saw. Implements ``Judge``.

    Example:
        train.HindsightHints(judge=train.RuleHintJudge())    # for the task programs
    """

    several: bool = False
    """Also offer each rule separately, for a teacher that chooses among hints."""

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        rules_by_step = [rules_from_errors([step.observed or step.error]) for step in view.steps]
        rules = rules_from_errors([step.observed or step.error for step in view.steps])
        if not rules:
            return NOTHING
        last = max(index for index, named in enumerate(rules_by_step) if named)
        single = [[rule] for rule in rules] if self.several and len(rules) > 1 else []
        texts = tuple(hint_text(selected) for selected in (rules, *single))
        return JudgeVerdict(True, texts[0], (1,), texts, place=view.steps[last].place)


class OracleJudge(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:OracleJudge",
):
    """A judge that knows the secret meaning of every word.

    So it also finds mistakes that raise no error. The policy cannot have this knowledge. Implements
    ``Judge``.

    Example:
        train.HindsightHints(judge=train.OracleJudge())    # for the task programs
    """

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        problem = ProgramWritingExercise.parse(view.item.question)
        if problem is None or "secret" not in view.item.metadata:
            return JudgeVerdict(reason="no problem of programs")
        replies = [step.reply for step in view.steps]
        rules = broken_rules(
            problem, replies, generate_word_functions(view.item.metadata["secret"])
        )
        return JudgeVerdict(True, hint_text(rules), (1,)) if rules else NOTHING


class ProgramErrorJudge(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:StepRules",
):
    """A judge that votes +1 for a turn whose program ran and -1 for one that raised an error.

    A wrong program that runs also gets +1, so this signal alone helps little. Implements ``Judge``.

    Example:
        train.ProcessRewardSignal(judge=train.ProgramErrorJudge())    # for the task programs
    """

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        before = [step for step in view.steps if step.place[1] < view.place[1]]
        judged = (
            view.judged_turn
            if ToyProgram.parse(view.judged_turn.reply) is not None
            else (before[-1] if before else None)
        )
        ran = judged is not None and ToyProgram.parse(judged.reply) is not None and not judged.error
        return JudgeVerdict(votes=(1 if ran else -1,))


class ShuffledHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ramify.train.signals.programs:ShuffledHints",
):
    """A control experiment in which every hint is about a different problem.

    The hints of another source are replaced. The number, length and correctness of the hints stay
    the same, but they are irrelevant. Implements ``HintSource``.

    Example:
        train.TeacherSignal(hints=train.ShuffledHints(source=hints))
    """

    source: Any

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        source = build_hint_source(self.source)
        assert source is not None
        hinted = await source.hints(group, context)
        others = [item for id, item in sorted(context.items.items()) if id != group.task]
        for index, result in enumerate(hinted):
            for place, texts in result.at.items() if others else ():
                rng = random.Random(f"{context.step}/{group.task}/{index}")
                result.at[place] = [_about_another(rng.choice(others), hint, rng) for hint in texts]
                result.reading.notes = dict.fromkeys(result.reading.notes, result.at[place][0])
        return hinted


def _about_another(item: Item, hint: str, rng: random.Random) -> str:
    """Return a hint about a different task item, with as many rules as the given hint."""
    problem = ProgramWritingExercise.parse(item.question)
    assert problem is not None, item.question
    words = [word for word, _ in problem.steps]
    secret = generate_word_functions(item.metadata["secret"])
    num = max(1, hint.count("@w"))
    return hint_text(
        ToyLanguageRule(word, secret.right[word])
        for word in rng.sample(words, min(num, len(words)))
    )

"""Hindsight: after a rollout is over, one short sentence that would have helped, or nothing.

    finished trajectory ── judge ── accept? ── filters ──> hint          most abstain: 35-40 % are expected to get one
                                     │            └─ rejected: short, long, sentences, leak, question, duplicate
                                     └─ abstained: no hint is worth it, outside the format, …

A hint states a rule or a fix, never the answer: what is true of one item alone does not carry over
to others. So one that holds the gold, or a long number of it, is rejected. Wrong hints are far
worse than none, hence abstaining is the default at every turn. Besides a judge, demonstrations and
tool feedback can stand in a hint's place (self-distillation). Leaves out what is done with hints
(``teacher.py``).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item, total
from ramify.tasks.scoring.answer_text import accepted, as_text
from ramify.train.signals.base import Judge, JudgeVerdict, Place, SignalContext, SignalScore
from ramify.train.signals.judge import judge_of, known_judge
from ramify.train.signals.judge_view import steps_of, view_of
from ramify.train.signals.rollout_trees import was_cut_off
from ramify.types.trajectory import Group, Trajectory

LONG_NUMBER = 4
"""Digits from which a number of the gold is never chance."""


class TrajectoryHints(msgspec.Struct, eq=False):
    """What was found for one trajectory."""

    reading: SignalScore
    """Notes, counts and judges' calls; ``abstained`` where there is no hint."""
    at: dict[Place, list[str]] = msgspec.field(default_factory=dict)
    """The turn before whose reply they are shown -> candidates, best first."""


class HintSource(Protocol):
    """Implemented by ``Hindsight``, ``DemonstrationHints`` and ``FeedbackHints``."""

    async def hints(self, group: Group, context: SignalContext) -> list[TrajectoryHints]:
        """One per trajectory, in order."""
        ...


class HintFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which hints are good enough."""

    min_chars: int = 10
    """A hint has more."""
    max_chars: int = 300
    max_sentences: int = 3

    def rejects(self, hint: str, item: Item, question: str) -> str:
        """Why ``hint`` is not taken, in a word; empty where it is."""
        text = hint.strip()
        if len(text) <= self.min_chars or len(text.split()) < 2:
            return "short"
        if len(text) > self.max_chars:
            return "long"
        if len(re.findall(r"[.!?](?:\s|$)", text)) > self.max_sentences or "```" in text:
            return "sentences"
        if leaks(text, item):
            return "leak"
        return "question" if text.casefold() in question.casefold() else ""


def leaks(hint: str, item: Item) -> bool:
    """Whether ``hint`` holds the gold as a word of its own (``7`` in "the answer is 7", not in
    "f7"), or a number of ``LONG_NUMBER`` digits or more that the gold has."""
    said = _plain(hint)
    for gold in accepted(item.gold):
        text = _plain(as_text(gold) or "")
        if text and re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", said):
            return True
        if any(
            len(number) >= LONG_NUMBER and number in said for number in re.findall(r"\d+", text)
        ):
            return True
    return False


def _plain(text: str) -> str:
    """Without what hides a number: separators of thousands, dollars, blanks at ends, case."""
    return re.sub(r"(?<=\d)[,_\u2009 ](?=\d{3})", "", text.casefold().replace("$", "")).strip()


class Hindsight(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="hindsight",
):
    """Implements ``HintSource``, and ``Signal`` for looking at hints without learning from them."""

    judge: Any
    """Of ``judge.JUDGES``, ``module:Class``, or one that is made already: its ``accept`` and
    ``hint`` count."""
    filter: HintFilter = HintFilter()
    per_turn: bool = False
    """A hint for each turn, shown right before it; otherwise one for the trajectory, shown at its
    beginning."""
    only: Literal["all", "failed"] = "all"
    """Which trajectories are judged."""
    passed: float = 0.5
    """Least total reward of one that did not fail."""
    cut_off: bool = False
    """Judge trajectories that a limit cut off, too."""
    choose: Literal["shortest", "longest"] = "shortest"
    """Which of several accepted hints comes first. The longest favours verbosity."""
    keep: int = 3
    """Candidates at most."""
    once: bool = False
    """Give a hint to one trajectory of a group alone, the first that it was found for."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "judge", known_judge(self.judge))

    async def hints(self, group: Group, context: SignalContext) -> list[TrajectoryHints]:
        judge = judge_of(self.judge)
        item = context.items.get(group.task)
        found = await asyncio.gather(
            *(self._one(judge, each, item, context) for each in group.trajectories)
        )
        return _each_once(found) if self.once else list(found)

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [each.reading for each in await self.hints(group, context)]

    async def _one(
        self, judge: Judge, trajectory: Trajectory, item: Item | None, context: SignalContext
    ) -> TrajectoryHints:
        found = TrajectoryHints(SignalScore())
        found.reading.abstained = self._passes_over(trajectory, item, context)
        if found.reading.abstained or item is None:
            return found
        ask = (
            context.asking.of(trajectory, "hindsight", found.reading)
            if context.asking is not None
            else None
        )
        call = trajectory.root
        turns: list[int | None] = list(range(len(call.turns))) if self.per_turn else [None]
        views = [view_of(trajectory, call, turn, item, ask) for turn in turns]
        verdicts = await asyncio.gather(*(_verdict(judge, view) for view in views))
        for view, verdict in zip(views, verdicts, strict=True):
            self._take(found, verdict, item, view.place)
        if not found.at:
            rejected = next(
                (name for name in found.reading.counts if name.startswith("rejected/")), ""
            )
            reason = rejected or next(
                (each.reason for each in verdicts if each.reason), "no hint is worth it"
            )
            found.reading.abstained = reason
        return found

    def _passes_over(
        self, trajectory: Trajectory, item: Item | None, context: SignalContext
    ) -> str:
        if (
            item is None
            or not trajectory.calls
            or not trajectory.root.turns
            or not trajectory.rewards
        ):
            return "not scored"
        if self.only == "failed" and total(trajectory.rewards, context.weights) >= self.passed:
            return "did not fail"
        return "cut off" if not self.cut_off and was_cut_off(trajectory.root) else ""

    def _take(
        self, found: TrajectoryHints, verdict: JudgeVerdict, item: Item, place: Place
    ) -> None:
        """Put the hints of a verdict that pass the filter before the turn that they are for."""
        counts = Counter({"votes": len(verdict.votes), "invalid": verdict.invalid})
        candidates = list(
            dict.fromkeys(
                each.strip() for each in (verdict.hints or (verdict.hint,)) if each.strip()
            )
        )
        if verdict.accept and not candidates:
            counts["rejected/empty"] += 1
        taken: list[str] = []
        for hint in candidates if verdict.accept else []:
            reason = self.filter.rejects(hint, item, item.question)
            if not reason and any(_alike(hint, other) for other in taken):
                reason = "duplicate"
            if reason:
                counts[f"rejected/{reason}"] += 1
            else:
                taken.append(hint)
        for name, num in counts.items():
            if num:
                found.reading.counts[name] = found.reading.counts.get(name, 0.0) + num
        if taken:
            taken.sort(key=len, reverse=self.choose == "longest")
            about = verdict.place or place
            found.at[place if self.per_turn else (place[0], 0)] = taken[: self.keep]
            found.reading.notes[about] = taken[0]


def _each_once(found: Sequence[TrajectoryHints]) -> list[TrajectoryHints]:
    """``found``, where a hint that a trajectory before has as well counts as rejected."""
    given: list[str] = []
    for hints in found:
        if any(_alike(text, other) for text in hints.reading.notes.values() for other in given):
            hints.at.clear()
            hints.reading.notes.clear()
            hints.reading.counts["rejected/repeated"] = 1.0
            hints.reading.abstained = "rejected/repeated"
        given += hints.reading.notes.values()
    return list(found)


def _alike(one: str, other: str) -> bool:
    return re.findall(r"\w+", one.casefold()) == re.findall(r"\w+", other.casefold())


async def _verdict(judge: Judge, view: Any) -> JudgeVerdict:
    try:
        return await judge.judge(view)
    except RamifyError as error:
        return JudgeVerdict(reason=type(error).__name__, invalid=1)


class DemonstrationHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="demonstrations",
):
    """Self-distillation from demonstrations: the policy is shown a solution, and learns to do
    without (SDFT, OPSD, and with ``siblings`` SDPO). A solution is of one item alone: rules distil
    better (see ``docs/signals.md``)."""

    source: Literal["siblings", "item"] = "siblings"
    """``siblings``: what a solved rollout of the same group said; ``item``: ``metadata[field]``."""
    field: str = "solution"
    passed: float = 0.5
    skip_solved: bool = True
    """Leave out trajectories that are solved already."""
    max_chars: int = 8000

    async def hints(self, group: Group, context: SignalContext) -> list[TrajectoryHints]:
        item = context.items.get(group.task)
        solved = [self._is_solved(each, context) for each in group.trajectories]
        texts = [
            "\n".join(step.said for step in steps_of(each.root))
            for each, is_solved in zip(group.trajectories, solved, strict=True)
            if is_solved and self.source == "siblings"
        ]
        if (
            self.source == "item"
            and item is not None
            and isinstance(item.metadata.get(self.field), str)
        ):
            texts = [item.metadata[self.field]]
        fitting = sorted((text for text in texts if text and len(text) <= self.max_chars), key=len)
        return [
            self._one(each, is_solved, fitting)
            for each, is_solved in zip(group.trajectories, solved, strict=True)
        ]

    def _is_solved(self, trajectory: Trajectory, context: SignalContext) -> bool:
        return (
            bool(trajectory.calls and trajectory.rewards)
            and total(trajectory.rewards, context.weights) >= self.passed
        )

    def _one(
        self, trajectory: Trajectory, is_solved: bool, texts: Sequence[str]
    ) -> TrajectoryHints:
        found = TrajectoryHints(SignalScore())
        if not trajectory.calls or not trajectory.root.turns or not trajectory.rewards:
            found.reading.abstained = "not scored"
        elif is_solved and self.skip_solved:
            found.reading.abstained = "solved"
        elif not texts:
            found.reading.abstained = "no demonstration"
        else:
            place = (trajectory.root.id, 0)
            found.at[place] = [f"A solution of this task, by somebody else:\n{texts[0]}"]
            found.reading.notes[place] = found.at[place][0]
        return found


class FeedbackHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="feedback",
):
    """Self-distillation from what the environment said: the last error that the trajectory met
    (SDPO)."""

    max_chars: int = 1000

    async def hints(self, group: Group, context: SignalContext) -> list[TrajectoryHints]:
        return [self._one(trajectory) for trajectory in group.trajectories]

    def _one(self, trajectory: Trajectory) -> TrajectoryHints:
        found = TrajectoryHints(SignalScore())
        errors = (
            [step for step in steps_of(trajectory.root) if step.error] if trajectory.calls else []
        )
        if not errors:
            found.reading.abstained = "no error"
            return found
        text = f"An attempt at this failed with:\n{errors[-1].error[-self.max_chars :]}"
        found.at[trajectory.root.id, 0] = [text]
        found.reading.notes[errors[-1].place] = text
        return found


HINTS = {
    "demonstrations": "ramify.train.signals.hindsight:DemonstrationHints",
    "feedback": "ramify.train.signals.hindsight:FeedbackHints",
    "hindsight": "ramify.train.signals.hindsight:Hindsight",
}
"""Name -> the class that implements ``HintSource``."""


def hints_of(spec: Any) -> HintSource | None:
    """What gives hints; None for none. Raises ConfigError."""
    from ramify.train.signals.signal_registry import made

    if spec is None:
        return None
    source: HintSource = made(spec, HINTS, "source of hints")
    if not callable(getattr(source, "hints", None)):
        raise ConfigError(f"{spec!r} gives no hints: give one of {', '.join(HINTS)}")
    return source

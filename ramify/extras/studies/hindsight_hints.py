"""Hindsight hints: after a rollout, a judge may write a hint from which the policy learns.

The hint is short and would have helped in the rollout.

    finished trajectory ── judge ── accepted? ── filters ──> hint (expected for 35-40 %)
                                       │            └─ rejected: short, long, sentences, leak,
                                       │                         question, duplicate
                                       └─ abstained: no hint is worth it, outside the format, …

A hint states a rule or a fix, never the answer, because what is true of one item alone does not
help on others. A hint that contains the expected answer, or a long number from it, is rejected. A
wrong hint does far more harm than none, so abstaining is the default everywhere. Demonstrations and
feedback from tools can replace the judge (self-distillation).

How training uses the hints is decided in ``train/signals/teacher.py``.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.tasks.base import Item, total
from ramify.tasks.scoring.answer_text import accepted_answers, as_text
from ramify.train.advantages.credit_assignment import was_cut_off
from ramify.train.signals.base import (
    Judge,
    JudgeVerdict,
    SignalContext,
    SignalScore,
    TurnId,
    build_judge_view,
    judge_turn_views,
)
from ramify.train.signals.hint_sources import HintsForTrajectory
from ramify.train.signals.judge import build_judge, checked_judge_spec, verdict_or_invalid
from ramify.types.recorded_traffic import NEXT_MESSAGE
from ramify.types.trajectory import Group, Trajectory

LONG_NUMBER = 4
"""A number from the expected answer gives it away if it has at least this many digits."""


class HintAcceptanceRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rules for accepting a judge's hint, such as limits on its length."""

    min_chars: int = 10
    """A hint must be longer than this many characters."""
    max_chars: int = 300
    max_sentences: int = 3

    def rejects(self, hint: str, item: Item, question: str) -> str:
        """Return the reason for rejecting a hint as a single word, or an empty string if it
        passes."""
        text = hint.strip()
        if len(text) <= self.min_chars or len(text.split()) < 2:
            return "short"
        if len(text) > self.max_chars:
            return "long"
        if len(re.findall(r"[.!?](?:\s|$)", text)) > self.max_sentences or "```" in text:
            return "sentences"
        if leaks_answer(text, item):
            return "leak"
        return "question" if text.casefold() in question.casefold() else ""


def leaks_answer(hint: str, item: Item) -> bool:
    """Return True if a hint gives away the expected answer.

    It does so if it contains the answer as a separate word (``7`` in "the answer is 7", but not in
    "f7"), or a number of at least ``LONG_NUMBER`` digits from the answer.
    """
    hint_text = _normalize_text(hint)
    for gold in accepted_answers(item.gold):
        text = _normalize_text(as_text(gold) or "")
        if text and re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", hint_text):
            return True
        if any(
            len(number) >= LONG_NUMBER and number in hint_text
            for number in re.findall(r"\d+", text)
        ):
            return True
    return False


def _normalize_text(text: str) -> str:
    """Normalize text so that different notations of a number compare equal.

    Removes thousands separators, dollar signs and surrounding blanks, and folds case.
    """
    return re.sub(r"(?<=\d)[,_\u2009 ](?=\d{3})", "", text.casefold().replace("$", "")).strip()


class HindsightHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="hindsight",
):
    """A source of hints that a judge writes after a rollout has ended.

    Implements ``HintSource``. It also implements ``Signal``, so that hints can be inspected without
    training on them.
    """

    judge: Any
    """Judge whose ``accept`` and ``hint`` are used: a name from ``judge.JUDGES``, a class as
    ``module:Class``, or an instance."""
    filter: HintAcceptanceRules = HintAcceptanceRules()
    per_turn: bool = False
    """If true, ask for a hint per turn and show it right before that turn. Otherwise ask for one
    hint per trajectory, shown at its beginning."""
    only: Literal["all", "failed"] = "all"
    """Which trajectories are judged."""
    passed: float = 0.5
    """Minimum total reward for a trajectory to count as passed."""
    cut_off: bool = False
    """Also judge trajectories that were cut off by a limit."""
    choose: Literal["shortest", "longest"] = "shortest"
    """Which of several accepted hints comes first. ``longest`` favours verbose hints."""
    keep: int = 3
    """Maximum number of candidate hints."""
    once: bool = False
    """Use a hint only once per group, for the first trajectory that received it. Later trajectories
    do not get an equal hint."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "judge", checked_judge_spec(self.judge))

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        judge = build_judge(self.judge)
        item = context.items.get(group.task)
        hints = await asyncio.gather(
            *(self._hints(judge, trajectory, item, context) for trajectory in group.trajectories)
        )
        return _without_repeats(hints) if self.once else list(hints)

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [hints.reading for hints in await self.hints(group, context)]

    async def _hints(
        self, judge: Judge, trajectory: Trajectory, item: Item | None, context: SignalContext
    ) -> HintsForTrajectory:
        hints = HintsForTrajectory(SignalScore())
        hints.reading.abstained = self._why_skipped(trajectory, item, context)
        if hints.reading.abstained or item is None:
            return hints
        ask = (
            context.asking(trajectory, "hindsight", hints.reading)
            if context.asking is not None
            else None
        )
        call = trajectory.root
        turns: list[int | None] = list(range(len(call.turns))) if self.per_turn else [None]
        views = [build_judge_view(trajectory, call, turn, item, ask) for turn in turns]
        verdicts = await asyncio.gather(*(verdict_or_invalid(judge, view) for view in views))
        for view, verdict in zip(views, verdicts, strict=True):
            self._add_hints(hints, verdict, item, view.place)
        if not hints.at:
            rejected = next(
                (name for name in hints.reading.counts if name.startswith("rejected/")), ""
            )
            reason = rejected or next(
                (verdict.reason for verdict in verdicts if verdict.reason), "no hint is worth it"
            )
            hints.reading.abstained = reason
        return hints

    def _why_skipped(
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

    def _add_hints(
        self, hints: HintsForTrajectory, verdict: JudgeVerdict, item: Item, place: TurnId
    ) -> None:
        """Attach the accepted hints of a judge's verdict to the turn that was judged."""
        counts = Counter({"votes": len(verdict.votes), "invalid": verdict.invalid})
        candidates = list(
            dict.fromkeys(
                hint.strip() for hint in (verdict.hints or (verdict.hint,)) if hint.strip()
            )
        )
        if verdict.accept and not candidates:
            counts["rejected/empty"] += 1
        passed: list[str] = []
        for hint in candidates if verdict.accept else []:
            reason = self.filter.rejects(hint, item, item.question)
            if not reason and any(_is_same(hint, other) for other in passed):
                reason = "duplicate"
            if reason:
                counts[f"rejected/{reason}"] += 1
            else:
                passed.append(hint)
        for name, num in counts.items():
            if num:
                hints.reading.counts[name] = hints.reading.counts.get(name, 0.0) + num
        if passed:
            passed.sort(key=len, reverse=self.choose == "longest")
            about = verdict.place or place
            hints.at[place if self.per_turn else (place[0], 0)] = passed[: self.keep]
            hints.reading.notes[about] = passed[0]


def _without_repeats(all_hints: Sequence[HintsForTrajectory]) -> list[HintsForTrajectory]:
    """Reject all hints of a trajectory if they repeat one from an earlier rollout in its group.

    Returns all trajectories' hints.
    """
    earlier: list[str] = []
    for hints in all_hints:
        if any(_is_same(text, other) for text in hints.reading.notes.values() for other in earlier):
            hints.at.clear()
            hints.reading.notes.clear()
            hints.reading.counts["rejected/repeated"] = 1.0
            hints.reading.abstained = "rejected/repeated"
        earlier += hints.reading.notes.values()
    return list(all_hints)


def _is_same(one: str, other: str) -> bool:
    return re.findall(r"\w+", one.casefold()) == re.findall(r"\w+", other.casefold())


class SolutionHintSource(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="demonstrations",
):
    """A source of hints that shows the teacher model a solution of the same task item.

    The policy learns to do without it. This is self-distillation as in SDFT, OPSD and (with
    ``siblings``) SDPO. A solution fits only one item, so policies learn better from rules (see
    ``docs/signals.md``).
    """

    source: Literal["siblings", "item"] = "siblings"
    """Origin of the solution: ``siblings`` uses replies of a solved rollout of the same group,
    ``item`` uses the item's ``metadata[field]``."""
    field: str = "solution"
    passed: float = 0.5
    skip_solved: bool = True
    """Give no hint to trajectories that already solved the task."""
    max_chars: int = 8000

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        item = context.items.get(group.task)
        solved = [self._is_solved(trajectory, context) for trajectory in group.trajectories]
        texts = [
            "\n".join(step.reply for step in judge_turn_views(trajectory.root))
            for trajectory, is_solved in zip(group.trajectories, solved, strict=True)
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
            self._hints(trajectory, is_solved, fitting)
            for trajectory, is_solved in zip(group.trajectories, solved, strict=True)
        ]

    def _is_solved(self, trajectory: Trajectory, context: SignalContext) -> bool:
        return (
            bool(trajectory.calls and trajectory.rewards)
            and total(trajectory.rewards, context.weights) >= self.passed
        )

    def _hints(
        self, trajectory: Trajectory, is_solved: bool, texts: Sequence[str]
    ) -> HintsForTrajectory:
        hints = HintsForTrajectory(SignalScore())
        if not trajectory.calls or not trajectory.root.turns or not trajectory.rewards:
            hints.reading.abstained = "not scored"
        elif is_solved and self.skip_solved:
            hints.reading.abstained = "solved"
        elif not texts:
            hints.reading.abstained = "no demonstration"
        else:
            place = (trajectory.root.id, 0)
            hints.at[place] = [f"A solution of this task, by somebody else:\n{texts[0]}"]
            hints.reading.notes[place] = hints.at[place][0]
        return hints


class NextMessageHintSource(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="next_message",
):
    """A source of hints that uses the user's next message in recorded conversations
    (``task.traffic``).

    The hint for a reply is the user's next message. Implements ``HintSource``.

    Example:
        train.TeacherSignal(hints=train.NextMessageHintSource())
    """

    only: Literal["all", "failed"] = "failed"
    """Which replies get a hint. After a good reply, the next message is often about something
    else."""
    passed: float = 0.5
    """Minimum total reward for a reply to count as passed."""
    max_chars: int = 1000

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        return [self._hints(trajectory, context) for trajectory in group.trajectories]

    def _hints(self, trajectory: Trajectory, context: SignalContext) -> HintsForTrajectory:
        hints = HintsForTrajectory(SignalScore())
        text = trajectory.metadata.get(NEXT_MESSAGE, "").strip()
        if not trajectory.calls or not trajectory.rewards:
            hints.reading.abstained = "not scored"
        elif self.only == "failed" and total(trajectory.rewards, context.weights) >= self.passed:
            hints.reading.abstained = "did not fail"
        elif not text:
            hints.reading.abstained = "no next message"
        else:
            place = (trajectory.root.id, len(trajectory.root.turns) - 1)
            text = text[: self.max_chars]
            hints.at[place] = [f"The user's answer to your reply will be:\n{text}"]
            hints.reading.notes[place] = hints.at[place][0]
        return hints


class FeedbackHints(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="feedback",
):
    """A source of hints that turns the last error of a trajectory into its hint.

    The error comes from the environment, as in SDPO. Implements ``HintSource``.

    Example:
        train.TeacherSignal(hints=train.FeedbackHints(max_chars=500))
    """

    max_chars: int = 1000

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        return [self._hints(trajectory) for trajectory in group.trajectories]

    def _hints(self, trajectory: Trajectory) -> HintsForTrajectory:
        hints = HintsForTrajectory(SignalScore())
        errors = (
            [step for step in judge_turn_views(trajectory.root) if step.error]
            if trajectory.calls
            else []
        )
        if not errors:
            hints.reading.abstained = "no error"
            return hints
        text = f"An attempt at this failed with:\n{errors[-1].error[-self.max_chars :]}"
        hints.at[trajectory.root.id, 0] = [text]
        hints.reading.notes[errors[-1].place] = text
        return hints

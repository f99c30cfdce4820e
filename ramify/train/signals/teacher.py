"""A teacher reads the policy's own tokens again, shown a hint that the policy had not: ℓ_T − ℓ_o,
token by token.

    path     P P P u u u </u> <a> r r r </a> o o o <a> r r       r sampled, o observed, u the last user message
    row      P P P u u u h h </u> <a> r r r </a> o o o <a> r r   the hint at the end of the message, the rest unchanged
                                      x x x            x x       scored

Positive where the hint makes the token likelier: minus a one-sample estimate of the reverse KL from
policy to teacher. Everything is ids: the hint's are put into the prompt's, and those of the
response are asserted to be the same. Without hints (``hints=None``) it is on-policy distillation
from whoever the source is. What cannot be scored has no reading, never zeros. Decides rows, the
choice among hints and what becomes of the scores; leaves out who computes them (``scorer.py``).

Legend: N tokens sampled in a turn, k candidates per position.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from ramify.errors import ConfigError, RamifyError, TrainError
from ramify.train.optional_fields import check_optional
from ramify.train.signals.base import (
    Place,
    PromptRenderer,
    ScoringRow,
    SignalContext,
    SignalScore,
    TokenScorer,
    TokenScores,
    TopKCandidates,
)
from ramify.train.signals.hindsight import TrajectoryHints, hints_of
from ramify.train.signals.rollout_trees import is_scored, was_cut_off
from ramify.types.message import Message
from ramify.types.token_path import TokenPath, TokenSpan
from ramify.types.trajectory import Call, Group, Trajectory

TEMPLATE = "\n\n[A hint for this task]\n{hint}"
ALL = -1
"""As ``top``: the whole vocabulary."""


class TeacherSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="teacher",
):
    """Implements ``Signal``: ``tokens`` is ℓ_T − ℓ_o, ``logprobs`` ℓ_T, ``top`` candidates where
    asked for."""

    hints: Any = None
    """Of ``hindsight.HINTS``; None: the teacher sees what the policy saw, and every trajectory is
    scored."""
    source: str = "reference"
    """Who it is: ``reference`` (the policy that rollouts began with, frozen), ``ema`` (an average
    of the policy's weights), ``live`` (the policy as it is), ``random`` (untrained weights: a
    control), ``client:NAME`` (an engine that gives log-probabilities of a prompt), or a
    checkpoint's folder."""
    template: str = TEMPLATE
    """What is put at the end of the last message before the reply, ``{hint}`` in it."""
    student: Literal["sampler", "recomputed"] = "sampler"
    """Where ℓ_o comes from: what the sampler said, or one more pass over the plain path by the code
    that scores the teacher: exact where sampler and trainer round differently (bf16), for another
    half of a forward pass."""
    top: int | None = None
    """Candidates per position for losses over more than the sampled token; -1: the whole
    vocabulary; None: none."""
    support: Literal["teacher", "student"] = "teacher"
    """Whose likeliest tokens the candidates are."""
    choose: Literal["first", "overlap"] = "first"
    """Among several accepted hints: as their source ordered them, or the one whose teacher shares
    the most of its likeliest tokens with the policy."""
    overlap: int = 4
    """Likeliest tokens per position that are compared."""
    evidence: float | None = None
    """Only tokens whose log-probability the hint itself moves by more than this count, so that
    un-hinted tokens are not pulled back to an old teacher; takes another pass of the teacher. None:
    all tokens count."""
    turns: Literal["all", "named"] = "all"
    """Which are scored: all from the hint on, or those up to the one that the hint is about. What
    comes after it has seen what the hint says, so that there the teacher mostly repeats what it was
    before."""
    cut_off: bool = False
    """Score trajectories that a limit cut off, too."""
    ema_decay: float = 0.05
    """Of the policy in each step's average."""

    def __post_init__(self) -> None:
        if isinstance(self.hints, str | Mapping):
            msgspec.structs.force_setattr(self, "hints", hints_of(self.hints))
        if "{hint}" not in self.template:
            raise ConfigError(f"teacher.template={self.template!r} has no {{hint}} in it")
        check_optional("teacher", "all tokens", evidence=self.evidence)
        is_number = self.top is None or self.top == ALL or self.top > 0
        if not is_number or self.overlap < 1 or not 0 < self.ema_decay <= 1:
            raise ConfigError(
                f"teacher: top={self.top} is -1 (all), null (none) or at least 1, "
                f"overlap={self.overlap} at least 1, ema_decay={self.ema_decay} in (0, 1]"
            )
        if self.source == "live" and self.hints is not None:
            warnings.warn(
                "a live teacher (the policy itself, with a hint) eroded or collapsed in two of "
                "five seeds: source=reference "
                "or source=ema is safer",
                stacklevel=2,
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Scorers that it needs."""
        needs_student = (
            self.student == "recomputed"
            or self.choose == "overlap"
            or (self.top and self.support == "student")
        )
        return tuple(dict.fromkeys((self.source, *(["live"] if needs_student else []))))

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        source = hints_of(self.hints)
        if source is None:
            found = [self._unhinted(each) for each in group.trajectories]
        else:
            found = await source.hints(group, context)
        scorer = context.scorers.get(self.source)
        if scorer is None:
            raise ConfigError(
                f"there is no teacher '{self.source}' here: "
                f"{', '.join(context.scorers) or 'none was made'}"
            )
        rows = [
            row
            for index, (trajectory, hints) in enumerate(zip(group.trajectories, found, strict=True))
            for row in self._rows(index, trajectory, hints, context.writing)
        ]
        try:
            await self._score(rows, scorer, group, found, context)
        except RamifyError as error:  # no zeros in place of what could not be scored
            for hints in found:
                _abstain(hints.reading, type(error).__name__)
                hints.reading.tokens.clear()
                hints.reading.reference.clear()
        return [hints.reading for hints in found]

    def _unhinted(self, trajectory: Trajectory) -> TrajectoryHints:
        found = TrajectoryHints(SignalScore())
        if not trajectory.calls or not trajectory.root.turns or not trajectory.rewards:
            found.reading.abstained = "not scored"
        elif not self.cut_off and was_cut_off(trajectory.root):
            found.reading.abstained = "cut off"
        else:
            found.at[trajectory.root.id, 0] = [""]
        return found

    def _rows(
        self,
        index: int,
        trajectory: Trajectory,
        hints: TrajectoryHints,
        writing: PromptRenderer | None,
    ) -> list[_HintedRow]:
        """One per place and candidate. What cannot be written is counted, and the reading
        abstains."""
        rows = []
        for place, candidates in hints.at.items():
            call = trajectory.call(place[0])
            paths = trajectory.paths(call)
            spans = self._spans(paths[0], call, place, hints) if len(paths) == 1 else []
            if not spans or paths[0].logprobs is None:
                _abstain(hints.reading, "no whole path of ids")
                continue
            for hint in candidates if self.choose == "overlap" else candidates[:1]:
                try:
                    rows.append(
                        _HintedRow(
                            index,
                            place,
                            hint,
                            *self._row(trajectory, call, paths[0], spans, hint, writing),
                        )
                    )
                except _CannotWrite as error:
                    _abstain(hints.reading, str(error))
        return rows

    def _spans(
        self, path: TokenPath, call: Call, place: Place, hints: TrajectoryHints
    ) -> list[TokenSpan]:
        """What is scored of ``path`` with a hint at ``place``. With hints at several turns each is
        for its own."""
        spans = [span for span in path.spans if span.call == call.id and span.turn >= place[1]]
        about = [turn for id, turn in hints.reading.notes if id == call.id]
        if self.turns == "named" and about:
            spans = [span for span in spans if span.turn <= max(about)] or spans[:1]
        return spans[:1] if len(hints.at) > 1 else spans

    def _row(
        self,
        trajectory: Trajectory,
        call: Call,
        path: TokenPath,
        spans: list[TokenSpan],
        hint: str,
        writing: PromptRenderer | None,
    ) -> tuple[ScoringRow, ScoringRow, list[TokenSpan]]:
        """(the teacher's row, the plain one, the spans that are scored)."""
        begin, end = spans[0].start, spans[-1].end
        plain = list(path.ids[:end])
        prompt = plain[:begin]
        given = (
            self._hinted(trajectory, call, spans[0].turn, prompt, hint, writing) if hint else prompt
        )
        row = ScoringRow(
            [*given, *plain[begin:]],
            [(s.start + len(given) - begin, s.end + len(given) - begin) for s in spans],
        )
        for span, (start, stop) in zip(spans, row.spans, strict=True):
            if list(row.ids[start:stop]) != plain[span.start : span.end]:
                raise TrainError(
                    f"{trajectory.id}/call={call.id}/turn={span.turn}: the teacher's row has other "
                    "response ids"
                )
        return row, ScoringRow(plain, [(s.start, s.end) for s in spans]), spans

    def _hinted(
        self,
        trajectory: Trajectory,
        call: Call,
        turn: int,
        prompt: list[int],
        hint: str,
        writing: PromptRenderer | None,
    ) -> list[int]:
        """The ids of ``prompt`` with the hint at the end of its last message. The messages are
        written with and without it; where they differ, and there alone, the ids are exchanged."""
        if writing is None:
            raise _CannotWrite("no renderer")
        messages = trajectory.conversation(call, turn)[:-1]
        if not messages or messages[-1].role not in ("user", "tool"):
            raise _CannotWrite("the prompt ends with no message to it")
        last = messages[-1]
        more = Message(
            last.role,
            last.content + self.template.format(hint=hint),
            tool_call_id=last.tool_call_id,
        )
        without, with_hint = writing.prompt(messages), writing.prompt([*messages[:-1], more])
        same = next(
            (index for index, (a, b) in enumerate(zip(without, with_hint, strict=False)) if a != b),
            len(without),
        )
        tail = without[same:]
        if not tail or prompt[-len(tail) :] != tail:
            raise _CannotWrite("the prompt cannot be written again")
        return [*prompt[: len(prompt) - len(tail)], *with_hint[same:]]

    async def _score(
        self,
        rows: Sequence[_HintedRow],
        scorer: TokenScorer,
        group: Group,
        found: Sequence[TrajectoryHints],
        context: SignalContext,
    ) -> None:
        """One pass of the policy over the plain rows, where it is asked for, and one of the teacher
        over all candidates."""
        if not rows:
            return
        temperature = context.temperature
        compares = self.choose == "overlap" and len(
            {(row.number, row.place) for row in rows}
        ) < len(rows)
        student = await self._student(rows, compares, context)
        theirs = [
            ScoringRow(
                each.row.ids, each.row.spans, _first(scores.top_ids, self._num_support), temperature
            )
            for each, scores in zip(rows, student, strict=True)
        ]
        plain = [
            ScoringRow(each.plain.ids, each.plain.spans, row.candidates, temperature)
            for each, row in zip(rows, theirs, strict=True)
        ]
        whole = list(self._whole(group, context))
        top = max(
            (self.top or 0) if self.support == "teacher" else 0, self.overlap if compares else 0
        )
        top = ALL if self.top == ALL and self.support == "teacher" else top
        asked = [*theirs, *(plain if self.evidence else ()), *(each.row for each in whole)]
        scores = await scorer.score(asked, top=top)
        for root, values in zip(whole, scores[len(asked) - len(whole) :], strict=True):
            found[root.number].reading.reference |= _by_place(root.spans, values.logprobs)
        for index in self._chosen(rows, scores, student):
            each, reading = rows[index], found[rows[index].number].reading
            if compares and each.hint and len(reading.notes) == 1:
                reading.notes = dict.fromkeys(reading.notes, each.hint)
            evidence = scores[len(rows) + index].logprobs if self.evidence else None
            old = student[index].logprobs if self.student == "recomputed" else _sampled(each, group)
            self._write(reading, each, scores[index], student[index], old, evidence)

    @property
    def _num_support(self) -> int:
        """Of the policy's likeliest tokens that are candidates."""
        return (self.top or 0) if self.support == "student" else 0

    async def _student(
        self, rows: Sequence[_HintedRow], compares: bool, context: SignalContext
    ) -> list[TokenScores]:
        """What the policy thinks of the plain rows; empty ones where nobody asks. Rows of one
        trajectory are the same."""
        if not (compares or self._num_support or self.student == "recomputed"):
            return [TokenScores([])] * len(rows)
        top = (
            ALL
            if self._num_support == ALL
            else max(self._num_support, self.overlap if compares else 0)
        )
        plain = [
            ScoringRow(each.plain.ids, each.plain.spans, (), context.temperature) for each in rows
        ]
        return list(await context.scorers["live"].score(plain, top=top))

    def _whole(self, group: Group, context: SignalContext) -> Iterator[_SampledRoot]:
        """The roots of the group as they were sampled, where the teacher is who training compares
        them with by a KL: packed together, teacher's rows cost no prompt of their own, and training
        is spared this pass. Not where candidates are asked for, which would be made of these rows
        as well."""
        if not context.wants_reference or self.source != "reference" or self.top:
            return
        for index, trajectory in enumerate(group.trajectories):
            if not is_scored(trajectory):
                continue
            root = trajectory.root
            paths = trajectory.paths(root)
            spans = paths[0].spans if len(paths) == 1 and paths[0].logprobs is not None else ()
            if spans and all(span.call == root.id for span in spans):
                ids, places = (
                    list(paths[0].ids[: spans[-1].end]),
                    [(span.start, span.end) for span in spans],
                )
                yield _SampledRoot(
                    index,
                    ScoringRow(ids, places, (), context.temperature, is_plain=True),
                    list(spans),
                )

    def _chosen(
        self,
        rows: Sequence[_HintedRow],
        teacher: Sequence[TokenScores],
        student: Sequence[TokenScores],
    ) -> list[int]:
        """Of the rows of each trajectory and place the index of one."""
        by_place: dict[tuple[int, Place], list[int]] = {}
        for index, row in enumerate(rows):
            by_place.setdefault((row.number, row.place), []).append(index)
        if self.choose == "first":
            return [candidates[0] for candidates in by_place.values()]

        def shared(index: int) -> int:
            pairs = zip(teacher[index].top_ids, student[index].top_ids, strict=True)
            return sum(len({*a[: self.overlap]} & {*b[: self.overlap]}) for a, b in pairs)

        return [max(each, key=shared) if len(each) > 1 else each[0] for each in by_place.values()]

    def _write(
        self,
        reading: SignalScore,
        row: _HintedRow,
        scores: TokenScores,
        student: TokenScores,
        old: Sequence[float],
        plain: Sequence[float] | None,
    ) -> None:
        num = sum(span.end - span.start for span in row.spans)
        if not len(scores.logprobs) == len(old) == num:
            raise TrainError(
                f"the teacher '{self.source}' gave {len(scores.logprobs)} log-probabilities and "
                f"the policy {len(old)} for "
                f"{num} tokens"
            )
        begin = 0
        for span in row.spans:
            at = slice(begin, begin := begin + span.end - span.start)
            place = (span.call, span.turn)
            gaps = [t - o for t, o in zip(scores.logprobs[at], old[at], strict=True)]
            if plain is not None:
                moved = [
                    abs(t - p) > (self.evidence or 0.0)
                    for t, p in zip(scores.logprobs[at], plain[at], strict=True)
                ]
                gaps = [gap if counts else 0.0 for gap, counts in zip(gaps, moved, strict=True)]
            reading.tokens[place], reading.logprobs[place] = gaps, scores.logprobs[at]
            if num := self._num_support:
                reading.top[place] = TopKCandidates(
                    _first(student.top_ids[at], num),
                    scores.candidates[at],
                    _first(student.top[at], num),
                )
            elif self.top:
                reading.top[place] = TopKCandidates(
                    _first(scores.top_ids[at], self.top), _first(scores.top[at], self.top)
                )


class _CannotWrite(Exception):
    """Why a hint cannot be put before a reply, in a few words."""


class _HintedRow(NamedTuple):
    """One row to be scored."""

    number: int
    """Of the trajectory in its group."""
    place: Place
    hint: str
    row: ScoringRow
    plain: ScoringRow
    """The same without the hint."""
    spans: list[TokenSpan]


class _SampledRoot(NamedTuple):
    """A root as it was sampled."""

    number: int
    row: ScoringRow
    spans: list[TokenSpan]


T = TypeVar("T")


def _first(rows: Sequence[Sequence[T]], num: int) -> list[list[T]]:
    """The first ``num`` of each row, which are the likeliest; nothing for 0, all for ``ALL``."""
    if not num:
        return []
    return [list(row if num == ALL else row[:num]) for row in rows]


def _by_place(spans: Sequence[TokenSpan], values: Sequence[float]) -> dict[Place, list[float]]:
    """One number after the other, by the turns that they are about."""
    given = iter(values)
    return {
        (span.call, span.turn): [next(given) for _ in range(span.end - span.start)]
        for span in spans
    }


def _sampled(row: _HintedRow, group: Group) -> list[float]:
    """ℓ_o of the row's scored tokens, as the sampler said."""
    turns = {
        (c.id, i): t for c in group.trajectories[row.number].calls for i, t in enumerate(c.turns)
    }
    return [
        value for span in row.spans for value in turns[span.call, span.turn].reply.logprobs or ()
    ]


def _abstain(reading: SignalScore, reason: str) -> None:
    reading.abstained = reading.abstained or reason
    name = f"unscored/{reason}"
    reading.counts[name] = reading.counts.get(name, 0.0) + 1


def needed(signals: Mapping[str, Any]) -> dict[str, float]:
    """Scorers that these signals need -> the decay of its average, for ``ema``."""
    found: dict[str, float] = {}
    for signal in signals.values():
        if isinstance(signal, TeacherSignal):
            found |= dict.fromkeys(signal.sources, signal.ema_decay)
    return found

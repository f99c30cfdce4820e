"""The teacher signal: a teacher model rescores the policy's sampled tokens after a hint was added
to the prompt.

A token's score is its log-probability under the teacher (ℓ_T) minus its log-probability at sampling
(ℓ_o).

    path     P P P u u u </u> <a> r r r </a> o o o <a> r r
    row      P P P u u u h h </u> <a> r r r </a> o o o <a> r r
                                      x x x            x x       scored

    P prompt, u last user message, h hint at the end of that message, r sampled, o observed

The difference is positive if the hint makes the token more likely. Its negative is a one-sample
estimate of the reverse KL from policy to teacher. Everything is done on ids: the hint's ids are
inserted into the prompt's, and the response ids are checked to be unchanged. Without hints
(``hints=None``) this is on-policy distillation from the source. A turn that cannot be scored gets
no number, never zeros. This module builds the rows (token sequences to score), chooses among the
hints, and makes the signal from the scores. Log-probabilities are computed by teacher_logprobs.py.

Legend: N tokens sampled in a turn, k candidates per position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from ramify.errors import ConfigError, RamifyError, TrainError
from ramify.logging import ComponentLogger
from ramify.train.advantages.credit_assignment import has_usable_reward, was_cut_off
from ramify.train.config_redaction import check_none_or_positive
from ramify.train.signals.base import (
    ConversationTokenizer,
    SignalContext,
    SignalScore,
    TokenScorer,
    TokenScores,
    TokenScoringRequest,
    TopKCandidates,
    TurnId,
)
from ramify.train.signals.hint_sources import HintsForTrajectory, build_hint_source
from ramify.types.call_token_ids import CallTokenIds, SampledTokenSpan
from ramify.types.message import Message
from ramify.types.trajectory import Call, Group, Trajectory

_log = ComponentLogger("train")
TEMPLATE = "\n\n[A hint for this task]\n{hint}"
ALL = -1
"""Value of the option ``top`` that requests the whole vocabulary."""


class TeacherSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="teacher",
):
    """A training signal from a teacher model, which rescores the tokens that the policy sampled.

    ``tokens`` is ℓ_T − ℓ_o, ``logprobs`` is ℓ_T, and ``top`` holds candidates if requested."""

    hints: Any = None
    """Name of a hint source in ``hint_sources.HINTS``. None: the teacher sees what the policy saw,
    and every trajectory is scored.
    """
    source: str = "reference"
    """The teacher: ``reference`` (the initial policy, frozen), ``ema`` (an average of the policy's
    weights), ``live`` (the current policy), ``random`` (untrained weights, a control),
    ``client:NAME`` (an engine that returns prompt log-probabilities), or a checkpoint folder."""
    template: str = TEMPLATE
    """Text appended to the last message before the reply. It must contain ``{hint}``."""
    student: Literal["sampler", "recomputed"] = "sampler"
    """Source of the policy's log-probabilities ℓ_o. ``sampler``: those recorded during sampling.
    ``recomputed``: those of a pass over the sequence without the hint, by the code that also scores
    the teacher. This is exact even if sampler and trainer round differently (bf16), but adds half a
    forward pass."""
    top: int | None = None
    """Candidates per position, for losses over more than the sampled token. -1: the whole
    vocabulary. None: no candidates."""
    support: Literal["teacher", "student"] = "teacher"
    """Whose most likely tokens are the candidates, the teacher's or the policy's (``student``)."""
    choose: Literal["first", "overlap"] = "first"
    """How to choose among several accepted hints. ``first``: the source's first hint. ``overlap``:
    the hint with which the teacher's top tokens agree most with the policy's."""
    overlap: int = 4
    """Number of most likely tokens per position that ``choose="overlap"`` compares."""
    evidence: float | None = None
    """Minimum change that the hint must make to a token's log-probability under the teacher;
    smaller changes count as 0. This keeps tokens that the hint does not affect from being pulled
    towards an older teacher. Needs one more teacher pass. None: all tokens count.
    """
    turns: Literal["all", "named"] = "all"
    """Which turns are scored. ``all``: the turn where the teacher sees the hint and all later ones.
    ``named``: only up to the turn that the hint is about, since later turns have already seen what
    the hint says."""
    cut_off: bool = False
    """Also score trajectories that were cut off by a limit."""
    ema_decay: float = 0.05
    """Weight of the current policy when the moving average is updated in each step."""

    def __post_init__(self) -> None:
        if isinstance(self.hints, str | Mapping):
            msgspec.structs.force_setattr(self, "hints", build_hint_source(self.hints))
        if "{hint}" not in self.template:
            raise ConfigError(f"teacher.template={self.template!r} does not contain {{hint}}")
        check_none_or_positive("teacher", "all tokens", evidence=self.evidence)
        is_number = self.top is None or self.top == ALL or self.top > 0
        if not is_number or self.overlap < 1 or not 0 < self.ema_decay <= 1:
            raise ConfigError(
                f"teacher: top={self.top} must be -1 (all), null (none) or at least 1, "
                f"overlap={self.overlap} at least 1, ema_decay={self.ema_decay} in (0, 1]"
            )
        if self.source == "live" and self.hints is not None:
            _log.issue_python_warning(
                "a live teacher (the policy itself, with a hint) degraded or collapsed the policy "
                "in two of five seeds of our tests: source=reference or source=ema is safer",
                stacklevel=2,
            )

    @property
    def scorer_names(self) -> tuple[str, ...]:
        """The names of the models that this signal needs: its teacher, and ``live`` if the policy
        scores too."""
        needs_student = (
            self.student == "recomputed"
            or self.choose == "overlap"
            or (self.top and self.support == "student")
        )
        return tuple(dict.fromkeys((self.source, *(["live"] if needs_student else []))))

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        source = build_hint_source(self.hints)
        if source is None:
            hints = [self._without_hints(trajectory) for trajectory in group.trajectories]
        else:
            hints = await source.hints(group, context)
        scorer = context.scorers.get(self.source)
        if scorer is None:
            raise ConfigError(
                f"this run has no teacher '{self.source}'; it has "
                f"{', '.join(context.scorers) or 'none'}"
            )
        rows = [
            row
            for index, (trajectory, own) in enumerate(zip(group.trajectories, hints, strict=True))
            for row in self._hinted_rows(index, trajectory, own, context.writing)
        ]
        try:
            await self._score(rows, scorer, group, hints, context)
        except RamifyError as error:
            # A failed pass must not leave numbers: the signal abstains instead.
            for own in hints:
                _abstain(own.reading, type(error).__name__)
                own.reading.tokens.clear()
                own.reading.reference.clear()
        return [own.reading for own in hints]

    def _without_hints(self, trajectory: Trajectory) -> HintsForTrajectory:
        hints = HintsForTrajectory(SignalScore())
        if not trajectory.calls or not trajectory.root.turns or not trajectory.rewards:
            hints.reading.abstained = "not scored"
        elif not self.cut_off and was_cut_off(trajectory.root):
            hints.reading.abstained = "cut off"
        else:
            hints.at[trajectory.root.id, 0] = [""]
        return hints

    def _hinted_rows(
        self,
        index: int,
        trajectory: Trajectory,
        hints: HintsForTrajectory,
        writing: ConversationTokenizer | None,
    ) -> list[_HintedRow]:
        """Return the hinted token sequences for the teacher to score, one per turn and candidate
        hint.

        If a hint cannot be inserted into a prompt, the failure is counted and the turn gets no
        score.
        """
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
                            *self._build_scoring_requests(
                                trajectory, call, paths[0], spans, hint, writing
                            ),
                        )
                    )
                except _CannotInsert as error:
                    _abstain(hints.reading, str(error))
        return rows

    def _spans(
        self, path: CallTokenIds, call: Call, place: TurnId, hints: HintsForTrajectory
    ) -> list[SampledTokenSpan]:
        """Return the spans of sampled tokens that the teacher scores for the hint at the turn
        ``place``.

        If several turns have hints, each hint applies only to its own turn.
        """
        spans = [span for span in path.spans if span.call == call.id and span.turn >= place[1]]
        about = [turn for id, turn in hints.reading.notes if id == call.id]
        if self.turns == "named" and about:
            spans = [span for span in spans if span.turn <= max(about)] or spans[:1]
        return spans[:1] if len(hints.at) > 1 else spans

    def _build_scoring_requests(
        self,
        trajectory: Trajectory,
        call: Call,
        path: CallTokenIds,
        spans: list[SampledTokenSpan],
        hint: str,
        writing: ConversationTokenizer | None,
    ) -> tuple[TokenScoringRequest, TokenScoringRequest, list[SampledTokenSpan]]:
        """Build the requests to score a token sequence with and without one hint.

        Returns the token sequence with the hint for the teacher, the same sequence without the
        hint, and the token spans to score.
        """
        begin, end = spans[0].start, spans[-1].end
        plain = list(path.ids[:end])
        prompt = plain[:begin]
        hinted = (
            self._insert_hint(trajectory, call, spans[0].turn, prompt, hint, writing)
            if hint
            else prompt
        )
        row = TokenScoringRequest(
            [*hinted, *plain[begin:]],
            [(s.start + len(hinted) - begin, s.end + len(hinted) - begin) for s in spans],
        )
        for span, (start, stop) in zip(spans, row.spans, strict=True):
            if list(row.ids[start:stop]) != plain[span.start : span.end]:
                raise TrainError(
                    f"{trajectory.id}/call={call.id}/turn={span.turn}: the teacher's row has "
                    "different response ids"
                )
        return row, TokenScoringRequest(plain, [(s.start, s.end) for s in spans]), spans

    def _insert_hint(
        self,
        trajectory: Trajectory,
        call: Call,
        turn: int,
        prompt: list[int],
        hint: str,
        writing: ConversationTokenizer | None,
    ) -> list[int]:
        """Return the token ids of ``prompt`` with the hint added to the end of its last message.

        The messages are rendered with and without the hint, and only the ids that differ are
        replaced.
        """
        if writing is None:
            raise _CannotInsert("no renderer")
        messages = trajectory.conversation(call, turn)[:-1]
        if not messages or messages[-1].role not in ("user", "tool"):
            raise _CannotInsert("the prompt ends with no message to it")
        last = messages[-1]
        extended = Message(
            last.role,
            last.content + self.template.format(hint=hint),
            tool_call_id=last.tool_call_id,
        )
        plain, with_hint = writing.prompt(messages), writing.prompt([*messages[:-1], extended])
        num_same = next(
            (index for index, (a, b) in enumerate(zip(plain, with_hint, strict=False)) if a != b),
            len(plain),
        )
        tail = plain[num_same:]
        if not tail or prompt[-len(tail) :] != tail:
            raise _CannotInsert("the prompt cannot be written again")
        return [*prompt[: len(prompt) - len(tail)], *with_hint[num_same:]]

    async def _score(
        self,
        rows: Sequence[_HintedRow],
        scorer: TokenScorer,
        group: Group,
        hints: Sequence[HintsForTrajectory],
        context: SignalContext,
    ) -> None:
        """Score all hinted token sequences with the teacher in one pass.

        If the policy's scores are needed too, the policy makes one pass over the sequences without
        hints.
        """
        if not rows:
            return
        temperature = context.temperature
        compares = self.choose == "overlap" and len(
            {(row.number, row.place) for row in rows}
        ) < len(rows)
        student = await self._student_scores(rows, compares, context)
        hinted = [
            TokenScoringRequest(
                row.row.ids,
                row.row.spans,
                _first_candidates(scores.top_ids, self._num_support),
                temperature,
            )
            for row, scores in zip(rows, student, strict=True)
        ]
        plain = [
            TokenScoringRequest(row.plain.ids, row.plain.spans, scored.candidates, temperature)
            for row, scored in zip(rows, hinted, strict=True)
        ]
        roots = list(self._sampled_roots(group, context))
        top = max(
            (self.top or 0) if self.support == "teacher" else 0, self.overlap if compares else 0
        )
        top = ALL if self.top == ALL and self.support == "teacher" else top
        # Results have this order: with hints, without hints, root calls.
        requested = [*hinted, *(plain if self.evidence else ()), *(root.row for root in roots)]
        scores = await scorer.score(requested, top=top)
        for root, values in zip(roots, scores[len(requested) - len(roots) :], strict=True):
            hints[root.number].reading.reference |= _by_place(root.spans, values.logprobs)
        for index in self._choose_hints(rows, scores, student):
            row = rows[index]
            reading = hints[row.number].reading
            if compares and row.hint and len(reading.notes) == 1:
                reading.notes = dict.fromkeys(reading.notes, row.hint)
            evidence = scores[len(rows) + index].logprobs if self.evidence else None
            old = (
                student[index].logprobs
                if self.student == "recomputed"
                else _sampler_logprobs(row, group)
            )
            self._write(reading, row, scores[index], student[index], old, evidence)

    @property
    def _num_support(self) -> int:
        """The number of the policy's most likely tokens that are candidates at each position.

        It is 0 if the candidates are the teacher's.
        """
        return (self.top or 0) if self.support == "student" else 0

    async def _student_scores(
        self, rows: Sequence[_HintedRow], compares: bool, context: SignalContext
    ) -> list[TokenScores]:
        """Return the token scores of the policy (the student) for the token sequences without
        hints.

        If they are not needed, nothing is computed and all results are empty.
        """
        if not (compares or self._num_support or self.student == "recomputed"):
            return [TokenScores([])] * len(rows)
        top = (
            ALL
            if self._num_support == ALL
            else max(self._num_support, self.overlap if compares else 0)
        )
        plain = [
            TokenScoringRequest(row.plain.ids, row.plain.spans, (), context.temperature)
            for row in rows
        ]
        return list(await context.scorers["live"].score(plain, top=top))

    def _sampled_roots(self, group: Group, context: SignalContext) -> Iterator[_SampledRoot]:
        """Yield scoring requests for root calls without hints, if the loss has a KL term to this
        teacher.

        They save training the pass that this term would need.

        They are packed with the sequences that the teacher scores anyway, so the prompts that both
        share are computed only once. Yields nothing if candidates are requested, because those
        would be computed for these calls as well.
        """
        if not context.wants_reference or self.source != "reference" or self.top:
            return
        for index, trajectory in enumerate(group.trajectories):
            if not has_usable_reward(trajectory):
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
                    TokenScoringRequest(ids, places, (), context.temperature, is_plain=True),
                    list(spans),
                )

    def _choose_hints(
        self,
        rows: Sequence[_HintedRow],
        teacher: Sequence[TokenScores],
        student: Sequence[TokenScores],
    ) -> list[int]:
        """Choose one hint for each trajectory and turn, and return the indices of the chosen
        ``rows``.

        The option ``choose`` selects either the first hint or the one with the largest ``overlap``
        of teacher and policy.
        """
        by_place: dict[tuple[int, TurnId], list[int]] = {}
        for index, row in enumerate(rows):
            by_place.setdefault((row.number, row.place), []).append(index)
        if self.choose == "first":
            return [candidates[0] for candidates in by_place.values()]

        def shared(index: int) -> int:
            pairs = zip(teacher[index].top_ids, student[index].top_ids, strict=True)
            return sum(len({*a[: self.overlap]} & {*b[: self.overlap]}) for a, b in pairs)

        return [
            max(indices, key=shared) if len(indices) > 1 else indices[0]
            for indices in by_place.values()
        ]

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
                f"the policy {len(old)} for {num} tokens"
            )
        begin = 0
        for span in row.spans:
            at = slice(begin, begin := begin + span.end - span.start)
            place = (span.call, span.turn)
            differences = [t - o for t, o in zip(scores.logprobs[at], old[at], strict=True)]
            if plain is not None:
                moved = [
                    abs(t - p) > (self.evidence or 0.0)
                    for t, p in zip(scores.logprobs[at], plain[at], strict=True)
                ]
                differences = [
                    difference if counts else 0.0
                    for difference, counts in zip(differences, moved, strict=True)
                ]
            reading.tokens[place], reading.logprobs[place] = differences, scores.logprobs[at]
            if num := self._num_support:
                reading.top[place] = TopKCandidates(
                    _first_candidates(student.top_ids[at], num),
                    scores.candidates[at],
                    _first_candidates(student.top[at], num),
                )
            elif self.top:
                reading.top[place] = TopKCandidates(
                    _first_candidates(scores.top_ids[at], self.top),
                    _first_candidates(scores.top[at], self.top),
                )


class _CannotInsert(Exception):
    """Raised if a hint cannot be inserted before a reply.

    The message gives the reason in a few words.
    """


class _HintedRow(NamedTuple):
    """A token sequence with an inserted hint, for the teacher to score."""

    number: int
    """Index of the trajectory in its group."""
    place: TurnId
    hint: str
    row: TokenScoringRequest
    plain: TokenScoringRequest
    """The same sequence without the hint."""
    spans: list[SampledTokenSpan]


class _SampledRoot(NamedTuple):
    """The token sequence of a root call as it was sampled, without any hint."""

    number: int
    row: TokenScoringRequest
    spans: list[SampledTokenSpan]


T = TypeVar("T")


def _first_candidates(rows: Sequence[Sequence[T]], num: int) -> list[list[T]]:
    """Return the ``num`` most likely candidate tokens at each position.

    The candidates of a position are sorted by probability. The result is empty if ``num`` is 0. All
    candidates are kept if ``num`` is ``ALL``.
    """
    if not num:
        return []
    return [list(row if num == ALL else row[:num]) for row in rows]


def _by_place(
    spans: Sequence[SampledTokenSpan], values: Sequence[float]
) -> dict[TurnId, list[float]]:
    """Group per-token values by the turn in which the tokens were sampled.

    There is one value for each scored token.
    """
    remaining = iter(values)
    return {
        (span.call, span.turn): [next(remaining) for _ in range(span.end - span.start)]
        for span in spans
    }


def _sampler_logprobs(row: _HintedRow, group: Group) -> list[float]:
    """Return the sampler's log-probabilities of the tokens that the teacher scores in ``row``."""
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


def needed_scorers(signals: Mapping[str, Any]) -> dict[str, float]:
    """Return the moving-average decay of each model that scores tokens for ``signals``, by model
    name.

    Only ``ema``, an average of the policy's weights, uses the decay.
    """
    decays: dict[str, float] = {}
    for signal in signals.values():
        if isinstance(signal, TeacherSignal):
            decays |= dict.fromkeys(signal.scorer_names, signal.ema_decay)
    return decays

"""Defines the interface of signals. A signal looks at the rollouts of one task and gives numbers to
their turns and tokens, from which advantages are computed.

    Group ── signal.read(group, context) ──> [SignalScore], one per trajectory
                                             ── compose.py ──> advantages, weights

Signals are independent of each other. Every number belongs to a *turn* of a call (``TurnId``). A
judge, which may be a model or a rule, looks at a trajectory through a ``JudgeView`` and returns a
``JudgeVerdict``. A scorer returns log-probabilities of given tokens.

This module contains only these interfaces. Scores are combined in ``compose.py``, and ``stages.py``
decides when signals run.

Legend: N tokens sampled in a turn, k candidate tokens per position, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.tasks.base import Item
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Trajectory, Turn

TurnId = tuple[str, int]
"""(call id, index of the turn in ``Call.turns``)"""


class TopKCandidates(msgspec.Struct, eq=False):
    """The k candidate tokens at each position of one turn, with log-probabilities that are
    normalised over the whole vocabulary."""

    ids: list[list[int]]
    """[N, k]"""
    teacher: list[list[float]]
    """[N, k] log-probabilities of the candidates under the teacher."""
    student: list[list[float]] = msgspec.field(default_factory=list)
    """[N, k] log-probabilities under the policy being trained, as it was when the signal read the
    turn; empty if not requested."""


class SignalScore(msgspec.Struct, eq=False):
    """The output of one signal for one trajectory. If all fields are empty, the signal had nothing
    to say about it (it abstained)."""

    turns: dict[TurnId, float] = msgspec.field(default_factory=dict)
    """A number for each turn."""
    tokens: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """[N] a number for each sampled token of the turn's reply."""
    logprobs: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """[N] the teacher's log-probability of each sampled token, for losses that need it instead of
    the difference."""
    top: dict[TurnId, TopKCandidates] = msgspec.field(default_factory=dict)
    """Candidate tokens, if the teacher was asked for more than the sampled token."""
    reference: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """[N] log-probability of each sampled token under the initial policy, without any hint; for
    all turns of a call or for none. A by-product that saves the trainer a forward pass if its loss
    has a KL to that policy."""
    notes: dict[TurnId, str] = msgspec.field(default_factory=dict)
    """A short text per turn, such as a hint, which the viewer shows next to the turn."""
    abstained: str = ""
    """Why the signal abstained, in a few words; metrics count the reasons."""
    outcome: float | None = None
    """A reward for the whole trajectory, if the signal gives one."""
    counts: dict[str, float] = msgspec.field(default_factory=dict)
    """Counts for the metrics: votes, votes outside the format, hints rejected and why."""
    calls: list[Call] = msgspec.field(default_factory=list)
    """The judges' calls, of kind ``judge``. They are added to the tree after its streams are made,
    so they are never trained on."""


class JudgeTurnView(msgspec.Struct, frozen=True):
    """One turn of a call as a judge sees it: the reply, and what was observed after it.

    Example:
        JudgeTurnView(("0", 1), reply="FINAL(2)", observed="", error="")  # call 0, turn 1
    """

    place: TurnId
    reply: str
    """The reply, including reasoning that is stored separately."""
    observed: str
    """The result of the turn: what the next turn's prompt adds. Empty for the last turn."""
    error: str = ""
    """Traceback of the turn's first cell that raised."""


class ModelCaller(Protocol):
    """A function with which judges ask models. It uses the run's own client pool, cache and budget,
    and records each call for the tree.

    Example:
        reply = await view.ask("policy", messages, sampling, view.place)
    """

    async def __call__(
        self, model: str, messages: Sequence[Message], sampling: Sampling, about: TurnId
    ) -> Reply:
        """Ask a model and return its reply. Raises RamifyError if no reply arrived, or if the
        judges' budget is used up."""
        ...


class JudgeView(msgspec.Struct, frozen=True, eq=False):
    """Everything that a judge sees when it judges a turn or a trajectory. The item contains
    information that the policy did not have; a judge that uses this information is privileged and
    must say so."""

    trajectory: Trajectory
    steps: tuple[JudgeTurnView, ...]
    """The turns of the judged call, in order, up to and including the judged turn."""
    place: TurnId
    """The turn to judge; the last one if the whole trajectory is judged."""
    item: Item
    ask: ModelCaller | None = None
    """For judges that are models; None if no client pool is available."""

    @property
    def judged_turn(self) -> JudgeTurnView:
        """The turn to judge."""
        return next(step for step in self.steps if step.place == self.place)


class JudgeVerdict(msgspec.Struct, frozen=True):
    """The result of a judge, which consists of votes, a hint or both. If all fields are empty, the
    judge abstains."""

    accept: bool = False
    """Whether a hint is worth giving."""
    hint: str = ""
    votes: tuple[int, ...] = ()
    """Valid votes: +1, -1, and 0 if the judge's scale has a middle."""
    hints: tuple[str, ...] = ()
    """All accepted hints, if there are several; ``hint`` is the one that the judge prefers."""
    invalid: int = 0
    """Number of votes outside the format; they are ignored."""
    reason: str = ""
    """Why the judge abstains, in a few words."""
    place: TurnId | None = None
    """The turn that the hint is about, if it is not the turn that was judged."""


class Judge(Protocol):
    """The interface of a judge of turns or trajectories, which is either a model (``judge.py``) or
    a rule."""

    async def judge(self, view: JudgeView) -> JudgeVerdict: ...


class TokenScoringRequest(msgspec.Struct, frozen=True, eq=False):
    """A request for the log-probabilities of some of the tokens in a sequence. Token ids are never
    converted to text."""

    ids: Sequence[int]
    """[T]"""
    spans: Sequence[tuple[int, int]]
    """Half-open ranges ``[start, end)`` to score, in order; N tokens in total. The first token of a
    row cannot be scored."""
    candidates: Sequence[Sequence[int]] = ()
    """[N, k] further ids to score at each position; empty for none."""
    temperature: float = 1.0
    """Logits are divided by it: the temperature that the tokens were sampled at."""
    is_plain: bool = False
    """Whether training would compute this row anyway. It is scored here because other rows share
    its prefix."""


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """The log-probabilities that a model gave to the requested tokens of one sequence. Those of
    several ranges are concatenated."""

    logprobs: list[float]
    """[N] log-probabilities of the tokens."""
    candidates: list[list[float]] = []
    """[N, k] log-probabilities of the row's candidates, if it has any."""
    top_ids: list[list[int]] = []
    """[N, k] ids of the most likely tokens, if requested."""
    top: list[list[float]] = []
    """[N, k] their log-probabilities."""


class TokenScorer(Protocol):
    """The interface of a model that returns log-probabilities of given tokens, such as a teacher
    (see ``scorer.py``)."""

    async def score(
        self, rows: Sequence[TokenScoringRequest], *, top: int = 0
    ) -> list[TokenScores]:
        """Return one result per requested sequence, in order. ``top`` is the number of most likely
        tokens to return at each position. Raises RamifyError if the tokens cannot be scored; a
        missing score is never replaced by zero."""
        ...


class ConversationTokenizer(Protocol):
    """The interface for converting conversations to token ids, which the policy's renderer
    implements."""

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...


class SignalContext(msgspec.Struct, eq=False, kw_only=True):
    """Everything that a signal may need in addition to the rollouts."""

    step: int
    items: Mapping[str, Item]
    """Item id (``Group.task``) -> the item, including the gold answer: only for verifiers and leak
    filters."""
    weights: Mapping[str, float] = {}
    """The task's weights, by reward name."""
    asking: Callable[[Trajectory, str, SignalScore], ModelCaller] | None = None
    """(trajectory, name of the signal, score) -> a caller for judges that are models. It records
    its calls in the score, each under the turn it is about. None if no client pool is
    available."""
    scorers: Mapping[str, TokenScorer] = {}
    """Teachers by name: ``reference``, ``ema``, ``live`` (the current policy), or a checkpoint
    folder."""
    writing: ConversationTokenizer | None = None
    temperature: float = 1.0
    """The temperature at which rollouts were sampled."""
    wants_reference: bool = False
    """Whether training needs ``SignalScore.reference`` of the rollouts it learns from."""


class Signal(Protocol):
    """The interface of a signal, a source of numbers for turns and tokens. A recipe names its
    signals under ``signals``."""

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        """Return one score per trajectory of ``group``, in order. The scores must not depend on
        another signal's output. If the signal fails on one trajectory, the reason is recorded in
        the ``abstained`` field of its score."""
        ...


NO_ITEM = Item("")


def steps_of(call: Call) -> tuple[JudgeTurnView, ...]:
    """Return the turns of ``call`` in the form in which a judge sees them, in order."""
    turns = call.turns
    after = [*turns[1:], None]
    return tuple(
        JudgeTurnView((call.id, index), _reply_text(turn), _observed(following), _error(turn))
        for index, (turn, following) in enumerate(zip(turns, after, strict=True))
    )


def view_of(
    trajectory: Trajectory,
    call: Call,
    turn: int | None = None,
    item: Item | None = None,
    ask: ModelCaller | None = None,
) -> JudgeView:
    """Return what a judge sees when it judges one turn: that turn and all earlier turns of the
    call. If ``turn`` is None, the judge sees the whole finished call."""
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

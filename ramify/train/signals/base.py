"""What a signal is: it looks at the rollouts of one task and writes numbers on turns and tokens; it
knows of no other.

    Group ── signal.read(group, context) ──> [Reading], one per trajectory ── compose.py ──> advantages, weights

A number is about a *place*: a turn of a call. A judge looks at a finished trajectory through a
``JudgeView`` and gives a ``JudgeVerdict``; whether a model or a rule answers is no matter. A scorer
gives log-probabilities of tokens that stand at the end of a row of ids. Decides these forms alone.
Leaves out what is made of the readings (``compose.py``), and who runs signals, and when
(``stages.py``).

Legend: N tokens sampled in a turn, k candidate tokens per position, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.tasks.base import Item
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Trajectory

Place = tuple[str, int]
"""(call id, index of the turn in ``Call.turns``)"""


class TopKCandidates(msgspec.Struct, eq=False):
    """Distributions of one turn's positions, told by k tokens each; log-probabilities are over the
    whole vocabulary."""

    ids: list[list[int]]
    """[N, k]"""
    teacher: list[list[float]]
    """[N, k] their log-probabilities under the teacher."""
    student: list[list[float]] = msgspec.field(default_factory=list)
    """[N, k] under the policy that is learning, as it was when the reading was made; empty where it
    was not asked for."""


class SignalScore(msgspec.Struct, eq=False):
    """What one signal found in one trajectory; with all empty it abstained."""

    turns: dict[Place, float] = msgspec.field(default_factory=dict)
    """A number for a whole turn."""
    tokens: dict[Place, list[float]] = msgspec.field(default_factory=dict)
    """[N] a number for each sampled token of the turn's reply."""
    logprobs: dict[Place, list[float]] = msgspec.field(default_factory=dict)
    """[N] a teacher's log-probability of each sampled token, for losses that want it and not its
    gap."""
    top: dict[Place, TopKCandidates] = msgspec.field(default_factory=dict)
    """Where a teacher gives more than the sampled token's log-probability."""
    reference: dict[Place, list[float]] = msgspec.field(default_factory=dict)
    """[N] what the policy that rollouts began with thinks of each sampled token as it was sampled,
    without any hint; of all turns of a call or of none. A by-product that a loss with a KL to that
    policy needs not compute again."""
    notes: dict[Place, str] = msgspec.field(default_factory=dict)
    """One short text, as a hint, which is shown beside what it is about."""
    abstained: str = ""
    """Why it says nothing, in a word or a few, where it does not; metrics count them."""
    outcome: float | None = None
    """A reward of the whole trajectory, where the signal gives one."""
    counts: dict[str, float] = msgspec.field(default_factory=dict)
    """What happened on the way, for the metrics: votes, those outside the format, hints rejected
    and why."""
    calls: list[Call] = msgspec.field(default_factory=list)
    """What was asked of judges, of kind ``judge``: put on the tree once its streams are made, so
    that it is never trained."""


class JudgedTurn(msgspec.Struct, frozen=True):
    """One turn as a judge sees it."""

    place: Place
    said: str
    """The reply, reasoning included where it was kept apart."""
    observed: str
    """What came back for it: what the next turn's prompt adds. Empty for the last."""
    error: str = ""
    """The traceback of its first cell that raised."""


class ModelCaller(Protocol):
    """Asks a model through the run's own pool, cache and ledger, and keeps the call for the
    tree."""

    async def __call__(
        self, model: str, messages: Sequence[Message], sampling: Sampling, about: Place
    ) -> Reply:
        """Raises RamifyError where no reply came, or the budget for judges is used up."""
        ...


class JudgeView(msgspec.Struct, frozen=True, eq=False):
    """What a judge is shown. The item holds what the policy did not know; a judge that reads it is
    privileged, and says so."""

    trajectory: Trajectory
    steps: tuple[JudgedTurn, ...]
    """Of the root call, or of the call that is judged, in order; where a turn is judged, those up
    to it."""
    place: Place
    """The turn that is judged; for a finished trajectory its last."""
    item: Item
    ask: ModelCaller | None = None
    """For judges that are models."""

    @property
    def step(self) -> JudgedTurn:
        """The turn that is judged."""
        return next(step for step in self.steps if step.place == self.place)


class JudgeVerdict(msgspec.Struct, frozen=True):
    """What a judge says. All empty, it abstains."""

    accept: bool = False
    """A hint is worth it."""
    hint: str = ""
    votes: tuple[int, ...] = ()
    """Valid ones: +1, -1 (and 0 where its scale has a middle)."""
    hints: tuple[str, ...] = ()
    """All hints that were accepted, where there are several; ``hint`` is the one that the judge
    would choose."""
    invalid: int = 0
    """Votes that were outside the format, and count for nothing."""
    reason: str = ""
    """Why it abstains, in a word or a few."""
    place: Place | None = None
    """The turn that the hint is about, where that is another than was asked about."""


class Judge(Protocol):
    """A model (``judge.py``), or a rule."""

    async def judge(self, view: JudgeView) -> JudgeVerdict: ...


class ScoringRow(msgspec.Struct, frozen=True, eq=False):
    """A path of tokens, some of which are to be scored. They are given as ids, never as text."""

    ids: Sequence[int]
    """[T]"""
    spans: Sequence[tuple[int, int]]
    """The stretches ``[start, end)`` to be scored, in order; N tokens in all. The first token of a
    path has no score."""
    candidates: Sequence[Sequence[int]] = ()
    """[N, k] further ids that are scored at each position; empty for none."""
    temperature: float = 1.0
    """Logits are divided by it: the one that the tokens were sampled at."""
    is_plain: bool = False
    """What training would compute by itself, and is taken along here because others begin with the
    same tokens."""


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """What a model thinks of a row's spans, one after the other."""

    logprobs: list[float]
    """[N]"""
    candidates: list[list[float]] = []
    """[N, k] of the row's candidates, where it has any."""
    top_ids: list[list[int]] = []
    """[N, k] the likeliest tokens, where they were asked for."""
    top: list[list[float]] = []
    """[N, k] their log-probabilities."""


class TokenScorer(Protocol):
    """One model that scores; see ``teacher.py``."""

    async def score(self, rows: Sequence[ScoringRow], *, top: int = 0) -> list[TokenScores]:
        """One per row, in order; with ``top`` the likeliest that many tokens at each position, too.
        Raises RamifyError where it cannot, never gives zeros in place of numbers."""
        ...


class PromptRenderer(Protocol):
    """How a policy writes conversations as ids; its renderer."""

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...


class SignalContext(msgspec.Struct, eq=False, kw_only=True):
    """What a signal may need besides the rollouts."""

    step: int
    items: Mapping[str, Item]
    """Id of an item (``Group.task``) -> the item, gold answer included: for verifiers and leak
    filters only."""
    weights: Mapping[str, float] = {}
    """The task's, by reward name."""
    asking: ModelCallerFactory | None = None
    """For judges that are models; None where there is no pool to ask through."""
    scorers: Mapping[str, TokenScorer] = {}
    """Teachers by name: ``reference``, ``ema``, ``live`` (the policy as it is), or a checkpoint's
    folder."""
    writing: PromptRenderer | None = None
    temperature: float = 1.0
    """That the rollouts were sampled at."""
    wants_reference: bool = False
    """Whether training will ask for ``SignalScore.reference`` of what it learns from."""


class ModelCallerFactory(Protocol):
    """Makes ``ModelCaller``s."""

    def of(self, trajectory: Trajectory, signal: str, reading: SignalScore) -> ModelCaller:
        """One whose calls go into ``reading.calls``, under the places that they are about."""
        ...


class Signal(Protocol):
    """Implemented by every class that a recipe names under ``signals``."""

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        """One per trajectory of ``group``, in order; never another signal's output. What goes wrong
        with one trajectory is that one's ``abstained``."""
        ...

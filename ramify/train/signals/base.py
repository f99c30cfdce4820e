"""Define the interface of training signals, which assign numbers to the turns and tokens of
rollouts.

Advantages are computed from these numbers.

    Group ── signal.read(group, context) ──> [SignalScore], one per trajectory
                                             ── signal_composition.py ──> advantages, weights

A signal reads the rollouts of one task. Signals are independent of each other. Every number belongs
to a *turn* of a call (``TurnId``). A
judge, which may be a model or a rule, looks at a trajectory through a ``JudgeView`` and returns a
``JudgeVerdict``. A scorer returns log-probabilities of given tokens.

This module contains only these interfaces. Scores are combined in ``signal_composition.py``, and
``stages.py`` decides when signals run.

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
"""Identifies one turn: (call id, index of the turn in ``Call.turns``)."""


class TopKCandidates(msgspec.Struct, eq=False):
    """The k candidate tokens at each of the N positions of one turn, and their log-probabilities.

    These are normalised over the whole vocabulary.
    """

    ids: list[list[int]]
    """Candidate token ids, [N, k]."""
    teacher: list[list[float]]
    """Log-probabilities of the candidates under the teacher, [N, k]."""
    student: list[list[float]] = msgspec.field(default_factory=list)
    """Log-probabilities of the candidates under the policy being trained, computed when the signal
    scored the turn, [N, k]. Empty if not requested.
    """


class SignalScore(msgspec.Struct, eq=False):
    """The output of one signal for one trajectory.

    If all fields are empty, the signal abstained: it had nothing to say about the trajectory.
    """

    turns: dict[TurnId, float] = msgspec.field(default_factory=dict)
    """The signal's number for each turn."""
    tokens: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """A number for each of the N sampled tokens of the turn's reply, [N]."""
    logprobs: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """The teacher's log-probability of each sampled token, [N], for losses that need it instead of
    its difference from the policy's.
    """
    top: dict[TurnId, TopKCandidates] = msgspec.field(default_factory=dict)
    """Candidate tokens at each position, if the teacher was asked for more than the sampled
    token."""
    reference: dict[TurnId, list[float]] = msgspec.field(default_factory=dict)
    """Log-probability of each sampled token under the initial policy without any hint, [N]. Set
    for all turns of a call or for none. It saves the trainer a forward pass if its loss has a KL
    term to the initial policy.
    """
    notes: dict[TurnId, str] = msgspec.field(default_factory=dict)
    """A short text per turn, such as a hint, which the viewer shows next to the turn."""
    abstained: str = ""
    """Why the signal abstained, in a few words. Metrics count the reasons."""
    outcome: float | None = None
    """A reward for the whole trajectory. None if the signal gives none."""
    counts: dict[str, float] = msgspec.field(default_factory=dict)
    """Counts for the metrics, such as votes, malformed votes, and rejected hints by reason."""
    calls: list[Call] = msgspec.field(default_factory=list)
    """The judges' own model calls, of kind ``judge``. They are added to the call tree only after
    its token sequences were built, so they are never trained on.
    """


class JudgeTurnView(msgspec.Struct, frozen=True):
    """One turn of a call as a judge sees it: the reply and the observation that followed.

    Example:
        JudgeTurnView(("0", 1), reply="FINAL(2)", observed="", error="")  # call 0, turn 1
    """

    place: TurnId
    reply: str
    """The reply, including reasoning that is stored separately."""
    observed: str
    """The observation after the turn, which is the text that the next turn's prompt adds. Empty for
    the last turn."""
    error: str = ""
    """Traceback of the turn's first code cell that raised an error."""


class JudgeModelCaller(Protocol):
    """A function through which a judge asks a model about a rollout.

    It uses the run's own client pool, cache and budget, and records each call in the rollout's
    tree.

    Example:
        reply = await view.ask("policy", messages, sampling, view.place)
    """

    async def __call__(
        self, model: str, messages: Sequence[Message], sampling: Sampling, about: TurnId
    ) -> Reply:
        """Ask a model and return its reply.

        Raises RamifyError if no reply arrived or the judges' budget is used up.
        """
        ...


class JudgeView(msgspec.Struct, frozen=True, eq=False):
    """Everything that a judge sees when it judges a turn or a trajectory.

    The task item is included, which contains information that the policy did not have. A judge that
    uses this information is privileged and must declare it.
    """

    trajectory: Trajectory
    steps: tuple[JudgeTurnView, ...]
    """The turns of the judged call, in order, up to and including the judged turn."""
    place: TurnId
    """The turn to judge. It is the last turn if the whole trajectory is judged."""
    item: Item
    ask: JudgeModelCaller | None = None
    """Asks a model, for judges that need one. None if no client pool is available."""

    @property
    def judged_turn(self) -> JudgeTurnView:
        """The turn to judge."""
        return next(step for step in self.steps if step.place == self.place)


class JudgeVerdict(msgspec.Struct, frozen=True):
    """The result of a judge: votes, a hint or both.

    If all fields are empty, the judge abstains.
    """

    accept: bool = False
    """True if the judge considers the hint worth giving."""
    hint: str = ""
    votes: tuple[int, ...] = ()
    """Valid votes: +1 or -1, and also 0 if the judge's scale has a middle."""
    hints: tuple[str, ...] = ()
    """All accepted hints, if there are several. ``hint`` is the one that the judge prefers."""
    invalid: int = 0
    """Number of malformed votes, which are ignored."""
    reason: str = ""
    """Why the judge abstains, in a few words."""
    place: TurnId | None = None
    """The turn that the hint is about; None: the judged turn."""


class Judge(Protocol):
    """The interface of a judge, which rates turns or whole trajectories.

    A judge may ask a model (see ``judge.py``) or apply a rule.
    """

    async def judge(self, view: JudgeView) -> JudgeVerdict: ...


class TokenScoringRequest(msgspec.Struct, frozen=True, eq=False):
    """A request for the log-probabilities of some tokens of a sequence.

    Token ids are never converted to text.
    """

    ids: Sequence[int]
    """All T token ids of the sequence."""
    spans: Sequence[tuple[int, int]]
    """Half-open ranges ``[start, end)`` to score, in order; N tokens in total. The first token of a
    sequence cannot be scored."""
    candidates: Sequence[Sequence[int]] = ()
    """Further token ids to score at each position, [N, k]. Empty if there are none."""
    temperature: float = 1.0
    """Logits are divided by this number, the temperature at which the tokens were sampled."""
    is_plain: bool = False
    """True if training would score this sequence anyway. It is scored here, together with other
    sequences that share its prefix, to save that pass.
    """


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """The log-probabilities that a model gave to the requested tokens of one sequence.

    Results for several ranges are concatenated.
    """

    logprobs: list[float]
    """Log-probabilities of the requested tokens, [N]."""
    candidates: list[list[float]] = []
    """Log-probabilities of the requested candidates, [N, k]. Empty if there were none."""
    top_ids: list[list[int]] = []
    """Ids of the most likely tokens, [N, k], if requested."""
    top: list[list[float]] = []
    """Log-probabilities of the most likely tokens, [N, k]."""


class TokenScorer(Protocol):
    """The interface of a model that returns log-probabilities of given tokens, such as a teacher.

    ``teacher_logprobs.py`` implements it.
    """

    async def score(
        self, rows: Sequence[TokenScoringRequest], *, top: int = 0
    ) -> list[TokenScores]:
        """Return the log-probabilities of the requested tokens of each sequence, in order.

        ``top`` is the number of most likely tokens to return at each position. Raises RamifyError
        if the tokens cannot be scored. A missing score is never replaced by zero.
        """
        ...


class ConversationTokenizer(Protocol):
    """The interface for converting conversations to token ids.

    The policy's renderer implements it.
    """

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...


class SignalContext(msgspec.Struct, eq=False, kw_only=True):
    """The data and services that a signal may need beyond the rollouts, such as task items and
    teachers."""

    step: int
    items: Mapping[str, Item]
    """Items by id (``Group.task``), including the gold answer. Only verifiers and leak filters may
    use them."""
    weights: Mapping[str, float] = {}
    """The task's weights of its rewards, by reward name."""
    asking: Callable[[Trajectory, str, SignalScore], JudgeModelCaller] | None = None
    """Creates the ``JudgeModelCaller`` of a judge, given a trajectory, the name of the signal and
    its score. The caller adds its calls to the score, each as a child of the turn that it is about.
    None if no client pool is available.
    """
    scorers: Mapping[str, TokenScorer] = {}
    """Teachers by name: ``reference``, ``ema``, ``live`` for the current policy, or a checkpoint
    folder."""
    writing: ConversationTokenizer | None = None
    temperature: float = 1.0
    """The temperature at which rollouts were sampled."""
    wants_reference: bool = False
    """True if training needs ``SignalScore.reference`` of the rollouts that it trains on."""


class Signal(Protocol):
    """The interface of a training signal, which assigns numbers to the turns and tokens of
    rollouts.

    A recipe names its signals under ``signals``.
    """

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        """Return one score for each trajectory of ``group``, in order.

        The scores must not depend on another signal's output. If the signal fails on a trajectory,
        its score gives the reason in ``abstained``.
        """
        ...


NO_ITEM = Item("")


def judge_turn_views(call: Call) -> tuple[JudgeTurnView, ...]:
    """Return the turns of ``call`` as a judge sees them, in order."""
    turns = call.turns
    after = [*turns[1:], None]
    return tuple(
        JudgeTurnView((call.id, index), _reply_text(turn), _observed_text(following), _error(turn))
        for index, (turn, following) in enumerate(zip(turns, after, strict=True))
    )


def build_judge_view(
    trajectory: Trajectory,
    call: Call,
    turn: int | None = None,
    item: Item | None = None,
    ask: JudgeModelCaller | None = None,
) -> JudgeView:
    """Return what a judge sees when it judges one turn: the turn and all earlier turns of the call.

    If ``turn`` is None, the judge sees the whole finished call.
    """
    steps = judge_turn_views(call)
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


def _observed_text(following: Turn | None) -> str:
    if following is None:
        return ""
    return "\n".join(
        message.content for message in following.prompt if message.role in ("user", "tool")
    )


def _error(turn: Turn) -> str:
    return next((cell.error for cell in turn.cells if cell.error), "")

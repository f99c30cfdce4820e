"""The tree that a run leaves behind: who was asked what, what code ran, what came of it.

A ``Trajectory`` is what a user looks at, an evaluation scores and a trainer learns from. Each thing
is stored once: calls are a flat list with parent ids, and a turn holds only the messages that the
turn before it did not have.

    Trajectory
    └── Call 0            (rlm, depth 0)
        ├── Turn 0        prompt: [system, user]    reply    cells: [Cell]
        ├── Turn 1        prompt: [observation]     reply    cells: [Cell]
        ├── Call 0.0      (lm, depth 1)   parent: call 0, turn 0, cell 0
        └── Call 0.1      (rlm, depth 1)  parent: call 0, turn 1, cell 0
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ramify.types.message import Message, Reply, Usage
from ramify.types.token_path import TokenPath, TokenPathBuilder

SCHEMA_VERSION = 2
"""Of events and trajectories on disk. A reader refuses a newer one, and reads older ones: 2 added
``Scored`` and ``Annotation``."""

CallKind = Literal["rlm", "lm", "leaf", "judge"]
"""``judge``: asked about the call that it stands under, after it had ended; never learnt from."""


class Stop(enum.StrEnum):
    """Why a call ended."""

    FINAL = "final"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_COST = "max_cost"
    DEADLINE = "deadline"
    MAX_CALLS = "max_calls"
    NO_CODE = "no_code"
    ERROR = "error"
    CANCELLED = "cancelled"

    def is_truncated(self) -> bool:
        """Whether a limit cut the call short, so that its answer is the best so far."""
        return self in _TRUNCATED


_TRUNCATED = {
    Stop.MAX_TURNS,
    Stop.MAX_TOKENS,
    Stop.MAX_COST,
    Stop.DEADLINE,
    Stop.MAX_CALLS,
    Stop.CANCELLED,
}


class ContextRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A context by content, never by value."""

    digest: str
    """SHA-256, hexadecimal, of the context's encoded form; the blob's name in a store."""
    chars: int
    kind: str
    """Its Python type in the session: ``str``, ``dict``, ``list`` …"""


class Cell(msgspec.Struct, frozen=True, omit_defaults=True):
    """One execution of code in a session."""

    code: str
    stdout: str = ""
    """What was printed, cut to what the model was shown at most."""
    value: str | None = None
    """The echo of the last expression."""
    error: str | None = None
    """The traceback, with the cell's own line numbers; None if the cell ended well."""
    seconds: float = 0.0
    """Time that the session worked; time spent waiting for models is not counted."""
    stdout_chars: int = 0
    """True length of what was printed; more than ``len(stdout)`` where it was cut."""
    stdout_digest: str | None = None
    """The blob that holds the whole output, where it was cut and a store was given."""
    restored: tuple[str, ...] = ()
    """Reserved names that the cell had rebound and that were put back."""
    died: bool = False
    """The session ended in the middle of it, and what it had done there is lost; ``error`` says
    why."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to a model and what was done with its reply."""

    reused: int
    """How many messages of the conversation so far (prompt and reply of every turn before) this
    prompt begins with."""
    prompt: tuple[Message, ...]
    """The messages of this prompt after the reused ones."""
    reply: Reply
    """Its ``prompt_ids`` are those after the reused ones."""
    cells: tuple[Cell, ...] = ()
    reused_ids: int = 0
    """How many ids of the path so far (of prompt and reply of every turn before) this prompt begins
    with. Less than all of them where the history was summarised, or where the client made ids of
    old text again; see ``paths``."""

    @property
    def num_ids(self) -> int | None:
        """Length of the path up to and including this reply; None where the client gave no ids."""
        if self.reply.prompt_ids is None or self.reply.token_ids is None:
            return None
        return self.reused_ids + len(self.reply.prompt_ids) + len(self.reply.token_ids)


class Parent(msgspec.Struct, frozen=True):
    """Where a call was made: in cell ``cell`` of turn ``turn`` of call ``call``."""

    call: str
    turn: int
    cell: int


class Fork(msgspec.Struct, frozen=True):
    """The call continues ``call`` after ``turn`` and shares everything before."""

    call: str
    turn: int


class Call(msgspec.Struct, omit_defaults=True):
    """One invocation of a model at one depth: a whole RLM loop, or a single plain request."""

    id: str
    """Dotted path by order of issue: ``0``, ``0.0``, ``0.3.1``."""
    kind: CallKind
    model: str
    """``provider:model``"""
    depth: int
    question: str
    parent: Parent | None = None
    fork: Fork | None = None
    context: ContextRef | None = None
    turns: list[Turn] = msgspec.field(default_factory=list)
    answer: Any = None
    """JSON-ready; None until the call ends with one."""
    stop: Stop | None = None
    """None while the call runs, and after a crash."""
    error: str | None = None
    usage: Usage = Usage()
    """Of this call alone, without its children."""
    cost: float | None = None
    """Dollars for this call alone; None where its model has no price."""
    started_s: float = 0.0
    """Seconds since the run began."""
    ended_s: float | None = None


class Annotation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody made of a run, a call or a turn, beside its rewards: named numbers, and one
    short text."""

    by: str
    """Who: ``task``, or the name of a signal or judge."""
    call: str = ""
    """The call that it is about; empty for the whole run."""
    turn: int = -1
    """Index in ``Call.turns`` of the turn that it is about; -1 for the whole call."""
    values: dict[str, float] = {}
    tokens: dict[str, list[float]] = {}
    """Name -> a number for each token that the turn's reply sampled."""
    text: str = ""
    """As a hint, or the reason."""


class Trajectory(msgspec.Struct, omit_defaults=True):
    """One run: the tree of its calls, its rewards and its bill."""

    id: str
    question: str
    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    """Always written, although it is the default: a later version must be able to tell."""
    task: str = ""
    """Name of the task it came from; empty for a user's question."""
    context: ContextRef | None = None
    calls: list[Call] = msgspec.field(default_factory=list)
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    call_rewards: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """Call id -> reward name -> reward."""
    marks: list[Annotation] = msgspec.field(default_factory=list)
    """What was scored beside the rewards, oldest first: of two at one place and of one name the
    later counts."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    errors: list[str] = msgspec.field(default_factory=list)
    answer: Any = None
    answered_by: str = ""
    """The call whose answer was chosen, where several branches gave one; each call has its own
    ``answer``."""
    stop: Stop | None = None
    usage: Usage = Usage()
    """Of the whole tree."""
    cost: float | None = None
    """Dollars for the whole tree; None where no model had a price."""
    seconds: float = 0.0
    started_at: float = 0.0
    """Unix time."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def root(self) -> Call:
        """The first call; in a conversation, the first question's."""
        return self.calls[0]

    @property
    def depth(self) -> int:
        """Depth of the deepest call; 0 where the root made none."""
        return max((call.depth for call in self.calls), default=0)

    def call(self, id: str) -> Call:
        for call in self.calls:
            if call.id == id:
                return call
        raise KeyError(f"no call {id!r} in trajectory {self.id}")

    def children(self, call: Call) -> list[Call]:
        """The calls that ``call``'s cells made, in order of issue."""
        return [
            child
            for child in self.calls
            if child.parent is not None and child.parent.call == call.id
        ]

    def walk(self) -> Iterator[Call]:
        """Every call, a parent before its children, siblings in order of issue."""
        below: dict[str | None, list[Call]] = {}
        for call in self.calls:
            below.setdefault(call.parent.call if call.parent else None, []).append(call)
        stack = below.get(None, [])[::-1]
        while stack:
            call = stack.pop()
            yield call
            stack.extend(below.get(call.id, [])[::-1])

    def conversation(self, call: Call, turn: int | None = None) -> list[Message]:
        """The messages of ``call`` up to and including the reply of ``turn`` (by default its
        last)."""
        messages = self.conversation(self.call(call.fork.call), call.fork.turn) if call.fork else []
        for step in call.turns if turn is None else call.turns[: turn + 1]:
            messages = [*messages[: step.reused], *step.prompt, step.reply.message]
        return messages

    def path(self, call: Call, turn: int | None = None) -> TokenPath | None:
        """The token ids of ``call`` up to and including the reply of ``turn`` (by default its
        last), those of the calls that it continues first. None where that turn has none.

        A turn that does not extend the one before cuts the path where they part; ``paths`` has what
        was cut off."""
        path = TokenPathBuilder()
        for owner, index, step in self._steps(call, turn):
            path.add(owner, index, step)
        return path.built()

    def paths(self, call: Call) -> list[TokenPath]:
        """The fewest paths that hold every id of ``call``: one, but where a turn does not extend
        the one before (``metrics["split_turns"]`` counts those). What several of them share is
        sampled once: ``TokenPath.spans`` tell which turn of which call sampled what."""
        path = TokenPathBuilder()
        found = []
        for owner, index, step in self._steps(call, None):
            if owner == call.id and index > 0 and not path.is_extended_by(step):
                found.append(path.built())
            path.add(owner, index, step)
        last = path.built() if call.turns else None
        return [each for each in (*found, last) if each is not None]

    def _steps(self, call: Call, turn: int | None) -> Iterator[tuple[str, int, Turn]]:
        """(call's id, index, turn) from the first turn on, those of the calls that ``call``
        continues first."""
        line = [(call, len(call.turns) if turn is None else turn + 1)]
        while (fork := line[-1][0].fork) is not None:
            line.append((self.call(fork.call), fork.turn + 1))
        for owner, num_turns in reversed(line):
            for index, step in enumerate(owner.turns[:num_turns]):
                yield owner.id, index, step


class Group(msgspec.Struct):
    """Trajectories of one task: the siblings that a baseline is taken over."""

    task: str
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None
    """An attempt beside them at temperature 0, where a baseline wants one; nothing is learnt from
    it."""

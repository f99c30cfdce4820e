"""The record of a run: a tree of calls with their questions, code and results.

Users inspect a ``Trajectory``, evaluations score it and trainers learn from it. Nothing is stored
twice: calls are a flat list with parent ids, and a turn holds only the messages that the previous
turn did not have.

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

from ramify.types.call_token_ids import CallTokenIds, CallTokenIdsBuilder
from ramify.types.message import Message, Reply, Usage

SCHEMA_VERSION = 2
"""Version of events and trajectories on disk. Readers accept older versions and reject newer ones.
Version 2 added ``Scored`` and ``RunAnnotation``."""

CallKind = Literal["rlm", "strategy", "lm", "leaf", "judge"]
"""Kinds of calls. ``strategy``: a call without turns, answered by a plan or another strategy that
makes ``leaf`` calls. ``judge``: a call that judged its parent call after the parent had ended;
training never uses it.
"""


class Stop(enum.StrEnum):
    """The reason why a call ended, such as a final answer, a limit or an error.

    >>> ramify.Stop.MAX_TURNS.is_truncated(), ramify.Stop.FINAL.is_truncated()
    (True, False)
    """

    FINAL = "final"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_COST = "max_cost"
    DEADLINE = "deadline"
    MAX_CALLS = "max_calls"
    NO_CODE = "no_code"
    ERROR = "error"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    """The run waits until someone fixes the cause of a failure. It can be resumed."""

    def is_truncated(self) -> bool:
        """Return True if a limit cut the call short, leaving its best answer so far."""
        return self in _TRUNCATED


_TRUNCATED = {
    Stop.MAX_TURNS,
    Stop.MAX_TOKENS,
    Stop.MAX_COST,
    Stop.DEADLINE,
    Stop.MAX_CALLS,
    Stop.CANCELLED,
}


class NewAgentCallReason(enum.StrEnum):
    """The reason why a request of an external agent began a new call instead of continuing an
    earlier one.

    See ``docs/agents.md``.
    """

    NEW = "new"
    """The request contains no reply of an earlier call. It is a first request, comes from a
    sub-agent, or starts over from a summary."""
    SAMPLE = "sample"
    """The call is an additional reply to a request that asked for several (``n``)."""
    REPEATED = "repeated"
    """The same request was sent before and is answered again."""
    BRANCH = "branch"
    """The request continues an earlier reply that another request has already continued."""
    TOOLS = "tools"
    """The request repeats a conversation but offers different tools."""
    THINKING = "thinking"
    """The client dropped or changed the reasoning of a reply."""
    WHITESPACE = "whitespace"
    """The client changed only the whitespace of a message."""
    ARGUMENTS = "arguments"
    """The client reformatted the JSON of a tool call's arguments."""
    MERGED = "merged"
    """The client joined several messages into one, or split one into several."""
    TRUNCATED = "truncated"
    """The client dropped messages."""
    COMPACTED = "compacted"
    """The client replaced messages by a new one, such as a summary."""
    EDITED = "edited"
    """The client changed the text of a message in another way."""
    TEMPLATE = "template"
    """The client changed nothing, but the chat template renders an earlier message differently."""

    def is_history_rewritten(self) -> bool:
        """Return True if the client sent back a history that differs from what was actually sent
        and received.

        >>> NewAgentCallReason.THINKING.is_history_rewritten()
        True
        >>> NewAgentCallReason.TEMPLATE.is_history_rewritten()
        False
        """
        return self not in _NOT_REWRITTEN


_NOT_REWRITTEN = {
    NewAgentCallReason.NEW,
    NewAgentCallReason.SAMPLE,
    NewAgentCallReason.REPEATED,
    NewAgentCallReason.BRANCH,
    NewAgentCallReason.TOOLS,
    NewAgentCallReason.TEMPLATE,
}


class FileReference(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A reference to a file on this machine, with its properties at the time it was read."""

    path: str
    """Absolute path."""
    num_bytes: int
    """Number of bytes that were read, from the beginning of the file."""
    mtime_ns: int
    """Time of the last change, in nanoseconds since 1970."""
    digest: str
    """SHA-256 of those bytes, in hexadecimal digits."""


class ContextRef(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A reference to a context by the hash of its content.

    A context is the input that a call works on, and is stored elsewhere.
    """

    digest: str
    """SHA-256 of the encoded context, in hexadecimal digits. The context's blob in a store has the
    same name."""
    chars: int
    kind: str
    """Python type of the context in the session: ``str``, ``dict``, ``list``, …"""
    pictures: tuple[str, ...] = ()
    """Digests of the context's pictures, which are blobs of the store."""
    files: tuple[FileReference, ...] = ()
    """Files that the context refers to instead of containing them."""

    @property
    def reference_text(self) -> str:
        """Text that names the files to which the context refers, such as ``by reference:
        /var/log/a.log (92,663,629 bytes) and 2 more files``.

        Empty if the context does not refer to files.
        """
        if not self.files:
            return ""
        more = len(self.files) - 1
        first = f"by reference: {self.files[0].path} ({self.files[0].num_bytes:,} bytes)"
        return f"{first} and {more:,} more file{'s' * (more > 1)}" if more else first


class Cell(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One execution of a block of code in a session, with its output.

    >>> ramify.Cell("1 + 1", value="2", seconds=0.01).value
    '2'
    """

    code: str
    stdout: str = ""
    """Printed output, truncated to the maximum length that the model is shown."""
    value: str | None = None
    """Value of the last expression, as the session echoed it."""
    error: str | None = None
    """Traceback with the cell's line numbers. None if the cell succeeded."""
    seconds: float = 0.0
    """Execution time of the cell in seconds, excluding time spent waiting for models."""
    stdout_chars: int = 0
    """Full length of the printed output. It exceeds ``len(stdout)`` if the output was truncated."""
    stdout_digest: str | None = None
    """Digest of the blob with the full output, if it was truncated and a store is in use."""
    restored: tuple[str, ...] = ()
    """Reserved names that the cell overwrote and that were restored."""
    died: bool = False
    """True if the session died while it ran the cell, so that the cell's effects were lost.
    ``error`` gives the reason.
    """


class Turn(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One request to a model, the model's reply, and the code cells in the reply that were run."""

    reused: int
    """Number of messages at the start of this prompt that are earlier messages of the
    conversation, i.e. prompts and replies of previous turns.
    """
    prompt: tuple[Message, ...]
    """Messages of this prompt that follow the reused ones."""
    reply: Reply
    """The model's reply. Its ``prompt_ids`` hold only the ids after the reused ones."""
    cells: tuple[Cell, ...] = ()
    reused_ids: int = 0
    """Number of token ids from previous turns that this prompt starts with. Some are not reused if
    the history was summarized, or if the client tokenized old text again (see ``paths``)."""

    @property
    def num_ids(self) -> int | None:
        """Number of token ids of the call up to and including this reply.

        None if the client returned no ids.
        """
        if self.reply.prompt_ids is None or self.reply.token_ids is None:
            return None
        return self.reused_ids + len(self.reply.prompt_ids) + len(self.reply.token_ids)


class CallSite(msgspec.Struct, frozen=True, gc=False):
    """The place where a call was made: a code cell in a turn of its parent call."""

    call: str
    turn: int
    cell: int


class CallForkOrigin(msgspec.Struct, frozen=True, gc=False):
    """The point from which a forked call continues: after one turn of another call.

    Both calls share everything up to that point.
    """

    call: str
    turn: int


class Call(msgspec.Struct, omit_defaults=True, gc=False):
    """One call to a model.

    It is either a whole recursive loop (RLM) with many turns, or a single plain request.
    """

    id: str
    """Dotted path in order of creation, such as ``0``, ``0.0`` or ``0.3.1``."""
    kind: CallKind
    model: str
    """Name of the model, as ``provider:model``."""
    depth: int
    question: str
    parent: CallSite | None = None
    fork: CallForkOrigin | None = None
    context: ContextRef | None = None
    turns: list[Turn] = msgspec.field(default_factory=list)
    answer: Any = None
    """Answer that JSON can represent. None until the call ends with one."""
    stop: Stop | None = None
    """Why the call ended. None while it runs, and after a crash."""
    error: str | None = None
    usage: Usage = Usage()
    """Usage of this call alone, without its children."""
    cost: float | None = None
    """Cost of this call alone in dollars. None if its model has no price."""
    started_s: float = 0.0
    """Seconds since the run started."""
    ended_s: float | None = None
    reason: str = ""
    """One sentence on why the call ended. Empty for ``FINAL`` and in older journals."""
    cause: NewAgentCallReason | None = None
    """Why a request of an outside agent began this call. None for calls of the engine's own
    loop."""


class RunAnnotation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A remark on a run, call or turn: named numbers and a short text, separate from rewards."""

    by: str
    """Author of the remark: ``task``, or the name of a signal or judge."""
    call: str = ""
    """Id of the annotated call. Empty for the whole run."""
    turn: int = -1
    """Index of the annotated turn in ``Call.turns``, or -1 for the whole call."""
    values: dict[str, float] = {}
    tokens: dict[str, list[float]] = {}
    """Numbers by name, each with one value for every token sampled in the turn's reply."""
    text: str = ""
    """A short text, such as a hint or a reason."""


class Trajectory(msgspec.Struct, omit_defaults=True):
    """The complete record of one run: its tree of calls, its rewards and its cost."""

    id: str
    question: str
    schema_version: int = msgspec.field(default_factory=SCHEMA_VERSION.__int__)
    """Version of the stored format. It is always written, so that later versions can tell formats
    apart."""
    task: str = ""
    """Name of the task that the question came from. Empty for a user's question."""
    context: ContextRef | None = None
    calls: list[Call] = msgspec.field(default_factory=list)
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    call_rewards: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """Rewards of single calls, by call id and then by reward name."""
    marks: list[RunAnnotation] = msgspec.field(default_factory=list)
    """Annotations that are not rewards, oldest first. A later one replaces an earlier one with the
    same target and name.
    """
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    errors: list[str] = msgspec.field(default_factory=list)
    answer: Any = None
    answered_by: str = ""
    """Id of the call whose answer was chosen, if several branches gave one. Each call has its own
    ``answer``."""
    stop: Stop | None = None
    usage: Usage = Usage()
    """Usage of all calls of the run."""
    cost: float | None = None
    """Cost of all calls of the run in dollars. None if no model had a price."""
    seconds: float = 0.0
    started_at: float = 0.0
    """Unix time in seconds."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    warnings: list[str] = msgspec.field(default_factory=list)
    """Warnings about the run as a whole, for example about a weak sandbox."""
    reason: str = ""
    """One sentence on why the run ended. Empty for ``FINAL`` and in older journals."""
    awaits_score: bool = False
    """True if the run has no rewards yet because its task scores all rollouts of a step
    together."""
    score_error: str = ""
    """Why the task could not score the run, without the names of the task and item. Empty if the
    run has rewards or failed before it was scored. ``errors`` has the complete message.
    """

    @property
    def root(self) -> Call:
        """The root of the call tree, which is the first call of the run.

        In a conversation, this is the call that answers the first question.
        """
        return self.calls[0]

    @property
    def depth(self) -> int:
        """Depth of the deepest call in the run's call tree.

        It is 0 if the root call made no calls.
        """
        return max((call.depth for call in self.calls), default=0)

    def __str__(self) -> str:
        """Return the tree of calls as text, with one line for each call.

        A line shows the question and the answer, or the reason why the answer is missing. ``repr``
        has the whole record.
        """
        lines = [f"run {self.id}: {self.stop or 'running'}"]
        for call in self.walk():
            what = call.error or call.reason if call.answer is None else answer_text(call.answer)
            texts = (" ".join(cut(text).split())[:80] for text in (call.question, what or ""))
            lines.append("  " * call.id.count(".") + f"{call.id} {' → '.join(texts)}")
        return "\n".join(lines)

    def call(self, id: str) -> Call:
        for call in self.calls:
            if call.id == id:
                return call
        raise KeyError(f"no call {id!r} in trajectory {self.id}")

    def children(self, call: Call) -> list[Call]:
        """Return the calls that the code of ``call`` made, in order of creation."""
        return [
            child
            for child in self.calls
            if child.parent is not None and child.parent.call == call.id
        ]

    def walk(self) -> Iterator[Call]:
        """Yield every call of the run: parents before children, siblings in order of creation."""
        below: dict[str | None, list[Call]] = {}
        for call in self.calls:
            below.setdefault(call.parent.call if call.parent else None, []).append(call)
        stack = below.get(None, [])[::-1]
        while stack:
            call = stack.pop()
            yield call
            stack.extend(below.get(call.id, [])[::-1])

    def conversation(self, call: Call, turn: int | None = None) -> list[Message]:
        """Return all messages of ``call`` up to and including the reply of turn ``turn``.

        The default is the last turn.
        """
        messages = self.conversation(self.call(call.fork.call), call.fork.turn) if call.fork else []
        for step in call.turns if turn is None else call.turns[: turn + 1]:
            messages = [*messages[: step.reused], *step.prompt, step.reply.message]
        return messages

    def path(self, call: Call, turn: int | None = None) -> CallTokenIds | None:
        """Return the token ids of ``call`` up to and including the reply of turn ``turn``, by
        default the last turn.

        If the call continues other calls, their ids come first. Returns None if the turn has no
        ids.

        A turn that does not extend the previous one truncates the path where they diverge.
        ``paths`` also returns the part that was cut off.
        """
        path = CallTokenIdsBuilder()
        for owner, index, step in self._lineage_turns(call, turn):
            path.add(owner, index, step.reply, step.reused_ids)
        return path.build()

    def paths(self, call: Call) -> list[CallTokenIds]:
        """Return the smallest set of token sequences (paths) that contains every token id of
        ``call``.

        There is one path, plus another for each turn that does not extend the previous one
        (``metrics["split_turns"]`` counts these turns). Tokens that several paths
        share were sampled once. ``CallTokenIds.spans`` gives the turn and call that sampled them.
        """
        path = CallTokenIdsBuilder()
        paths = []
        for owner, index, step in self._lineage_turns(call, None):
            is_extended = path.is_extended_by(step.reply, step.reused_ids)
            if owner == call.id and index > 0 and not is_extended:
                paths.append(path.build())
            path.add(owner, index, step.reply, step.reused_ids)
        last = path.build() if call.turns else None
        return [known for known in (*paths, last) if known is not None]

    def _lineage_turns(self, call: Call, turn: int | None) -> Iterator[tuple[str, int, Turn]]:
        """Yield each turn of ``call`` up to turn ``turn``, with the id of its call and its index.

        If ``call`` continues other calls, their turns come first.
        """
        lineage = [(call, len(call.turns) if turn is None else turn + 1)]
        while (fork := lineage[-1][0].fork) is not None:
            lineage.append((self.call(fork.call), fork.turn + 1))
        for owner, num_turns in reversed(lineage):
            for index, step in enumerate(owner.turns[:num_turns]):
                yield owner.id, index, step


class RolloutGroupOutcome(enum.StrEnum):
    """The outcome of a group of rollouts: whether training used it, and if not, why."""

    LEARNT = "learnt"
    """Training used the group: some of its tokens had a nonzero advantage."""
    NO_SIGNAL = "no_signal"
    """All advantages of the group were 0 (zero variance), or the group was replaced because
    nothing could be learned from it.
    """
    LOST = "lost"
    """No rollout of the group has a reward."""
    SPARE = "spare"
    """The group was not needed, since more groups had begun than the step used."""
    SKIPPED = "skipped"
    """The group did not begin. Its item was skipped because it currently gives no training
    signal."""

    @classmethod
    def _missing_(cls, value: object) -> RolloutGroupOutcome | None:
        return cls.NO_SIGNAL if value == "silent" else None  # its name in earlier runs


class Group(msgspec.Struct):
    """A group of rollouts: the trajectories of several attempts at one task item.

    Algorithms compute a baseline over them.
    """

    task: str
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None
    """An additional attempt at temperature 0, if a baseline needs one. Training never uses it."""


def cut(text: str, width: int = 120) -> str:
    """Shorten ``text`` to at most ``width`` characters, so that it fits on one line."""
    return text if len(text) <= width else text[: width - 1] + "…"


def answer_text(value: Any) -> str:
    """Convert an answer of any type to a string.

    A string stays as it is, None becomes the empty string, and other values become JSON.
    """
    return (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else msgspec.json.encode(value).decode()
    )

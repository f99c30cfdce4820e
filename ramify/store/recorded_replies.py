"""What a journal recorded, as a resumed or replayed run asks for it: by where in the tree, and
checked by content.

    replay   every reply and tool result must be there; a missing or different one is ``ReplayDiverged``
    resume   what is there is used; what is missing (None) is asked for and paid
In both, a request at a recorded place with another hash is ``ReplayDiverged``, so that nothing is spent in silence, and
from there on nothing is written; and a request that had failed for good fails again, as it did. A resume leaves out the
failure that ended the run: that request is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

from ramify.errors import LimitReached, ModelError, Refused, ReplayDiverged, StoreError
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunStarted,
    ScoreAdded,
    ToolAnswered,
)
from ramify.types.message import Reply
from ramify.types.trajectory import Cell, Stop

Key = tuple[object, ...]


class RecordedReplies:
    """Looks up what ``events`` recorded. Holds references to the events, no copies."""

    started: RunStarted
    """The first one of a conversation."""
    questions: list[RunStarted]
    ended: RunEnded | None
    """The last question's end; None if the run can be resumed: it was killed, stopped without an
    answer, or failed."""
    diverged: ReplayDiverged | None
    """How the run that asks first differed from the recorded one, if it did."""
    attempts: list[AttemptFailed]
    """Failed attempts, some of which may have been paid: a resumed run is charged for them."""
    last_s: float
    """When the last event happened, in seconds since the run began."""

    def __init__(self, events: Iterable[AnyEvent], strict: bool = False) -> None:
        self.strict = strict
        self.diverged = None
        self.questions = []
        self.ended = None
        self.attempts = []
        self.last_s = 0.0
        self._ends: dict[str, CallEnded] = {}
        self._cells: dict[tuple[str, int, int], Cell] = {}
        self._asked: dict[tuple[str, int], RequestStarted] = {}
        self._replaced: dict[tuple[str, int, str], tuple[RequestStarted, RequestStarted]] = {}
        """(call, turn, hash) of a refused prompt -> its request, and the request that replaced
        it."""
        self._replies: dict[tuple[str, int], ReplyReceived] = {}
        self._tools: dict[tuple[str, int, int, int], ToolAnswered] = {}
        self._attempts: dict[tuple[str, int], list[AttemptFailed]] = {}
        self._held: set[Key] = set()
        self._sub_calls: set[str] = set()
        self._booked: set[tuple[str, int]] = set()
        """Requests whose last attempt is accounted for, although they have no reply."""
        for event in events:
            self._add(event)
        if not self.questions:
            raise StoreError(
                "the journal holds no RunStarted event: the run was cut off before its first act"
            )
        self.started = self.questions[0]

    def reply(self, call: str, turn: int, prompt_hash: str) -> Reply | None:
        """The reply that was recorded for this request, with the prompt ids that it added. Raises
        what ended the call, where that was the outcome."""
        self.check(call, turn, prompt_hash)
        if (call, turn) not in self._asked:
            self._fail_again(call)  # for want of budget, it was never sent
            self._missing(f"a request of call {call}, turn {turn} (prompt {prompt_hash[:12]})")
            return None
        reply = self._replies.get((call, turn))
        if reply is None:
            self._fail_again(call)
            self._missing(f"a reply to call {call}, turn {turn}")
        return None if reply is None else reply.reply

    def check(self, call: str, turn: int, prompt_hash: str) -> None:
        """Raises ReplayDiverged if another request was recorded there, or if the run diverged
        before; Refused if the model refused this prompt and another one replaced it."""
        if self.diverged is not None:
            raise self.diverged
        asked = self._asked.get((call, turn))
        if asked is not None and asked.prompt_hash != prompt_hash:
            self._refuse_again(call, turn, prompt_hash)
            raise self._diverged(
                f"run {self.started.id}, call {call}, turn {turn}: the prompt has hash "
                f"{prompt_hash[:12]} but "
                f"{asked.prompt_hash[:12]} was recorded; the code, tools or context have changed, "
                "so ask as a new run"
            )

    def reused_ids(self, call: str, turn: int) -> int:
        """How many ids of the call's path the prompt of a recorded reply began with."""
        return self._replies[call, turn].reused_ids

    def attempts_at(self, call: str, turn: int) -> list[AttemptFailed]:
        """What was sent for this turn and failed; some of it may have been paid."""
        return self._attempts.get((call, turn), [])

    def in_flight(self, call: str, turn: int) -> bool:
        """Whether this request had been sent, perhaps paid, and not been answered when the run was
        cut off."""
        place = (call, turn)
        is_open = place in self._asked and place not in self._replies and place not in self._booked
        return is_open and call not in self._ends

    def unanswered(self) -> list[RequestStarted]:
        """Every request that was in flight."""
        return [asked for (call, turn), asked in self._asked.items() if self.in_flight(call, turn)]

    def last_word(self, call: str, turn: int) -> Stop | None:
        """The limit at which this request was the call's last, if it was."""
        asked = self._asked.get((call, turn))
        return None if asked is None else asked.last_word

    def cell(self, call: str, turn: int, cell: int) -> Cell | None:
        """What this cell was recorded to have done."""
        return self._cells.get((call, turn, cell))

    def was_skipped(self, call: str, turn: int, cell: int) -> bool:
        """Whether the run was closing by the time of this cell: nothing came after it but the last
        word, if that."""
        if (call, turn, cell) in self._cells:
            return False
        asked, ended = self._asked.get((call, turn + 1)), self._ends.get(call)
        if asked is not None:
            return asked.last_word is not None
        return ended is not None and ended.stop.is_truncated()

    def tool(
        self, call: str, turn: int, cell: int, ordinal: int, arguments_hash: str
    ) -> ToolAnswered | None:
        """What a user's tool was recorded to have returned or raised."""
        found = self._tools.get((call, turn, cell, ordinal))
        place = f"call {call}, turn {turn}, cell {cell}, tool call {ordinal}"
        if found is None:
            self._missing(f"a tool's answer at {place}")
            return None
        if found.arguments_hash != arguments_hash:
            raise self._diverged(
                f"run {self.started.id}, {place}: the arguments have hash {arguments_hash[:12]} "
                "but "
                f"{found.arguments_hash[:12]} was recorded for tool '{found.name}'; ask as a new "
                "run"
            )
        return found

    def holds(self, event: AnyEvent) -> bool:
        """True if a resumed run must not append this event: the journal has it already, or the run
        has diverged, and the journal stays as it is for the right program."""
        return self.diverged is not None or _key(event) in self._held

    def _refuse_again(self, call: str, turn: int, prompt_hash: str) -> None:
        """Raise Refused for a prompt that was refused, and that another prompt replaced at the same
        place."""
        if (call, turn, prompt_hash) not in self._replaced:
            return
        before, after = self._replaced[call, turn, prompt_hash]
        error = Refused(
            f"call {call}, turn {turn}: the prompt {prompt_hash[:12]} was refused when it was "
            "recorded"
        )
        # With as many messages, it was shortened; a last word without them is sent for no other
        # reason.
        error.too_long = len(before.prompt) == len(after.prompt) or before.last_word is not None
        raise error

    def _fail_again(self, call: str) -> None:
        ended = self._ends.get(call)
        if ended is None:
            return
        reason = ended.error or next(
            (a.error for a in reversed(self.attempts) if a.call == call), str(ended.stop)
        )
        if ended.stop.is_truncated():
            raise LimitReached(reason, ended.stop)
        raise ModelError(reason)

    def _reopen(self) -> None:
        """The run was stopped before it had an answer, or failed: forget how it and its unfinished
        calls ended. What a sub-call met stays, since a cell has seen it."""
        self.ended = None
        self._booked.update(self._asked)
        for id, ended in list(self._ends.items()):
            is_stopped = ended.stop is Stop.CANCELLED and ended.answer is None
            if is_stopped or (ended.stop is Stop.ERROR and id not in self._sub_calls):
                del self._ends[id]
                self._held.discard(_key(ended))

    def _diverged(self, text: str) -> ReplayDiverged:
        self.diverged = ReplayDiverged(text)
        return self.diverged

    def _missing(self, what: str) -> None:
        if self.strict:
            raise self._diverged(
                f"run {self.started.id} recorded no such thing as {what}; resume it to ask for it"
            )

    def _can_be_resumed(self, end: RunEnded) -> bool:
        """A replay repeats a failure; a resume tries again."""
        if end.stop is Stop.ERROR:
            return not self.strict
        return end.stop is Stop.CANCELLED and end.answer is None

    def _add(self, event: AnyEvent) -> None:
        if isinstance(event, ScoreAdded):
            return  # about the run, and no part of what it did
        self._held.add(_key(event))
        self.last_s = max(self.last_s, event.at_s)
        match event:
            case RunStarted():
                self.questions.append(event)
                self.ended = None
            case RequestStarted():
                before = self._asked.get((event.call, event.turn))
                if before is not None:
                    self._replaced[before.call, before.turn, before.prompt_hash] = (before, event)
                self._asked[event.call, event.turn] = event
            case AttemptFailed():
                self.attempts.append(event)
                self._attempts.setdefault((event.call, event.turn), []).append(event)
            case ReplyReceived():
                if (event.call, event.turn) not in self._asked:
                    raise StoreError(
                        f"call {event.call}, turn {event.turn} has a reply but no request in the "
                        "journal"
                    )
                self._replies[event.call, event.turn] = event
            case CellRan():
                self._cells[event.call, event.turn, event.cell] = event.result
            case ToolAnswered():
                self._tools[event.call, event.turn, event.cell, event.ordinal] = event
            case CallEnded():
                self._ends[event.id] = event
            case CallStarted():
                self._sub_calls.update({event.id} if event.parent is not None else ())
            case RunEnded() if self._can_be_resumed(event):
                self._reopen()
            case RunEnded():
                self.ended = event
            case _:
                pass


def _key(event: AnyEvent) -> Key:
    """What makes two events the same fact, whenever they happened."""
    match event:
        case RunStarted() | CallStarted() | CallEnded():
            return (type(event), event.id)
        case RequestStarted():
            return (RequestStarted, event.call, event.turn, event.prompt_hash)
        case ReplyReceived():
            return (ReplyReceived, event.call, event.turn)
        case CellRan():
            return (CellRan, event.call, event.turn, event.cell)
        case ToolAnswered():
            return (ToolAnswered, event.call, event.turn, event.cell, event.ordinal)
        case NoteAdded():
            return (NoteAdded, event.call, event.text)
        case AttemptFailed():
            return (AttemptFailed, event.call, event.turn, event.error, event.at_s)
        case RunEnded():
            return (RunEnded, event.stop, event.at_s)
        case ScoreAdded():
            return (ScoreAdded, event.by, event.call, event.turn, event.at_s)

"""What a journal recorded, as a resumed or replayed run asks for it: by where in the tree, and checked by content.

    replay   every reply and tool result must be there; a missing or different one is ``ReplayDiverged``
    resume   what is there is used; what is missing (None) is asked for and paid
In both, a request at a recorded place with another hash is ``ReplayDiverged``: nothing is spent in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from ramify.errors import ReplayDiverged, StoreError
from ramify.types.event import (
    AnyEvent,
    Attempted,
    CallEnded,
    CallStarted,
    CellRan,
    Noted,
    Replied,
    Requested,
    RunEnded,
    RunStarted,
    ToolAnswered,
)
from ramify.types.message import Reply
from ramify.types.trajectory import Cell, Stop

Key = tuple[object, ...]


class Recording:
    """Looks up what ``events`` recorded. Holds references to the events, no copies."""

    started: RunStarted
    """The first one of a conversation."""
    questions: list[RunStarted]
    ended: RunEnded | None
    """The last question's end; None where the run was cut off."""
    attempts: list[Attempted]
    """Failed attempts, some of which may have been paid: a resumed run is charged for them."""

    def __init__(self, events: Iterable[AnyEvent], strict: bool = False) -> None:
        self.strict = strict
        self.questions = []
        self.ended = None
        self.attempts = []
        self.call_ends: dict[str, CallEnded] = {}
        self._asked: dict[tuple[str, int], Requested] = {}
        self._replies: dict[tuple[str, int], tuple[str, Reply]] = {}
        self._tools: dict[tuple[str, int, int, int], ToolAnswered] = {}
        self._cells: dict[tuple[str, int, int], Cell] = {}
        self._last_words: dict[tuple[str, int], Stop] = {}
        self._held: set[Key] = set()
        self.last_s = 0.0
        """Where the run's clock stood when it was cut off."""
        for event in events:
            self._add(event)
        if not self.questions:
            raise StoreError("the journal holds no RunStarted event: the run was cut off before its first act")
        self.started = self.questions[0]

    def reply(self, call: str, turn: int, prompt_hash: str) -> Reply | None:
        """The reply that was recorded for this request."""
        found = self._replies.get((call, turn))
        if found is None:
            self._missing(f"a reply to call {call}, turn {turn} (prompt {prompt_hash[:12]})")
            return None
        recorded, reply = found
        if recorded != prompt_hash:
            raise ReplayDiverged(
                f"run {self.started.id}, call {call}, turn {turn}: the prompt has hash {prompt_hash[:12]} but "
                f"{recorded[:12]} was recorded; the code, tools or context have changed, so ask as a new run"
            )
        return reply

    def tool(self, call: str, turn: int, cell: int, ordinal: int, arguments_hash: str) -> ToolAnswered | None:
        """What a user's tool was recorded to have returned or raised."""
        found = self._tools.get((call, turn, cell, ordinal))
        place = f"call {call}, turn {turn}, cell {cell}, tool call {ordinal}"
        if found is None:
            self._missing(f"a tool's answer at {place}")
            return None
        if found.arguments_hash != arguments_hash:
            raise ReplayDiverged(
                f"run {self.started.id}, {place}: the arguments have hash {arguments_hash[:12]} but "
                f"{found.arguments_hash[:12]} was recorded for tool '{found.name}'; ask as a new run"
            )
        return found

    def unanswered(self) -> list[Requested]:
        """Requests that were in flight when the run was cut off: sent, perhaps paid, never answered."""
        return list(self._asked.values())

    def attempts_at(self, call: str, turn: int) -> list[Attempted]:
        """What was sent for this turn and failed; some of it may have been paid."""
        return [attempt for attempt in self.attempts if (attempt.call, attempt.turn) == (call, turn)]

    def in_flight(self, call: str, turn: int) -> bool:
        """Whether this turn's request was on the wire when the run was cut off."""
        return (call, turn) in self._asked

    def last_word(self, call: str, turn: int) -> Stop | None:
        """The limit at which this turn asked for the answer with what there was, if it did."""
        return self._last_words.get((call, turn))

    def cell(self, call: str, turn: int, cell: int) -> Cell | None:
        """What this cell gave when it was recorded."""
        return self._cells.get((call, turn, cell))

    def holds(self, event: AnyEvent) -> bool:
        """Whether the journal has this event already, so that a resumed run must not append it again."""
        return _key(event) in self._held

    def _missing(self, what: str) -> None:
        if self.strict:
            raise ReplayDiverged(f"run {self.started.id} recorded no such thing as {what}; resume it to ask for it")

    def _add(self, event: AnyEvent) -> None:
        self._held.add(_key(event))
        self.last_s = max(self.last_s, event.at_s)
        match event:
            case RunStarted():
                self.questions.append(event)
                self.ended = None
            case Requested():
                self._asked[event.call, event.turn] = event
                if event.last_word is not None:
                    self._last_words[event.call, event.turn] = event.last_word
            case Attempted():
                self.attempts.append(event)
            case Replied():
                asked = self._asked.pop((event.call, event.turn), None)
                if asked is None:
                    raise StoreError(f"call {event.call}, turn {event.turn} has a reply but no request in the journal")
                self._replies[event.call, event.turn] = (asked.prompt_hash, event.reply)
            case CellRan():
                self._cells[event.call, event.turn, event.cell] = event.result
            case ToolAnswered():
                self._tools[event.call, event.turn, event.cell, event.ordinal] = event
            case CallEnded():
                self.call_ends[event.id] = event
            case RunEnded():
                self.ended = event
            case _:
                pass


def _key(event: AnyEvent) -> Key:
    """What makes two events the same fact, whenever they happened."""
    match event:
        case RunStarted() | CallStarted() | CallEnded():
            return (type(event), event.id)
        case Requested():
            return (Requested, event.call, event.turn, event.prompt_hash)
        case Replied():
            return (Replied, event.call, event.turn)
        case CellRan():
            return (CellRan, event.call, event.turn, event.cell)
        case ToolAnswered():
            return (ToolAnswered, event.call, event.turn, event.cell, event.ordinal)
        case Noted():
            return (Noted, event.call, event.text)
        case Attempted():
            return (Attempted, event.call, event.turn, event.error, event.at_s)
        case RunEnded():
            return (RunEnded, event.stop, event.at_s)

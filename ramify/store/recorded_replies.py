"""Finds the model replies that are recorded in the journal of a run.

A run that is resumed or replayed uses them instead of paying for them again.

Each reply is found by its call and turn. It is used only if the hash of the request is the same.

    replay   every reply and tool result must be recorded; a missing or different one raises
             ``ReplayDiverged``
    resume   what is recorded is used; what is missing (None) is requested again, and paid for

In both, a request at a recorded place with another hash raises ``ReplayDiverged``, so that no money
is spent silently, and nothing is written after that. A request that had failed for good fails again
in the same way. A resume skips the failure that ended the run: that request is sent again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ramify.errors import LimitReached, ModelError, ReplayDiverged, RequestRefusedError, StoreError
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    ModeChosen,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
    ToolAnswered,
)
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallKind, CallSite, Cell, Stop

Key = tuple[object, ...]
_LOOKED_UP = (CallStarted, RequestStarted, ReplyReceived, CallEnded)
"""The most frequent types of events. The indexes by call and turn already find them, so their keys
are not kept in ``_held``.
"""


class TurnsDroppedOnResume(NamedTuple):
    """Turns of a root call that were dropped so that the run could resume past a limit."""

    events: list[AnyEvent]
    """Requests and replies of the dropped turns."""
    is_recorded: bool
    """True if the journal already records that the turns were dropped."""


class RunEventIndex:
    """An index of a recorded run's events by call, turn and code cell.

    The index refers to the events and does not copy them.
    """

    started: RunStarted
    """The event that started the first question of the conversation."""
    questions: list[RunStarted]
    ended: RunEnded | None
    """End of the last question. None if the run can be resumed because it was killed, failed, or
    stopped without an answer.
    """
    diverged: ReplayDiverged | None
    """First difference between the current run and the recorded one, or None."""
    attempts: list[RequestAttemptFailed]
    """Failed attempts. Their cost is charged to the resumed run, because some may have been
    billed.
    """
    is_fork: bool
    """True if another run continues from this record, and so pays only for new requests."""
    given: dict[tuple[str, int], str]
    """(call, turn) -> code that replaces the reply recorded for that turn."""
    prompts: dict[tuple[str, int], list[str]]
    """(call, turn) -> edited texts of the last messages of that turn's request. Used in a fork with
    edits.
    """
    has_other_limits: bool
    """True if the prompts of the current run may state different limits from those of the recorded
    run.
    """
    limits: dict[str, Any]
    """Limits of the latest resumption; empty if the run was never resumed."""
    last_s: float
    """Time of the last event, in seconds since the run began."""
    chosen_mode: ModeChosen | None
    """How the answering mode of the question was chosen, or None."""

    def __init__(self, events: Iterable[AnyEvent], strict: bool = False) -> None:
        self.strict = strict
        self.diverged = None
        self.questions = []
        self.ended = None
        self.attempts = []
        self.is_fork = self.has_other_limits = False
        self.given = {}
        self.limits = {}
        self.last_s = 0.0
        self.chosen_mode = None
        self._failed_end = False
        """True if the last event ended the run in a way that allows it to be resumed."""
        self._finished = 0
        """Number of ``RunEnded`` events of earlier questions that a resumed run will emit again.
        They must not be appended a second time."""
        self._forgotten: dict[tuple[str, int], list[TurnsDroppedOnResume]] = {}
        self._models: dict[str, str] = {}
        self._kinds: dict[str, CallKind] = {}
        self._parents: dict[str, CallSite] = {}
        self._ends: dict[str, CallEnded] = {}
        self._cells: dict[tuple[str, int, int], Cell] = {}
        self._requests: dict[tuple[str, int], RequestStarted] = {}
        self._replaced: dict[tuple[str, int, str], tuple[RequestStarted, RequestStarted]] = {}
        """(call, turn, hash) of a refused prompt -> its request, and the request that replaced
        it."""
        self._replies: dict[tuple[str, int], ReplyReceived] = {}
        self._tools: dict[tuple[str, int, int, int], ToolAnswered] = {}
        self._attempts: dict[tuple[str, int], list[RequestAttemptFailed]] = {}
        self._held: dict[Key, None] = {}
        """Keys of the recorded events that ``is_event_suppressed`` cannot find in another index."""
        self._booked: set[tuple[str, int]] = set()
        """(call, turn) of each request without a reply whose last attempt is already accounted
        for."""
        for event in events:
            self._add(event)
        if self._failed_end:
            self._reopen_unfinished()
        if not self.questions:
            raise StoreError(
                "the journal contains no RunStarted event: the run was cut off before it began"
            )
        self.started = self.questions[0]
        forked = self.started.config.get("forked") or {}
        self.prompts = {
            (place.rpartition("/")[0], int(place.rpartition("/")[2])): texts
            for place, texts in (forked.get("prompts") or {}).items()
        }

    def apply_message_edits(
        self, call: str, turn: int, new: tuple[Message, ...]
    ) -> tuple[Message, ...]:
        """Return the new messages of a turn, in which edited texts replace the original ones.

        ``new`` has the messages as the engine made them. In a fork of a run whose texts were
        edited, the edited texts replace those of the last messages.
        """
        texts = self.prompts.get((call, turn), [])[-len(new) :] if new else []
        first = len(new) - len(texts)
        changed = zip(new[first:], texts, strict=True)
        return (*new[:first], *(msgspec.structs.replace(it, content=text) for it, text in changed))

    def reply(self, call: str, turn: int, prompt_hash: str) -> Reply | None:
        """Return the recorded reply to a request, or None if no reply was recorded.

        The reply has the token ids that the request added to the prompt. Raises the recorded error
        if the request failed for good.
        """
        self.check_prompt_matches(call, turn, prompt_hash)
        if (call, turn) not in self._requests:
            self._fail_again(call)  # the budget ran out before it was sent
            self._raise_if_strict(
                f"a request of call {call}, turn {turn} (prompt {prompt_hash[:12]})"
            )
            return None
        reply = self._replies.get((call, turn))
        if reply is None:
            self._fail_again(call)
            self._raise_if_strict(f"a reply to call {call}, turn {turn}")
        return None if reply is None else reply.reply

    def reusable_call(self, call: str) -> tuple[RequestStarted, ReplyReceived] | None:
        """Return a call's recorded first request and its reply, for direct reuse.

        Returns None if the recording of the call is incomplete, if the call had failed attempts or
        dropped turns, or if the run has diverged from the journal.
        """
        place = (call, 0)
        replied, request = self._replies.get(place), self._requests.get(place)
        if replied is None or request is None or call not in self._ends:
            return None
        is_special = place in self._attempts or place in self._forgotten or place in self.prompts
        if is_special or self.is_fork or self.diverged is not None:
            return None
        return request, replied

    def request(self, call: str, turn: int) -> RequestStarted | None:
        """Return the recorded request of this turn, or None."""
        return self._requests.get((call, turn))

    def model_of(self, call: str) -> str | None:
        """Return the name of the model with which a call started, or None if no such call is
        recorded.

        The hashes of all requests of the call include that name.
        """
        return self._models.get(call)

    def check_prompt_matches(self, call: str, turn: int, prompt_hash: str) -> None:
        """Check that a request has the same prompt as the one recorded for this turn.

        Raises ReplayDiverged if it differs, or if the run has already diverged.

        Raises RequestRefusedError if the model refused this prompt and another prompt replaced it.
        """
        if self.diverged is not None:
            raise self.diverged
        recorded = self._requests.get((call, turn))
        if recorded is not None and recorded.prompt_hash != prompt_hash:
            self._refuse_again(call, turn, prompt_hash)
            raise self._note_divergence(
                f"run {self.started.id}, call {call}, turn {turn}: the prompt has hash "
                f"{prompt_hash[:12]} but {recorded.prompt_hash[:12]} was recorded; the code, tools "
                "or context have changed, so start a new run"
            )

    def num_prefix_ids_reused(self, call: str, turn: int) -> int:
        """Return how many of the first token ids in this turn's prompt come from earlier turns."""
        return self._replies[call, turn].reused_ids

    def failed_attempts(self, call: str, turn: int) -> list[RequestAttemptFailed]:
        """Return the recorded attempts at this turn's request that failed.

        Some of them may have been billed.
        """
        return self._attempts.get((call, turn), [])

    def is_in_flight(self, call: str, turn: int) -> bool:
        """Return True if this turn's request was sent but its reply had not arrived when the run
        was cut off.

        The provider may have charged for it.
        """
        place = (call, turn)
        is_open = (
            place in self._requests and place not in self._replies and place not in self._booked
        )
        return is_open and call not in self._ends

    def is_unanswered(self, call: str, turn: int) -> bool:
        """Return True if this turn has a recorded request but no reply, and its call has not
        ended."""
        place = (call, turn)
        return place in self._requests and place not in self._replies and call not in self._ends

    def drop_request(self, call: str, turn: int) -> None:
        """Drop this turn's recorded request, which has no reply, so that another one can be
        sent."""
        request = self._requests.pop((call, turn), None)
        if request is not None:
            self._held[_key(request)] = None

    def in_flight_requests(self) -> list[RequestStarted]:
        """Return all requests that were in flight when the run was cut off."""
        return [
            request
            for (call, turn), request in self._requests.items()
            if self.is_in_flight(call, turn)
        ]

    def final_turn_reason(self, call: str, turn: int) -> Stop | None:
        """Return the limit that made this turn the last one of its call, or None if there was
        none."""
        request = self._requests.get((call, turn))
        return None if request is None else request.last_word

    def cell(self, call: str, turn: int, cell: int) -> Cell | None:
        """Return the recorded result of one code cell of a turn, or None if it was not recorded."""
        return self._cells.get((call, turn, cell))

    def was_call_made_at(self, id: str, where: CallSite) -> bool:
        """Return True if the recorded run made the call ``id`` from the code cell at ``where``."""
        return self._parents.get(id) == where

    def was_cell_skipped_at_end(self, call: str, turn: int, cell: int) -> bool:
        """Return True if this code cell was skipped because the recorded run was already ending.

        The call then sent at most one more request.
        """
        if (call, turn, cell) in self._cells:
            return False
        next_request, ended = self._requests.get((call, turn + 1)), self._ends.get(call)
        if next_request is not None:
            return next_request.last_word is not None
        return ended is not None and ended.stop.is_truncated()

    def recorded_tool_result(
        self, call: str, turn: int, cell: int, ordinal: int, arguments_hash: str
    ) -> ToolAnswered | None:
        """Return the recorded result of one call of a user's tool, or None if none was recorded."""
        recorded = self._tools.get((call, turn, cell, ordinal))
        place = f"call {call}, turn {turn}, cell {cell}, tool call {ordinal}"
        if recorded is None:
            self._raise_if_strict(f"a tool's answer at {place}")
            return None
        if recorded.arguments_hash != arguments_hash:
            raise self._note_divergence(
                f"run {self.started.id}, {place}: the arguments have hash {arguments_hash[:12]} "
                f"but {recorded.arguments_hash[:12]} was recorded for tool '{recorded.name}'; "
                "start a new run"
            )
        return recorded

    def is_event_suppressed(self, event: AnyEvent) -> bool:
        """Return True if a resumed run must not write this event to its journal.

        Either the journal already contains the event, or the run has diverged. In that case, the
        journal must stay as it is, so that the original program can still resume from it.
        """
        if isinstance(event, RunEnded) and self._finished:
            self._finished -= 1
            return True
        if self.diverged is not None:
            return True
        match event:
            case CallStarted():
                return event.id in self._models
            case RequestStarted():
                last = self._requests.get((event.call, event.turn))
                is_last = last is not None and last.prompt_hash == event.prompt_hash
                return is_last or _key(event) in self._held
            case ReplyReceived():
                return (event.call, event.turn) in self._replies
            case CallEnded():
                return event.id in self._ends
            case _:
                return _key(event) in self._held

    def continue_past_limit(self) -> None:
        """Discard the end of a run that a limit stopped, so that a resumed run can continue.

        The final reply of each root call, the result of the code cell before it, and the failures
        of calls made by that cell are dropped. If the model answered directly, without code, the
        whole answer is dropped.
        """
        stop, self.ended = self.ended and self.ended.stop, None
        turns: dict[str, list[int]] = {}
        for call, turn in self._requests:
            turns.setdefault(call, []).append(turn)
        made: dict[str, list[str]] = {}
        for child, parent in self._parents.items():
            made.setdefault(parent.call, []).append(child)
        cut: dict[str, int] = {}
        for id, ended in self._ends.items():
            is_root = id not in self._parents
            if is_root and (ended.stop.is_truncated() or ended.answer is None):
                cut[id] = self._first_forgotten(id, turns.get(id, []))
        below = list(cut)
        while below:
            id = below.pop()
            for child in made.get(id, ()):
                # The turn of a leaf is a step of its strategy, not a turn of its parent.
                is_of_cell = (
                    self._parents[child].turn == cut[id] - 1 or self._kinds.get(child) == "leaf"
                )
                end = self._ends.get(child)
                # With a reply, the limit may be that of the reply's own length, not of the run.
                has_reply = self._kinds.get(child) == "lm" and (child, 0) in self._replies
                if is_of_cell and end is not None and end.stop is stop and not has_reply:
                    cut[child] = self._first_forgotten(child, turns.get(child, []))
                    below.append(child)
        self._forget(cut, is_recorded=False)

    def discard_unanswered_request(self) -> None:
        """Discard the last request of a cancelled run if it has no reply."""
        for (id, turn), request in list(self._requests.items()):
            is_unanswered = request.last_word is Stop.CANCELLED and (id, turn) not in self._replies
            if is_unanswered and self._parents.get(id) is None:
                self._forget({id: turn}, is_recorded=False)

    def _first_forgotten(self, id: str, turns: list[int]) -> int:
        last = [turn for turn in turns if self._requests[id, turn].last_word is not None]
        return 0 if self._kinds.get(id) == "lm" else min(last, default=max(turns, default=-1) + 1)

    def pop_dropped_turns(self, call: str, turn: int) -> list[TurnsDroppedOnResume]:
        """Return the dropped turns of a call, and remove them from the index.

        They were dropped when the run was resumed. The result begins with the given turn and is
        ordered from the oldest on. They were paid for but no longer count. Each is returned only
        once.
        """
        return self._forgotten.pop((call, turn), [])

    def _forget(self, firsts: Mapping[str, int], *, is_recorded: bool) -> None:
        """Remove the end and the last turns of each given call from the index.

        ``firsts`` maps the id of each call to the first turn to drop. The result of the code cell
        before that turn is dropped too.
        """
        gone: dict[str, list[AnyEvent]] = {id: [] for id in firsts}
        for id, turn in sorted(
            (call, turn) for call, turn in self._requests if turn >= firsts.get(call, math.inf)
        ):
            gone[id].append(self._requests.pop((id, turn)))
            if (id, turn) in self._replies:
                gone[id].append(self._replies.pop((id, turn)))
        for at in [at for at in self._cells if at[1] >= firsts.get(at[0], math.inf) - 1]:
            del self._cells[at]
        for key in [key for key in self._held if _is_of_turns(key, firsts)]:
            del self._held[key]
        for id, first in firsts.items():
            self._ends.pop(id, None)
            forgotten = TurnsDroppedOnResume(gone[id], is_recorded)
            self._forgotten.setdefault((id, first), []).append(forgotten)

    def _refuse_again(self, call: str, turn: int, prompt_hash: str) -> None:
        """Raise RequestRefusedError if the model refused the same prompt in the recorded run.

        Another prompt then replaced it.
        """
        if (call, turn, prompt_hash) not in self._replaced:
            return
        before, after = self._replaced[call, turn, prompt_hash]
        error = RequestRefusedError(
            f"call {call}, turn {turn}: the prompt {prompt_hash[:12]} was refused when it was "
            "recorded"
        )
        # A replacement with as many messages was shortened. A last request with other messages is
        # only ever sent because the prompt was too long.
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

    def _reopen_unfinished(self) -> None:
        """Remove the end of a failed or stopped run from the index, so that it can continue.

        The ends of its unfinished calls are removed too. Failures of sub-calls are kept, since code
        in the session has already seen them.
        """
        # Unlike a run that is killed or blocked, one that ends normally records what these may have
        # cost.
        if self.ended is None or not self.ended.has_open_requests:
            self._booked.update(self._requests)
        self.ended = None
        self._failed_end = False
        for id, ended in list(self._ends.items()):
            is_stopped = ended.stop in (Stop.CANCELLED, Stop.SUSPENDED) and ended.answer is None
            if is_stopped or (ended.stop is Stop.ERROR and id not in self._parents):
                del self._ends[id]

    def _note_divergence(self, text: str) -> ReplayDiverged:
        self.diverged = ReplayDiverged(text)
        return self.diverged

    def _raise_if_strict(self, what: str) -> None:
        if self.strict:
            raise self._note_divergence(
                f"run {self.started.id} did not record {what}; resume the run to request it"
            )

    def _can_be_resumed(self, end: RunEnded) -> bool:
        """Return True if a run that ended in this way can be resumed.

        This includes a failed run, whose failure a replay would only repeat.
        """
        if end.stop is Stop.ERROR:
            return not self.strict
        return end.stop is Stop.SUSPENDED or (end.stop is Stop.CANCELLED and end.answer is None)

    def _add(self, event: AnyEvent) -> None:
        """Add one event of the journal to the index."""
        if isinstance(event, ScoreAdded):
            return  # a score is about the run, not part of it
        # The run was resumed after this end, so the end does not count. A new question keeps it.
        if self._failed_end and not isinstance(event, RunStarted):
            self._reopen_unfinished()
        if type(event) not in _LOOKED_UP:
            self._held[_key(event)] = None
        self.last_s = max(self.last_s, event.at_s)
        match event:  # the most frequent ones first
            case CallStarted():
                self._models[event.id] = event.model
                if event.parent is not None:
                    self._parents[event.id] = event.parent
                self._kinds[event.id] = event.kind
            case RequestStarted():
                place = (event.call, event.turn)
                before = self._requests.get(place)
                if before is not None:  # only the newer request can be looked up by its turn
                    self._held[_key(before)] = None
                    self._replaced[*place, before.prompt_hash] = (before, event)
                self._requests[place] = event
            case ReplyReceived():
                place = (event.call, event.turn)
                if place not in self._requests:
                    raise StoreError(
                        f"call {event.call}, turn {event.turn} has a reply but no request in the "
                        "journal"
                    )
                self._replies[place] = event
            case CallEnded():
                self._ends[event.id] = event
            case CellRan():
                self._cells[event.call, event.turn, event.cell] = event.result
            case ToolAnswered():
                self._tools[event.call, event.turn, event.cell, event.ordinal] = event
            case RequestAttemptFailed():
                self.attempts.append(event)
                self._attempts.setdefault((event.call, event.turn), []).append(event)
            case RunStarted():
                self._finished += bool(self.questions)  # the question before this one has ended
                self._failed_end = False
                self.questions.append(event)
                self.ended = None
            case RunResumed():
                self.limits, self.ended = event.limits, None
                self._forget(event.forgets, is_recorded=True)
            case ModeChosen():
                self.chosen_mode = event
            case RunEnded():
                self.ended = event
                self._failed_end = self._can_be_resumed(event)
            case _:
                pass


def _turn_of(key: Key) -> int:
    """Return the turn number in an event's key, or -1 if the key has none."""
    is_of_turn = key[0] in (RequestStarted, ReplyReceived, CellRan)
    return key[2] if is_of_turn and isinstance(key[2], int) else -1


def _is_of_turns(key: Key, firsts: Mapping[str, int]) -> bool:
    """Return True if the event with this key is dropped together with its turn.

    ``firsts`` maps each call to its first dropped turn. The code cell before that turn and the end
    of the call are dropped too.
    """
    first = firsts.get(str(key[1]))
    if first is None:
        return False
    return key[0] is CallEnded or _turn_of(key) >= first - (key[0] is CellRan)


def _key(event: AnyEvent) -> Key:
    """Return a key that identifies an event by its type and its position in the run.

    The time of the event has no effect.
    """
    match event:  # the most frequent ones first
        case CallStarted() | CallEnded() | RunStarted():
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
        case ModeChosen():
            return (ModeChosen, "")
        case RunResumed():
            return (RunResumed, "", tuple(event.forgets.items()))
        case RequestAttemptFailed():
            # With its time: a repeated run emits it unchanged, and a similar new one differs.
            return (RequestAttemptFailed, event.call, event.turn, event.error, event.at_s)
        case RunEnded():
            return (RunEnded, event.stop, event.at_s)
        case ScoreAdded():
            return (ScoreAdded, event.by, event.call, event.turn, event.at_s)

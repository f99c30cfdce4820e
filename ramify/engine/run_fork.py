"""Fork stored runs: repeat a run up to a turn, and then continue it differently.

A fork is a new run that repeats a stored run up to a chosen turn of one of its calls, and then
continues differently.

    events ──> those before the turn, or beside it ──> edited prompt or code ──> the new run

This module decides which events a fork takes from its origin, where an edit applies, and what the
fork may cost. An edited prompt is kept in the new run's ``metadata["forked"]``, so that it can be
resumed and replayed; edited code is kept as the reply of its turn. Recorded events are repeated by
``rerun.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client, Request
from ramify.engine.limits import BudgetLedger, Limits, max_request_amount
from ramify.engine.question import RunKeywordOptions
from ramify.engine.rerun import COMPARED
from ramify.errors import ConfigError, did_you_mean
from ramify.format_quantities import format_plain_number
from ramify.store.recorded_replies import RunEventIndex
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    ModeChosen,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunStarted,
    ToolAnswered,
)
from ramify.types.message import Message
from ramify.types.trajectory import Stop


class RunForkOptions(RunKeywordOptions, total=False):
    """Keyword options of a fork: all options of a run, and the edit with which the fork begins."""

    call: str | None
    """Id of the call in which the fork diverges; None for the root."""
    code: str | None
    """Code to run in place of the recorded reply of the turn."""
    prompt: str | Sequence[str] | None
    """New text for the last message of the turn's request, or a list of texts for its last
    messages."""


class RunForkCostEstimate(msgspec.Struct, frozen=True):
    """An estimate of what a fork may cost, made before the fork starts."""

    model: str
    """Model of the call in which the fork diverges."""
    input_tokens: int | None
    """Estimated tokens of the first new prompt; None if code runs first."""
    window: int
    """Context window of the model: maximum tokens of prompt and reply together."""
    max_cost: float | None
    """Maximum dollars that the new run may spend; None without a limit."""
    max_calls: int
    max_tokens: int
    recorded_cost: float | None
    """Dollars that the original run spent from this turn on; None if no model had a price."""


def fork_point(events: Iterable[AnyEvent], turn: int, changes: RunForkOptions) -> ForkPoint:
    """Return the point at which to fork a stored run, including the edit made there.

    The options that describe the edit (``call``, ``code`` and ``prompt``) are removed from
    ``changes``.
    """
    call, code = changes.pop("call", None), changes.pop("code", None)
    return ForkPoint(list(events), turn, call=call, code=code, prompt=changes.pop("prompt", None))


class ForkPoint:
    """The turn of a stored run at which a fork begins.

    It includes the edit made there and the recorded events that the fork repeats.
    """

    def __init__(
        self,
        events: Sequence[AnyEvent],
        turn: int,
        *,
        call: str | None = None,
        code: str | None = None,
        prompt: str | Sequence[str] | None = None,
    ) -> None:
        """Prepare a fork at the turn with index ``turn``, counted from 0.

        Raises ConfigError if the run has no such turn or has several root calls, or if the edit
        does not suit the turn.
        """
        calls = {event.id: event for event in events if isinstance(event, CallStarted)}
        self.call = _call_of(calls, call)
        self.turn = turn
        self._recorded = _turns_of(events, self.call.id)
        """For each turn: the request, all messages of its prompt, and the reply."""
        whose = "the root" if self.call.parent is None else f"call {self.call.id}"
        if not 0 <= turn < len(self._recorded):
            raise ConfigError(
                f"{whose} has {len(self._recorded)} turns: turn {turn + 1} cannot be forked"
            )
        self._codes = [
            event.result.code
            for event in events
            if isinstance(event, CellRan) and (event.call, event.turn) == (self.call.id, turn)
        ]
        texts = [prompt] if isinstance(prompt, str) else list(prompt or ())
        self._edited = "prompt" if texts else "" if code is None else "code"
        self._check_edit(whose, code, texts)
        path = _path(events, calls, self.call, turn)
        kept = _kept_calls(events, calls, path)
        are_kept = [_is_kept(event, path, kept) for event in events]
        kept_events = [event for event, is_kept in zip(events, are_kept, strict=True) if is_kept]
        self.recording = RunEventIndex(kept_events)
        self.recording.is_fork = True
        self.recording.prompts = {
            place: texts
            for place, texts in self.recording.prompts.items()
            if self.recording.request(*place) is not None
        }
        if code is not None:
            self.recording.given[self.call.id, turn] = code
        if texts:
            self.recording.prompts[self.call.id, turn] = texts
        costs = [
            event.reply.cost
            for event, is_kept in zip(events, are_kept, strict=True)
            if isinstance(event, ReplyReceived) and not is_kept and event.reply.cost is not None
        ]
        self._recorded_cost = sum(costs) if costs else None

    @property
    def turn_messages(self) -> tuple[Message, ...]:
        """The messages that the recorded turn's request added to the conversation."""
        return self._recorded[self.turn][0].prompt

    @property
    def turn_code(self) -> str | None:
        """The code that the recorded turn ran; None for a plain call, which runs no code."""
        return "\n\n".join(self._codes) if self.call.kind == "rlm" else None

    def _check_edit(self, whose: str, code: str | None, texts: Sequence[str]) -> None:
        if code is not None and texts:
            raise ConfigError("a fork takes an edited prompt or code, not both: give one")
        if code is not None and self.call.kind != "rlm":
            raise ConfigError(
                f"{whose} is a plain call, which runs no code: give an edited prompt instead"
            )
        most = len(self.turn_messages)
        if len(texts) > most:
            raise ConfigError(
                f"turn {self.turn + 1} of {whose} adds {most} messages to its prompt, and "
                f"{len(texts)} edited ones were given: give at most {most}"
            )
        if any(not text.strip() for text in texts):
            raise ConfigError("an edited message of the prompt is empty: give its text")

    def run_metadata(self) -> dict[str, Any]:
        """Return the metadata of the new run, which states from which run it was forked.

        It is the metadata of the original run and, under the key ``forked``, the original run's id,
        the turn and the edit.
        """
        started = self.recording.started
        known = {*COMPARED, "limits", "sandbox", "mcp", "search", "answer_schema", "cite", "about"}
        taken = {name: value for name, value in started.config.items() if name not in known}
        forked: dict[str, Any] = {"run": started.id, "turn": self.turn}
        if self.call.parent is not None:
            forked["call"] = self.call.id
        if self._edited:
            forked["edited"] = self._edited
        if self.recording.prompts:
            forked["prompts"] = {
                f"{call}/{turn}": texts for (call, turn), texts in self.recording.prompts.items()
            }
        return {**taken, "forked": forked}

    def estimate(
        self, limits: Limits, clients: Sequence[Client], reply_tokens: int
    ) -> RunForkCostEstimate:
        """Estimate the cost of the fork under the given limits.

        ``reply_tokens`` is the maximum number of tokens in a reply. Raises ConfigError if an edited
        prompt is too long for the model's window or for the budget.
        """
        client = next((each for each in clients if each.name == self.call.model), clients[0])
        ledger = BudgetLedger(limits, priced=any(each.price is not None for each in clients))
        tokens = None
        if self._edited != "code":
            _, recorded, reply = self._recorded[self.turn]
            edited = self.recording.apply_message_edits(self.call.id, self.turn, self.turn_messages)
            messages = (*recorded[: len(recorded) - len(self.turn_messages)], *edited)
            chars, before = _num_chars(messages), _num_chars(recorded)
            counted = reply.reply.usage.input_tokens
            tokens = chars // 4 if not counted else -(-counted * chars // max(1, before))
            if chars > before:
                self._check_window(client, tokens, reply_tokens)
            self._check_budget(ledger, client, Request(messages), reply_tokens)
        cost = ledger.limit.cost
        return RunForkCostEstimate(
            client.name,
            tokens,
            client.window,
            cost if cost < float("inf") else None,
            limits.max_calls,
            limits.max_tokens,
            self._recorded_cost,
        )

    def _check_window(self, client: Client, tokens: int, reply_tokens: int) -> None:
        if tokens + reply_tokens > client.window:
            raise ConfigError(
                f"the edited prompt has about {tokens:,} tokens, and the window of {client.name} "
                f"holds {client.window:,} with a reply of up to {reply_tokens:,}: shorten it"
            )

    def _check_budget(
        self, ledger: BudgetLedger, client: Client, request: Request, reply_tokens: int
    ) -> None:
        most = max_request_amount(request.max_input_tokens(), reply_tokens, client.price)
        exceeded = ledger.limit_exceeded_by(most)
        if exceeded is Stop.MAX_COST:
            raise ConfigError(
                "the edited prompt and its reply could cost "
                f"${format_plain_number(most.cost)}, too much for "
                f"the run's limit of ${format_plain_number(ledger.limit.cost, 6)}: "
                "shorten it, or raise max_cost"
            )
        if exceeded is not None:
            raise ConfigError(
                f"the edited prompt and its reply could take {most.tokens:,} tokens, too many for "
                f"the run's limit of {ledger.limit.tokens:,}: shorten it, or raise max_tokens"
            )


def _call_of(calls: dict[str, CallStarted], id: str | None) -> CallStarted:
    roots = [call for call in calls.values() if call.parent is None]
    if len(roots) != 1:
        raise ConfigError(
            f"the run has {len(roots)} root calls: only a run with one question and without "
            "branches can be forked"
        )
    if id is not None and id not in calls:
        raise ConfigError(f"the run has no call {id}: {did_you_mean(id, list(calls)[:20])}")
    return roots[0] if id is None else calls[id]


_Turns = list[tuple[RequestStarted, tuple[Message, ...], ReplyReceived]]


def _turns_of(events: Sequence[AnyEvent], id: str) -> _Turns:
    turns: _Turns = []
    request, messages = None, tuple[Message, ...]()
    for event in events:
        if isinstance(event, RequestStarted) and event.call == id:
            request = event
        elif isinstance(event, ReplyReceived) and event.call == id and request is not None:
            prompt = (*messages[: request.reused], *request.prompt)
            del turns[event.turn :]  # turns that a resumed run forgot
            turns.append((request, prompt, event))
            messages = (*prompt, event.reply.message)
    return turns


class _Place(msgspec.Struct, frozen=True):
    """The point at which one call of a forked run switches from replay to live execution.

    The forked call and each of its ancestors have such a point.
    """

    last_reply: int
    """Index of the last turn whose recorded reply is kept."""
    cell: tuple[int, int]
    """(turn, cell) of the first cell that runs again."""
    end: int
    """Index of the event at which the cell's repetition ends. Earlier events of this cell are
    repeated, because they cannot depend on the fork."""


def _path(
    events: Sequence[AnyEvent], calls: dict[str, CallStarted], call: CallStarted, turn: int
) -> dict[str, _Place]:
    ends = {event.id: index for index, event in enumerate(events) if isinstance(event, CallEnded)}
    path = {call.id: _Place(turn - 1, (turn, 0), -1)}
    while (parent := call.parent) is not None:
        end = ends.get(call.id, len(events))
        path[parent.call] = _Place(parent.turn, (parent.turn, parent.cell), end)
        call = calls[parent.call]
    return path


def _kept_calls(
    events: Sequence[AnyEvent], calls: dict[str, CallStarted], path: dict[str, _Place]
) -> dict[str, bool]:
    """Return for each recorded call, by its id, whether the fork replays it.

    The value is False for a call that the fork makes again. The forked call and its ancestors are
    not included, because they are repeated only in part.
    """
    kept: dict[str, bool] = {}
    for index, event in enumerate(events):
        if isinstance(event, CallStarted) and event.parent is not None and event.id not in path:
            at, place = event.parent, path.get(event.parent.call)
            kept[event.id] = (
                kept[at.call] if place is None else _is_before(place, at.turn, at.cell, index)
            )
    return kept


def _is_before(place: _Place, turn: int, cell: int, index: int) -> bool:
    return (turn, cell) < place.cell or ((turn, cell) == place.cell and index < place.end)


def _is_kept(event: AnyEvent, path: dict[str, _Place], kept: dict[str, bool]) -> bool:
    match event:
        case RunStarted() | ModeChosen():
            return True
        case CallStarted(id=call) | CallEnded(id=call):
            return kept.get(call, isinstance(event, CallStarted))
        case RequestStarted() | RequestAttemptFailed() | ReplyReceived():
            place = path.get(event.call)
            return kept[event.call] if place is None else event.turn <= place.last_reply
        case CellRan() | ToolAnswered():
            place = path.get(event.call)
            if place is None:
                return kept[event.call]
            is_tool = isinstance(event, ToolAnswered)
            return (event.turn, event.cell) < place.cell or (
                is_tool and (event.turn, event.cell) == place.cell and place.end >= 0
            )
        case _:
            return False


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)

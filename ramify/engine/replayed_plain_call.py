"""Replay plain model calls from a resumed run's journal with little overhead.

    id, prompt ──> request of the journal with this prompt, its reply and the end of its call
                     ├── all there ──> charged, added to the trajectory ──> CallOutcome
                     └── otherwise ──> None: the call is asked like any other, which also decides
                                       whether the run has diverged

A run with many sub-calls is resumed several times faster in this way. A call qualifies if it had
one request, which was answered at once by a valid answer that used no more than a new call would
reserve. Its outcome, spending and events are those of ``ask_plain``. All other calls are handled
by ``recorded_plain_call.py``.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from ramify.clients.base import Sampling
from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.event_recorder import context_ref
from ramify.engine.limits import max_request_amount
from ramify.engine.live_call import LiveCall
from ramify.engine.plain_call import LONG_CHARS, with_answer_format
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.typed_answers import AnswerSchema, TypeMismatch
from ramify.types.event import ReplyReceived, RequestStarted
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Stop, Turn


def repeat_plain(
    run: SharedRunState,
    call: LiveCall,
    prompt: str,
    kind: AnswerSchema | None,
    sampling: Sampling | None = None,
) -> CallOutcome | None:
    """Replay a complete plain call from the journal, and return its outcome.

    Return None, and change nothing, if the call must be made in the regular way. The arguments are
    those of ``ask_plain``.
    """
    recording = run.recording
    if recording is None or run.ending.suspension is not None:
        return None
    recorded = recording.reusable_call(call.id)
    if recorded is None:
        return None
    request, replied = recorded
    reply, message = replied.reply, Message("user", with_answer_format(prompt, kind))
    if request.reused or len(request.prompt) != 1 or request.prompt[0] != message:
        return None
    if not _is_within_reservation(run, call, message, reply, sampling):
        return None
    outcome = _certain_outcome(reply, kind)
    if outcome is not None:
        _record(run, call, request, replied, outcome)
    return outcome


def _certain_outcome(reply: Reply, kind: AnswerSchema | None) -> CallOutcome | None:
    """Return the outcome of ``reply`` if it is certainly a complete answer, and None otherwise.

    If ``kind`` is given, the answer must have that type.
    """
    text = reply.message.content
    if reply.finish != "stop" or len(text) > LONG_CHARS:
        return None
    if kind is None:
        return CallOutcome(Stop.FINAL, text) if text.strip() else None
    try:
        return CallOutcome(Stop.FINAL, kind.parse_answer(text))
    except TypeMismatch:
        return None


def _is_within_reservation(
    run: SharedRunState, call: LiveCall, message: Message, reply: Reply, sampling: Sampling | None
) -> bool:
    """Return True if the usage of ``reply`` cannot exceed its request's reservation.

    A larger reply would affect later reservations.
    """
    limit, usage = run.requests.max_reply_tokens(call), reply.usage
    if sampling is not None:
        limit = min(limit, sampling.max_tokens)
    num_bytes = len(message.content)  # at least; each may be a token
    if usage.total_tokens > num_bytes + limit:
        return False
    if reply.cost is None or not math.isfinite(run.requests.ledger.limit.cost):
        return True
    return reply.cost <= max_request_amount(num_bytes, limit, call.client.price).cost


def _record(
    run: SharedRunState,
    call: LiveCall,
    request: RequestStarted,
    replied: ReplyReceived,
    outcome: CallOutcome,
) -> None:
    """Charge the budget for a replayed call, and add the call to the run's record.

    Events are emitted one by one only if a listener receives them, since the journal already has
    them.
    """
    recorder, reply, ledger = run.recorder, replied.reply, run.requests.ledger
    if recorder.needs_events:
        run.begin_call(call)
        ledger.charge(reply.usage, reply.cost, is_recorded=True)
        recorder.emit(replace(request, at_s=recorder.elapsed_s(), last_word=None))
        recorder.emit(replace(replied, at_s=recorder.elapsed_s(), cached=True))
        run.end_call(call, outcome)
        return
    now = recorder.elapsed_s()
    ledger.charge(reply.usage, reply.cost, is_recorded=True)
    recorder.add_journaled_call(
        Call(
            call.id,
            call.kind,
            call.client.name,
            call.depth,
            call.question,
            parent=call.parent,
            context=context_ref(call.context),
            turns=[Turn(0, request.prompt, reply, reused_ids=replied.reused_ids)],
            answer=to_jsonable(outcome.answer),
            stop=outcome.stop,
            usage=reply.usage,
            cost=reply.cost,
            started_s=now,
            ended_s=now,
        )
    )

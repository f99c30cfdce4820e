"""Run a model call with a Python session until there is an answer.

In each turn, the model is asked, the code in its reply is run, and the model sees the output. This
is the RLM loop, which is the same at every depth.

    ask ──> parse the reply ──> run its cells ──> final answer? ── yes ──> check it; defer it if
     ^                                               │ no                  output is unseen; return
     └──────────────── observation <─────────────────┘

Requests and their budget are handled by ``model_requests.py``, the session and its recovery by
``persistent_session.py``, the calls that session code makes by ``session_host_calls.py``, and
several continuations of one turn by ``run_branching.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.base import Tool
from ramify.engine import observation_messages, retool_protocol
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.foreign_reply_syntax import syntax_hint
from ramify.engine.live_call import LiveCall
from ramify.engine.model_requests import truncated_reply_error
from ramify.engine.nonblocking_reply_parsing import read_reply
from ramify.engine.persistent_session import MAX_DEATHS, RecoverableSession
from ramify.engine.question import leading_messages
from ramify.engine.reply_action_parsing import (
    FinalAnswerText,
    ParsedAction,
    final_expression_code,
    parse_action,
    prose_of,
)
from ramify.engine.session_host_calls import CellHostCallHandler
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.truncated_replies import complete_truncated
from ramify.engine.typed_answers import AnswerSchema, TypeMismatch
from ramify.errors import (
    HostCallError,
    LimitReached,
    ModelError,
    ReplyTruncatedError,
    RequestRefusedError,
    SandboxError,
    SessionDied,
)
from ramify.sandbox.base import Answer
from ramify.terminal_sanitizer import replace_unprintable
from ramify.types.event import CellRan
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallForkOrigin, Cell, Stop

_NOTHING: Any = object()
_SHARES = (1, 2, 4, 8, 16, 32, 64)
"""Divisors for the length of an observation that does not fit the window. They are tried in this
order until the observation fits."""

_HINT_CHARS = 100_000
"""Characters of a cell's code that are searched for the reason of a syntax error."""
_REFUSED_CHARS = 500
"""Maximum characters that the journal keeps of the reason why an answer was not accepted."""


class MutableCallState(msgspec.Struct):
    """The state of one call that changes from turn to turn.

    It does not include the call's message history and session. A fork of the call starts with a
    copy.
    """

    kind: AnswerSchema | None = None
    """Type that the answer must match; None if the answer may have any type."""
    pending: list[Message] = []
    """Messages that the next request will add to the conversation."""
    reused: int | None = None
    """Number of messages that the next request keeps; None: all."""
    deferred: Any = _NOTHING
    """Final answer that awaits the model's confirmation, because the model has not seen its cell's
    output."""
    partial: Any = None
    """Best answer so far, as named by the model."""
    last_text: str = ""
    """Text of the last message if it had neither code nor an answer."""
    last_prose: str | None = None
    """Prose of the last message if it was already extracted."""
    is_cut: bool = False
    """True if the last reply was truncated at its token limit."""
    num_idle: int = 0
    """Number of consecutive messages without code or an answer."""
    refused_answer: str = ""
    """The last answer that was not accepted, with the reason."""
    cell_error: str = ""
    """The exception of the last cell that ran, in one line; empty if that cell succeeded."""
    told: dict[str, int] = {}
    """Maps each limit to the urgency of the last warning about it."""

    def copy(self) -> MutableCallState:
        """Return an independent copy of the state, from which a fork of the call can continue."""
        return msgspec.structs.replace(self, pending=list(self.pending), told=dict(self.told))


class RlmCall:
    """One call that answers a question by writing code in a Python session.

    Afterwards, its session and message history can be used for another question.
    """

    def __init__(
        self, run: SharedRunState, call: LiveCall, previous: RlmCall | None = None
    ) -> None:
        """Create a call that works in a Python session, without sending a request yet.

        In a conversation, ``previous`` is the call of the previous question, and its session is
        continued.
        """
        self.run = run
        self.call = call
        self.scaffold = run.setup.scaffold_at(call.depth)
        self.notebook = RecoverableSession(run, call)
        if previous is not None:
            self.notebook.adopt_previous_session(previous.notebook)
        self._state = MutableCallState()
        self._closed_by: Stop | None = None  # at which the last cell runs, which makes no calls
        self._is_root = call.parent is None

    async def answer(
        self, question: str, kind: AnswerSchema | None = None, before: Sequence[Message] = ()
    ) -> CallOutcome:
        """Take turns until the question is answered or a limit is reached, and return the outcome.

        ``question`` is the complete first message, ``before`` holds the messages that precede it,
        and ``kind`` is the required answer type.
        """
        self.begin(question, kind, before)
        while (outcome := await self.step()) is None:
            pass
        return outcome

    def begin(self, question: str, kind: AnswerSchema | None, before: Sequence[Message]) -> None:
        """Prepare the first turn of a question and start opening the session.

        Then call ``step`` for each turn.
        """
        self._state.kind = kind
        text = f"{question}\n\n{kind.instruction()}" if kind else question
        self._state.pending = [*self._before_question(before), Message("user", text)]
        self.notebook.open_in_background()

    async def run_child(self, call: LiveCall) -> CallOutcome:
        """Run a child call from start to end in its own new session, and return the outcome."""
        run = self.run
        run.begin_call(call)
        outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
        child = RlmCall(run, call)
        try:
            try:
                outcome = await child.answer(run.first_message_of(call))
            finally:
                await child.close()
        except (ModelError, SandboxError, LimitReached) as error:
            stop = Stop(error.stop) if isinstance(error, LimitReached) else Stop.ERROR
            outcome = CallOutcome(stop, error=str(error), failure=error)
        finally:
            run.end_call(call, outcome)
        if outcome.answer is None and outcome.error is None:
            why = f"the child ended without an answer ({outcome.stop})"
            return msgspec.structs.replace(outcome, error=why)
        # A cell gets any complete answer, even of a child that failed. An error would raise.
        is_complete = outcome.answer is not None and not isinstance(
            outcome.failure, ReplyTruncatedError
        )
        return CallOutcome(outcome.stop, outcome.answer) if is_complete else outcome

    async def fork(self) -> RlmCall:
        """Fork this call: return a copy that continues independently in a fork of the session.

        If the call has not taken a turn yet, the continuation gets a new session instead.
        """
        origin = self.call
        call = origin.fork()
        fork = RlmCall(self.run, call)
        if origin.messages:
            fork.notebook = await self.notebook.fork(call)
        fork._state = self._state.copy()
        self.run.begin_call(call, CallForkOrigin(origin.id, origin.turn - 1))
        return fork

    async def close(self) -> None:
        await self.notebook.close()

    # --- one turn ---------------------------------------------------------------------------------

    async def step(self) -> CallOutcome | None:
        """Take one turn: ask the model, and run the code in its reply.

        Return the outcome of the call if this was the last turn, and None otherwise.
        """
        run, call = self.run, self.call
        run.continue_past_recorded_limit(call)
        stop = run.stop_reason(call)
        # The final request of a child call is not reserved: after most limits, it is not sent.
        if stop is None and self._is_root and self.scaffold.last_word:
            stop = run.requests.reserve_final_request(call, self._state.pending)
        if (
            stop in (Stop.MAX_TOKENS, Stop.MAX_COST)
            and not call.messages
            and run.ending.closing is None
        ):
            # Nothing was seen yet, so a final request would be answered blindly.
            why = run.requests.ledger.refusals.get(stop, f"the run's limit is reached ({stop})")
            return CallOutcome(stop, error=f"nothing was asked: {why}")
        if stop is not None:
            return await self._last_word(stop)
        try:
            reply = await self._ask_within_window(tools=self.scaffold.tools())
            if self.scaffold.accepts_plain_text_answer:
                reply = await complete_truncated(run, call, reply, self._state.pending)
        except LimitReached as reached:
            return await self._last_word(Stop(reached.stop))
        except ModelError as error:
            outgrown = (
                isinstance(error, RequestRefusedError)
                and error.too_long
                and call.turn
                and not self.scaffold.compact_at
            )
            # Without compaction, a long history fills the window. This is a limit, not an error.
            stop = Stop.MAX_TOKENS if outgrown else Stop.ERROR
            return CallOutcome(stop, self._best_answer(use_prose=False), str(error), error)
        self._state.reused = None
        self._state.is_cut = reply.finish == "length"
        read = await read_reply(self.scaffold, reply.message, self._state.is_cut)
        action, self._state.last_prose = read.action, read.prose
        self._state.last_text = "" if action.was_attempted else reply.message.content
        # Again, for the turn after this reply: the cells that run now are dropped with that turn.
        run.continue_past_recorded_limit(call)
        try:
            outcome, messages = await self._act(action)
        except SessionDied as died:
            outcome = await self._last_word(Stop.ERROR)
            answer = (
                outcome.answer if outcome.answer is not None else self._best_answer(use_prose=False)
            )
            return CallOutcome(Stop.ERROR, answer, str(died), died)
        if outcome is None:
            self._state.pending = messages
            await self._compact_if_long()
        return outcome

    async def _ask_within_window(self, *after: Message, tools: tuple[Tool, ...] = ()) -> Reply:
        """Send the pending messages and ``after``, and shorten code output that exceeds the model's
        window.

        Return the reply. If the output of the last code does not fit the model's window, shorten it
        and try again.

        Raises what ``ModelRequestSender.ask`` raises, and RequestRefusedError if even a few
        characters do not fit.
        """
        run, full = self.run, self._state.pending
        error: RequestRefusedError | None = None
        for share in _SHARES if self.call.turn else _SHARES[:1]:  # a question is never shortened
            pending = [
                observation_messages.shorten_message(message, share, self.scaffold.terse_chars)
                for message in full
            ]
            if error is not None and pending == self._state.pending:
                continue
            self._state.pending = pending
            try:
                reply = await run.requests.ask(
                    self.call, [*pending, *after], reused=self._state.reused, tools=tools
                )
            except RequestRefusedError as refused:
                error = refused
                if not refused.too_long:
                    break
                continue
            if share > 1:
                run.note(
                    self.call,
                    f"the window had room for one part in {share} of what the last cells gave",
                )
            return reply
        self._state.pending = full
        assert error is not None
        raise error

    async def _act(self, action: ParsedAction) -> tuple[CallOutcome | None, list[Message]]:
        """Do what the model's reply asks for: run its code and accept its answer.

        Return the outcome of the call, or None together with the messages to show to the model
        next.
        """
        notes = list(action.ignored)
        turn = self.call.turn - 1
        deferred, self._state.deferred = self._state.deferred, _NOTHING
        # The model wrote an answer, not a cell: if this code fails, the text itself may count.
        if not action.codes and (codes := final_expression_code(action.final)):
            _, final = await self._run_cells(msgspec.structs.replace(action, codes=codes), turn, [])
            reports = list[str]()
        else:
            reports, final = await self._run_cells(action, turn, notes)
        if final is _NOTHING and action.final is not None:
            final = await self._text_final(action.final, notes)
        if final is _NOTHING and not action.codes:
            return self._handle_idle_reply(action, deferred, notes)
        self._state.num_idle = 0
        if final is not _NOTHING:
            outcome = self._conclude(final, reports, notes, confirmed=deferred is not _NOTHING)
            if outcome is not None:
                return outcome, []
        elif deferred is not _NOTHING:
            self._state.partial = deferred
        return None, self._observation(action, reports, notes)

    def _handle_idle_reply(
        self, action: ParsedAction, deferred: Any, notes: list[str]
    ) -> tuple[CallOutcome | None, list[Message]]:
        """Handle a reply without code or an answer.

        Accept an answer that was waiting for confirmation; otherwise remind the model. After
        ``max_idle`` such replies in a row, end the call.
        """
        # A model that only calls tools that it was not offered ends like an idle one.
        if action.was_attempted and not action.tool_call_ids:
            self._state.deferred = deferred
            return None, self._observation(action, [observation_messages.NOT_RUN], notes)
        if deferred is not _NOTHING:
            outcome = self._conclude(deferred, [], notes, confirmed=True)
            return outcome, [] if outcome else self._observation(action, [], notes)
        self._state.num_idle += 1
        if self._state.num_idle >= self.scaffold.max_idle:
            return self._prose_outcome(), []
        reminder = observation_messages.idle_reminder(self._state.num_idle, self.scaffold.max_idle)
        if self._state.refused_answer in notes and self._state.num_idle == 1:
            reminder = observation_messages.NOT_RUN  # there was a FINAL(…)
        return None, self._observation(action, [reminder], notes)

    def _prose_outcome(self) -> CallOutcome:
        """Return the outcome of a call that ended because its last replies contained only prose.

        Prose may be a plan rather than an answer. It counts as the answer only if it matches the
        answer type, and if that type would not accept just any text.
        """
        best, words = self._best_answer(use_prose=False), prose_of(self._state.last_text)
        if best is None and self._state.kind is not None and not self._state.is_cut:
            best = self._state.kind.convert_prose(words)
        if best is not None:
            return CallOutcome(Stop.NO_CODE, best, refused_answer=self._state.refused_answer)
        if not self._state.is_cut:
            refused = self._state.refused_answer
            return CallOutcome(Stop.NO_CODE, partial=words, refused_answer=refused)
        cut = truncated_reply_error(self.run.requests, self.call, self._state.last_text)
        stop = Stop.MAX_TOKENS if words else Stop.NO_CODE
        return CallOutcome(stop, None, str(cut) if words else None, cut, words)

    def _conclude(
        self, final: Any, reports: list[str], notes: list[str], *, confirmed: bool
    ) -> CallOutcome | None:
        """Return the outcome of the call if its final answer can be accepted.

        The answer must have the right type, and the model must have seen its code's output.
        Otherwise add a note for the model and return None.
        """
        try:
            value = self._state.kind.convert(final) if self._state.kind else final
        except TypeMismatch as mismatch:
            self._refuse(
                f"The answer does not fit its type: {mismatch}. Correct it and give it again with "
                "FINAL(…).",
                notes,
            )
            return None
        unseen = any(report not in ("", "(no output)") for report in reports)
        if unseen and self.scaffold.defer_final and not confirmed:
            self._state.deferred = final
            notes.append(observation_messages.DEFERRED)
            return None
        return CallOutcome(Stop.FINAL, value)

    # --- cells ------------------------------------------------------------------------------------

    async def _run_cells(
        self, action: ParsedAction, turn: int, notes: list[str]
    ) -> tuple[list[str], Any]:
        """Run the code blocks of a reply in order, stopping after the first one that fails.

        Return the reports to show to the model, and the final answer if the code gave one.
        """
        reports: list[str] = []
        final = _NOTHING
        for index, code in enumerate(action.codes):
            # Opened before the checks, because the run may begin to close during the wait.
            await self.notebook.session()
            if self.run.was_cell_skipped_at_end(self.call, turn, index):
                break
            # In a session that was opened too late, nothing would interrupt this cell.
            if self.run.ending.closing is not None:
                break
            cell, note = await self._run_cell(code, turn, index, notes)
            self._state.cell_error = (cell.error or "").rstrip().rpartition("\n")[2]
            reports.append(self.scaffold.report(cell))
            final = note.get("final", final)
            self._state.partial = note.get("partial", self._state.partial)
            if cell.error and self.scaffold.accepts_plain_text_answer:
                notes += filter(None, [syntax_hint(code[:_HINT_CHARS], cell.error)])
            if cell.error is not None and index + 1 < len(action.codes):
                notes.append(
                    f"cells {index + 2} to {len(action.codes)} were not run, since cell "
                    f"{index + 1} failed"
                )
                break
        return reports, final

    async def _run_cell(
        self, code: str, turn: int, index: int, notes: list[str]
    ) -> tuple[Cell, dict[str, Any]]:
        run, place = self.run, (self.call.id, turn, index)

        # Asked for at each host call, but made once, because it counts the tool calls.
        @functools.cache
        def answer() -> Answer:
            host = CellHostCallHandler(run, self.call, turn, index, self.run_child, self._closed_by)
            return host.handle_host_call

        recorded = run.recording.cell(*place) if run.recording is not None else None
        ran = await self.notebook.execute(code, answer, died=recorded is not None and recorded.died)
        if ran.interrupted == "time":
            state = "there" if (await self.notebook.session()).caps.interrupt else "undone"
            notes.append(
                f"the cell was stopped after {run.cell_timeout_s:g} s of work; what it "
                f"had bound is {state}"
            )
        note = ran.note.get("prelude") if isinstance(ran.note, dict) else None
        note = note if isinstance(note, dict) else {}
        cell = self.notebook.truncate_cell_output(ran, note)
        notes += observation_messages.saved_value_notes(note, cell.error is not None)
        if recorded is not None:
            cell = self.notebook.prefer_recorded_result(cell, recorded)
        run.recorder.emit(
            CellRan(
                at_s=run.recorder.elapsed_s(), call=self.call.id, turn=turn, cell=index, result=cell
            )
        )
        if self.notebook.num_deaths >= MAX_DEATHS:
            raise SessionDied(
                f"call {self.call.id} lost its session {MAX_DEATHS} times; last error: {cell.error}"
            )
        return cell, note

    # --- answers ----------------------------------------------------------------------------------

    async def _text_final(self, final: FinalAnswerText, notes: list[str]) -> Any:
        """Return the value of a ``FINAL(…)`` or ``FINAL_VAR(…)`` that the model wrote as text
        instead of code.

        If the variable cannot be read, add a note for the model and return ``_NOTHING``.
        """
        name = final.text
        if final.as_is:
            return name
        if final.variable or (name.isidentifier() and name not in ("True", "False", "None")):
            try:
                session = await self.notebook.session()
                return await session.get(name)
            except (HostCallError, SandboxError) as error:
                # The variable exists, and its value exceeds a limit.
                is_too_much = isinstance(error, HostCallError) and error.kind == "ValueError"
                if final.variable or is_too_much:
                    form = "FINAL_VAR" if final.variable else "FINAL"
                    self._refuse(f"{form}({name}): {error}", notes)
                    return _NOTHING
        return self._state.kind.literal_value(name) if self._state.kind else final.inferred_value()

    def _refuse(self, why: str, notes: list[str]) -> None:
        """Reject an answer: add a note for the model and record the rejection in the run."""
        notes.append(why)
        self._state.refused_answer = why
        self.run.note(
            self.call, f"answer not accepted: {replace_unprintable(why)[:_REFUSED_CHARS]}"
        )

    def _best_answer(self, *, use_prose: bool = True) -> Any:
        """Return the best answer so far that matches the required type, or None.

        Candidates are an answer that awaits confirmation, a partial answer and, if allowed, the
        prose of the last message.
        """
        prose = ""
        if use_prose and self.scaffold.accepts_plain_text_answer and self._state.last_text:
            known = self._state.last_prose
            prose = prose_of(self._state.last_text) if known is None else known
        for candidate in (self._state.deferred, self._state.partial, prose or None):
            if candidate is _NOTHING or candidate is None:
                continue
            # What can be parsed in a truncated text may be only the beginning of an answer.
            is_text = candidate is prose and not self._state.is_cut
            with contextlib.suppress(TypeMismatch):
                kind = self._state.kind
                return (
                    (kind.parse_answer if is_text else kind.convert)(candidate)
                    if kind
                    else candidate
                )
        return None

    async def _last_word(self, stop: Stop) -> CallOutcome:
        """Ask the model for a final answer because a limit has been reached, and return the
        outcome.

        For the root call, the cost of this request was reserved in advance. A child call may send
        it only if its own turns ran out.
        """
        if not self.scaffold.last_word:
            return self._cut_short(stop)
        if not self._is_root and stop not in (Stop.MAX_TURNS, Stop.ERROR):
            return self._cut_short(stop)
        request = Message(
            "user", observation_messages.final_answer_request(stop, self.notebook.num_deaths)
        )
        prompts = [[*self._state.pending, request]]
        if self.call.messages:
            prompts.append([request])  # without the observation, which may be too long to fit
        for prompt in prompts:
            try:
                reply = await self.run.requests.ask(
                    self.call, prompt, reused=self._state.reused, last_word=stop
                )
            except LimitReached:
                continue
            except ModelError as error:
                if (
                    isinstance(error, RequestRefusedError)
                    and error.too_long
                    and prompt is not prompts[-1]
                ):
                    continue
                return CallOutcome(stop, self._best_answer(), str(error), error)
            self._state.last_text, self._state.last_prose = reply.message.content, None
            self._state.is_cut = reply.finish == "length"
            answer = await self._last_answer(reply.message, stop)
            if self._state.is_cut:
                cut = truncated_reply_error(self.run.requests, self.call, self._state.last_text)
                return CallOutcome(stop, answer, str(cut), cut)
            return CallOutcome(
                stop,
                answer,
                refused_answer=self._state.refused_answer,
                cell_error=self._state.cell_error,
            )
        return self._cut_short(stop)

    def _cut_short(self, stop: Stop) -> CallOutcome:
        best = self._best_answer()
        return CallOutcome(
            stop,
            best,
            f"the run's limit is reached ({stop})" if best is None else None,
            refused_answer=self._state.refused_answer,
            cell_error=self._state.cell_error,
        )

    async def _last_answer(self, message: Message, stop: Stop) -> Any:
        """Return the answer given in the final reply, or else the best answer so far."""
        # Otherwise such a scaffold runs each reply as code. This one may be an answer in text.
        if self.scaffold.raw_code:
            action = parse_action(message)
        else:
            read = await read_reply(self.scaffold, message)
            action, self._state.last_prose = read.action, read.prose
        value = await self._last_cells(action, stop)
        if value is _NOTHING and action.final is not None:
            value = await self._text_final(action.final, [])  # no turn follows to show notes in
        if value is _NOTHING:
            return self._best_answer()
        try:
            return self._state.kind.convert(value) if self._state.kind else value
        except TypeMismatch as mismatch:
            self._refuse(f"The answer does not fit its type: {mismatch}", [])
            return self._best_answer()

    async def _last_cells(self, action: ParsedAction, stop: Stop) -> Any:
        """Run the code of the final reply, which was requested because a limit was reached.

        This code may not call models. Return its final answer, or ``_NOTHING``.
        """
        if stop in observation_messages.NO_LAST_CELL:
            return _NOTHING
        self._closed_by = stop
        codes = action.codes or final_expression_code(action.final)
        last = msgspec.structs.replace(action, codes=codes)
        try:
            _, final = await self._run_cells(last, self.call.turn - 1, [])
        except (SandboxError, LimitReached):
            return _NOTHING
        finally:
            self._closed_by = None
        return final

    # --- messages ---------------------------------------------------------------------------------

    def _before_question(self, before: Sequence[Message]) -> list[Message]:
        """Return the messages that precede the question in the next request.

        At first this is the system prompt. Later in a conversation, it is the answers to native
        tool calls of the last reply.
        """
        if not self.call.messages:
            return leading_messages(self.run.system_prompt(self.call), before)
        return [
            Message("tool", "(answered)", tool_call_id=call.id)
            for call in self.call.messages[-1].tool_calls
        ]

    def _observation(
        self, action: ParsedAction, reports: list[str], notes: list[str]
    ) -> list[Message]:
        if self.scaffold.protocol == "retool":
            return retool_protocol.observation(action, reports, notes)
        if self.scaffold.terse_chars:
            shown = (
                "\n".join(filter(None, reports)) or "\n".join(notes)[: self.scaffold.terse_chars]
            )
            return [Message("user", shown)]
        turn, most = (
            self.call.num_turns_before + self.call.turn,
            self.run.setup.max_turns(self.call.depth),
        )
        standing = [*self.run.usage_by_limit(), ("turns", float(turn), float(most))]
        warnings = observation_messages.low_limit_warnings(standing, self._state.told)
        text = observation_messages.observation_message(reports, notes, turn, most, warnings)
        if not action.tool_call_ids:
            return [Message("user", text)]
        # Each native call needs an answer, and the first one carries the report.
        first, *rest = action.tool_call_ids
        return [
            Message("tool", text, tool_call_id=first),
            *(Message("tool", "(reported with the first call)", tool_call_id=id) for id in rest),
        ]

    async def _compact_if_long(self) -> None:
        """Ask the model to summarize the conversation if its length approaches the model's window.

        The next turn then continues from the first messages and the summary.
        """
        run, call = self.run, self.call
        if not self.scaffold.compact_at:
            return
        known = call.history.server_counted_tokens()
        unknown = self._state.pending if known else [*call.messages, *self._state.pending]
        tokens = known + sum(len(message.content) for message in unknown) // 3
        most = self.scaffold.compact_at * call.client.window
        # Up to the first reply, there is hardly anything that a summary could shorten.
        if tokens + run.requests.sampling.max_tokens <= most or len(call.messages) <= 3:
            return
        run.note(
            call,
            f"the history has about {tokens:,} tokens of a window of {call.client.window:,}: "
            "summarising it",
        )
        try:
            reply = await self._ask_within_window(Message("user", observation_messages.SUMMARISE))
        except (LimitReached, ModelError) as error:
            run.note(call, f"the summary failed ({error}); continuing with the full history")
            return
        # Usually the system prompt and the question. The summary should state the question, too.
        self._state.reused = 2
        self._state.pending = [
            Message("user", observation_messages.CONTINUE.format(summary=reply.message.content))
        ]

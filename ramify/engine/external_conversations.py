"""Let code outside the engine hold conversations with the models of a run.

Examples are an environment with its own loop, or an agent written for another system.

    agent ── replies(messages, thread) ──> the turn that these messages follow ── turn ──> replies
                                           (conversation_matching.py), or a new call

Requests are recorded, budgeted and retried as those of the engine's own loop. A request that
continues an earlier one is the next turn of its call: the earlier token ids are extended and never
tokenized again. Any other request begins a new call, or a fork of the call whose first turns it
shares. The call records the cause (``NewAgentCallReason``). Several replies to one request are the
next turn of the call and forks that share its prompt.

``conversation_matching.py`` decides which turn a request follows. What is asked is decided by the
task's code (``RolloutInitialState.conduct``), and rewards are computed elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.clients.base import Client, KnownPrefix, Sampling, Tool
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.conversation_matching import (
    AgentConversations,
    AgentTurn,
    ConversationMatch,
    ExternallyDrivenCall,
)
from ramify.engine.live_call import CallMessageHistory, LiveCall
from ramify.engine.shared_run_state import SharedRunState
from ramify.errors import LimitReached
from ramify.types.message import Message, Reply, escape_message_surrogates
from ramify.types.trajectory import CallForkOrigin, NewAgentCallReason, Stop

if TYPE_CHECKING:
    from ramify.engine.resources import EventLoopResources

T = TypeVar("T")


class _AgentRequest(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    schema: dict[str, Any] | None
    depth: int
    learns: bool
    num_replies: int
    sampling: Sampling | None


class RunModelClient:
    """Gives code outside the engine, such as an agent, access to the models of one run.

    All requests are recorded and count towards the run's budget.
    """

    def __init__(self, run: SharedRunState, resources: EventLoopResources, question: str) -> None:
        self._run = run
        self._resources = resources
        self._question = question
        self._agents: dict[str, AgentConversations] = {}
        self._num_calls = 0
        self._num_other_sampling = 0
        """Number of requests whose temperature, top-p or top-k setting was ignored."""
        # Requests may arrive in tasks of a server that serves several runs. Clients and logs tell
        # runs apart by context variables.
        self._context = contextvars.copy_context()

    @property
    def max_turns(self) -> int:
        """The maximum number of requests in one conversation with the root model."""
        return self._run.setup.max_turns(0)

    def context_window(self, depth: int = 0) -> int:
        """Return the context window, in tokens, of the model that answers at ``depth``.

        Depth 0 is the root.
        """
        return self._run.models.client_at_depth(depth).window

    def client_at(self, depth: int = 0) -> Client:
        """Return the client of the model that answers at ``depth``.

        Depth 0 is the root.
        """
        return self._run.models.client_at_depth(depth)

    def agent_call_ids(self, thread: str) -> list[str]:
        """Return the ids of the calls of the agent named ``thread``, in order of creation."""
        known = self._agents.get(thread)
        return [] if known is None else [each.call.id for each in known.calls]

    async def get_or_open_shared(
        self, key: object, open: Callable[[], AbstractAsyncContextManager[T]]
    ) -> T:
        """Return an object that all runs of this RLM on one event loop share, opening it on first
        use.

        At the first call with ``key``, the context manager that ``open()`` returns is entered. It
        is exited when the RLM closes its connections.
        """
        return await self._resources.get_or_open(key, open)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        thread: str = "",
        tools: tuple[Tool, ...] = (),
        schema: dict[str, Any] | None = None,
        depth: int = 0,
        learns: bool = True,
        sampling: Sampling | None = None,
    ) -> Reply:
        """Send ``messages`` to one of the run's models, and return its reply.

        The options are those of ``request_replies``, which returns several replies to the same
        messages.
        """
        replies = await self.request_replies(
            messages,
            thread=thread,
            tools=tools,
            schema=schema,
            depth=depth,
            learns=learns,
            sampling=sampling,
        )
        return replies[0]

    async def request_replies(
        self,
        messages: Sequence[Message],
        *,
        thread: str = "",
        tools: tuple[Tool, ...] = (),
        schema: dict[str, Any] | None = None,
        depth: int = 0,
        learns: bool = True,
        num_replies: int = 1,
        sampling: Sampling | None = None,
    ) -> tuple[Reply, ...]:
        """Send ``messages`` to one of the run's models, and return ``num_replies`` independent
        replies.

        ``thread`` names the agent: only its own conversations are continued. ``depth`` chooses the
        model: 0 is the root's. With ``learns=False``, replies are recorded without token ids, so no
        training learns from them. Of ``sampling``, ``max_tokens``, ``stop`` and ``top_logprobs``
        apply; the run's own temperature and top-p stay, so that log-probabilities are those of the
        policy. The ``prompt_ids`` of a reply are those of its whole prompt.

        Raises ModelError if any reply could not be obtained, LimitReached if the run may not ask
        any more, and ConfigError if the model's chat template cannot render the messages.
        """
        given = tuple(map(escape_message_surrogates, messages))
        request = _AgentRequest(given, tools, schema, depth, learns, num_replies, sampling)
        # The task inherits the run's context, and is cancelled with its caller.
        asking = asyncio.get_running_loop().create_task(
            self._answer_request(request, self._agents.setdefault(thread, AgentConversations())),
            context=self._context.copy(),
        )
        return await asking

    async def _answer_request(
        self, request: _AgentRequest, agent: AgentConversations
    ) -> tuple[Reply, ...]:
        client = self._run.models.client_at_depth(request.depth)
        self._note_sampling(request)
        place = agent.match_conversation(
            request.messages, request.tools, client, request.depth, request.learns
        )
        first, start = self._open_call(agent, request, place)
        new = request.messages[start:]
        num_turns = len(first.turns)
        more = [
            self._fork_call(agent, first, num_turns, NewAgentCallReason.SAMPLE)
            for _ in range(1, request.num_replies)
        ]
        known = _shift_prefix(place.known, len(first.call.messages) - start)
        calls = [first, *more]
        for each in calls:
            each.asked = new
            each.first = each.first or new
        try:
            # Wait for all replies before raising, so that no call is still waiting for one.
            results = await asyncio.gather(
                *(self._take_turn(each, new, request, known) for each in calls),
                return_exceptions=True,
            )
        finally:
            for each in calls:
                each.asked = None
        replies = [each for each in results if isinstance(each, Reply)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(replies)

    def _open_call(
        self, agent: AgentConversations, request: _AgentRequest, place: ConversationMatch
    ) -> tuple[ExternallyDrivenCall, int]:
        """Return the call that a request belongs to, and how many of its messages the call already
        has."""
        if place.call is None:
            return self._begin_call(agent, request, place.cause), 0
        if place.cause is None:
            return place.call, place.start
        return self._fork_call(agent, place.call, place.num_turns, place.cause), place.start

    def _begin_call(
        self, agent: AgentConversations, request: _AgentRequest, cause: NewAgentCallReason | None
    ) -> ExternallyDrivenCall:
        depth, learns = request.depth, request.learns
        client = self._run.models.client_at_depth(depth)
        history = CallMessageHistory(keeps_ids=learns)
        call = LiveCall(str(self._num_calls), "lm", client, depth, self._question, history=history)
        self._num_calls += 1
        begun = ExternallyDrivenCall(call, request.tools, learns)
        agent.calls.append(begun)
        self._run.begin_call(call, cause=cause)
        return begun

    def _fork_call(
        self,
        agent: AgentConversations,
        origin: ExternallyDrivenCall,
        num_turns: int,
        cause: NewAgentCallReason,
    ) -> ExternallyDrivenCall:
        """Fork the recorded call ``origin`` after its first ``num_turns`` turns, and return the new
        call."""
        # If none of a fork's own turns is shared, continue from the call that it was forked from.
        while not num_turns and origin.origin is not None:
            origin, num_turns = origin.origin
        num_messages = origin.num_messages_after_turns(num_turns)
        call = origin.call.fork(num_turns, num_messages)
        fork = ExternallyDrivenCall(
            call, origin.tools, origin.learns, num_messages, origin=(origin, num_turns)
        )
        agent.calls.append(fork)
        self._run.begin_call(call, CallForkOrigin(origin.call.id, num_turns - 1), cause)
        return fork

    async def _take_turn(
        self,
        each: ExternallyDrivenCall,
        new: tuple[Message, ...],
        request: _AgentRequest,
        known: KnownPrefix | None,
    ) -> Reply:
        """Send a request as the next turn of a call, and return the reply.

        While the reply is awaited, no other request can continue this call.
        """
        run, call = self._run, each.call
        try:
            stop = run.stop_reason(call)
            if stop is not None:
                num_turns = call.num_turns_before + call.turn
                reason = run.explain_call_stop(CallOutcome(stop), num_turns, request.depth)
                raise LimitReached(reason or f"the run is closing ({stop})", stop)
            reply = await run.requests.ask(
                call,
                new,
                schema=request.schema,
                tools=request.tools,
                known=known,
                asked=request.sampling,
            )
        except LimitReached as error:
            each.stop = Stop(error.stop)
            raise
        each.asked = None
        ids = call.history.ids
        num_prompt_ids = len(ids) - len(reply.token_ids or ()) if ids else 0
        each.turns.append(
            AgentTurn(len(call.messages), num_prompt_ids, len(ids), call.messages[-1])
        )
        prompt_ids = ids[:num_prompt_ids] if ids else None
        return msgspec.structs.replace(reply, prompt_ids=prompt_ids)

    def _note_sampling(self, request: _AgentRequest) -> None:
        """Count an agent's request if its sampling settings differ from those of the run.

        The settings compared are temperature, top-p and top-k. At the end of the run, a note says
        how many such requests there were.
        """
        if request.sampling is None:
            return
        own = self._run.requests.lengths.sampling_of(
            self._run.models.client_at_depth(request.depth)
        )
        asked = request.sampling
        self._num_other_sampling += any(
            wanted is not None and wanted != have
            for wanted, have in (
                (asked.temperature, own.temperature),
                (asked.top_p, own.top_p),
                (asked.top_k, own.top_k),
            )
        )

    def end_calls(self, outcome: CallOutcome) -> None:
        """Record the end of every call that the run's external agents began.

        ``outcome`` is the outcome of the run.
        """
        calls = [each for agent in self._agents.values() for each in agent.calls]
        if self._num_other_sampling and calls:
            self._run.note(
                calls[0].call,
                f"{self._num_other_sampling} requests asked for another temperature, top-p or "
                "top-k than the run's, which had no effect",
            )
        for each in calls:
            replies = [message for message in each.call.messages if message.role == "assistant"]
            answer = replies[-1].content if replies else None
            own = CallOutcome(each.stop, answer) if outcome.stop is Stop.FINAL else outcome
            self._run.end_call(each.call, own)


def _shift_prefix(known: KnownPrefix | None, by: int) -> KnownPrefix | None:
    """Adjust a known prompt prefix after ``by`` messages were inserted at the conversation's start.

    The token ids stay the same.
    """
    return None if known is None else KnownPrefix(known.num_messages + by, known.ids)

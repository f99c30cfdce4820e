"""Conversations that code outside of the engine holds with the models of a run: an environment with
its own loop, or an agent that was written elsewhere.

    environment ── ask(messages, thread) ──> the call that these messages continue ── turn ──> reply
                                             or a new call, if they continue none

Requests are recorded, budgeted and retried as those of the engine's own loop. A request whose
messages begin with a whole earlier conversation of its thread is that call's next turn: the earlier
token ids are extended and never tokenized again. Any other request begins a new call: the first one
of a thread, one with other tools, one whose history was rewritten, and one that arrives while the
conversation that it would continue still waits for a reply.

Not here: who decides what is asked (``TaskStart.conduct``), and the reward.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.clients.base import Tool
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.live_call import CallHistory, LiveCall
from ramify.engine.live_run import LiveRun
from ramify.errors import LimitReached
from ramify.types.message import Message, Reply, sendable
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.resources import LoopResources

T = TypeVar("T")


class ExternalCall(msgspec.Struct):
    """A call whose requests come from code outside of the engine."""

    call: LiveCall
    tools: tuple[Tool, ...]
    """Tools of its first request."""
    is_waiting: bool = False
    """True while it waits for a reply."""
    stop: Stop = Stop.FINAL
    """The limit that ended it, if one did."""


class ModelConversations:
    """Gives code outside of the engine access to the models of one run."""

    def __init__(self, run: LiveRun, resources: LoopResources, question: str) -> None:
        self._run = run
        self._resources = resources
        self._question = question
        self._threads: dict[str, list[ExternalCall]] = {}
        self._num_calls = 0
        # Requests may arrive in tasks of a server that serves several runs. Clients and logs tell
        # runs apart by context variables.
        self._context = contextvars.copy_context()

    @property
    def max_turns(self) -> int:
        """Maximum number of requests in one conversation with the root's model."""
        return self._run.setup.max_turns(0)

    def window(self, depth: int = 0) -> int:
        """Context window, in tokens, of the model that answers at ``depth``."""
        return self._run.models.rlm(depth).window

    def calls(self, thread: str) -> list[str]:
        """Ids of the calls of ``thread``, in order of creation."""
        return [each.call.id for each in self._threads.get(thread, ())]

    async def shared(self, key: object, open: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Enter ``open()`` if no run of this RLM has done so on this event loop, and return its
        value. It is left when the RLM closes its connections. ``key`` identifies it."""
        return await self._resources.shared(key, open)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        thread: str = "",
        tools: tuple[Tool, ...] = (),
        schema: dict[str, Any] | None = None,
        depth: int = 0,
        learns: bool = True,
    ) -> Reply:
        """Return the reply to ``messages``.

        ``depth`` chooses the model: 0 is the root's. With ``learns=False``, the reply is recorded
        without token ids, so no training learns from it. Raises ModelError if the model gave no
        reply, and LimitReached if the run may not ask any more.
        """
        given = tuple(map(sendable, messages))
        # The task inherits the run's context, and is cancelled with its caller.
        asking = asyncio.get_running_loop().create_task(
            self._ask(given, thread, tools, schema, depth, learns), context=self._context.copy()
        )
        return await asking

    async def _ask(
        self,
        messages: tuple[Message, ...],
        thread: str,
        tools: tuple[Tool, ...],
        schema: dict[str, Any] | None,
        depth: int,
        learns: bool,
    ) -> Reply:
        run = self._run
        async with self._turn_of(messages, thread, tools, depth, learns) as external:
            call = external.call
            stop = run.must_stop(call)
            if stop is not None:
                reason = run.reason(CallOutcome(stop), call.turn, depth)
                raise LimitReached(reason or f"the run is closing ({stop})", stop)
            new = messages[len(call.messages) :]
            return await run.requests.ask(call, new, schema=schema, tools=tools)

    @asynccontextmanager
    async def _turn_of(
        self,
        messages: tuple[Message, ...],
        thread: str,
        tools: tuple[Tool, ...],
        depth: int,
        learns: bool,
    ) -> AsyncIterator[ExternalCall]:
        """Yield the call that this request continues, or a new one. No other request can continue
        it until the block ends."""
        external = self._continued(messages, thread, tools)
        if external is None:
            external = self._begun(thread, tools, depth, learns)
        external.is_waiting = True
        try:
            yield external
        except LimitReached as error:
            external.stop = Stop(error.stop)
            raise
        finally:
            external.is_waiting = False

    def _continued(
        self, messages: tuple[Message, ...], thread: str, tools: tuple[Tool, ...]
    ) -> ExternalCall | None:
        """Return the call with the longest conversation that is a prefix of ``messages``."""
        found: ExternalCall | None = None
        for each in self._threads.get(thread, ()):
            before = each.call.messages
            if each.is_waiting or each.tools != tools or len(before) >= len(messages):
                continue
            is_longer = found is None or len(before) > len(found.call.messages)
            if before and is_longer and all(map(_is_same, before, messages)):
                found = each
        return found

    def _begun(
        self, thread: str, tools: tuple[Tool, ...], depth: int, learns: bool
    ) -> ExternalCall:
        client = self._run.models.rlm(depth)
        history = CallHistory(keeps_ids=learns)
        call = LiveCall(str(self._num_calls), "lm", client, depth, self._question, history=history)
        self._num_calls += 1
        external = ExternalCall(call, tools)
        self._threads.setdefault(thread, []).append(external)
        self._run.begin(call)
        return external

    def end(self, outcome: CallOutcome) -> None:
        """Record the end of every call. ``outcome`` is that of the run."""
        for each in (each for thread in self._threads.values() for each in thread):
            replies = [message for message in each.call.messages if message.role == "assistant"]
            answer = replies[-1].content if replies else None
            own = CallOutcome(each.stop, answer) if outcome.stop is Stop.FINAL else outcome
            self._run.end(each.call, own)


def _is_same(ours: Message, theirs: Message) -> bool:
    """Return True if ``theirs`` is the same message as ``ours``, sent back by another program.
    Programs may drop the reasoning of earlier replies."""
    if theirs.reasoning is None and ours.reasoning is not None:
        ours = msgspec.structs.replace(ours, reasoning=None)
    return ours == theirs

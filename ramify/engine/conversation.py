"""Several questions over one live session.

Variables, imports and the history stay from question to question; each question is a call of its
own in one trajectory (``0``, ``1``, …) that continues the one before, or the branch of it that was
chosen. Limits hold for each question; the clock stops in between.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from ramify.engine import event_loop_thread
from ramify.engine.branch import BranchSearch, config_of, search_of
from ramify.engine.question import question
from ramify.engine.recorder import EventRecorder, Listener, checked_listener
from ramify.engine.resources import SharedResources
from ramify.engine.run_handle import ConversationState, Result, RunHandle, checked
from ramify.engine.setup import RlmSetup
from ramify.engine.spans import tracing
from ramify.errors import ConfigError
from ramify.store.store import Store
from ramify.types.trajectory import Trajectory


class Conversation:
    """Open it with ``with`` (and ``ask``) or with ``async with`` (and ``aask``)."""

    def __init__(
        self,
        setup: RlmSetup,
        shared: SharedResources,
        prompt: Any,
        store: Store | None,
        search: BranchSearch | None = None,
    ) -> None:
        self._setup, self._shared, self._prompt, self._store = setup, shared, prompt, store
        self._search = search
        self._thread: ConversationState | None = None
        self._id = ""
        self._close_journal: Callable[[], None] | None = None
        self._turn = asyncio.Lock()
        """Held while a question is answered: there is one session."""

    @property
    def trajectory(self) -> Trajectory:
        """All questions so far."""
        return self._opened().recorder.trajectory

    def ask(
        self,
        query: str,
        *,
        answer_type: Any = None,
        cite: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """Ask the next question. Raises as ``RLM.completion`` does."""
        return event_loop_thread.run(
            self.aask(query, answer_type=answer_type, cite=cite, search=search, on_event=on_event)
        )

    async def aask(
        self,
        query: str,
        *,
        answer_type: Any = None,
        cite: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """``ask`` on the caller's event loop. Questions asked at once are answered one after the
        other."""
        chosen = self._search if search is None else search_of(search)
        async with self._turn:
            return await self._answer(query, answer_type, cite, chosen, on_event)

    async def _answer(
        self,
        query: str,
        answer_type: Any,
        cite: bool,
        search: BranchSearch | None,
        on_event: Listener | None,
    ) -> Result:
        thread = self._opened()
        asked = question(self._prompt, query, answer_type, cite)
        for listener in checked_listener(on_event):
            thread.recorder.listen(listener)
        try:
            setup = msgspec.structs.replace(
                self._setup, config={**self._setup.config, **config_of(search)}
            )
            running = RunHandle(
                setup,
                asked,
                self._shared.use(),
                id=self._id,
                recorder=thread.recorder,
                thread=thread,
                search=search,
            )
            return checked(await running.result())
        finally:
            if on_event is not None:
                thread.recorder.ignore(on_event)

    async def __aenter__(self) -> Conversation:
        self._shared.pin()
        journal = self._store.create(self._store.new_id("conversation")) if self._store else None
        self._id = journal.id if journal else secrets.token_hex(8)
        self._close_journal = journal.close if journal else None
        self._thread = ConversationState(EventRecorder(journal, tracing()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        thread, self._thread = self._opened(), None
        try:
            await thread.close()
        finally:
            if self._close_journal is not None:
                self._close_journal()
            await self._shared.unpin()

    def __enter__(self) -> Conversation:
        return event_loop_thread.run(self.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        event_loop_thread.run(self.__aexit__(kind, error, at))

    def _opened(self) -> ConversationState:
        if self._thread is None:
            raise ConfigError(
                "the conversation is not open: use `with rlm.conversation(context) as c: c.ask(…)`"
            )
        return self._thread

"""Demonstrations without a session: the demonstrator's code runs in this process, thousands of
cells per second.

    play(item, NOISY, seed=0, scaffold=SCAFFOLDS["tiny"])
        ->  [root's conversation, first child's, …]

The code is written by this package and the contexts are generated, so no sandbox is needed. The
first message of each call and the reports of its cells follow the engine's rules, which are passed
as its scaffold; conversations are equal to those of the engine (a test compares them). Not here:
what the demonstrator does not use (echoes, tools, limits, failing children).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, Protocol

import msgspec

from ramify.errors import RamifyError
from ramify.tasks.base import Item
from ramify.tasks.ledger.demos import (
    CallScene,
    DemonstratedCall,
    LedgerDemonstratorHabits,
    scene_of,
    seed_of,
)
from ramify.tasks.ledger.ledger_rows import Row, solve
from ramify.tasks.ledger.task import LedgerQuestion, documents_of
from ramify.tasks.scoring import exact
from ramify.types.message import Message
from ramify.types.trajectory import Cell


class LedgerScaffold(Protocol):
    """The part of the engine's ``Scaffold`` that a conversation needs."""

    def first_message(self, question: str, context: object) -> str: ...

    def report(self, cell: Cell) -> str: ...


class LedgerDemonstration(msgspec.Struct, frozen=True):
    """Conversation of one call in a demonstration."""

    item: str
    """Id of the item."""
    call: str
    """Id of the call in the engine's form."""
    messages: tuple[Message, ...]
    """First message, reply, observation, reply, … up to the reply with the answer."""
    answer: Any
    correct: bool
    """True if the answer is right for this call's own question; False also if that is unknown."""


def play(
    item: Item, habits: LedgerDemonstratorHabits, seed: int, scaffold: LedgerScaffold
) -> list[LedgerDemonstration]:
    """Return the calls of one demonstration, the root first."""
    return _Play(item, habits, seed, scaffold).run()


def demonstrations(
    items: Iterable[Item], habits: LedgerDemonstratorHabits, seed: int, scaffold: LedgerScaffold
) -> Iterator[list[LedgerDemonstration]]:
    """Yield one demonstration for each item."""
    items = iter(items)
    while True:
        with _no_collection():
            item = next(items, None)
            if item is None:
                return
            conversations = play(item, habits, seed, scaffold)
        yield conversations


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off. A long context has hundreds of thousands of
    rows, and creating them would make the collector scan the whole process many times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _FinalCalled(Exception):
    """Ends a cell at FINAL. (The engine would continue the cell, but the demonstrator's cells end
    with it.)"""


class _Play:
    """State of one demonstration."""

    def __init__(
        self, item: Item, habits: LedgerDemonstratorHabits, seed: int, rules: LedgerScaffold
    ) -> None:
        self._item = item
        self._habits = habits
        self._seed = seed
        self._rules = rules
        self._conversations: list[LedgerDemonstration] = []
        documents = documents_of(item)
        self._rows = {item.context[each.start : each.end]: [each] for each in documents} | {
            item.context: documents
        }

    def run(self) -> list[LedgerDemonstration]:
        self._call("0", scene_of(self._item), self._item.question, self._item.context)
        return sorted(self._conversations, key=lambda each: each.call)

    def _call(self, id: str, scene: CallScene, question: str, context: str) -> Any:
        call = DemonstratedCall(scene, self._habits, seed_of(self._item, self._seed, id))
        session = _Namespace(context, self._children(id, call, context))
        messages = [Message("user", self._rules.first_message(question, context))]
        observation = None
        while True:
            code = call.reply(observation)
            messages.append(Message("assistant", code))
            cell = session.run(code)
            if session.answer is not None:
                break
            observation = self._rules.report(cell)
            messages.append(Message("user", observation))
        correct = self._is_right(question, context, session.answer)
        self._conversations.append(
            LedgerDemonstration(self._item.id, id, tuple(messages), session.answer, correct)
        )
        return session.answer

    def _children(self, id: str, call: DemonstratedCall, context: str) -> Any:
        """Return the function ``rlm_query_batched`` of one call."""

        def rlm_query_batched(prompts: list[str], contexts: list[str]) -> list[Any]:
            scenes = call.children
            if [scene.asked.text for scene in scenes] != prompts:
                raise RamifyError(
                    f"item {self._item.id}, call {id}: the code asks {prompts}, which does not "
                    f"match its {len(scenes)} known scenes"
                )
            return [
                self._call(f"{id}.{index}", scene, prompt, part)
                for index, (scene, prompt, part) in enumerate(
                    zip(scenes, prompts, contexts, strict=True)
                )
            ]

        return rlm_query_batched

    def _is_right(self, question: str, context: str, answer: Any) -> bool:
        if context is self._item.context and question == self._item.question:
            return exact(answer, self._item) == 1.0
        asked, documents = LedgerQuestion.read(question), self._rows.get(context)
        if asked is None or documents is None:
            return False
        rows: list[Row] = [
            row for document in documents for row in document.rows(self._item.context)
        ]
        return exact(answer, Item(question, gold=solve(rows, asked.kind, asked.about))) == 1.0


@functools.lru_cache(4096)
def _compiled(code: str) -> CodeType:
    return compile(code, "<demonstration>", "exec")


class _Namespace:
    """The part of a session that the demonstrator's code needs."""

    def __init__(self, context: str, rlm_query_batched: Any) -> None:
        self.answer: Any = None
        self._printed: list[str] = []
        self._names: dict[str, Any] = {
            "context": context,
            "print": self._print,
            "FINAL": self._final,
            "rlm_query_batched": rlm_query_batched,
            "rlm_query": lambda prompt, part: rlm_query_batched([prompt], [part])[0],
        }

    def run(self, code: str) -> Cell:
        self._printed = []
        error = None
        try:
            exec(_compiled(code), self._names)
        except _FinalCalled:
            pass
        except RamifyError:
            raise
        except Exception as raised:  # noqa: BLE001 -- formatted as in a session
            error = "".join(traceback.format_exception_only(raised))
        return Cell(code, "".join(self._printed), None, error)

    def _print(self, *values: object) -> None:
        self._printed.append(" ".join(map(str, values)) + "\n")

    def _final(self, value: Any) -> None:
        self.answer = value
        raise _FinalCalled

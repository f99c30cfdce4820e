"""Demonstrations without a session: the demonstrator's own code is run right here, thousands a
second.

The code is ours and the contexts are generated, so nothing needs a sandbox. What each call is told
first and shown of each cell are the engine's rules, passed in as its scaffold; conversations are
those that the engine would have had (a test compares them). Leaves out everything that the
demonstrator does not do: echoes, tools, limits, failing children.

    play(item, NOISY, seed=0, scaffold=SCAFFOLDS["tiny"])  ->  [root's conversation, first child's, …]
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
    """What the engine's ``Scaffold`` decides of a conversation."""

    def first_message(self, question: str, context: object) -> str: ...

    def report(self, cell: Cell) -> str: ...


class LedgerDemonstration(msgspec.Struct, frozen=True):
    """One call of a demonstration."""

    item: str
    """Id of the item."""
    call: str
    """Id of the call, as the engine would give it."""
    messages: tuple[Message, ...]
    """First message, reply, observation, reply, … to the reply that answers."""
    answer: Any
    correct: bool
    """Whether the answer is right for what this very call was asked. False also where that cannot
    be told."""


def play(
    item: Item, habits: LedgerDemonstratorHabits, seed: int, scaffold: LedgerScaffold
) -> list[LedgerDemonstration]:
    """The calls of one demonstration, the root first."""
    return _Play(item, habits, seed, scaffold).run()


def demonstrations(
    items: Iterable[Item], habits: LedgerDemonstratorHabits, seed: int, scaffold: LedgerScaffold
) -> Iterator[list[LedgerDemonstration]]:
    """One demonstration of each of ``items``."""
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
    """Python's cyclic garbage collector is off meanwhile. The rows of a long context are hundreds
    of thousands of objects: as they are made, it would search all that the process holds many
    times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _FinalCalled(Exception):
    """Ends a cell of ours where the real FINAL would go on; the demonstrator's have nothing after
    it."""


class _Play:
    def __init__(
        self, item: Item, habits: LedgerDemonstratorHabits, seed: int, rules: LedgerScaffold
    ) -> None:
        self._item, self._habits, self._seed, self._rules = item, habits, seed, rules
        self._conversations: list[LedgerDemonstration] = []
        documents = documents_of(item)
        self._rows = {item.context[each.start : each.end]: [each] for each in documents} | {
            item.context: documents
        }

    def run(self) -> list[LedgerDemonstration]:
        self._call("0", scene_of(self._item), self._item.question, self._item.context)
        return sorted(self._conversations, key=lambda each: each.call)

    def _call(self, id: str, scene: CallScene, question: str, context: str) -> Any:
        course = DemonstratedCall(scene, self._habits, seed_of(self._item, self._seed, id))
        session = _Namespace(context, self._children(id, course, context))
        messages = [Message("user", self._rules.first_message(question, context))]
        observation = None
        while True:
            code = course.reply(observation)
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

    def _children(self, id: str, course: DemonstratedCall, context: str) -> Any:
        """``rlm_query_batched`` of one call."""

        def rlm_query_batched(prompts: list[str], contexts: list[str]) -> list[Any]:
            scenes = course.children
            if [scene.asked.text for scene in scenes] != prompts:
                raise RamifyError(
                    f"item {self._item.id}, call {id}: {prompts} asked, but {len(scenes)} scenes "
                    "are known"
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
    """As much of a session as the demonstrator's code needs."""

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
        except Exception as raised:  # noqa: BLE001 -- as a session would show it
            error = "".join(traceback.format_exception_only(raised))
        return Cell(code, "".join(self._printed), None, error)

    def _print(self, *values: object) -> None:
        self._printed.append(" ".join(map(str, values)) + "\n")

    def _final(self, value: Any) -> None:
        self.answer = value
        raise _FinalCalled

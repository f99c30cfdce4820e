"""A scripted demonstrator for ledger questions.

It answers as a person with partial knowledge would, in several replies that contain code.

    print(context[:70])                            look at the format first
    R=[l.split(',') for l in context.splitlines()[1:]]           one document: parse, ask, show
    r=sum(int(q) for u,l,q in R if l=='red')
    print(r)
    FINAL(r)

    P=context[4:].split('\\n###\\n')                several documents: one child for each, then
                                                    combine
    A=rlm_query_batched(["sum qty of 'red'"]*len(P),P)
    r=sum(A)
    print(r)

``EXPERT`` is always right. ``NOISY`` has habits that are wrong as often as right, independent of
the context. A policy that imitates it learns every skill, and has yet to learn when to use which.
Replies are code in the form of the scaffold ``tiny``. ``LedgerDemonstrator`` runs them with the
engine. ``simulate_demonstration`` runs them without a session, in this process, thousands of cells
per second:

    play(item, NOISY, 0, texts_of(SCAFFOLDS["tiny"]))
        ->  [root's conversation, first child's, …]

The code is written by this package and the contexts are generated, so no sandbox is needed. The
first message of each call and the reports of its cells are the engine's, which are passed as
``DemonstrationPromptFormat``; conversations are equal to those of the engine (a test compares
them). Echoes, tools, limits and failing children are left out, since the demonstrator does
not use them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import msgspec

from ramify.clients.base import Price, Request
from ramify.errors import RamifyError, RequestRefusedError
from ramify.tasks.base import DemonstrationPromptFormat, Item
from ramify.tasks.ledger.ledger_rows import (
    COMBINED,
    KINDS,
    KNOWN_FORMATS,
    Kind,
    LedgerRowTextFormat,
    Row,
    solve,
)
from ramify.tasks.ledger.task import MARKS, LedgerQuestion, documents_of
from ramify.tasks.scoring import exact
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Cell

LOOK = "print(context[:70])"
GIVE_UP, ANSWER = "FINAL('none')", "FINAL(r)"
NAMES_OF = ("u", "l", "q")
"""Variable names for the fields of a row in a demonstration's code."""
_RAISED = re.compile(r"^[A-Za-z]*(?:Error|Exception|Interrupt)\b", re.MULTILINE)


class LedgerMistakeRates(msgspec.Struct, frozen=True):
    """How often a scripted demonstrator makes and repairs each kind of mistake.

    Each value is the fraction of calls in which the demonstrator has that habit.
    """

    looks: float = 1.0
    """How often the demonstrator looks at the context first. Otherwise it guesses the format and
    the separator of documents."""
    knows_header: float = 1.0
    """How often the demonstrator knows whether the first line is a header, and skips it only then.
    In other calls, it skips the line at random."""
    mistakes: Mapping[Kind, float] = {}
    """For each kind of question, how often the demonstrator makes a mistake: counts the label in
    the whole text, omits the filter, compares numbers as text, or takes the first value instead of
    the latest."""
    repairs: float = 1.0
    """How often the demonstrator looks again after an error, or changes whether it skips a header.
    Otherwise it gives up."""
    recurses: float = 1.0
    """How often the demonstrator passes each of several documents to a child call."""
    delegates_whole: float = 0.0
    """How often the demonstrator passes all documents to one child call instead of parsing them as
    if they were one document."""
    asks_children_wrong: float = 0.0
    """How often the demonstrator asks its child calls a question of the wrong kind."""
    combines_wrong: float = 0.0
    """How often the demonstrator combines results wrongly: adds them if the maximum is asked for,
    or takes the maximum if the sum is asked for."""


EXPERT = LedgerMistakeRates()
NOISY = LedgerMistakeRates(
    looks=0.6,
    knows_header=0.0,
    mistakes=dict.fromkeys(KINDS, 0.5),
    repairs=0.5,
    recurses=0.6,
    delegates_whole=0.1,
    asks_children_wrong=0.2,
    combines_wrong=0.25,
)


class LedgerDemonstratorInput(msgspec.Struct, frozen=True):
    """What a scripted demonstrator knows about a call: its question and its documents' formats.

    It also knows the separator of the documents.
    """

    asked: LedgerQuestion
    formats: tuple[LedgerRowTextFormat, ...]
    mark: str = ""
    """Separator of documents. Empty if the call parses its whole context as one document in the
    first of ``formats``."""


def root_call_input(item: Item) -> LedgerDemonstratorInput:
    """Return what the demonstrator knows about the root call of a task item."""
    asked = LedgerQuestion.parse(item.question)
    assert asked is not None, item.question
    mark = item.metadata["mark"]
    return LedgerDemonstratorInput(
        asked, tuple(document.format for document in documents_of(item)), mark
    )


class DemonstratorReplies:
    """Produces a scripted demonstrator's replies in one call, one after another."""

    def __init__(
        self, scene: LedgerDemonstratorInput, habits: LedgerMistakeRates, seed: str
    ) -> None:
        """Prepare a demonstrator's replies in one call, given its habits and a random seed.

        All random choices depend only on ``seed``, so equal arguments give equal replies.
        """
        self._scene = scene
        self._habits = habits
        self._rng = random.Random(seed)
        self._has_looked = self._draw_with_chance(habits.looks)
        self._format = scene.formats[0] if self._has_looked else self._rng.choice(KNOWN_FORMATS)
        self._mark = scene.mark if self._has_looked else self._rng.choice(MARKS)
        self._strategy = self._choose_strategy()
        self._child_asked = self._choose_child_question()
        self._has_raised = False
        self._replies = self._iter_codes()

    @property
    def child_call_inputs(self) -> list[LedgerDemonstratorInput]:
        """What the demonstrator knows about each child call, in the order of the calls."""
        scene = self._scene
        if self._strategy == "recurse" and self._mark == scene.mark:
            return [LedgerDemonstratorInput(self._child_asked, (form,)) for form in scene.formats]
        return (
            [LedgerDemonstratorInput(self._child_asked, scene.formats)]
            if self._strategy != "direct"
            else []
        )

    def reply(self, observation: str | None) -> str:
        """Return the demonstrator's next reply.

        Raises StopIteration after the answer.

        ``observation`` is the output of the previous reply's code, or None for the first reply.
        """
        self._has_raised = observation is not None and bool(_RAISED.search(observation))
        return next(self._replies)

    # --- decisions --------------------------------------------------------------------------------

    def _draw_with_chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _choose_strategy(self) -> str:
        if not self._scene.mark:
            return "direct"
        drawn = self._rng.random() - self._habits.recurses
        return (
            "recurse"
            if drawn < 0
            else "whole"
            if drawn < self._habits.delegates_whole
            else "direct"
        )

    def _choose_child_question(self) -> LedgerQuestion:
        asked = self._scene.asked
        other = [kind for kind in COMBINED if kind != asked.kind]
        kind = (
            self._rng.choice(other)
            if self._draw_with_chance(self._habits.asks_children_wrong)
            else asked.kind
        )
        return LedgerQuestion(kind, asked.about)

    # --- replies ----------------------------------------------------------------------------------

    def _iter_codes(self) -> Iterator[str]:
        if self._has_looked:
            yield LOOK
        if self._strategy == "direct":
            yield from self._work_it_out()
        elif self._strategy == "whole":
            yield f'r=rlm_query("{self._child_asked.text}",context)\nprint(r)'
        else:
            yield from self._ask_children()
        yield GIVE_UP if self._has_raised else ANSWER

    def _work_it_out(self) -> Iterator[str]:
        skips = (
            self._format.header
            if self._draw_with_chance(self._habits.knows_header)
            else self._draw_with_chance(0.5)
        )
        mistaken = self._draw_with_chance(self._habits.mistakes.get(self._scene.asked.kind, 0.0))
        yield self._parsing_code(skips, mistaken)
        if self._has_raised and self._draw_with_chance(self._habits.repairs):
            if self._has_looked:
                skips = not skips
            else:
                yield LOOK
                self._format = self._scene.formats[0]
            yield self._parsing_code(skips, mistaken)

    def _parsing_code(self, skips: bool, mistaken: bool) -> str:
        rest = "[1:]" if skips else ""
        rows = f"R=[l.split('{self._format.separator}') for l in context.splitlines(){rest}]"
        return (
            f"{rows}\nr={_answer_expression(self._scene.asked, self._format, mistaken)}\nprint(r)"
        )

    def _ask_children(self) -> Iterator[str]:
        right = "max" if self._scene.asked.kind == "max" else "sum"
        put_together = (
            {"max": "sum", "sum": "max"}[right]
            if self._draw_with_chance(self._habits.combines_wrong)
            else right
        )
        question = f'"{self._child_asked.text}"'
        parts = f"P=context[4:].split('\\n{self._mark}\\n')"
        yield f"{parts}\nA=rlm_query_batched([{question}]*len(P),P)\nr={put_together}(A)\nprint(r)"
        if self._has_raised and self._draw_with_chance(self._habits.repairs):
            yield f"r={put_together}(int(a) for a in A)\nprint(r)"


def _answer_expression(asked: LedgerQuestion, form: LedgerRowTextFormat, mistaken: bool) -> str:
    """Return a Python expression that computes the answer from a list ``R`` of ledger rows.

    The column names always come at the same place in the expression, whatever the kind of
    question, so that a policy learns to read a format only once.
    """
    rows = f"for {','.join(NAMES_OF[field] for field in form.field_order)} in R"
    label, user = f"if l=='{asked.about}'", f"if u=='{asked.about}'"
    number = "q" if mistaken else "int(q)"
    match asked.kind:
        case "count":
            return f"context.count('{asked.about}')" if mistaken else f"sum(1 {rows} {label})"
        case "sum":
            return f"sum(int(q) {rows})" if mistaken else f"sum(int(q) {rows} {label})"
        case "max":
            return f"max({number} {rows} {label})"
        case "top":
            return f"max(({number},u) {rows})[1]"
        case "latest":
            return f"[q {rows} {user}][{'0' if mistaken else '-1'}]"


# --- through the engine ---------------------------------------------------------------------------


class LedgerDemonstrator:
    """A model client that replies with a scripted demonstration of one task item.

    It uses the prompt format (scaffold) ``tiny``, and only one run at a time may use it.
    """

    window = 1 << 20
    price: Price | None = None

    def __init__(self, item: Item, habits: LedgerMistakeRates = EXPERT, seed: int = 0) -> None:
        self.name = "demonstrator:ledger"
        self._item = item
        self._habits = habits
        self._seed = seed
        self._calls = {
            "0": DemonstratorReplies(root_call_input(item), habits, call_seed(item, seed, "0"))
        }

    async def complete(self, request: Request) -> Reply:
        call = self._replies_of_call(request.affinity)
        last = request.messages[-1]
        try:
            code = call.reply(None if len(request.messages) == 1 else last.content)
        except StopIteration:
            raise RequestRefusedError(
                f"{self.name}: call {request.affinity} has answered; it gives no further replies"
            ) from None
        return Reply(Message("assistant", code), Usage(len(last.content), len(code), calls=1))

    async def close(self) -> None:
        """Do nothing: the client holds no resources."""

    def _replies_of_call(self, id: str) -> DemonstratorReplies:
        if id not in self._calls:
            parent, _, number = id.rpartition(".")
            scene = self._replies_of_call(parent).child_call_inputs[int(number)]
            self._calls[id] = DemonstratorReplies(
                scene, self._habits, call_seed(self._item, self._seed, id)
            )
        return self._calls[id]


def call_seed(item: Item, seed: int, call: str) -> str:
    """Return the seed from which the random choices in one call of a demonstration are derived."""
    return f"{seed}/{item.id}/{call}"


class LedgerCallDemonstration(msgspec.Struct, frozen=True):
    """One call of a scripted demonstration: its messages and its answer."""

    item: str
    """Id of the item."""
    call: str
    """Id of the call within its run, as in ``Call.id``."""
    messages: tuple[Message, ...]
    """First message, reply, observation, reply and so on, up to the reply with the answer."""
    answer: Any
    correct: bool
    """True if the answer is right for this call's own question. False if it is wrong or the right
    answer is unknown.
    """


def simulate_demonstration(
    item: Item, habits: LedgerMistakeRates, seed: int, texts: DemonstrationPromptFormat
) -> list[LedgerCallDemonstration]:
    """Play one item's demonstration without a session, and return each call's conversation.

    The root call comes first.
    """
    return _Play(item, habits, seed, texts).run()


def demonstrations(
    items: Iterable[Item],
    habits: LedgerMistakeRates,
    seed: int,
    texts: DemonstrationPromptFormat,
) -> Iterator[list[LedgerCallDemonstration]]:
    """Yield one demonstration for each item, as the list of its calls' conversations."""
    items = iter(items)
    while True:
        with _no_collection():
            item = next(items, None)
            if item is None:
                return
            conversations = simulate_demonstration(item, habits, seed, texts)
        yield conversations


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector until the ``with`` block ends.

    A long context has hundreds of thousands of rows, and creating them would make the collector
    scan the whole process many times.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _FinalCalled(Exception):
    """Raised by the demonstrator's function ``FINAL`` to end the running code cell.

    In the engine a cell continues after ``FINAL``, but the demonstrator's cells end there.
    """


class _Play:
    """Simulates one scripted demonstration and collects its conversations."""

    def __init__(
        self,
        item: Item,
        habits: LedgerMistakeRates,
        seed: int,
        texts: DemonstrationPromptFormat,
    ) -> None:
        self._item = item
        self._habits = habits
        self._seed = seed
        self._texts = texts
        self._conversations: list[LedgerCallDemonstration] = []
        documents = documents_of(item)
        self._rows = {item.context[each.start : each.end]: [each] for each in documents} | {
            item.context: documents
        }

    def run(self) -> list[LedgerCallDemonstration]:
        self._play_call("0", root_call_input(self._item), self._item.question, self._item.context)
        return sorted(self._conversations, key=lambda each: each.call)

    def _play_call(
        self, id: str, scene: LedgerDemonstratorInput, question: str, context: str
    ) -> Any:
        call = DemonstratorReplies(scene, self._habits, call_seed(self._item, self._seed, id))
        session = _Namespace(context, self._make_batched_query(id, call, context))
        messages = [Message("user", self._texts.first_message(question, context))]
        observation = None
        while True:
            code = call.reply(observation)
            messages.append(Message("assistant", code))
            cell = session.run(code)
            if session.answer is not None:
                break
            observation = self._texts.report(cell)
            messages.append(Message("user", observation))
        correct = self._is_right(question, context, session.answer)
        self._conversations.append(
            LedgerCallDemonstration(self._item.id, id, tuple(messages), session.answer, correct)
        )
        return session.answer

    def _make_batched_query(self, id: str, call: DemonstratorReplies, context: str) -> Any:
        """Return a function ``rlm_query_batched`` that plays the child calls of one call."""

        def rlm_query_batched(prompts: list[str], contexts: list[str]) -> list[Any]:
            scenes = call.child_call_inputs
            if [scene.asked.text for scene in scenes] != prompts:
                raise RamifyError(
                    f"item {self._item.id}, call {id}: the code asks {prompts}, which does not "
                    f"match its {len(scenes)} known scenes"
                )
            return [
                self._play_call(f"{id}.{index}", scene, prompt, part)
                for index, (scene, prompt, part) in enumerate(
                    zip(scenes, prompts, contexts, strict=True)
                )
            ]

        return rlm_query_batched

    def _is_right(self, question: str, context: str, answer: Any) -> bool:
        if context is self._item.context and question == self._item.question:
            return exact(answer, self._item) == 1.0
        asked, documents = LedgerQuestion.parse(question), self._rows.get(context)
        if asked is None or documents is None:
            return False
        rows: list[Row] = [
            row for document in documents for row in document.rows(self._item.context)
        ]
        return exact(answer, Item(question, gold=solve(rows, asked.kind, asked.about))) == 1.0


@functools.lru_cache(4096)
def _compile_code(code: str) -> CodeType:
    return compile(code, "<demonstration>", "exec")


class _Namespace:
    """The namespace in which the demonstrator's code runs, modelled on that of a session."""

    def __init__(self, context: str, rlm_query_batched: Any) -> None:
        self.answer: Any = None
        self._printed: list[str] = []
        self._names: dict[str, Any] = {
            "context": context,
            "print": self._print,
            "FINAL": self._set_final_answer,
            "rlm_query_batched": rlm_query_batched,
            "rlm_query": lambda prompt, part: rlm_query_batched([prompt], [part])[0],
        }

    def run(self, code: str) -> Cell:
        self._printed = []
        error = None
        try:
            exec(_compile_code(code), self._names)
        except _FinalCalled:
            pass
        except RamifyError:
            raise
        except Exception as raised:  # noqa: BLE001 -- formatted as in a session
            error = "".join(traceback.format_exception_only(raised))
        return Cell(code, "".join(self._printed), None, error)

    def _print(self, *values: object) -> None:
        self._printed.append(" ".join(map(str, values)) + "\n")

    def _set_final_answer(self, value: Any) -> None:
        self.answer = value
        raise _FinalCalled

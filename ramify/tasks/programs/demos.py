"""A weak demonstrator of programs: it half knows the words, mends what an error names, and takes
every hint that it gets.

    78@w18@9@w9@6                     knows w18, takes w9 for one of its false friends
    78@w18@f5@9@w9@f20@6              TypeError: not @w9@f20 but @w9@f4
    78@w18@f5@9@w9@f4@6               17
    FINAL(17)

In half of the demonstrations the problem comes with a hint, of one to three rules, which the
demonstrator follows; half of those hints are wrong on purpose. A policy that imitates it can only
tell what comes next from the hint itself, so it learns to read hints rather than to know what they
would say. Of a demonstration with a wrong hint only the first program is kept: it would go on to
learn the wrong from its errors. Conversations are those that the engine would have had.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from ramify.tasks.base import Item
from ramify.tasks.programs.hints import MAX_RULES, HintRule, hint_text
from ramify.tasks.programs.program_library import (
    IMPORTED,
    NUM_WORDS,
    Program,
    ProgramLibrary,
    ProgramProblem,
    RuleViolation,
    library,
)
from ramify.tasks.programs.vocabulary import HINT, answer
from ramify.types.message import Message
from ramify.types.trajectory import Cell

MAX_CODE_TURNS = 2


class ProgramScaffold(Protocol):
    """What the engine's ``Scaffold`` decides of a conversation."""

    def first_message(self, question: str, context: object) -> str: ...

    def report(self, cell: Cell) -> str: ...


class ProgramDemonstratorHabits(msgspec.Struct, frozen=True):
    """How weak the demonstrator is; all shares."""

    knows: float = 0.5
    """Of words that it takes for what they are, drawn anew for each problem; the others for one of
    three false friends."""
    remembers_import: float = 0.5
    hinted: float = 0.5
    """Of demonstrations that come with a hint."""
    counterfactual: float = 0.5
    """Of those, how many with a wrong one."""


class ProgramDemonstration(msgspec.Struct, frozen=True):
    """One demonstration; see ``train.sft.Conversation``."""

    item: str
    messages: tuple[Message, ...]
    correct: bool
    call: str = "0"


def demonstrations(
    items: Iterable[Item], habits: ProgramDemonstratorHabits, seed: int, rules: ProgramScaffold
) -> Iterator[list[ProgramDemonstration]]:
    """One demonstration of each of ``items``."""
    return ([demonstrate(item, habits, seed, rules)] for item in items)


def demonstrate(
    item: Item, habits: ProgramDemonstratorHabits, seed: int, rules: ProgramScaffold
) -> ProgramDemonstration:
    """How the demonstrator goes about ``item``."""
    return _Demonstration(item, habits, random.Random(f"{seed}/{item.id}"), rules).run()


class _Demonstration:
    def __init__(
        self,
        item: Item,
        habits: ProgramDemonstratorHabits,
        rng: random.Random,
        rules: ProgramScaffold,
    ) -> None:
        problem = ProgramProblem.read(item.question)
        assert problem is not None, item.question
        self._item, self._habits, self._rng, self._rules, self._problem = (
            item,
            habits,
            rng,
            rules,
            problem,
        )
        self._library: ProgramLibrary = library(item.metadata["secret"])
        self._believed = {word: self._belief(word) for word, _ in problem.steps}
        self._imports: dict[int, None] = {}
        self._remembers = rng.random() < habits.remembers_import
        self._question = rules.first_message(item.question, "")

    def run(self) -> ProgramDemonstration:
        hinted, is_wrong = (
            self._rng.random() < self._habits.hinted,
            self._rng.random() < self._habits.counterfactual,
        )
        if hinted:
            self._take(self._hint(is_wrong))
        if self._remembers:
            self._imports.update(
                dict.fromkeys(each for each in IMPORTED if each in self._believed.values())
            )
        messages = [Message("user", self._question)]
        if hinted and is_wrong:
            return self._ended([*messages, Message("assistant", self._program().text)], None)
        number = None
        for _ in range(MAX_CODE_TURNS):
            program = self._program()
            found = self._library.run(program)
            messages += [
                Message("assistant", program.text),
                Message("user", self._rules.report(self._cell(program, found))),
            ]
            if not isinstance(found, RuleViolation):
                number = found
                break
            self._mend(found)
        return self._ended([*messages, Message("assistant", answer(number or 0))], number)

    def _belief(self, word: int) -> int:
        if self._rng.random() < self._habits.knows:
            return self._library.right[word]
        return self._rng.choice(self._library.false_friends(word))

    def _hint(self, is_wrong: bool) -> list[HintRule]:
        words = self._rng.sample(
            [word for word, _ in self._problem.steps], self._rng.randint(1, MAX_RULES)
        )
        if is_wrong:
            return [HintRule(word, self._rng.randrange(NUM_WORDS)) for word in words]
        rules = [HintRule(word, self._library.right[word]) for word in words]
        needed = [each for each in IMPORTED if each in (rule.function for rule in rules)]
        return [*rules, *(HintRule(None, each) for each in needed)][:MAX_RULES]

    def _take(self, hint: list[HintRule]) -> None:
        self._question += HINT + hint_text(hint)
        for rule in hint:
            if rule.word is None:
                self._imports[rule.function] = None
            else:
                self._believed[rule.word] = rule.function

    def _mend(self, broken: RuleViolation) -> None:
        if broken.word is None:
            self._imports[broken.function] = None
        else:
            self._believed[broken.word] = broken.function

    def _program(self) -> Program:
        return self._problem.program(self._believed, tuple(sorted(self._imports)))

    def _cell(self, program: Program, found: int | RuleViolation) -> Cell:
        if isinstance(found, RuleViolation):
            return Cell(program.text, error=self._library.message(program, found))
        return Cell(program.text, value=str(found))

    def _ended(self, messages: list[Message], number: int | None) -> ProgramDemonstration:
        return ProgramDemonstration(self._item.id, tuple(messages), number == self._item.gold)

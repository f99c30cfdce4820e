"""A scripted demonstrator that writes example solutions of the task ``programs``.

It is weak on purpose: it knows only part of the vocabulary, corrects what an error message names,
and follows every hint.

    78@w18@9@w9@6                     knows w18, mistakes w9 for one of its false friends
    78@w18@f5@9@w9@f20@6              TypeError: not @w9@f20 but @w9@f4
    78@w18@f5@9@w9@f4@6               17
    FINAL(17)

In half of the demonstrations, the problem comes with a hint of one to three rules, which the
demonstrator follows. Half of those hints are deliberately wrong. So a policy that imitates the
demonstrator can predict its next program only from the hint itself, and learns to read hints
instead of learning the rules that they usually state.

A demonstration with a wrong hint ends after the first program; otherwise the policy would learn
wrong rules from the errors that follow. Conversations have exactly the form that the engine
produces.

A hint is one to three rules that would have helped. It has one of two sources:

    TypeError: not @w9@f20 but @w9@f4     rules_from_errors: only what the tool reported     ->  use
                                                                                           @w9@f4
    a program that took f7 for w40        broken_rules: needs access to the library      ->  use
                                                                                           @w40@f31

A hint states rules that hold for every problem, never the answer of a single one. Hints from errors
contain nothing that the policy has not seen, so a teacher that reads such a hint has no additional
knowledge.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ramify.extras.studies.programs.toy_program_language import (
    IMPORTED,
    NUM_WORDS,
    PROGRAM_HINT,
    USE,
    ProgramWritingExercise,
    ToyProgram,
    ToyWordMeanings,
    ViolatedProgramRule,
    answer_reply,
    generate_word_functions,
)
from ramify.tasks.base import DemonstrationPromptFormat, Item, Task
from ramify.types.message import Message
from ramify.types.trajectory import Cell

MAX_RULES = 3
"""Maximum number of rules in a hint."""
_MISTAKEN = re.compile(r"TypeError: not @w\d{1,2}@f\d{1,2} but @w(\d{1,2})@f(\d{1,2})")
_MISSING = re.compile(r"ImportError: from ops import f(\d{1,2});")


class ToyLanguageRule(msgspec.Struct, frozen=True):
    """One rule of the task ``programs``, as stated in a hint.

    It says which function a word means, or that a function must be imported.
    """

    word: int | None
    """The word, or None for a rule that ``function`` must be imported."""
    function: int
    """The function that the word means, or that must be imported."""

    @property
    def text(self) -> str:
        return (
            f"from ops import f{self.function};"
            if self.word is None
            else f"@w{self.word}@f{self.function}"
        )


def hint_text(rules: Iterable[ToyLanguageRule]) -> str:
    """Return the text of a hint that states the given rules.

    Rules about words come first, then rules about imports. Without rules, the hint is empty.

    >>> hint_text([ToyLanguageRule(None, 10), ToyLanguageRule(3, 9)])
    'use @w3@f9from ops import f10;'
    """
    ordered = sorted(rules, key=lambda rule: (rule.word is None, rule.word, rule.function))
    return USE + "".join(rule.text for rule in ordered) if ordered else ""


def rules_from_errors(observed: Iterable[str]) -> list[ToyLanguageRule]:
    """Return the rules that error messages reveal, at most ``MAX_RULES``.

    They are the first ones, in order.
    """
    rules: dict[ToyLanguageRule, None] = {}
    for text in observed:
        for word, function in _MISTAKEN.findall(text):
            rules[ToyLanguageRule(int(word), int(function))] = None
        for function in _MISSING.findall(text):
            rules[ToyLanguageRule(None, int(function))] = None
    return list(rules)[:MAX_RULES]


def broken_rules(
    problem: ProgramWritingExercise, replies: Sequence[str], library: ToyWordMeanings
) -> list[ToyLanguageRule]:
    """Return the rules that the first program of a rollout breaks, at most ``MAX_RULES``.

    The program is compared with the library's secret, so mistakes that raise no error are found,
    too.
    """
    program = next(filter(None, map(ToyProgram.parse, replies)), None)
    if program is None:
        return []
    asked = {word for word, _ in problem.steps}
    wrong = [
        step
        for step in program.steps
        if step.word in asked and step.function != library.right[step.word]
    ]
    rules = [ToyLanguageRule(step.word, library.right[step.word]) for step in wrong]
    needed = {library.right[word] for word in asked} & set(IMPORTED) - set(program.imports)
    return [*rules, *(ToyLanguageRule(None, function) for function in sorted(needed))][:MAX_RULES]


MAX_CODE_TURNS = 2


class ProgramDemonstratorSkill(msgspec.Struct, frozen=True):
    """Settings of the demonstrator's skill, such as the fraction of words that it knows.

    All values are between 0 and 1.
    """

    knows: float = 0.5
    """Fraction of words whose function the demonstrator knows, drawn independently for each
    problem. It mistakes any other word for one of three wrong functions."""
    remembers_import: float = 0.5
    hinted: float = 0.5
    """Fraction of demonstrations that come with a hint."""
    counterfactual: float = 0.5
    """Fraction of those hints that are wrong on purpose."""


class ProgramTaskDemonstration(msgspec.Struct, frozen=True):
    """A demonstration of the task ``programs`` as a conversation about one task item.

    It has the fields of ``train.sft.Conversation``.
    """

    item: str
    messages: tuple[Message, ...]
    correct: bool
    call: str = "0"


def demonstrations(
    items: Iterable[Item],
    habits: ProgramDemonstratorSkill,
    seed: int,
    texts: DemonstrationPromptFormat,
) -> Iterator[list[ProgramTaskDemonstration]]:
    """Yield a list with a single demonstration for each task item."""
    return ([demonstrate(item, habits, seed, texts)] for item in items)


def program_demos(
    task: Task, num: int, seed: int, texts: DemonstrationPromptFormat, **habits: float
) -> Iterator[list[ProgramTaskDemonstration]]:
    """Yield demonstrations of the first ``num`` training items of the task ``programs``.

    ``habits`` sets the demonstrator's weaknesses. A recipe selects this function by
    ``sft.demos=programs``.
    """
    weaknesses = msgspec.convert(habits, ProgramDemonstratorSkill, strict=False)
    return demonstrations(task.splits["train"][:num], weaknesses, seed, texts)


def demonstrate(
    item: Item, habits: ProgramDemonstratorSkill, seed: int, texts: DemonstrationPromptFormat
) -> ProgramTaskDemonstration:
    """Write a demonstration conversation for one task item, which may end in failure."""
    return _Demonstration(item, habits, random.Random(f"{seed}/{item.id}"), texts).run()


class _Demonstration:
    """A demonstration in progress: its problem and the demonstrator's belief about each word.

    A belief is the function that the demonstrator takes a word to mean.
    """

    def __init__(
        self,
        item: Item,
        habits: ProgramDemonstratorSkill,
        rng: random.Random,
        texts: DemonstrationPromptFormat,
    ) -> None:
        problem = ProgramWritingExercise.parse(item.question)
        assert problem is not None, item.question
        self._item = item
        self._habits = habits
        self._rng = rng
        self._texts = texts
        self._problem = problem
        self._library: ToyWordMeanings = generate_word_functions(item.metadata["secret"])
        self._believed = {word: self._belief(word) for word, _ in problem.steps}
        self._imports: dict[int, None] = {}
        self._remembers = rng.random() < habits.remembers_import
        self._question = texts.first_message(item.question, "")

    def run(self) -> ProgramTaskDemonstration:
        hinted, is_wrong = (
            self._rng.random() < self._habits.hinted,
            self._rng.random() < self._habits.counterfactual,
        )
        if hinted:
            self._take(self._hint(is_wrong))
        if self._remembers:
            self._imports.update(
                dict.fromkeys(number for number in IMPORTED if number in self._believed.values())
            )
        messages = [Message("user", self._question)]
        if hinted and is_wrong:
            return self._make_demonstration(
                [*messages, Message("assistant", self._program().text)], None
            )
        number = None
        for _ in range(MAX_CODE_TURNS):
            program = self._program()
            outcome = self._library.run(program)
            messages += [
                Message("assistant", program.text),
                Message("user", self._texts.report(self._cell(program, outcome))),
            ]
            if not isinstance(outcome, ViolatedProgramRule):
                number = outcome
                break
            self._mend(outcome)
        return self._make_demonstration(
            [*messages, Message("assistant", answer_reply(number or 0))], number
        )

    def _belief(self, word: int) -> int:
        if self._rng.random() < self._habits.knows:
            return self._library.right[word]
        return self._rng.choice(self._library.decoy_functions(word))

    def _hint(self, is_wrong: bool) -> list[ToyLanguageRule]:
        words = self._rng.sample(
            [word for word, _ in self._problem.steps], self._rng.randint(1, MAX_RULES)
        )
        if is_wrong:
            return [ToyLanguageRule(word, self._rng.randrange(NUM_WORDS)) for word in words]
        rules = [ToyLanguageRule(word, self._library.right[word]) for word in words]
        needed = [number for number in IMPORTED if number in (rule.function for rule in rules)]
        return [*rules, *(ToyLanguageRule(None, number) for number in needed)][:MAX_RULES]

    def _take(self, hint: list[ToyLanguageRule]) -> None:
        self._question += PROGRAM_HINT + hint_text(hint)
        for rule in hint:
            if rule.word is None:
                self._imports[rule.function] = None
            else:
                self._believed[rule.word] = rule.function

    def _mend(self, broken: ViolatedProgramRule) -> None:
        if broken.word is None:
            self._imports[broken.function] = None
        else:
            self._believed[broken.word] = broken.function

    def _program(self) -> ToyProgram:
        return self._problem.program_for_meanings(self._believed, tuple(sorted(self._imports)))

    def _cell(self, program: ToyProgram, outcome: int | ViolatedProgramRule) -> Cell:
        if isinstance(outcome, ViolatedProgramRule):
            return Cell(program.text, error=self._library.error_message(program, outcome))
        return Cell(program.text, value=str(outcome))

    def _make_demonstration(
        self, messages: list[Message], number: int | None
    ) -> ProgramTaskDemonstration:
        return ProgramTaskDemonstration(self._item.id, tuple(messages), number == self._item.gold)

"""Bridge thoughts of programs: the one to three rules that would have helped, and where they may be
had from.

    TypeError: not @w9@f20 but @w9@f4       from_errors: what the tool said, and nothing else         ->  use @w9@f4
    a program that took f7 for w40          from_facts: what only who knows the library can tell      ->  use @w40@f31

A hint states rules that hold for every problem, never the answer of one. What follows from errors
the policy has seen itself: a teacher who is shown the hint knows nothing that the policy could not
have learnt there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from ramify.tasks.programs.program_library import IMPORTED, Program, ProgramLibrary, ProgramProblem
from ramify.tasks.programs.vocabulary import USE

MAX_RULES = 3
"""Of a hint."""
_MISTAKEN = re.compile(r"TypeError: not @w\d{1,2}@f\d{1,2} but @w(\d{1,2})@f(\d{1,2})")
_MISSING = re.compile(r"ImportError: from ops import f(\d{1,2});")


class HintRule(msgspec.Struct, frozen=True):
    """One thing that a hint may say."""

    word: int | None
    """None: ``function`` has to be imported."""
    function: int
    """The one that the word stands for."""

    @property
    def text(self) -> str:
        return (
            f"from ops import f{self.function};"
            if self.word is None
            else f"@w{self.word}@f{self.function}"
        )


def hint_text(rules: Iterable[HintRule]) -> str:
    """A hint as it is shown to a policy: words before imports; empty without rules.

    >>> hint_text([Rule(None, 10), Rule(3, 9)])
    'use @w3@f9from ops import f10;'
    """
    ordered = sorted(rules, key=lambda rule: (rule.word is None, rule.word, rule.function))
    return USE + "".join(rule.text for rule in ordered) if ordered else ""


def from_errors(observed: Iterable[str]) -> list[HintRule]:
    """The rules that errors name, in the order in which they were met, ``MAX_RULES`` at most."""
    rules: dict[HintRule, None] = {}
    for text in observed:
        for word, function in _MISTAKEN.findall(text):
            rules[HintRule(int(word), int(function))] = None
        for function in _MISSING.findall(text):
            rules[HintRule(None, int(function))] = None
    return list(rules)[:MAX_RULES]


def from_facts(
    problem: ProgramProblem, said: Sequence[str], library: ProgramLibrary
) -> list[HintRule]:
    """The rules that the first program among ``said`` breaks, silently or not, ``MAX_RULES`` at
    most."""
    program = next(filter(None, map(Program.read, said)), None)
    if program is None:
        return []
    asked = {word for word, _ in problem.steps}
    wrong = [
        step
        for step in program.steps
        if step.word in asked and step.function != library.right[step.word]
    ]
    rules = [HintRule(step.word, library.right[step.word]) for step in wrong]
    needed = {library.right[word] for word in asked} & set(IMPORTED) - set(program.imports)
    return [*rules, *(HintRule(None, function) for function in sorted(needed))][:MAX_RULES]

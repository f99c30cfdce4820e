"""Bridge thoughts for programs: one to three rules that would have helped, and their two sources.

    TypeError: not @w9@f20 but @w9@f4     from_errors: only what the tool reported     ->  use
    @w9@f4
    a program that took f7 for w40        from_facts: needs access to the library      ->  use
    @w40@f31

A hint states rules that hold for every problem, never the answer of one. Hints from errors contain
nothing that the policy has not seen: a teacher that reads such a hint has no additional knowledge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from ramify.tasks.programs.program_library import (
    IMPORTED,
    USE,
    Program,
    ProgramLibrary,
    ProgramProblem,
)

MAX_RULES = 3
"""Maximum number of rules in a hint."""
_MISTAKEN = re.compile(r"TypeError: not @w\d{1,2}@f\d{1,2} but @w(\d{1,2})@f(\d{1,2})")
_MISSING = re.compile(r"ImportError: from ops import f(\d{1,2});")


class HintRule(msgspec.Struct, frozen=True):
    """One rule of a hint."""

    word: int | None
    """The word; None if the rule says that ``function`` must be imported."""
    function: int
    """The function that the word stands for, or that must be imported."""

    @property
    def text(self) -> str:
        return (
            f"from ops import f{self.function};"
            if self.word is None
            else f"@w{self.word}@f{self.function}"
        )


def hint_text(rules: Iterable[HintRule]) -> str:
    """Format a hint for a policy, words before imports. Empty without rules.

    >>> hint_text([HintRule(None, 10), HintRule(3, 9)])
    'use @w3@f9from ops import f10;'
    """
    ordered = sorted(rules, key=lambda rule: (rule.word is None, rule.word, rule.function))
    return USE + "".join(rule.text for rule in ordered) if ordered else ""


def from_errors(observed: Iterable[str]) -> list[HintRule]:
    """Return the rules that errors name, in order of appearance, at most ``MAX_RULES``."""
    rules: dict[HintRule, None] = {}
    for text in observed:
        for word, function in _MISTAKEN.findall(text):
            rules[HintRule(int(word), int(function))] = None
        for function in _MISSING.findall(text):
            rules[HintRule(None, int(function))] = None
    return list(rules)[:MAX_RULES]


def from_facts(
    problem: ProgramProblem, replies: Sequence[str], library: ProgramLibrary
) -> list[HintRule]:
    """Return the rules that the first program among ``replies`` breaks, with or without an error,
    at most ``MAX_RULES``."""
    program = next(filter(None, map(Program.read, replies)), None)
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

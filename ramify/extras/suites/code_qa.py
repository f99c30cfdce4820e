"""The suite ``code_qa``: multiple-choice questions about a package of Python modules, as in the
code domain of LongBench-v2.

    code_qa(tokens=65_536)
    code_qa(families=("order",))
    code_qa(test="data.parquet", domains="Code Repository Understanding")     LongBench-v2's file

    # file: depot/bodafi.py
    from depot import kelumo

    RESERVE = 17

    def quota():
        return kelumo.base_rate() * 3 + RESERVE

    What does depot.bodafi.quota() return?  A) 41  B) 58  C) 75  D) 24

The families of questions are ``value`` (constants and arithmetic over three modules), ``caller``
(which function calls another one) and ``order`` (which function runs as the nth). The package can
be imported. The filler consists of further modules, whose functions and constants have the same
names but other values.

This module generates the package, the questions and their choices. Answers are scored by ``choice``
of ``ramify.tasks``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.extras.suites.fact_planting import Fact, filler_rng, plant
from ramify.extras.suites.filler_text import NUM_WORDS, invented_names, numbered_word
from ramify.extras.suites.suite_common import (
    CHARS_PER_TOKEN,
    BenchmarkFileFormat,
    Row,
    chosen_families,
    suite_task,
)
from ramify.tasks.base import SPLITS, DatasetTask, Item
from ramify.tasks.data import DatasetItems
from ramify.tasks.scoring import choice

PACKAGE = "depot"
_LETTERS = "ABCD"
_CONSTANTS = ("RESERVE", "MARGIN", "LIMIT", "OFFSET", "WEIGHT", "FLOOR")
_FUNCTIONS = ("quota", "base_rate", "surcharge", "capacity", "turnover", "backlog", "discount")
_FILLER = (
    "def {0}(value=1):\n    total = value * {2} + {1}\n    return total - {3}",
    "def {0}(value=1):\n    if value > {1}:\n        return value - {2}\n    return value + {3}",
    "def {0}(value=1):\n    steps = [value + step for step in range({3})]\n"
    "    return sum(steps) + {1} * {2}",
    "def {0}(value=1):\n    return max({1}, value * {2}) + {3}",
)
"""Templates of filler functions: name, constant, and two numbers."""
_NTH = {2: "second", 3: "third", 4: "fourth"}


def code_qa(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    domains: str | Sequence[str] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> DatasetTask:
    """Return a task of multiple-choice questions about a Python package, generated or read from
    LongBench-v2.

    Args:
        tokens: Length of a generated text in tokens: 1,000 to 10,000,000. A token counts as four
            characters.
        families: Which of ``value``, ``caller`` and ``order`` are asked; None for all.
        domains: Domains of LongBench-v2 whose rows are kept; None for all.
        train: A ``.jsonl`` or ``.parquet`` file in LongBench-v2's form, or its rows, which replaces
            the generated split. The same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for an unknown family or domain, a length outside these bounds, or a file in
    another form.
    """
    chosen = chosen_families("code_qa", families, FAMILIES, tokens)
    sources = (train, validation, test)
    make = functools.partial(_make, tokens * CHARS_PER_TOKEN, chosen)
    task = suite_task(
        "code_qa", make, choice, seed=seed, families=chosen, sources=sources, file=LONGBENCH_V2
    )
    if domains is None:
        return task
    wanted = [domains] if isinstance(domains, str) else list(domains)
    if not any(source is not None for source in sources):
        raise ConfigError(f"code_qa: domains={wanted} needs a file of LongBench-v2: give test=PATH")
    splits = dict(task.splits)
    for split, source in zip(SPLITS, sources, strict=True):
        if source is not None:
            splits[split] = _of_domains(split, splits[split], wanted)
    return msgspec.structs.replace(task, splits=splits)


def _make(chars: int, families: Sequence[str], rng: random.Random) -> Item:
    family = rng.choice(families)
    used = [each.lower() for each in invented_names(rng, 8, 4)]
    question, modules, right, others = _QUESTIONS[family](rng, used)
    choices = rng.sample([right, *others], len(_LETTERS))
    facts: list[Fact] = [(rng.random(), text) for text in modules]
    text = plant(facts, _modules(filler_rng(rng), used), chars, "\n\n")
    gold = _LETTERS[choices.index(right)]
    wrong = _LETTERS[(choices.index(right) + 1) % len(_LETTERS)]
    return Item(
        _format_question(question, choices),
        text,
        gold,
        family,
        wrong=wrong,
        metadata={"choices": choices},
    )


def _format_question(question: str, choices: Sequence[str]) -> str:
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(_LETTERS, choices, strict=True))
    return f"{question}\n{listed}\nAnswer with one letter."


Asked = tuple[str, list[str], str, list[str]]
"""A question: (text, modules to plant, right choice, three wrong choices)."""


# --- planted modules ------------------------------------------------------------------------------


def _module_source(module: str, *parts: str, imports: Sequence[str] = ()) -> str:
    head = f"# file: {PACKAGE}/{module}.py\n"
    head += "".join(f"from {PACKAGE} import {other}\n" for other in sorted(imports))
    return head + ("\n" if imports else "") + "\n\n".join(parts)


def _function_source(function: str, *lines: str) -> str:
    return f"def {function}():\n" + "\n".join(f"    {line}" for line in lines)


def _value_question(rng: random.Random, used: Sequence[str]) -> Asked:
    """Generate a question about the value that a Python function returns.

    The value depends on constants in three modules.
    """
    top, middle, low, other = used[:4]
    asked, inner, deep = rng.sample(_FUNCTIONS, 3)
    first, second, third = rng.sample(_CONSTANTS, 3)
    one, two, three = (rng.randint(11, 99) for _ in range(3))
    factor, more = rng.randint(2, 5), rng.randint(6, 9)
    value = (three * more + two) * factor + one
    # What mistakes give: a constant is left out or counted twice, or taken from another module.
    steps = {one, two * factor, more * factor, three * more + two, rng.randint(1, 9) * factor}
    while len(steps) < len(_LETTERS) - 1:  # several mistakes gave the same value
        steps.add(rng.randint(1, 99))
    rank = rng.randrange(len(_LETTERS))
    smaller = rng.sample(sorted(steps), rank)
    larger = rng.sample(sorted(steps), len(_LETTERS) - 1 - rank)
    others = [str(value - step) for step in smaller] + [str(value + step) for step in larger]
    modules = [
        _module_source(
            top,
            f"{first} = {one}",
            _function_source(asked, f"return {middle}.{inner}() * {factor} + {first}"),
            imports=[middle],
        ),
        _module_source(
            middle,
            f"{second} = {two}",
            _function_source(inner, f"return {low}.{deep}() + {second}"),
            imports=[low],
        ),
        _module_source(
            low, f"{third} = {three}", _function_source(deep, f"return {third} * {more}")
        ),
        # The same names with other values, which are not imported.
        _module_source(
            other,
            f"{second} = {two + rng.randint(1, 9)}\n{third} = {three + rng.choice((-1, 1))}",
            _function_source(inner, f"return {second} + {third}"),
        ),
    ]
    question = f"What does `{PACKAGE}.{top}.{asked}()` return?"
    return question, modules, str(value), others


def _caller_question(rng: random.Random, used: Sequence[str]) -> Asked:
    """Generate a question that asks which Python function calls a given function.

    Only one of the four choices calls it. The others mention it or call another function of its
    module.
    """
    target, callers = used[0], used[1:5]
    asked, sibling = rng.sample(_FUNCTIONS, 2)
    own = [rng.choice(_FUNCTIONS) for _ in callers]
    modules = [
        _module_source(
            target,
            _function_source(asked, f"return {rng.randint(11, 99)}"),
            _function_source(sibling, f"return {rng.randint(11, 99)}"),
        )
    ]
    bodies = (
        [f"return {target}.{asked}() + {rng.randint(2, 9)}"],
        [f"return {target}.{sibling}() + {rng.randint(2, 9)}"],
        [
            f'"""Return a number without {target}.{asked}()."""',
            f"return {target}.{sibling}() * {rng.randint(2, 9)}",
        ],
        [f"# see {target}.{asked}", f"return {rng.randint(11, 99)} - {target}.{sibling}()"],
    )
    modules += [
        _module_source(module, _function_source(function, *body), imports=[target])
        for module, function, body in zip(callers, own, bodies, strict=True)
    ]
    right, *others = (
        f"{PACKAGE}.{module}.{function}" for module, function in zip(callers, own, strict=True)
    )
    question = f"Which of these functions calls `{PACKAGE}.{target}.{asked}`?"
    return question, modules, right, others


def _order_question(rng: random.Random, used: Sequence[str]) -> Asked:
    """Generate a question about the order in which four Python functions start to run.

    Some of them call others, and each call runs to its end before its caller makes the next one.
    """
    start, *rest = used[:5]
    run, *called = rng.sample(_FUNCTIONS, 5)
    places = [f"{module}.{function}" for module, function in zip(rest, called, strict=True)]
    numbers = [rng.randint(11, 99) for _ in places]
    # Which functions each one calls, in the order of the calls: 0 is the first that runs.
    calls = rng.choice(({0: [1], 2: [3]}, {0: [1, 2]}, {1: [2, 3]}, {0: [1], 1: [2]}, {2: [3]}))
    inner = {place for own in calls.values() for place in own}
    modules = [
        _module_source(
            start,
            _function_source(
                run,
                "total = 0",
                *(f"total += {places[n]}()" for n in range(4) if n not in inner),
                "return total",
            ),
            imports=[rest[n] for n in range(4) if n not in inner],
        )
    ]
    for number, (module, function) in enumerate(zip(rest, called, strict=True)):
        own = calls.get(number, [])
        body = [f"total = {numbers[number]}", *(f"total += {places[n]}()" for n in own)]
        modules.append(
            _module_source(
                module,
                _function_source(function, *body, "return total"),
                imports=[rest[n] for n in own],
            )
        )
    nth = rng.choice(list(_NTH))
    names_of = [f"{PACKAGE}.{place}" for place in places]
    right = names_of.pop(nth - 1)
    question = (
        f"`{PACKAGE}.{start}.{run}()` is called. Which of these functions begins as the "
        f"{_NTH[nth]} of the four?"
    )
    return question, modules, right, names_of


_QUESTIONS: Mapping[str, Callable[[random.Random, Sequence[str]], Asked]] = {
    "value": _value_question,
    "caller": _caller_question,
    "order": _order_question,
}
FAMILIES = tuple(_QUESTIONS)


# --- filler ---------------------------------------------------------------------------------------


def _modules(rng: random.Random, used: Sequence[str]) -> Callable[[int], list[str]]:
    """Return a function that generates filler modules for a generated Python package.

    Each has a constant and up to three functions, and every second one imports the module before
    it.
    """
    at, step = rng.randrange(NUM_WORDS), 7_654_321

    def one(imported: str) -> tuple[str, str]:
        """Generate one filler module, which may import a function of another module.

        Returns its name and its text.
        """
        nonlocal at
        at = (at + step) % NUM_WORDS
        while numbered_word(at) in used:
            at = (at + step) % NUM_WORDS
        constant = rng.choice(_CONSTANTS)
        functions = [
            rng.choice(_FILLER).format(
                function, constant, int(rng.random() * 90) + 2, int(rng.random() * 90) + 2
            )
            for function in dict.fromkeys(rng.choices(_FUNCTIONS, k=3))
        ]
        head = f"{constant} = {int(rng.random() * 90) + 10}"
        if imported:
            functions.append(f"def total(value=1):\n    return {imported}(value) + {constant}")
        imports = [imported.partition(".")[0]] if imported else []
        return numbered_word(at), _module_source(
            numbered_word(at), head, *functions, imports=imports
        )

    def made(num: int) -> list[str]:
        found = []
        for _ in range(num // 2):
            module, text = one("")
            # The first function of the module before.
            called = text.partition("\ndef ")[2].partition("(")[0]
            found += [text, one(f"{module}.{called}")[1]]
        return found

    return made


# --- LongBench-v2 ---------------------------------------------------------------------------------


def _longbench_item(row: Row) -> Item:
    choices = [str(row[f"choice_{letter}"]) for letter in _LETTERS]
    gold = str(row["answer"]).strip()
    if gold not in _LETTERS or len(gold) != 1:
        raise ValueError(f"its answer is {gold!r:.20}, not one of A, B, C and D")
    wrong = _LETTERS[(_LETTERS.index(gold) + 1) % len(_LETTERS)]
    kept = ("_id", "sub_domain", "difficulty", "length")
    return Item(
        _format_question(str(row["question"]), choices),
        row["context"],
        gold,
        str(row["domain"]),
        wrong=wrong,
        metadata={"choices": choices, **{column: row[column] for column in kept}},
    )


def _of_domains(split: str, items: Sequence[Item], domains: Sequence[str]) -> Sequence[Item]:
    """Return the task items whose questions belong to the given domains.

    Raises ConfigError for a domain without items.
    """
    known = [item.kind for item in items]
    for domain in domains:
        if domain not in known:
            raise ConfigError(
                f"code_qa: unknown domain '{domain}': {did_you_mean(domain, set(known))}"
            )
    places = [place for place, domain in enumerate(known) if domain in domains]
    assert isinstance(items, DatasetItems)
    return items.select(f"code_qa/{split}", places)


LONGBENCH_V2 = BenchmarkFileFormat(
    "LongBench-v2",
    (
        *("_id", "domain", "sub_domain", "difficulty", "length", "question"),
        *(f"choice_{letter}" for letter in _LETTERS),
        *("answer", "context"),
    ),
    _longbench_item,
)

"""For each suite, a program that reads the whole text and answers, and the facts that it finds.

A reader sees the question and the context, as a model does. So if it is right, the text has the
answer; and if it finds the same facts in two texts, they differ only in filler.
"""

from __future__ import annotations

import ast
import datetime
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ramify.extras.suites.oolong import COMPARISONS, LABELS
from ramify.tasks.base import Item

DATE = "%b %d, %Y"


class Found(NamedTuple):
    """What a reader found."""

    answer: Any
    facts: Any
    """The facts in their order; filler does not change them."""


# --- niah -----------------------------------------------------------------------------------------


def read_niah(question: str, text: str) -> Found:
    if asked := re.search(r"special magic \w+ for (.+) mentioned in", question):
        keys = re.split(r", and |, ", asked[1])
        needle = re.compile(
            rf"special magic \w+ for ({'|'.join(map(re.escape, keys))}) is: (\S+)\."
        )
        facts = needle.findall(text)
        return Found(", ".join(value for _, value in facts), facts)
    if asked := re.search(r"assigned the value (\d+)", question):
        chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        known = [asked[1]]
        for variable, source in chain:
            if source in known:
                known.append(variable)
        return Found(", ".join(known[1:]), chain)
    if "most common words" in question:
        counts = Counter(re.findall(r"\d+\. (\w+)", text))
        common = [word for word, _ in counts.most_common(10)]
        return Found(", ".join(common), sorted(common))
    if "coded text" in question:
        frequent = [word for word, _ in Counter(text.split()).most_common(4)][1:]
        return Found(", ".join(frequent), frequent)
    person = question.removeprefix("What is the access code of ").removesuffix("?")
    facts = re.findall(r"The access code of \w+ is \d+\.|Until last year the access [^.]+\.", text)
    return Found(re.findall(rf"The access code of {person} is (\d+)\.", text)[0], facts)


# --- oolong and oolong_pairs ----------------------------------------------------------------------


class Line(NamedTuple):
    date: datetime.date
    user: int
    label: str


def lines_of(text: str) -> list[Line]:
    """Read the lines, and infer the label of each from the form of its instance."""
    forms = {
        label: re.compile("|".join(form.replace("?", r"\?").format(r"\w+", r"\w+") for form in own))
        for label, own in LABELS.items()
    }
    lines = []
    for line in text.splitlines()[1:]:
        date, user, instance, *_ = line.split(" || ")
        label = next(
            label
            for label, form in forms.items()
            if form.fullmatch(instance.removeprefix("Instance: "))
        )
        day = datetime.datetime.strptime(date.removeprefix("Date: "), DATE).date()
        lines.append(Line(day, int(user.removeprefix("User: ")), label))
    return lines


def read_oolong(question: str, text: str) -> Found:
    lines = lines_of(text)
    if users := re.match(r"Consider only the lines of the users ([\d, ]+)\. ", question):
        lines = [line for line in lines if str(line.user) in users[1].split(", ")]
    if month := re.match(r"Consider only the lines of (\w+ \d{4})\. ", question):
        lines = [line for line in lines if line.date.strftime("%B %Y") == month[1]]
    counts = Counter(dict.fromkeys(LABELS, 0))
    counts.update(line.label for line in lines)
    labels = re.findall(r"'([a-z ]+)'", question)
    answer: Any
    if "Which of the labels is the most" in question:
        answer = [each for each in counts if counts[each] == max(counts.values())]
    elif "Which of the labels is the least" in question:
        answer = [each for each in counts if counts[each] == min(counts.values())]
    elif "second most common" in question:
        sizes = sorted({count for count in counts.values() if count}, reverse=True)[:2]
        answer = [each for each in counts if counts[each] == sizes[-1]]
    elif "How many instances" in question:
        answer = counts[labels[0]]
    elif times := re.search(r"How many dates occur in exactly (\d+) lines", question):
        answer = list(Counter(line.date for line in lines).values()).count(int(times[1]))
    elif "Which user has the most" in question:
        users_of = Counter(str(line.user) for line in lines if line.label == labels[0])
        answer = [user for user in users_of if users_of[user] == max(users_of.values())]
    elif "Which month" in question:
        months = Counter(line.date.strftime("%B %Y") for line in lines)
        answer = [each for each in months if months[each] == max(months.values())]
    elif day := re.search(r"more common before (.+?) than", question):
        first = datetime.datetime.strptime(day[1], DATE).date()
        own = [line.date < first for line in lines if line.label == labels[0]]
        answer = compared(own.count(True), own.count(False))
    else:
        answer = compared(counts[labels[0]], counts[labels[1]])
    return Found(", ".join(answer) if isinstance(answer, list) else answer, lines)


def compared(one: int, other: int) -> str:
    return COMPARISONS[0 if one > other else 1 if one < other else 2]


def read_oolong_pairs(question: str, text: str) -> Found:
    lines = lines_of(text)
    labels = re.findall(r"label '([a-z ]+)'(?: or '([a-z ]+)')?", question)
    first_day = datetime.date.min
    if day := re.search(r"on or after (\w+ \d+, \d+)", question):
        first_day = datetime.datetime.strptime(day[1], DATE).date()
    tests: list[Callable[[int], bool]] = []
    for named, number in zip(
        labels, re.findall(r"(at least one|exactly \w+) instance", question), strict=True
    ):
        counts = Counter(
            line.user for line in lines if line.label in named and line.date >= first_day
        )
        wanted = {"one": 1, "1": 1, "2": 2}[number.split()[-1]]
        tests.append(
            (lambda user, counts=counts: counts[user] >= 1)  # type: ignore[misc]
            if number.startswith("at least")
            else (lambda user, counts=counts, wanted=wanted: counts[user] == wanted)
        )
    one, other = tests[0], tests[-1]
    users = sorted({line.user for line in lines})
    pairs = [
        (user, mate)
        for user, mate in itertools.combinations(users, 2)
        if (one(user) and other(mate)) or (one(mate) and other(user))
    ]
    return Found(pairs, (users, pairs))


# --- multihop -------------------------------------------------------------------------------------


PERSON = re.compile(
    r"# (?P<name>\w+ \w+)\n.+? is a (?P<profession>\w+), born in (?P<year>\d+) in (?P<town>\w+), and "
    r"won the (?P<prize>\w+) Prize\. \w+ studied under (?P<teacher>\w+ \w+), is married to "
    r"(?P<spouse>\w+ \w+), and rents a house from (?P<landlord>\w+ \w+)\. The first book by \w+ is "
    r"'(?P<book>[^']+)'"
)
TOWN = re.compile(
    r"# (?P<name>\w+)\n\w+ is a town\. Its only bridge is the (?P<bridge>[\w ]+)\. It was founded by "
    r"(?P<founder>\w+ \w+), and its mayor is (?P<mayor>\w+ \w+)\."
)
STEPS = {
    "teacher": r"the teacher of (.+)",
    "spouse": r"the person who is married to (.+)",
    "landlord": r"the person from whom (.+) rents a house",
    "town": r"the town in which (.+) was born",
    "mayor": r"the mayor of (.+)",
    "founder": r"the founder of (.+)",
    "book": r"What is the title of the first book by (.+)\?",
    "bridge": r"What is the name of the only bridge of (.+)\?",
}


def read_multihop(question: str, text: str) -> Found:
    entities = [
        found.groupdict()
        for document in text.split("\n\n")
        if (found := PERSON.match(document) or TOWN.match(document))
    ]
    path: list[dict[str, str]] = []

    def resolved(asked: str) -> str:
        for relation, step in STEPS.items():
            if found := re.fullmatch(step, asked):
                wanted = resolved(found[1])
                (entity,) = (each for each in entities if each["name"] == wanted)
                path.append(entity)
                return entity[relation]
        found = re.fullmatch(r"the (\w+) who was born in (\d+) and won the (\w+) Prize", asked)
        assert found is not None, asked
        (first,) = (
            each
            for each in entities
            if (each.get("profession"), each.get("year"), each.get("prize")) == found.groups()
        )
        return first["name"]

    answer = resolved(question.removesuffix(" Answer with the name alone."))
    return Found(answer, path)


# --- code_qa --------------------------------------------------------------------------------------


def read_code_qa(question: str, text: str) -> Found:
    modules = {
        path.removesuffix(".py").replace("/", "."): ast.parse(code)
        for path, code in re.findall(r"# file: (\S+)\n(.*?)(?=\n# file: |\Z)", text, re.DOTALL)
    }
    choices = {option: letter for letter, option in re.findall(r"^([A-D])\) (.+)$", question, re.M)}
    functions = {
        f"{module}.{node.name}": node
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }

    def calls(function: str) -> list[str]:
        return [
            f"depot.{node.func.value.id}.{node.func.attr}"
            for node in ast.walk(functions[function])
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ]

    target = re.findall(r"`(depot\.\w+\.\w+)", question)[0]
    if "What does" in question:
        with TemporaryDirectory() as folder:
            for module, tree in modules.items():
                path = Path(folder, *module.split(".")).with_suffix(".py")
                path.parent.mkdir(exist_ok=True)
                path.write_text(ast.unparse(tree))
            module = target.rpartition(".")[0]
            code = f"import {module}; print({target}())"
            command = [sys.executable, "-S", "-c", code]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return Found(choices[done.stdout.strip()], calls(target))
    if "Which of these functions calls" in question:
        (caller,) = (function for function in choices if target in calls(function))
        return Found(choices[caller], caller)
    order: list[str] = []

    def run(function: str) -> None:
        order.append(function)
        for inner in calls(function):
            run(inner)

    run(target)
    nth = {"second": 2, "third": 3, "fourth": 4}[re.findall(r"begins as the (\w+) of", question)[0]]
    return Found(choices[order[nth]], order)


# --- mrcr and planted -----------------------------------------------------------------------------


def read_mrcr(question: str, text: str) -> Found:
    asked = re.match(r"Prepend (\w+) to the (\d)\w\w \(1 indexed\) (.+) about (.+?)\. Do", question)
    assert asked is not None
    mark, nth, form, topic = asked.groups()
    turns = text.split("\n\n")
    replies = [
        reply.removeprefix("Assistant: ")
        for request, reply in itertools.pairwise(turns)
        if request == f"User: Write a {form} about {topic}."
    ]
    return Found(mark + replies[int(nth) - 1], replies)


def read_planted(question: str, text: str) -> Found:
    if asked := re.search(r"Summarise what (\w+ \w+) bought", question):
        form = rf"{asked[1]} bought the \w+ of (?P<place>\w+) for (?P<amount>\d+) crowns"
    elif "latest yearly grant" in question:
        form = r"The yearly grant of (?P<place>\w+) is now (?P<amount>\d+) crowns"
    else:
        form = r"The council granted (?P<amount>\d+) crowns to the \w+ of (?P<place>\w+)\."
    facts = [(found["place"], found["amount"]) for found in re.finditer(form, text)]
    summary = "\n".join(f"{place} has {amount} crowns." for place, amount in dict(facts).items())
    return Found(summary, facts)


READERS: dict[str, Callable[[str, str], Found]] = {
    "code_qa": read_code_qa,
    "mrcr": read_mrcr,
    "multihop": read_multihop,
    "niah": read_niah,
    "oolong": read_oolong,
    "oolong_pairs": read_oolong_pairs,
    "planted": read_planted,
}


def read(suite: str, item: Item) -> Found:
    return READERS[suite](item.question, item.context)

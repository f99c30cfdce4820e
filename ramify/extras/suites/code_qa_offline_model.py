"""Simulate a language model that solves the suite ``code_qa``.

The offline model is a program that replaces a language model. Its code follows imports to the
modules that a question needs, and one sub-model call reads them.

The module contains the strategy of a root call, what a leaf reads, and plausible errors. A leaf
knows the kinds of statements that matter in generated packages; the questions of LongBench-v2
cannot be answered. The accuracy of replies and the steps of a root call are in
``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator

from ramify.testing.offline_model import OfflineModelSuiteStrategy

_BY_THESE = "By these modules alone: "
_MODULE = r"# file: depot/(\w+)\.py\n(.*?)(?=\n# file: |\Z)"
_NTH = {"second": 1, "third": 2, "fourth": 3}


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    waiting = re.findall(r"depot\.(\w+)\.\w+", question)
    found: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        start = context.find(f"# file: depot/{module}.py\n")
        if module in found or start < 0:
            continue
        end = context.find("\n# file: ", start)
        found[module] = context[start : end if end >= 0 else len(context)].strip()
        waiting += re.findall(r"^from depot import (\w+)", found[module], re.MULTILINE)
    texts = "\n\n".join(found.values())
    return ask([f"{texts}\n\nQuestion: By these modules alone: {question}"])[0]


def answer_from_text(question: str, text: str) -> str | None:
    if not question.startswith(_BY_THESE):
        return None
    listed: list[tuple[str, str]] = re.findall(r"^([A-D])\) (.+)$", question, re.MULTILINE)
    choices = {option: letter for letter, option in listed}
    package = _Package(text)
    target = re.findall(r"`(depot\.\w+\.\w+)", question)[0]
    if target not in package.functions:
        return "unknown"
    if "What does" in question:
        return choices.get(str(package.value(target)), "unknown")
    if "functions calls" in question:
        callers = [place for place in choices if target in package.calls(place)]
        return choices[callers[0]] if callers else "unknown"
    nth = re.search(r"begins as the (\w+) of", question)
    order = [place for place in package.order(target) if place in choices]
    place = _NTH[nth[1]] if nth else 0
    return choices[order[place]] if place < len(order) else "unknown"


class _Package:
    """The Python package that a context contains, parsed into functions and constants.

    They are stored under their full names.
    """

    def __init__(self, text: str) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, int] = {}
        for module, code in re.findall(
            r"# file: depot/(\w+)\.py\n(.*?)(?=\n# file: |\Z)", text, re.S
        ):
            for node in ast.parse(code).body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[f"depot.{module}.{node.name}"] = node
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    name = ast.unparse(node.targets[0])
                    self.constants[f"depot.{module}.{name}"] = int(str(node.value.value))

    def calls(self, place: str) -> list[str]:
        """Return the functions of other modules that a function calls, in the order of the calls.

        The function is named by ``place``.
        """
        node = self.functions.get(place)
        found = [] if node is None else list(_calls_in(node))
        return [f"depot.{each}" for each in found]

    def order(self, place: str) -> Iterator[str]:
        """Yield all functions that a function calls, directly or indirectly, in the order in which
        they start.

        The function is named by ``place``.
        """
        for each in self.calls(place):
            yield each
            yield from self.order(each)

    def value(self, place: str) -> int | None:
        """Return the return value of a purely arithmetic function, or None for any other
        function."""
        node = self.functions.get(place)
        last = node.body[-1] if node else None
        if not isinstance(last, ast.Return) or last.value is None:
            return None
        return self._evaluate_node(last.value, place.rpartition(".")[0])

    def _evaluate_node(self, node: ast.expr, module: str) -> int | None:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return self.constants.get(f"{module}.{name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=other), attr=function)):
                return self.value(f"depot.{other}.{function}")
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
                one, other_value = (
                    self._evaluate_node(left, module),
                    self._evaluate_node(right, module),
                )
                if one is None or other_value is None:
                    return None
                return one + other_value if isinstance(op, ast.Add) else one * other_value
        return None


def _calls_in(node: ast.AST) -> Iterator[str]:
    """Yield the name ``module.function`` of each function call in the syntax tree, in order."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=function)):
                yield f"{module}.{function}"
            case _:
                yield from _calls_in(child)


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return the letter of a wrong choice as a plausible wrong answer."""
    return draw.choice([letter for letter in "ABCD" if letter != right])


CODE_QA = OfflineModelSuiteStrategy(
    "code_qa", r"`depot\.\w+\.\w+", solve, answer_from_text, make_wrong_answer
)
"""How the offline model answers ``code_qa``: code follows imports, and a sub-model call reads the
modules."""

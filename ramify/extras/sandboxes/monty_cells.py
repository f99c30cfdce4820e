"""State of a code cell that runs in the Monty interpreter, and analysis of its source.

``monty.py`` runs the cells.
"""

from __future__ import annotations

import ast
import asyncio
from concurrent.futures import Future
from typing import Any

from ramify.sandbox.base import Answer
from ramify.sandbox.guest.guest import SessionHostCallError
from ramify.sandbox.guest.output import HeadTailBuffer
from ramify.sandbox.guest.value_encoding import ValueEncoder, ValueEncodingError


class RunningMontyCell:
    """A running code cell of the Monty interpreter.

    It has the output, the working time, and the reason if the cell was stopped.
    """

    def __init__(self, answer: Answer, max_output_bytes: int) -> None:
        self.answer = answer
        self.output = HeadTailBuffer(max_output_bytes)
        self.full_output = HeadTailBuffer(16 * max_output_bytes)
        self.chars = 0
        self.worked_s = 0.0
        self.stopped: str | None = None
        self.stop = asyncio.Event()
        self.bug: Exception | None = None
        self.calls: set[Future[Any]] = set()

    def add_output(self, stream: str, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self.output.add(data)
        self.full_output.add(data)
        self.chars += len(text)

    def interrupt(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        self.stop.set()


def analyze_cell(code: str) -> tuple[set[str], bool, bool]:
    """Return the names that a code cell may bind, and two flags for handling expression values.

    The other two results tell whether the cell ends in an expression and whether it uses ``_``, the
    value of the previous expression.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return set(), False, False
    bound: set[str] = set()
    uses_last = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            uses_last = uses_last or node.id == "_"
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return bound, bool(tree.body) and isinstance(tree.body[-1], ast.Expr), uses_last


def is_encodable(value: Any) -> bool:
    try:
        ValueEncoder().encode(value)
    except ValueEncodingError:
        return False
    return True


def exception_for_monty(error: Exception) -> Exception:
    """Convert an exception to a built-in one, which Monty can raise in its session.

    A builtin exception stays unchanged. Any other becomes a RuntimeError with the same message.
    """
    kind = type(error)
    if kind.__module__ == "builtins" and kind is not SessionHostCallError:
        return error
    name = error.kind if isinstance(error, SessionHostCallError) else kind.__name__
    return RuntimeError(f"{name}: {error}")

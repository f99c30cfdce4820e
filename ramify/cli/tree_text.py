"""The tree of a run's calls as text: question → answer → cost → time, and colors and paging.

    0 Sum the revenue of all twelve sheets  → 332628  $0.011  12 s
    ├ 0.0 sheet 1  → 30102  $0.001  0.9 s
    ├ 0.7 sheet 8  → 1414  $0.001  0.8 s  differs: 1,414 is far from the others (median 29,877)
    └ llm_query × 500: 497 done, 3 failed  $0.02  9 s

Colors mean the same as on the page (viewer/static/style.css). Not here: turns and code (see
show.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ramify.cli.terminal_text import clean, dollars, one_line, seconds
from ramify.types.call_tree import CallNode, CallTree
from ramify.types.trajectory import Stop, Trajectory

_COLORS = {"good": "32", "bad": "31", "warn": "33", "live": "36", "odd": "35", "quiet": "2"}
_TOGETHER = 8
"""Maximum plain sub-calls of one call that are listed one by one."""
_MARK = "\ue000"
"""Stands for an escape character in our own lines, so that ``clean`` keeps it."""


class Paint:
    """Colors a text by its meaning, if the output is a terminal and NO_COLOR is not set."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on

    @staticmethod
    def of_stdout() -> Paint:
        return Paint(sys.stdout.isatty() and not os.environ.get("NO_COLOR"))

    def __call__(self, meaning: str, text: str) -> str:
        text = clean(text).replace(_MARK, "")
        if not self.is_on or not meaning:
            return text
        return f"{_MARK}[{_COLORS[meaning]}m{text}{_MARK}[0m"

    def cleaned(self, line: str) -> str:
        """``line`` without escape sequences, except those of this object."""
        kept = clean(line)
        return kept.replace(_MARK, "\x1b") if self.is_on else kept.replace(_MARK, "")


def tree_lines(trajectory: Trajectory, paint: Paint) -> Iterator[str]:
    """The tree of calls, with answers first and outliers marked."""
    tree = CallTree()
    tree.take(trajectory)
    below: dict[str, list[CallNode]] = {}
    roots = []
    for node in tree.order:
        if node.parent is None:
            roots.append(node)
        else:
            below.setdefault(node.parent.call, []).append(node)
    for root in roots:
        yield _row(root, paint)
        yield from _branches(root, below, "", paint)


def _branches(
    node: CallNode, below: dict[str, list[CallNode]], indent: str, paint: Paint
) -> Iterator[str]:
    entries = list(_together(below.get(node.id, []), below))
    for index, entry in enumerate(entries):
        is_last = index == len(entries) - 1
        stem = indent + ("└ " if is_last else "├ ")
        if isinstance(entry, list):
            yield paint("quiet", stem) + _group(entry, paint)
            continue
        yield paint("quiet", stem) + _row(entry, paint)
        yield from _branches(entry, below, indent + ("  " if is_last else "│ "), paint)


def _together(nodes: Sequence[CallNode], below: dict[str, Any]) -> Iterator[Any]:
    """Many plain sub-calls become one entry, but outliers and failures keep their own row."""
    plain = [node for node in nodes if node.kind != "rlm" and node.id not in below]
    if len(plain) <= _TOGETHER:
        yield from nodes
        return
    yield plain
    yield from [node for node in plain if node.outlier][:_TOGETHER]
    hidden = {node.id for node in plain}
    yield from (node for node in nodes if node.id not in hidden)


def _row(node: CallNode, paint: Paint) -> str:
    if node.has_failed:
        answer, tone = node.error or node.reason or str(node.stop), "bad"
    elif node.stop is None:
        answer, tone = "not ended", "warn"
    else:
        answer = node.answer or "(empty)"
        tone = "odd" if node.outlier else "good" if node.stop is Stop.FINAL else "warn"
    parts = [f"{node.id} {one_line(node.question, 60)}", f"→ {paint(tone, one_line(answer, 60))}"]
    parts += [dollars(node.cost)] if node.cost is not None else []
    if node.ended_s is not None:
        parts.append(seconds(max(0.0, node.ended_s - node.started_s)))
    if node.stop not in (None, Stop.FINAL, Stop.ERROR):
        parts.append(paint("warn", str(node.stop)))
    if node.outlier and not node.has_failed:
        parts.append(paint("odd", f"differs: {one_line(node.outlier, 80)}"))
    return "  ".join(parts)


def _group(nodes: Sequence[CallNode], paint: Paint) -> str:
    failed = sum(node.has_failed for node in nodes)
    done = sum(node.stop is not None for node in nodes) - failed
    costs = [node.cost for node in nodes if node.cost is not None]
    ends = [node.ended_s for node in nodes if node.ended_s is not None]
    name = {"lm": "llm_query"}.get(nodes[0].kind, nodes[0].kind)
    parts = [f"{name} × {len(nodes):,}: {done:,} done"]
    if failed:
        parts[0] += paint("bad", f", {failed:,} failed")
    parts += [dollars(sum(costs))] if costs else []
    parts += [seconds(max(0.0, max(ends) - nodes[0].started_s))] if ends else []
    return "  ".join(parts)


def print_paged(lines: Iterable[str], *, use_pager: bool = True) -> None:
    """Print ``lines``, through PAGER (default: less) if they do not fit on the terminal."""
    if not (use_pager and sys.stdout.isatty()):
        for line in lines:
            print(line)
        return
    text = "\n".join(lines) + "\n"
    command = shlex.split(os.environ.get("PAGER", "less -R"))
    fits = text.count("\n") < shutil.get_terminal_size().lines
    if fits or not command or shutil.which(command[0]) is None:
        sys.stdout.write(text)
        return
    subprocess.run(command, input=text.encode("utf-8", "replace"), check=False)

"""``search`` over a text of 1 GB (0.2 GB with ``--quick``): building the index, and queries after.

    python benchmarks/inputs.py --part search

The text has lines of 110 characters: a number that no other line has, and words with the frequencies
of a natural language. Seconds for a smaller text are multiplied to those for 1 GB. The queries have
rare words, common words, many words, and words that every line has; the figure is the slowest of
them, each at its fastest of a few runs, through the function that a session calls.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure

_SECONDS = 90.0
_QUERY_MS = 50.0
_BASE_LINES = 200_000
_RUNS = 3


def figures(quick: bool) -> Iterator[Figure]:
    from ramify.sources.text_search import TextSearchTool

    num_bytes = 200_000_000 if quick else 1_000_000_000
    text, words = _text(num_bytes)
    search = TextSearchTool(text)
    before, cpu = _children(), _cpu_s()
    started = time.perf_counter()
    search.prepare()
    while True:  # a search waits for a minute at most
        try:
            search("ready")
            break
        except TimeoutError:
            continue
    took = time.perf_counter() - started
    (process,) = _children() - before
    cpu = _cpu_s() - cpu + _cpu_s(process)
    peak = _peak_mb(process)
    middle = text[len(text) // 2 :].split("\n")[1]
    queries = {
        "a number of one line": middle.split()[0],
        "all words of a line": middle,
        "a rare word": words[-1],
        "the ten most common words": " ".join(words[:10]),
        "common words and a rare one": " ".join([*words[:5], words[-2]]),
        "words of every line": "served request",
    }
    slowest = {
        name: 1000 * _fastest(functools.partial(search, query)) for name, query in queries.items()
    }
    found = search(queries["all words of a line"], 1)[0]
    yield Figure(
        "index of 1 GB of text, built",
        round(took * 1e9 / num_bytes, 1),
        "s",
        {
            "CPU seconds of this process and the index's": round(cpu * 1e9 / num_bytes, 1),
            "MB of the index's process": round(peak),
        },
        floor=_SECONDS,
        valid=found["text"] == middle,
    )
    yield Figure(
        "slowest query of six",
        round(max(slowest.values()), 2),
        "ms",
        {name: round(ms, 2) for name, ms in slowest.items()},
        floor=_QUERY_MS,
    )


def _text(num_bytes: int) -> tuple[str, list[str]]:
    """Return a text, and its words with the most common ones first."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 11))) for _ in range(60_000)]
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))
    base = [
        " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(8, 12)))
        for _ in range(_BASE_LINES)
    ]
    parts, size, number = [], 0, 0
    while size < num_bytes:
        parts.append(
            "".join(f"id{number + i:09d} served request {line}\n" for i, line in enumerate(base))
        )
        number += _BASE_LINES
        size += len(parts[-1])
        rng.shuffle(base)
    return "".join(parts)[:num_bytes], words


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _cpu_s(process: str | int = "self") -> float:
    """CPU seconds of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(process) for task in tasks for process in task.read_text().split()}


def _peak_mb(process: int) -> float:
    """Largest memory of a process, with mapped files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000

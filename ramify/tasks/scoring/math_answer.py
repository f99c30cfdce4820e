r"""The same mathematical value: ``\frac{1}{2}``, ``0.5`` and ``\boxed{1/2}``; golds may be LaTeX.

    answer ── last box, near the end ── same text? same whole number? ── else math-verify, in a process of its own

Most golds are whole numbers, which are compared here. The rest goes to ``math-verify`` (extra
``math``) in a process that is killed where it takes too long: what a model wrote may send a
computer algebra system on a walk of hours.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import re
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text
from ramify.tasks.scoring.boxed import TAIL_CHARS, last_boxed

MAX_CHARS = 1000
"""Of an expression; what is longer is argument, not answer."""
MAX_WORKERS = 4
_START_S = 60.0
_INTEGER = re.compile(r"[-+]?\d{1,400}")
_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+")


class MathScore(msgspec.Struct, frozen=True):
    """1 where the answer is worth a gold, else 0."""

    tail_chars: int = TAIL_CHARS
    """Only a box that begins in so many last characters of a text counts."""
    boxed: bool = False
    """An answer without a box is wrong; otherwise a text without one is taken as a whole."""
    timeout_s: float = 5.0
    """Of one comparison; what takes longer is not the same."""

    def __call__(self, answer: Any, item: Item) -> float:
        said = self.read(answer)
        return float(
            said is not None
            and any(self._is_same(as_text(gold), said) for gold in accepted(item.gold))
        )

    def read(self, answer: Any) -> str | None:
        """The expression that ``answer`` says; None where it says none."""
        text = as_text(answer)
        if text is None:
            return None
        found = last_boxed(text, self.tail_chars)
        if found is None and not self.boxed:
            found = text
        return found if found and len(found) <= MAX_CHARS else None

    def _is_same(self, gold: str | None, said: str) -> bool:
        if not gold:
            return False
        gold = last_boxed(gold, None) or gold
        if _plain(gold) == _plain(said):
            return True
        numbers = _integer(gold), _integer(said)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return _workers.same(gold, said, self.timeout_s)


def _plain(text: str) -> str:
    r"""Without what changes no value: dollars, blanks, ``\!``, a full stop at the end."""
    bare = text.strip().strip("$").rstrip(".")
    return re.sub(r"\\[!,;: ]|\\left|\\right|\s+", "", bare)


def _integer(text: str) -> int | None:
    plain = _plain(text)
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    return int(plain) if _INTEGER.fullmatch(plain) else None


class _Workers:
    """Processes that compare; started when they are needed, at most ``MAX_WORKERS`` at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MAX_WORKERS)
        self._idle: list[subprocess.Popen[str]] = []

    def same(self, gold: str, answer: str, timeout_s: float) -> bool:
        """False where it takes longer. Raises ConfigError without the extra, RamifyError where no
        process starts."""
        with self._room:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.poll() is not None:
                worker = _started()
            line = None
            try:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps({"gold": gold, "answer": answer}) + "\n")
                worker.stdin.flush()
                line = _line(worker, timeout_s)
            except OSError:
                line = None
            if not line:  # too slow, or killed by its own memory limit
                _end(worker)
                return False
            with self._lock:
                self._idle.append(worker)
            return bool(json.loads(line)["same"])

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            _end(worker)


def _started() -> subprocess.Popen[str]:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "an answer that is no whole number needs math-verify to be compared: pip install "
            "'ramify[math]'"
        )
    path = Path(__file__).with_name("math_worker.py")
    worker = subprocess.Popen(
        [sys.executable, "-P", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    if _line(worker, _START_S) != "ready\n":
        _end(worker)
        raise RamifyError(
            "the process that compares mathematical answers did not start: is math-verify whole?"
        )
    return worker


def _line(worker: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line that ``worker`` says; empty where it says none in time."""
    assert worker.stdout is not None
    poll = (
        select.poll()
    )  # not select: it takes no descriptor above 1023, and a host of many sessions has more
    poll.register(worker.stdout, select.POLLIN)
    return worker.stdout.readline() if poll.poll(timeout_s * 1000) else ""


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    worker.wait()


_workers = _Workers()
atexit.register(_workers.close)
math_answer = MathScore()
"""A box near the end, or the whole answer."""
boxed_math = MathScore(boxed=True, tail_chars=TAIL_CHARS)
"""As ``math_answer``, where an answer that is not boxed is wrong."""

r"""Score answers by mathematical equality: ``\frac{1}{2}``, ``0.5`` and ``\boxed{1/2}`` are equal.

Gold answers may be LaTeX.

    answer ──> last box near the end ──> same text? same integer? ──> else math-verify in a process

Most golds are integers, which are compared directly. Other answers are compared by ``math-verify``
(extra ``math``) in a separate process. The process is killed at a timeout, because a computer
algebra system may need hours for an expression that a model wrote.
"""

from __future__ import annotations

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

from ramify.actors.child_process import HelperProcessPool, kill_and_reap
from ramify.errors import ConfigError, RamifyError
from ramify.pip_install_command import install_command
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted_answers, as_text
from ramify.types.boxed_answer import TAIL_CHARS, last_boxed

MAX_CHARS = 1000
"""Maximum length of an expression in characters. A longer text is reasoning rather than an
answer.
"""
MAX_WORKERS = 4
_START_S = 60.0
_INTEGER = re.compile(r"[-+]?\d{1,400}")
_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+")


class MathScorer(msgspec.Struct, frozen=True):
    """A scorer that returns 1 if the answer and a gold answer have equal mathematical values,
    otherwise 0."""

    tail_chars: int = TAIL_CHARS
    """A boxed answer counts only if it begins within this many characters of the end."""
    boxed: bool = False
    """Require an answer in a LaTeX box. If False, a text without a box is taken as the answer in
    full.
    """
    timeout_s: float = 5.0
    """Time limit of one comparison in seconds. An answer that takes longer counts as wrong."""

    def __call__(self, answer: Any, item: Item) -> float:
        expression = self.read(answer)
        return float(
            expression is not None
            and any(
                self._is_same(as_text(gold), expression) for gold in accepted_answers(item.gold)
            )
        )

    def read(self, answer: Any) -> str | None:
        """Return the mathematical expression that an answer contains, or None if there is none.

        It is the content of the last box, or the whole text if no box is required.
        """
        text = as_text(answer)
        if text is None:
            return None
        expression = last_boxed(text, self.tail_chars)
        if expression is None and not self.boxed:
            expression = text
        return expression if expression and len(expression) <= MAX_CHARS else None

    def as_answer(self, gold: Any) -> Any:
        """Return the gold answer in a form that this scorer accepts, such as in a LaTeX box."""
        text = as_text(gold)
        if not self.boxed or text is None or last_boxed(text, None) is not None:
            return gold
        return f"\\boxed{{{text}}}"

    def _is_same(self, gold: str | None, answer: str) -> bool:
        if not gold:
            return False
        gold = last_boxed(gold, None) or gold
        if _strip_formatting(gold) == _strip_formatting(answer):
            return True
        numbers = _integer(gold), _integer(answer)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return _same_in_time(gold, answer, self.timeout_s)


def _strip_formatting(text: str) -> str:
    r"""Remove parts of a LaTeX expression that do not change its value, such as spacing.

    These are dollar signs, blanks, LaTeX spacing commands, and a final full stop.
    """
    bare = text.strip().strip("$").rstrip(".")
    return re.sub(r"\\[!,;: ]|\\left|\\right|\s+", "", bare)


def _integer(text: str) -> int | None:
    plain = _strip_formatting(text)
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    return int(plain) if _INTEGER.fullmatch(plain) else None


def _start_worker() -> subprocess.Popen[str]:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "an answer that is not an integer needs math-verify to be compared: "
            + install_command("math")
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
    if _read_line(worker, _START_S) != "ready\n":
        kill_and_reap(worker)
        raise RamifyError(
            "the process that compares mathematical answers did not start: check the installation "
            "of math-verify"
        )
    return worker


def _read_line(worker: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the next line of output from a worker process, or an empty string after a timeout."""
    assert worker.stdout is not None
    # select() does not support descriptors above 1023, which a host with many sessions exceeds.
    poll = select.poll()
    poll.register(worker.stdout, select.POLLIN)
    return worker.stdout.readline() if poll.poll(timeout_s * 1000) else ""


_slots = threading.Semaphore(MAX_WORKERS)
_workers = HelperProcessPool(_start_worker)


def _same_in_time(gold: str, answer: str, timeout_s: float) -> bool:
    """Return True if a worker process finds within the time limit that two expressions are equal.

    Returns False on a time-out. Raises ConfigError if math-verify is not installed, and RamifyError
    if the process does not start.
    """
    try:
        with _slots, _workers.lend_process() as worker:
            print(json.dumps({"gold": gold, "answer": answer}), file=worker.stdin, flush=True)
            line = _read_line(worker, timeout_s)
            if not line:
                raise TimeoutError
    except (TimeoutError, BrokenPipeError):  # too slow, or killed by its own memory limit
        return False
    return bool(json.loads(line)["same"])


math_answer = MathScorer()
"""Scores 1 if the last LaTeX box near the end of an answer has the same value as a gold answer.
The whole answer is compared if it has no box.

Example:
    math_answer("1/2", tasks.Item("?", gold="0.5"))    # 1.0
"""
boxed_math = MathScorer(boxed=True, tail_chars=TAIL_CHARS)
"""Like ``math_answer``, but an answer without a box is wrong.

Example:
    boxed_math("so it is \\boxed{1/2}", tasks.Item("?", gold="0.5"))    # 1.0
"""

"""One call in the tree of a run, as live views show it: its state, times, costs, and whether its
answer is a number, a text, or something else.

Texts are shortened. Events change a node in ``call_tree.py``; ``sibling_outliers.py`` finds the
nodes that differ from their siblings.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.lazy_pattern import lazy_pattern
from ramify.types.sibling_question_diff import SiblingQuestions
from ramify.types.trajectory import Annotation, Fork, Parent, Stop, answer_text, cut

MAX_NUMBER_CHARS = 40
"""A longer text is not read as a number."""
_NUMBER = lazy_pattern(r"\s*[$€£]?\s*([-+]?\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*%?\s*\.?\s*")


def parse_number(text: str) -> float | None:
    """Return the number that ``text`` consists of, such as 1234.5 for ``$1,234.50``, or None if the
    text is something else."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    return float(match[1].replace(",", "").replace("_", "")) if match else None


def kind_of_answer(answer: Any, text: str) -> str:
    """Return the kind of an answer: ``number``, ``text``, ``list``, ``dict`` or ``none``. A text
    that consists of a number counts as a number."""
    if answer is None:
        return "none"
    if isinstance(answer, list | tuple):
        return "list"
    if isinstance(answer, dict):
        return "dict"
    return "text" if isinstance(answer, bool) or parse_number(text) is None else "number"


class CallNode(msgspec.Struct, gc=False):
    """One call in the tree of a run, as live views show it.

    There may be many thousands, most of them plain calls, so lists that plain calls lack are None.
    """

    index: int
    """Position in order of creation."""
    id: str
    kind: str
    model: str
    depth: int
    question: str
    """Shortened, as are ``answer`` and ``error``."""
    parent: Parent | None = None
    fork: Fork | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    stop: Stop | None = None
    answer: str = ""
    error: str = ""
    reason: str = ""
    """One sentence on why it ended; empty for a final answer."""
    answer_kind: str = ""
    """``number``, ``text``, ``list``, ``dict`` or ``none``."""
    answer_chars: int = 0
    """Length of the whole answer."""
    answer_hash: int = 0
    """Hash of the whole answer."""
    subject: int = 0
    """Hash of its whole question and context: siblings with the same one must agree."""
    outlier: str = ""
    """How it differs from its siblings, in one sentence; empty if it does not."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    num_turns: int = 0
    """Number of turns that have a reply."""
    asking: int = -1
    """Turn with a pending request; -1 for none."""
    is_running: bool = False
    """Whether the code of the last reply is running."""
    spans: list[float] | None = None
    """Times of each request and reply of a session in turn, in seconds since the run began. The
    number is odd while a request is pending."""
    tools: list[tuple[float, bool]] | None = None
    """(time, whether it failed) of each answer of a user's tool."""
    marks: list[Annotation] | None = None
    version: int = 0
    """Version of the run at the last change of this call."""
    last_line: int = -1
    """Its last line in the journal, from 0. ``RunTree.lines_of`` follows the lines back from it."""
    active_s: float = 0.0
    """Time of its start, last reply or last cell, whichever came last."""
    siblings: SiblingQuestions | None = None
    """Questions of the calls of its kind that its cell made; None for a root."""
    nth: int = 0
    """Its place among these siblings, from 0."""

    def take_answer(self, answer: Any) -> None:
        text = answer_text(answer)
        self.answer, self.answer_chars = cut(text), len(text)
        self.answer_hash = hash(text)
        self.answer_kind = kind_of_answer(answer, text)

    @property
    def telling(self) -> str:
        """The part of the call's question that distinguishes it from those of its siblings. Empty
        if the beginning of the question is enough to distinguish it."""
        return self.siblings.telling(self.nth) if self.siblings else ""

    @property
    def name(self) -> str:
        """A short name for the call, such as ``sheet 7`` or ``number 7 of 12``. A root call is
        named by its id."""
        return self.siblings.name(self.nth) if self.siblings else f"call {self.id}"

    @property
    def has_failed(self) -> bool:
        """True if the call ended with an error or without an answer."""
        return self.stop is Stop.ERROR or (
            self.stop not in (None, Stop.FINAL) and self.answer_kind == "none"
        )

"""Describe one call of a run for live views: its state, times, costs and kind of answer.

Texts are shortened. ``call_tree.py`` updates nodes from events, and ``sibling_outliers.py`` finds
the nodes that differ from their siblings.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.lazy_pattern import lazy_pattern
from ramify.types.sibling_question_diff import SiblingQuestionStore
from ramify.types.trajectory import CallForkOrigin, CallSite, RunAnnotation, Stop, answer_text, cut

MAX_NUMBER_CHARS = 40
"""Texts longer than this are never parsed as numbers."""
_NUMBER = lazy_pattern(r"\s*[$€£]?\s*([-+]?\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*%?\s*\.?\s*")


def parse_number(text: str) -> float | None:
    """Parse a numeric string such as ``$1,234.50`` as a float.

    Returns None for any other text.
    """
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    return float(match[1].replace(",", "").replace("_", "")) if match else None


def kind_of_answer(answer: Any, text: str) -> str:
    """Return the kind of an answer: ``number``, ``text``, ``list``, ``dict`` or ``none``.

    A text that consists of a number counts as a number.
    """
    if answer is None:
        return "none"
    if isinstance(answer, list | tuple):
        return "list"
    if isinstance(answer, dict):
        return "dict"
    return "text" if isinstance(answer, bool) or parse_number(text) is None else "number"


class RunCallNode(msgspec.Struct, gc=False):
    """One call in a run's call tree, with the data that live views show.

    A call is one model request or one recursive session.

    A run may have many thousands of nodes, most of them plain calls. Lists that plain calls do not
    need are therefore None.
    """

    index: int
    """Position among all calls in order of creation."""
    id: str
    kind: str
    model: str
    depth: int
    question: str
    """The question, shortened. ``answer`` and ``error`` are shortened too."""
    parent: CallSite | None = None
    fork: CallForkOrigin | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    stop: Stop | None = None
    answer: str = ""
    error: str = ""
    reason: str = ""
    """One sentence on why the call ended. Empty for a final answer."""
    answer_kind: str = ""
    """``number``, ``text``, ``list``, ``dict`` or ``none``."""
    answer_chars: int = 0
    """Length of the complete answer in characters."""
    answer_hash: int = 0
    """Hash of the complete answer."""
    subject: int = 0
    """Hash of the complete question and context. Siblings with the same hash were asked the same,
    so their answers should agree.
    """
    outlier: str = ""
    """One sentence that says how the call differs from its siblings. Empty if it does not."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    num_turns: int = 0
    """Number of turns that have a reply."""
    asking: int = -1
    """Index of the turn whose request has no reply yet, or -1 if there is none."""
    is_running: bool = False
    """True while the code of the last reply is running."""
    spans: list[float] | None = None
    """Alternating times of the requests and replies of a call with a session, in seconds since the
    run began. The list has odd length while a request is pending.
    """
    tools: list[tuple[float, bool]] | None = None
    """One pair (time, whether it failed) for each result of a tool that the user provided."""
    marks: list[RunAnnotation] | None = None
    version: int = 0
    """Version of the run when this call last changed."""
    last_line: int = -1
    """Index of the call's last line in the journal, from 0. ``RunCallTree.lines_of`` follows the
    call's lines back from it."""
    active_s: float = 0.0
    """Time of the call's latest activity: its start, its last reply or its last cell."""
    siblings: SiblingQuestionStore | None = None
    """Questions of all calls of this kind that were made by the same code cell, including this
    one. None for a root call.
    """
    nth: int = 0
    """Index of this call in ``siblings``."""

    def set_answer(self, answer: Any) -> None:
        text = answer_text(answer)
        self.answer, self.answer_chars = cut(text), len(text)
        self.answer_hash = hash(text)
        self.answer_kind = kind_of_answer(answer, text)

    @property
    def distinguishing_text(self) -> str:
        """The part of the call's question that distinguishes it from its siblings.

        Empty if the questions already differ at the beginning.
        """
        return self.siblings.distinguishing_text(self.nth) if self.siblings else ""

    @property
    def name(self) -> str:
        """A short name for the call, such as ``sheet 7`` or ``number 7 of 12``.

        A root call is named after its id.
        """
        return self.siblings.call_name(self.nth) if self.siblings else f"call {self.id}"

    @property
    def has_failed(self) -> bool:
        """True if the call ended with an error or without an answer."""
        return self.stop is Stop.ERROR or (
            self.stop not in (None, Stop.FINAL) and self.answer_kind == "none"
        )

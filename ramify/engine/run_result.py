"""Define the result of a question: an answer, or the error that explains why there is none.

How a run is watched and ended is in ``run_handle.py``. This module does not import the modules
that execute a run, so that a program that only creates an ``RLM`` starts fast.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.typed_answers import Citation
from ramify.errors import EventLoopBlockedError, RamifyError, RunSuspendedError
from ramify.types.end_reason import describe_ending
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, Trajectory

_SHOWN_CHARS = 60
"""Characters of an answer in the ``repr`` of its result."""


class Result(msgspec.Struct, frozen=True):
    """The result of a question: its answer, its cost, its record of calls, and why the run
    stopped."""

    response: str
    """The answer as text; empty if there is none."""
    answer: Any
    """The answer as a value of the requested type; None if there is none."""
    stop: Stop
    usage: Usage
    """Tokens and requests of all calls of the run."""
    cost: float | None
    """Dollars for all calls of the run; None if no model has a price."""
    trajectory: Trajectory
    citations: tuple[Citation, ...] = ()
    error: str | None = None
    failure: BaseException | None = None
    """Exception that ended the run, if there was one."""
    partial: str = ""
    """Prose of the last message if the run ended without an answer. It often says only what the
    model intended to do."""

    @property
    def run_id(self) -> str:
        """The id of the run that produced this result.

        ``RLM.resume`` and ``ramify show`` accept it if the run is stored.
        """
        return self.trajectory.id

    @property
    def reason(self) -> str:
        """One sentence that says why the run ended, quoting the numbers of any limit that it
        reached.

        Empty after a final answer.
        """
        return self.trajectory.reason

    def __repr__(self) -> str:
        shown = self.response if self.answer is not None else self.partial or self.error or ""
        text = " ".join(shown[:_SHOWN_CHARS].split())
        text += "…" * (len(shown) > _SHOWN_CHARS)
        label = "" if self.answer is not None else "no answer: "
        return f"Result({label}{text!r}, {', '.join(self._figures())})"

    def _figures(self) -> list[str]:
        usage, bound = self.usage, "<=" if self.usage.unknown_calls else ""
        cost = [] if self.cost is None else [f"cost={bound}${self.cost:.4g}"]
        counts = [f"calls={usage.calls:,}", f"tokens={bound}{usage.total_tokens:,}"]
        return [f"stop={self.stop}", *counts, *cost, f"run={self.run_id}"]

    def _repr_html_(self) -> str:
        """Return the result as HTML, for display in a Jupyter notebook."""
        import html

        shown = self.response if self.answer is not None else self.partial
        why = why_unanswered(self) if self.answer is None else self.error or self.reason
        lines = [f"<pre style='white-space: pre-wrap'>{html.escape(shown)}</pre>"] * bool(shown)
        lines += [f"<p><b>{html.escape(why)}</b></p>"] * bool(why)
        lines.append(f"<small>{html.escape(' · '.join(self._figures()))}</small>")
        return f"<div>{''.join(lines)}</div>"


def as_text(answer: Any) -> str:
    """Return an answer as text: a string unchanged, None as ``""``, and any other value as JSON."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    plain = to_jsonable(answer)
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can represent
        return json.dumps(plain, separators=(",", ":"))


def why_unanswered(result: Result) -> str:
    """Return one sentence that explains why ``result`` has no answer."""
    if result.error:
        return result.error
    if result.stop is Stop.FINAL:
        return "no answer: the model gave None as its final answer"
    return f"no answer: {describe_ending(result.stop, result.trajectory.reason, 0)}"


def raise_if_failed(result: Result, resume: Callable[[str], Result]) -> Result:
    """Return ``result``, or raise its error if the run was suspended or failed without an answer.

    The ``resume`` method of a RunSuspendedError calls the function ``resume``.
    """
    if result.stop is Stop.SUSPENDED:
        raise _suspended_error(result.run_id, result.error, resume) from result.failure
    if result.stop is Stop.ERROR and result.answer is None:
        raise (
            result.failure
            if isinstance(result.failure, RamifyError)
            else RamifyError(result.error or "no answer")
        )
    return result


@contextlib.contextmanager
def suspend_if_loop_blocked(resume: Callable[[str], Result]) -> Iterator[None]:
    """Turn EventLoopBlockedError in a ``with`` block into RunSuspendedError, so that the run can be
    resumed.

    This applies only to a stored run. The caller can then continue it with ``resume``.
    """
    try:
        yield
    except EventLoopBlockedError as error:
        if not error.run_id:
            raise
        raise _suspended_error(error.run_id, str(error), resume) from error


def _suspended_error(
    run_id: str, error: str | None, resume: Callable[[str], Result]
) -> RunSuspendedError:
    return RunSuspendedError(
        f"the run is suspended: {error}; continue it with resume({run_id!r})",
        run_id,
        functools.partial(resume, run_id),
    )

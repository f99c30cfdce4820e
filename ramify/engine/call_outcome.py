"""Describe how a call of a run, or the run itself, ended."""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.errors import RamifyError, is_fixable_by_user
from ramify.types.trajectory import Stop


class CallOutcome(msgspec.Struct, frozen=True):
    """The outcome of a call: why it stopped, and its answer or its error."""

    stop: Stop
    answer: Any = None
    error: str | None = None
    failure: BaseException | None = None
    """Exception that ended the call, if any."""
    partial: str = ""
    """Text of the last message, if the call ended without an answer."""
    refused_answer: str = ""
    """The last answer that was rejected, and why, as in ``FINAL_VAR(n): name 'n' is not
    defined``. Empty if none was rejected since the last cell ran."""
    cell_error: str = ""
    """The exception of the last cell that ran, as in ``NameError: name 'n' is not defined``. Empty
    if that cell succeeded."""
    answered_by: str = ""
    """Id of the continuation that gave the answer, if there were several."""


def failed_outcome(error: RamifyError, is_stored: bool) -> CallOutcome:
    """Return the outcome of a run that failed with ``error``.

    If the run is stored and the user can fix the cause, the outcome is "suspended", and the run can
    be resumed later.
    """
    stop = Stop.SUSPENDED if is_stored and is_fixable_by_user(error) else Stop.ERROR
    return CallOutcome(stop, error=str(error), failure=error)

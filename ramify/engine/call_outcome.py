"""How a call of a run, or the run itself, ended."""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.errors import RamifyError, can_be_fixed
from ramify.types.trajectory import Stop


class CallOutcome(msgspec.Struct, frozen=True):
    """Outcome of a call."""

    stop: Stop
    answer: Any = None
    error: str | None = None
    failure: BaseException | None = None
    """Exception that ended the call, if any."""
    partial: str = ""
    """Words of the last message of a call that ended without an answer."""
    answered_by: str = ""
    """Id of the continuation that gave the answer, if there were several."""


def failed(error: RamifyError, is_stored: bool) -> CallOutcome:
    """Return the outcome of a run that was ended by ``error``. The run counts as suspended, so that
    it can be resumed, if it is stored and the cause can be fixed."""
    stop = Stop.SUSPENDED if is_stored and can_be_fixed(error) else Stop.ERROR
    return CallOutcome(stop, error=str(error), failure=error)

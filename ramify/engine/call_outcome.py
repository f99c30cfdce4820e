"""How a call of a run ended."""

from __future__ import annotations

from typing import Any

import msgspec

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

"""Records of our loggers, and runs that make some."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ramify import RLM, SandboxSpec

SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
KEY = "abcdef-0123456789-of-a-test"


def of(found: list[logging.LogRecord], event: str) -> list[tuple[str, str]]:
    """(logger, run) of each record of ``event``."""
    return [
        (record.name, getattr(record, "run", ""))
        for record in found
        if record.event == event  # type: ignore[attr-defined]
    ]


def run_rlm(model: Any, **options: Any) -> Any:
    async def main() -> Any:
        async with RLM(model, sandbox=SANDBOX, **options) as rlm:
            return await rlm.acompletion("x" * 100_000, "?")

    return asyncio.run(main())

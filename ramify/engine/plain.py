"""One plain request with a checked reply: ``llm_query``, the direct answer to a small question, a child too deep."""

from __future__ import annotations

import asyncio
from typing import Any

from ramify.engine.call import LiveCall, Outcome
from ramify.engine.run import Run
from ramify.engine.typed import AnswerType, Mismatch
from ramify.errors import LimitReached, ModelError, ReplayDiverged
from ramify.types.message import Message
from ramify.types.trajectory import Stop

MAX_REPAIRS = 2
"""How often a reply that does not fit its schema is asked for again."""
_LONG_CHARS = 5_000


async def ask_plain(
    run: Run, call: LiveCall, prompt: str, kind: AnswerType | None, *, system: str | None = None
) -> Outcome:
    """Ask once, and again with the error shown while the reply does not fit ``kind``. Never raises for a failed model."""
    text = f"{prompt}\n\n{kind.alone()}" if kind else prompt
    new = [*([Message("system", system)] if system else []), Message("user", text)]
    schema = kind.enforced if kind else None
    error = "no reply"
    for _ in range(1 + MAX_REPAIRS):
        try:
            reply = await run.ask(call, new, schema=schema)
        except LimitReached as reached:
            return Outcome(Stop(reached.stop), error=str(reached), failure=reached)
        except (ModelError, ReplayDiverged) as failure:
            return Outcome(Stop.ERROR, error=str(failure), failure=failure)
        if kind is None:
            return Outcome(Stop.FINAL, reply.message.content)
        try:
            return Outcome(Stop.FINAL, await _value(kind, reply.message.content))
        except Mismatch as mismatch:
            error = str(mismatch)
            new = [
                Message("user", f"That does not fit the schema: {error}. Reply with the corrected JSON value alone.")
            ]
    return Outcome(
        Stop.ERROR, error=f"after {1 + MAX_REPAIRS} replies the value still does not fit its schema: {error}"
    )


async def _value(kind: AnswerType, text: str) -> Any:
    """What a reply says; a long one is checked in a thread, where that takes seconds."""
    return await asyncio.to_thread(kind.read, text) if len(text) > _LONG_CHARS else kind.read(text)

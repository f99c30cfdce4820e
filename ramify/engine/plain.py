"""One plain request with a checked reply: ``llm_query``, direct answers, and children at the depth
limit.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ramify.engine.call import CallOutcome, LiveCall
from ramify.engine.run_state import RunState, cut_reply
from ramify.engine.typed import AnswerType, TypeMismatch
from ramify.errors import LimitReached, ModelError, ReplayDiverged
from ramify.types.message import Message
from ramify.types.trajectory import Stop

MAX_REPAIRS = 2
"""Number of times that a reply is requested again because it does not match its schema."""
_LONG_CHARS = 5_000


async def ask_plain(
    run: RunState,
    call: LiveCall,
    prompt: str,
    kind: AnswerType | None,
    *,
    system: str | None = None,
) -> CallOutcome:
    """Ask once, and again with the error shown while the reply does not match ``kind``. Never
    raises for a failed model.

    A reply that was truncated at its token limit ends with ``MAX_TOKENS``: its text is a partial
    answer, never a complete one.
    """
    question = f"{prompt}\n\n{kind.alone()}" if kind else prompt
    new = [*([Message("system", system)] if system else []), Message("user", question)]
    schema = kind.enforced if kind else None
    error, text, is_cut = "no reply", "", False
    for _ in range(1 + MAX_REPAIRS):
        try:
            reply = await run.ask(call, new, schema=schema)
        except LimitReached as reached:
            return CallOutcome(Stop(reached.stop), error=str(reached), failure=reached)
        except (ModelError, ReplayDiverged) as failure:
            return CallOutcome(Stop.ERROR, error=str(failure), failure=failure)
        text, is_cut = reply.message.content, reply.finish == "length"
        if kind is None:
            return _cut(run, call, text, text or None) if is_cut else CallOutcome(Stop.FINAL, text)
        try:
            value = await _value(kind, text)
            # A truncated number or text that matches may be the beginning of a longer one.
            return _cut(run, call, text, None) if is_cut else CallOutcome(Stop.FINAL, value)
        except TypeMismatch as mismatch:
            error = str(mismatch)
            new = [
                Message(
                    "user",
                    f"That does not fit the schema: {error}. Reply with the corrected JSON value "
                    "alone.",
                )
            ]
    if is_cut:
        return _cut(run, call, text, None)
    return CallOutcome(
        Stop.ERROR,
        error=f"after {1 + MAX_REPAIRS} replies the value still does not fit its schema: {error}",
    )


def _cut(run: RunState, call: LiveCall, text: str, answer: str | None) -> CallOutcome:
    error = cut_reply(call, run.sampling.max_tokens, text)
    return CallOutcome(Stop.MAX_TOKENS, answer, str(error), error)


async def _value(kind: AnswerType, text: str) -> Any:
    """Return the value of a reply. A long reply is checked in a thread, because that may take
    seconds."""
    return await asyncio.to_thread(kind.read, text) if len(text) > _LONG_CHARS else kind.read(text)

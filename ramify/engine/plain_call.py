"""Build the prompt of a plain model call, which needs no Python session, and check the reply.

If the reply does not match the required type, ask the model up to two more times.

    question, context ──> messages ──> reply ──┬── fits ──> answer
                              ^                └── "That does not fit the schema: …"
                              └────────────────────┘

The plain call of a run, the ``llm_query`` of a session (``session_host_calls.py``) and the calls
without a run (``calls_outside_runs.py``) all use this module. Each of them sends, records and pays
for its requests itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ramify.engine import observation_messages
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.prompt_text import PromptExample, user_instructions
from ramify.engine.question import Question, leading_messages
from ramify.engine.typed_answers import AnswerSchema, TypeMismatch
from ramify.errors import LimitReached, ModelError, ReplayDiverged, ReplyTruncatedError
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Stop

AskModel = Callable[[list[Message], int | None], Awaitable[Reply]]
"""Function that sends new messages to the model and returns its reply. Its second argument says how
many earlier messages of the call precede them; None means all."""
MAX_REPAIRS = 2
"""Maximum number of times the model is asked again because its reply does not match the schema."""
LONG_CHARS = 5_000
"""Replies longer than this many characters are checked in a worker thread, so that the event loop
is not blocked."""


def direct_prompt(
    scaffold: Scaffold, text: str, examples: Sequence[PromptExample], question: Question
) -> tuple[list[Message], str]:
    """Return the opening messages and the prompt of a plain call for ``question``.

    ``text`` and ``examples`` are the user's instructions and examples for the run.
    """
    prompt = observation_messages.plain_prompt(question.text, question.context)
    texts = (
        scaffold.direct_system if question.context is not None else "",
        user_instructions(text, examples),
    )
    before = leading_messages("\n\n".join(filter(None, texts)), question.before)
    return before, f"{prompt}\n\n{question.about}" if question.about else prompt


def with_answer_format(prompt: str, kind: AnswerSchema | None) -> str:
    """Return ``prompt``, followed by a description of the required answer format if there is
    one."""
    return f"{prompt}\n\n{kind.json_only_instruction()}" if kind else prompt


async def answer_without_session(
    ask: AskModel,
    model: str,
    first: list[Message],
    kind: AnswerSchema | None,
    cut: Callable[[str], ReplyTruncatedError],
    max_repairs: int = MAX_REPAIRS,
    *,
    retry_empty: bool = True,
) -> CallOutcome:
    """Ask a model a question without a Python session, and return the outcome.

    If the reply does not match the answer type ``kind``, show the model the error and ask again.
    Without an answer type, ask again only after an empty reply or a tool call, unless
    ``retry_empty`` is false: the text of such a reply is then the answer.

    ``first`` holds the messages of the first request. Nothing is raised if the model fails: the
    outcome then holds the error.

    A reply that was truncated at its token limit is never a complete answer. The outcome then holds
    the partial text, the stop reason ``MAX_TOKENS`` and the error that ``cut`` returns.
    """
    new = first
    error, text, is_cut = "no reply", "", False
    reused = 0 if kind is None else None
    for _ in range(1 + max_repairs):
        try:
            reply = await ask(new, reused)
        except LimitReached as reached:
            return CallOutcome(Stop(reached.stop), error=str(reached), failure=reached)
        except (ModelError, ReplayDiverged) as failure:
            return CallOutcome(Stop.ERROR, error=str(failure), failure=failure)
        text, is_cut = reply.message.content, reply.finish == "length"
        if kind is None and is_cut:
            return _truncated_outcome(cut(text), text or None)
        if kind is None and (not retry_empty or (text.strip() and reply.finish != "tool_calls")):
            return CallOutcome(Stop.FINAL, text)
        if kind is None:
            error = "called a tool" if reply.message.tool_calls else "gave an empty reply"
            continue
        try:
            value = await _parse_value(kind, text)
            # A truncated number or text that matches may be the beginning of a longer one.
            return _truncated_outcome(cut(text), None) if is_cut else CallOutcome(Stop.FINAL, value)
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
        return _truncated_outcome(cut(text), None)
    if kind is None:
        unanswered = ModelError(
            f"{model}: the model {error} instead of answering, {1 + max_repairs} times; "
            "ask in another way, or ask another model"
        )
        return CallOutcome(Stop.ERROR, error=str(unanswered), failure=unanswered)
    misfit = ModelError(
        f"after {1 + max_repairs} replies the value still does not fit its schema: "
        + " ".join(error.split())
    )
    return CallOutcome(Stop.ERROR, error=str(misfit), failure=misfit)


def _truncated_outcome(error: ReplyTruncatedError, answer: str | None) -> CallOutcome:
    return CallOutcome(Stop.MAX_TOKENS, answer, str(error), error)


async def _parse_value(kind: AnswerSchema, text: str) -> Any:
    """Parse a reply as a value of the required type.

    A long reply is parsed in a thread, because that may take seconds.
    """
    return (
        await asyncio.to_thread(kind.parse_answer, text)
        if len(text) > LONG_CHARS
        else kind.parse_answer(text)
    )

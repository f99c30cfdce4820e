"""Converts the result of a run to an answer: text, finish reason, usage and the ``ramify`` field.

Only the model can count the tokens of its final answer. So ``max_tokens`` is stated in the
question, and a longer answer is cut at four characters per token, an estimate that needs no
tokenizer. Not here: the format of a response (see chat_completions.py and responses.py).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ramify.engine.run_handle import Result
from ramify.errors import ModelError, RamifyError, ReplyFiltered
from ramify.serve.answer_request import AnswerRequest
from ramify.serve.caller_tools import RequestedToolCall, ToolCallAnswer, new_id
from ramify.serve.web import RequestRejected
from ramify.types.message import Usage, encodable
from ramify.types.trajectory import Stop

_CHARS_PER_TOKEN = 4


class ServedAnswer(msgspec.Struct, frozen=True):
    """Answer to one request, before it is written in the format of an API."""

    text: str
    finish: Literal["stop", "length", "tool_calls", "content_filter"]
    """Finish reason: ``length`` if a limit cut the run or its answer short, ``content_filter`` if a
    filter removed the answer."""
    usage: Usage
    """Tokens and calls of the whole tree."""
    about: dict[str, Any]
    """Content of the ``ramify`` field in the response."""
    calls: tuple[tuple[str, RequestedToolCall], ...] = ()
    """(id, call) of each client function to call; the text is empty if there are any."""


def length_note(max_tokens: int | None) -> str:
    """Note to the model about the requested length; empty without ``max_tokens``."""
    return f"\n\n(The answer may have at most {max_tokens} tokens.)" if max_tokens else ""


def answer_of(result: Result, request: AnswerRequest) -> ServedAnswer:
    """Convert the result of a run. Raises RequestRejected if the run failed without an answer."""
    is_filtered = isinstance(result.failure, ReplyFiltered) and result.answer is None
    if result.stop is Stop.ERROR and result.answer is None and not is_filtered:
        raise failure_of(result.failure, result.error, result.run_id)
    called = result.answer if isinstance(result.answer, ToolCallAnswer) else None
    text, was_cut = _cut(encodable(result.response), request) if called is None else ("", False)
    is_partial = result.stop.is_truncated() or result.stop is Stop.ERROR
    about: dict[str, Any] = {
        "run": result.run_id,
        "stop": str(result.stop),
        "cost": result.cost,
        "seconds": result.trajectory.seconds,
        "calls": result.usage.calls,
        "unknown_calls": result.usage.unknown_calls,
        "depth": result.trajectory.depth,
        "error": result.error,
        "cut": was_cut,
    }
    if request.ramify.cite:
        about["citations"] = result.citations
    if called is not None:
        return ServedAnswer(
            "",
            "tool_calls",
            result.usage,
            about,
            tuple((new_id(), call) for call in called.tool_calls),
        )
    if is_filtered:
        return ServedAnswer("", "content_filter", result.usage, about)
    return ServedAnswer(text, "length" if is_partial or was_cut else "stop", result.usage, about)


def failure_of(failure: BaseException | None, error: str | None, run: str) -> RequestRejected:
    """Error response for a failed run."""
    text = error or "the run gave no answer"
    if isinstance(failure, ModelError):
        return RequestRejected(
            f"the model failed: {text} (run {run})", status=502, code="model_failed", run=run
        )
    known = isinstance(failure, RamifyError) or failure is None
    return RequestRejected(
        f"{text if known else 'internal error'} (run {run})",
        status=502 if known else 500,
        code="run_failed",
        run=run,
    )


def _cut(text: str, request: AnswerRequest) -> tuple[str, bool]:
    """Cut ``text`` at the first stop sequence and at the maximum length.

    Returns the text and whether it was too long.
    """
    ends = [at for at in (text.find(stop) for stop in request.stops if stop) if at >= 0]
    text = text[: min(ends)] if ends else text
    most = len(text) if request.max_tokens is None else request.max_tokens * _CHARS_PER_TOKEN
    return text[:most], len(text) > most

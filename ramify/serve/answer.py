"""A run's end -> what every API says of it: the text, why it ended, what the whole tree used, and
the field ``ramify``.

A final answer's length is only known to its model, so ``max_tokens`` is told to the model and then
kept by cutting at four characters a token, as good a guess as any without its tokenizer.
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
    """The answer to one request."""

    text: str
    finish: Literal["stop", "length", "tool_calls", "content_filter"]
    """``length`` if a limit cut the run or the answer short, ``content_filter`` if a filter left no
    answer."""
    usage: Usage
    """Of the whole tree."""
    about: dict[str, Any]
    """The field ``ramify``."""
    calls: tuple[tuple[str, RequestedToolCall], ...] = ()
    """Id and call of each function of the caller's that is asked for; there is no text then."""


def length_note(max_tokens: int | None) -> str:
    """What the model is told of the length that is asked for; empty where none is."""
    return f"\n\n(The answer may have at most {max_tokens} tokens.)" if max_tokens else ""


def answer_of(result: Result, wanted: AnswerRequest) -> ServedAnswer:
    """Raises Rejected with the run's id where a failure left it without an answer."""
    is_filtered = isinstance(result.failure, ReplyFiltered) and result.answer is None
    if result.stop is Stop.ERROR and result.answer is None and not is_filtered:
        raise failure_of(result.failure, result.error, result.run_id)
    called = result.answer if isinstance(result.answer, ToolCallAnswer) else None
    text, was_cut = _cut(encodable(result.response), wanted) if called is None else ("", False)
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
    if wanted.own.cite:
        about["citations"] = result.citations
    if called is not None:
        return ServedAnswer(
            "",
            "tool_calls",
            result.usage,
            about,
            tuple((new_id(), each) for each in called.tool_calls),
        )
    if is_filtered:
        return ServedAnswer("", "content_filter", result.usage, about)
    return ServedAnswer(text, "length" if is_partial or was_cut else "stop", result.usage, about)


def failure_of(failure: BaseException | None, error: str | None, run: str) -> RequestRejected:
    """What a caller is told of a run that failed."""
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


def _cut(text: str, wanted: AnswerRequest) -> tuple[str, bool]:
    """The answer up to its first stop, and no longer than asked for; whether its length was too
    much."""
    ends = [at for at in (text.find(stop) for stop in wanted.stops if stop) if at >= 0]
    text = text[: min(ends)] if ends else text
    most = len(text) if wanted.max_tokens is None else wanted.max_tokens * _CHARS_PER_TOKEN
    return text[:most], len(text) > most

"""Define scripts that say how simulated models reply in tests.

A script is a list, a set of rules or a function, and provides a reply or failure for each request.

``ScriptedClient`` (no network) and ``ScriptedServer`` (real HTTP) share this module, so that both
fail in the same way, and count tokens as ``clients/function_client.py`` does.

    ["hello", rate_limited(1.5), "again"]                  one per request, in order
    lambda messages: messages[-1].content.upper()          or a coroutine function
    [ScriptRule(match="capital", reply="Paris"), ...]      first rule that matches the last message

A script file is a JSON list of the same items: ``{"fail": "rate_limited", "retry_after_s": 1.5}``
for a failure and ``{"match": "capital", "reply": …}`` for a rule.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.clients.function_client import reply_with_token_counts
from ramify.errors import ConfigError, RequestRefusedError
from ramify.types.message import Message, Reply, Usage

Kind = Literal[
    "rate_limited",
    "server_error",
    "refused",
    "unreachable",
    "dropped",
    "cut",
    "stalled",
    "malformed",
    "html",
    "no_choices",
    "no_usage",
]


class ScriptedFailure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A failure that a script provides instead of a good reply.

    The functions of this module, such as ``rate_limited``, create the various kinds.

    >>> testing.rate_limited(1.5).fail
    'rate_limited'
    """

    fail: Kind
    text: str = ""
    """The reply that the model would have given, or the server's error message."""
    retry_after_s: float | None = None
    status: int = 0
    """HTTP status, for kinds of failure without a fixed status."""


def rate_limited(retry_after_s: float | None = None) -> ScriptedFailure:
    """Return a failure with HTTP status 429 (too many requests).

    With ``retry_after_s``, it tells the client how many seconds to wait.

    Example:
        testing.ScriptedClient([testing.rate_limited(0.5), "FINAL(2)"])    # wait half a second
    """
    return ScriptedFailure("rate_limited", retry_after_s=retry_after_s, status=429)


def server_error(status: int = 500, text: str = "the engine fell over") -> ScriptedFailure:
    """Return a failure with an HTTP status of 500 or above, which signals an internal server error.

    Example:
        testing.ScriptedClient([testing.server_error(503), "FINAL(2)"])
    """
    return ScriptedFailure("server_error", text, status=status)


def refused(status: int = 400, text: str = "the request was refused") -> ScriptedFailure:
    """Return a failure with an HTTP status from 400 to 499.

    The request is rejected, and a retry would not help.

    Example:
        testing.ScriptedClient([testing.refused(401, "wrong key")])
    """
    return ScriptedFailure("refused", text, status=status)


def unreachable() -> ScriptedFailure:
    """Return a failure to reach the server.

    The scripted HTTP server imitates it by closing the connection without a reply.

    Example:
        testing.ScriptedClient([testing.unreachable(), "FINAL(2)"])
    """
    return ScriptedFailure("unreachable")


def dropped(text: str = "lost") -> ScriptedFailure:
    """Return a failure in which the connection closes before the reply begins.

    The model has still produced the reply, which is billed.

    Example:
        testing.ScriptedClient([testing.dropped(), "the reply"])
    """
    return ScriptedFailure("dropped", text)


def cut(text: str = "cut in the middle") -> ScriptedFailure:
    """Return a failure in which the connection closes in the middle of the reply.

    The model has still produced the whole reply, which is billed.

    Example:
        testing.ScriptedClient([testing.cut(), "the whole reply"])    # a retry gets the second
    """
    return ScriptedFailure("cut", text)


def stalled(text: str = "too late") -> ScriptedFailure:
    """Return a failure in which the connection hangs and the finished reply never arrives.

    Example:
        testing.ScriptedClient([testing.stalled()])    # until the deadline of the run
    """
    return ScriptedFailure("stalled", text)


def malformed(text: str = "not json") -> ScriptedFailure:
    """Return a failure with HTTP status 200 and a body that is not JSON.

    The model is billed.

    Example:
        testing.ScriptedServer([testing.malformed("<not json>")])
    """
    return ScriptedFailure("malformed", text)


def html(status: int = 200) -> ScriptedFailure:
    """Return a failure in which the server sends a web page instead of JSON.

    A wrong base URL can cause such a failure.

    Example:
        testing.ScriptedServer([testing.html()])
    """
    return ScriptedFailure("html", "<!doctype html><title>Welcome</title>", status=status)


def no_choices(text: str = "nothing") -> ScriptedFailure:
    """Return a failure with HTTP status 200 and valid JSON that contains no choices.

    The model is billed.

    Example:
        testing.ScriptedServer([testing.no_choices()])
    """
    return ScriptedFailure("no_choices", text)


def no_usage(text: str) -> ScriptedFailure:
    """Return a complete reply that lacks token usage, as from a server that does not report it.

    Example:
        testing.ScriptedClient([testing.no_usage("FINAL(2)")])    # booked as an upper bound
    """
    return ScriptedFailure("no_usage", text)


PAID: frozenset[str] = frozenset(
    {"dropped", "cut", "stalled", "malformed", "no_choices", "no_usage"}
)
"""Kinds of failure for which the model is billed."""

Step = str | Message | Reply | ScriptedFailure
"""A reply or failure for one request."""


class ScriptRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of a script: the reply to every request whose last message matches a pattern.

    >>> testing.ScriptRule(match="capital of France", reply="Paris").reply
    'Paris'
    """

    match: str
    """Regular expression to search for in the last message; ``.`` also matches newlines."""
    reply: Step | tuple[Step, ...]
    """Reply to matching requests. The replies of a tuple are given in turn, and the last one is
    then repeated."""


ReplyFunction = Callable[[tuple[Message, ...]], Step | Awaitable[Step]]
Lines = Sequence[Step | ScriptRule] | ReplyFunction


class Script:
    """A script that provides the reply to each request in a test.

    If it is a list, requests take its entries in order of arrival.

    Example:
        testing.ScriptedServer(testing.Script.load("replies.json"))
    """

    def __init__(self, lines: Lines, name: str = "the script") -> None:
        if isinstance(lines, str) or not (callable(lines) or isinstance(lines, Iterable)):
            raise ConfigError(
                f"{name} is a {type(lines).__name__}: give a list of replies or rules, or a "
                "function from messages to a reply"
            )
        self.tell: ReplyFunction = lines if callable(lines) else _reply_function(tuple(lines), name)
        """Return the reply to these messages. Raises RequestRefusedError if the script has no
        reply."""

    @classmethod
    def load(cls, path: str | Path) -> Script:
        """Load a script from a JSON file.

        Raises ConfigError if the file cannot be read or is not a valid script.
        """
        return cls(_load_script(path), name=str(path))


def step_outcome(
    step: Step, messages: tuple[Message, ...], max_tokens: int
) -> tuple[Reply | ScriptedFailure, Usage]:
    """Convert a script step to a reply with token counts, or to a failure.

    Also returns the billed token usage, which is zero if the model did no work.
    """
    if isinstance(step, ScriptedFailure):
        paid = step.fail in PAID
        return step, reply_with_token_counts(
            step.text, messages, max_tokens
        ).usage if paid else Usage()
    reply = reply_with_token_counts(step, messages, max_tokens)
    return reply, reply.usage


def _reply_function(lines: tuple[Step | ScriptRule, ...], name: str) -> ReplyFunction:
    if any(isinstance(line, ScriptRule) for line in lines):
        return _by_rule(
            [line if isinstance(line, ScriptRule) else ScriptRule("", line) for line in lines], name
        )
    return _in_order(lines, name)  # type: ignore[arg-type]


def _in_order(lines: tuple[Step, ...], name: str) -> ReplyFunction:
    left = iter(lines)
    num_requests = 0

    def tell(messages: tuple[Message, ...]) -> Step:
        nonlocal num_requests
        num_requests += 1
        for line in left:
            return line
        raise RequestRefusedError(
            f"{name}: all {len(lines)} replies are used up (this is request {num_requests}): "
            "add one, or use a rule"
        )

    return tell


def _by_rule(rules: list[ScriptRule], name: str) -> ReplyFunction:
    patterns = [re.compile(rule.match, re.DOTALL) for rule in rules]
    replies = [rule.reply if isinstance(rule.reply, tuple) else (rule.reply,) for rule in rules]
    used = [0] * len(rules)

    def tell(messages: tuple[Message, ...]) -> Step:
        last = messages[-1].content if messages else ""
        for i, pattern in enumerate(patterns):
            if pattern.search(last):
                used[i] += 1
                return replies[i][min(used[i], len(replies[i])) - 1]
        raise RequestRefusedError(
            f'{name}: no rule matches the last message {last[:60]!r}: add a rule with "match": ""'
        )

    return tell


def _load_script(path: str | Path) -> tuple[Step | ScriptRule, ...]:
    try:
        lines = msgspec.json.decode(Path(path).read_bytes(), type=list[Any])
        return tuple(_parse_line(line) for line in lines)
    except OSError as error:
        raise ConfigError(
            f"script {path}: {error.strerror}; give a JSON list of replies or rules"
        ) from None
    except (msgspec.MsgspecError, re.error) as error:
        raise ConfigError(f"script {path}: {error}; give a JSON list of replies or rules") from None


def _parse_line(line: Any) -> Step | ScriptRule:
    if isinstance(line, dict) and "match" in line:
        reply = line.get("reply")
        steps = (
            tuple(_parse_step(item) for item in reply)
            if isinstance(reply, list)
            else _parse_step(reply)
        )
        re.compile(line["match"])
        return ScriptRule(line["match"], steps)
    return _parse_step(line)


def _parse_step(line: Any) -> Step:
    if isinstance(line, dict) and "fail" in line:
        return msgspec.convert(line, ScriptedFailure)
    if isinstance(line, dict):
        return msgspec.convert({"role": "assistant", **line}, Message)
    return msgspec.convert(line, str)

"""Redact personal data and keys from recorded conversations.

Both the text and the tokens that spell it are redacted.

    text   "write to ann@x.org please"   ──> "write to «redacted e-mail» please"
    ids    [ 5, 17, 80, 81, 82, 31 ]     ──> [ 5, 17, x, x, x, 31 ], and which ones they are

The number of token ids stays the same, so that positions, log-probabilities and versions of all
other tokens are unchanged. A token that spells only a part of a redacted span is replaced as a
whole. Ids are never made from text: a span is found in the text that the ids decode to.

By default, this redacts e-mail addresses, phone numbers, card numbers with a valid check digit, and
keys (``ramify/secret_redaction.py``). Patterns recognise forms, not meaning: names and addresses
stay. Conversations are stored by ``traffic_recorder.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.secret_redaction import SecretRedactor, likely_secret_spans
from ramify.types.message import Message, ToolCall
from ramify.types.trajectory import Cell

_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}")
_PHONE = re.compile(
    r"(?<![\w.])(?:(?:\+\d|\(\d|0\d)[\d ()./-]{5,20}\d|\d{3}[-. ]\d{3}[-. ]\d{4})(?!\w)"
)
_CARD = re.compile(r"(?<![\w.])\d(?:[ -]?\d){12,18}(?!\w)")
_PHONE_DIGITS = range(8, 16)


class RedactedSpan(NamedTuple):
    """A range of characters in a string that must be redacted."""

    start: int
    end: int
    kind: str
    """``e-mail``, ``phone``, ``card`` or ``key``; empty for a pattern that the user added."""


class RedactionRules:
    """A set of rules that redacts personal data and keys before conversations are stored."""

    def __init__(self, patterns: Sequence[str] = (), *, defaults: bool = True) -> None:
        """Create a set of redaction rules from the built-in ones and the given patterns.

        ``patterns`` are regular expressions to redact in addition to the default rules, which
        ``defaults=False`` turns off. Raises ConfigError for a pattern that does not compile, or
        that matches an empty string.
        """
        self._patterns = [_compile_pattern(pattern) for pattern in patterns]
        self._secrets = SecretRedactor() if defaults else None

    def spans(self, text: str) -> list[RedactedSpan]:
        """Return the ranges of a string that must be redacted, in order and without overlaps."""
        merged: list[RedactedSpan] = []
        for span in sorted(self._find_spans(text)):
            if merged and span.start < merged[-1].end:
                last = merged[-1]
                merged[-1] = last._replace(end=max(last.end, span.end))
            else:
                merged.append(span)
        return merged

    def redact_text(self, text: str) -> str:
        """Return a text in which all personal data and keys are replaced by placeholders.

        Each redacted span is replaced with a placeholder.
        """
        return self._redact_text(text, set())

    def redact_message(self, message: Message, removed: set[str]) -> Message:
        """Redact personal data and keys in the strings of a message.

        Each redacted span is replaced with a placeholder, and its text is added to the set
        ``removed``.
        """
        calls = tuple(
            ToolCall(call.id, call.name, self._redact_text(call.arguments, removed))
            for call in message.tool_calls
        )
        reasoning = message.reasoning
        return msgspec.structs.replace(
            message,
            content=self._redact_text(message.content, removed),
            reasoning=None if reasoning is None else self._redact_text(reasoning, removed),
            tool_calls=calls,
        )

    def redact_value(self, value: Any) -> Any:
        """Redact every string in an answer, which is a JSON value."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list | tuple):
            return [self.redact_value(each) for each in value]
        if isinstance(value, dict):
            return {self.redact_value(key): self.redact_value(each) for key, each in value.items()}
        return value

    def redact_cell(self, cell: Cell) -> Cell:
        """Return a copy of a code cell in which the code, output, value and error are redacted.

        The reference to its full output is removed, because that output is not stored.
        """
        return msgspec.structs.replace(
            cell,
            code=self.redact_text(cell.code),
            stdout=self.redact_text(cell.stdout),
            value=None if cell.value is None else self.redact_text(cell.value),
            error=None if cell.error is None else self.redact_text(cell.error),
            stdout_digest=None,
        )

    def token_mask(
        self, ids: Sequence[int], decode: Callable[[Sequence[int]], str], removed: set[str]
    ) -> list[bool]:
        """Return a mask with one boolean per token, which is True if the token must be redacted.

        ``removed`` holds the texts that were redacted in the messages. Wherever they occur here,
        they are redacted, too.
        """
        text = decode(ids)
        spans = [(span.start, span.end) for span in self.spans(text)]
        for value in removed:
            spans += [(match.start(), match.end()) for match in re.finditer(re.escape(value), text)]
        if len(spans) > _MAX_SPANS:
            return [True] * len(ids)
        flags = [False] * len(ids)
        lengths = _PrefixLengths(ids, decode)
        for start, end in spans:
            for index in range(lengths.last_up_to(start), lengths.first_from(end)):
                flags[index] = True
        return flags

    def _redact_text(self, text: str, removed: set[str]) -> str:
        parts, begin = [], 0
        for span in self.spans(text):
            removed.add(text[span.start : span.end])
            parts += [text[begin : span.start], f"«redacted {span.kind}»".replace(" »", "»")]
            begin = span.end
        return "".join([*parts, text[begin:]]) if parts else text

    def _find_spans(self, text: str) -> Iterator[RedactedSpan]:
        for pattern in self._patterns:
            for match in pattern.finditer(text):
                if match.end() > match.start():
                    yield RedactedSpan(match.start(), match.end(), "")
        if self._secrets is None:
            return
        for start, end in likely_secret_spans(text, self._secrets):
            yield RedactedSpan(start, end, "key")
        if "@" in text:
            for match in _EMAIL.finditer(text):
                yield RedactedSpan(match.start(), match.end(), "e-mail")
        for match in _CARD.finditer(text):
            if _has_check_digit(match.group()):
                yield RedactedSpan(match.start(), match.end(), "card")
        for match in _PHONE.finditer(text):
            if sum(char.isdigit() for char in match.group()) in _PHONE_DIGITS:
                yield RedactedSpan(match.start(), match.end(), "phone")


_MAX_SPANS = 256
"""Maximum number of redacted spans in one text for which the tokens are looked up.

If a text has more, all its token ids are redacted, since a caller could otherwise keep the server
busy.
"""


class _PrefixLengths:
    """A converter from character counts to token counts for the prefixes of one text.

    Only the prefixes that are needed are decoded.
    """

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._ids = ids
        self._decode = decode

    def last_up_to(self, chars: int) -> int:
        """Return the largest number of leading tokens that decode to at most ``chars`` characters.

        An incomplete character at the end counts as one.
        """
        return bisect_right(range(1, len(self._ids) + 1), chars, key=self._decoded_length)

    def first_from(self, chars: int) -> int:
        """Return the smallest number of leading tokens that decode to at least ``chars``
        characters.

        Only whole characters count.
        """
        return bisect_left(range(len(self._ids) + 1), chars, key=self._complete_chars_length)

    def _decoded_length(self, num: int) -> int:
        return len(self._decode(self._ids[:num]))

    def _complete_chars_length(self, num: int) -> int:
        return len(self._decode(self._ids[:num]).rstrip("\ufffd"))


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--redact {pattern!r} is not a regular expression: {error}") from None
    if compiled.fullmatch("") is not None:
        raise ConfigError(
            f"--redact {pattern!r} also matches an empty text: give a pattern that needs at least "
            "one character"
        )
    return compiled


def _has_check_digit(number: str) -> bool:
    """Return True if the digits of a number pass the Luhn check.

    Those of all card numbers do.
    """
    digits = [int(char) for char in number if char.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and any(digits)

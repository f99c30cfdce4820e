"""One event as one line of JSON, whatever the event contains.

The fast path is a single call of the codec. The slow path handles values that JSON or UTF-8 cannot
represent, and secrets: lone surrogates become ``\\\\udc80`` escapes, an infinite number becomes the
largest finite one, and a secret becomes ``«redacted NAME»``.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.secrets import SecretRedactor
from ramify.types.event import AnyEvent, ReplyReceived

_encoder = msgspec.json.Encoder()


def encode_line(event: AnyEvent, secrets: SecretRedactor) -> bytes:
    """``event`` as JSON with a newline."""
    if (
        type(event) is ReplyReceived
        and event.reply.logprobs
        and not math.isfinite(sum(event.reply.logprobs))
    ):
        return _plain_line(event, secrets)
    try:
        line = _encoder.encode(event)
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        return _plain_line(event, secrets, error)
    return _plain_line(event, secrets) if secrets.found_in(line) else line + b"\n"


def _plain_line(event: AnyEvent, secrets: SecretRedactor, cause: Exception | None = None) -> bytes:
    try:
        plain = msgspec.to_builtins(event)
        # A session may return any value, but log-probabilities must be numbers.
        may_be_nan = type(event) is not ReplyReceived
        return (
            _encoder.encode(
                {key: _clean(value, secrets, may_be_nan) for key, value in plain.items()}
            )
            + b"\n"
        )
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        raise StoreError(
            f"a {event.__struct_config__.tag} event cannot be written as JSON: {cause or error}; "
            "give it plain values"
        ) from error


def _clean(value: Any, secrets: SecretRedactor, may_be_nan: bool) -> Any:
    match value:
        case str():
            return secrets.redact(value.encode("utf-8", "backslashreplace").decode())
        case float() if math.isnan(value):
            if may_be_nan:
                return None
            raise TypeError("a number in it is NaN")
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
        case dict():
            return {
                _clean(key, secrets, may_be_nan): _clean(item, secrets, may_be_nan)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_clean(item, secrets, may_be_nan) for item in value]
        case _:
            return value

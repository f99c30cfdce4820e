"""Translate an HTTP error response (status, headers and body) into the matching ``ModelError``.

The message is one line and never contains a key. All clients that speak HTTP share this module,
whatever library they use. The time to wait is read from ``retry-after``, from the reset header of
an exhausted rate limit, and from Google's ``retryDelay``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from ramify.errors import ModelError, RateLimited, Refused, ReplyLost, ServerFailed
from ramify.secrets import forms_of

_LOOKS_LIKE_A_KEY = re.compile(r"\b((?:sk|pk|rk|gsk|xai|key)[-_]|AIza|Bearer\s+)[\w*.+/=-]{8,}")
_TOO_LONG = re.compile(
    r"context.{0,12}(length|window)|maximum context|too many (input )?tokens|prompt is too long"
    r"|input is too long|max_model_len|longer than the (model|maximum)"
    r"|exceeds? the (maximum|model|limit)[^.]{0,40}tokens",
    re.IGNORECASE,
)
_NO_MONEY = re.compile(
    r"insufficient_quota|billing|credit balance|exceeded your current quota", re.IGNORECASE
)
_NOT_THERE = (404, 405, 501)
"""Path not found, or not available for POST: typical answers of a server that is not an API."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d+(?:\.\d+)?)s"')


def from_status(
    where: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    key_variable: str = "",
    secrets: Iterable[str] = (),
) -> ModelError:
    """Return the error for a response that is not a 2xx. ``where`` names the model and its
    address."""
    message = message_of(body, secrets)
    text = f"{where} answered {status}: {message}" if message else f"{where} answered {status}"
    if status in (429, 529) or (status == 503 and retry_after_s(headers, body) is not None):
        if _NO_MONEY.search(message) and status == 429:
            return _needs_key(f"{text}; the account has no quota left")
        return RateLimited(text, retry_after_s(headers, body))
    if status in (504, 524):
        return ReplyLost(f"{text}; a gateway gave up waiting")
    if status in (408, 425) or (status >= 500 and status not in _NOT_THERE):
        return ServerFailed(text)
    return _refused(text, status, message, headers, key_variable)


def _refused(
    text: str, status: int, message: str, headers: Mapping[str, str], key_variable: str
) -> Refused:
    if status in (400, 413, 422) and (status == 413 or _TOO_LONG.search(message)):
        error = Refused(f"{text}; shorten the prompt or name a model with a larger window")
        error.too_long = True
        return error
    if status == 402 or (status in (400, 403) and _NO_MONEY.search(message)):
        return _needs_key(f"{text}; the account has no quota left")
    if status in (401, 403):
        key = f"; check the key in {key_variable}" if key_variable else ""
        return _needs_key(f"{text}{key}")
    if status in _NOT_THERE and "html" in headers.get("content-type", "").lower():
        return Refused(f"{text}; check the base URL: most end in /v1")
    return Refused(text)


def _needs_key(text: str) -> Refused:
    error = Refused(text)
    error.needs_key = True
    return error


def message_of(body: bytes, secrets: Iterable[str] = ()) -> str:
    """Return the message of an error body in any provider's format: one line of at most 300
    characters, without ``secrets``."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:20_000].decode("utf-8", "replace")
        parsed = "a web page" if text.lstrip()[:1] == "<" else text
    # Secrets are removed first, because half of one would not be recognized.
    return " ".join(redacted(_error_text(parsed), secrets).split())[:300]


def _error_text(parsed: Any) -> str:
    if isinstance(parsed, list):
        return _error_text(parsed[0]) if parsed else ""
    if not isinstance(parsed, dict):
        return str(parsed)
    for field in ("error", "message", "detail", "msg", "error_message"):
        if parsed.get(field):
            code = parsed.get("code") or parsed.get("type")
            tail = f" ({code})" if field == "message" and isinstance(code, str) else ""
            return _error_text(parsed[field]) + tail
    return msgspec.json.encode(parsed).decode() if parsed else ""


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` without the given secrets and without anything that looks like a key."""
    for secret in secrets:
        for form in forms_of(secret) if len(secret) >= 6 else ():
            text = text.replace(form, "***")
    return _LOOKS_LIKE_A_KEY.sub(r"\1***", text)


def retry_after_s(headers: Mapping[str, str], body: bytes = b"") -> float | None:
    """Return how many seconds the server asked to wait, or None if it did not say."""
    waits = [
        _scaled(headers.get("retry-after-ms"), 1e-3),
        seconds_of(headers.get("retry-after")),
        _reset_of_exhausted_limit(headers),
    ]
    for wait_s in waits:
        if wait_s is not None:
            return wait_s
    delay = _RETRY_DELAY.search(body)
    return float(delay[1]) if delay else None


def _scaled(value: str | None, unit: float) -> float | None:
    try:
        return max(0.0, float(value) * unit) if value is not None else None
    except ValueError:
        return None


def _reset_of_exhausted_limit(headers: Mapping[str, str]) -> float | None:
    waits = []
    for name, value in headers.items():
        name = name.lower()
        if "ratelimit" in name and "remaining" in name and value.strip() == "0":
            reset = seconds_of(headers.get(name.replace("remaining", "reset")))
            if reset is not None:
                waits.append(reset)
    return max(waits, default=None)


def seconds_of(value: str | None) -> float | None:
    """Parse ``"2"``, ``"6m0.5s"``, ``"20ms"``, an HTTP date, an ISO date or a Unix time as seconds
    from now."""
    if not value:
        return None
    value = value.strip()
    number = _scaled(value, 1.0)
    if number is not None:
        return (
            number
            if number < 1e9
            else max(0.0, (number / 1000 if number > 1e11 else number) - time.time())
        )
    if _DURATION.fullmatch(value) or re.fullmatch(rf"({_DURATION.pattern})+", value):
        return sum(float(amount) * _UNIT_S[unit] for amount, unit in _DURATION.findall(value))
    from email.utils import parsedate_to_datetime  # rarely needed, and slow to import

    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return max(0.0, parse(value).timestamp() - time.time())
        except (ValueError, TypeError):
            continue
    return None

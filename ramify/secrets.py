"""Redaction of known secret values from what a journal writes: the last line of defence for keys.

Ramify itself never writes a key, but a session's output or a tool's result may contain one. Secrets
are the values of environment variables whose names end in ``_KEY``, ``_TOKEN``, ``_SECRET`` or
``_PASSWORD``, and values that are given by name.

Not covered: encoded forms such as base64, and the contexts that a user supplies. Those are stored
unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
MIN_CHARS = 12


class SecretRedactor:
    """Secret values of this process, prepared for searching in encoded JSON."""

    def __init__(
        self, given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        names = {value: name for name, value in environ.items() if name.upper().endswith(ENDINGS)}
        names.update({value: name for name, value in (given or {}).items()})
        # Longest first, because one secret may contain another.
        self._names = {v: names[v] for v in sorted(names, key=len, reverse=True) if _is_secret(v)}
        self._encoded = [msgspec.json.encode(_clean(value))[1:-1] for value in self._names]

    def found_in(self, line: bytes) -> bool:
        """True if an encoded line contains a secret. Makes one fast search per secret."""
        return any(secret in line for secret in self._encoded)

    def redact(self, text: str) -> str:
        """``"key sk-123…"`` -> ``"key «redacted OPENAI_API_KEY»"``"""
        for value, name in self._names.items():
            if value in text:
                text = text.replace(value, f"«redacted {name}»")
        return text


def _is_secret(value: str) -> bool:
    """Exclude short words, plain numbers and paths of key files, which occur in ordinary text."""
    return (
        len(value) >= MIN_CHARS
        and not value.isdigit()
        and not (value[0] in "/~." and os.path.exists(value))
    )


def _clean(value: str) -> str:
    """Replace lone surrogates, which non-UTF-8 environment variables contain and encoded lines
    cannot."""
    return value.encode("utf-8", "replace").decode()

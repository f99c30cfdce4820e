"""The last line of defence against keys on the disk: known secret values are cut out of what a
journal writes.

Nothing that Ramify writes itself holds a key; a session's output or a tool's result might. Secrets
are the values of environment variables whose names end in ``_KEY``, ``_TOKEN``, ``_SECRET`` or
``_PASSWORD``, and those given by name. Leaves out encoded forms (base64 …) and the contexts that a
user points at: those are stored as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
MIN_CHARS = 12


class SecretRedactor:
    """The secret values of this process, ready to be looked for in encoded JSON."""

    def __init__(
        self, given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        found = {value: name for name, value in environ.items() if name.upper().endswith(ENDINGS)}
        found.update({value: name for name, value in (given or {}).items()})
        # The longest first: one secret may contain another.
        self._names = {v: found[v] for v in sorted(found, key=len, reverse=True) if _is_secret(v)}
        self._encoded = [msgspec.json.encode(_clean(value))[1:-1] for value in self._names]

    def found_in(self, line: bytes) -> bool:
        """Whether an encoded line holds a secret; one fast search per secret."""
        return any(secret in line for secret in self._encoded)

    def redact(self, text: str) -> str:
        """``"key sk-123…"`` -> ``"key «redacted OPENAI_API_KEY»"``"""
        for value, name in self._names.items():
            if value in text:
                text = text.replace(value, f"«redacted {name}»")
        return text


def _is_secret(value: str) -> bool:
    """Not short words, plain numbers or the path of a key file: those occur in any text."""
    return (
        len(value) >= MIN_CHARS
        and not value.isdigit()
        and not (value[0] in "/~." and os.path.exists(value))
    )


def _clean(value: str) -> str:
    """Environment variables that are not UTF-8 hold lone surrogates, which no encoded line can
    hold."""
    return value.encode("utf-8", "replace").decode()

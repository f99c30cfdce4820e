"""Redact secrets from everything that is written to journals and logs.

This is the last line of defence for keys.

    SecretRedactor().redact(text)    redacts known secrets: for journals, which keep all other text
    redact_likely_secrets(text)      also what looks like a secret: for logs, errors, configurations

Ramify itself never writes a key, but a session's output or a provider's error may contain one.
Known secrets are the values of environment variables whose names end in ``_KEY``, ``_TOKEN``,
``_SECRET`` or ``_PASSWORD``, values that are given by name, and keys that were given in code, which
clients and servers pass to ``register_secret``. They are found in plain form and as encoded in
URLs, JSON, ``repr`` and base64, alone or within longer text such as ``user:secret``.

Not covered: other encoded forms such as hexadecimal, keys given in code that are shorter than 8
characters, and the contexts that a user supplies. Those are stored unchanged.
"""

from __future__ import annotations

import binascii
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus

import msgspec

from ramify.lazy_pattern import lazy_pattern

ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
MIN_CHARS = 12
_MIN_REMEMBERED_CHARS = 8
"""Minimum length of a secret. Shorter keys, such as ``EMPTY``, occur in ordinary text."""
MARK = "«redacted»"
KINDS = "(?:key|token|secret|password|passwd|authorization|credentials?)"
LOGIN = lazy_pattern(r"//[^/@\s]+@")
QUERY = lazy_pattern(
    rf"([?&](?:[\w.-]*[_.-])?(?:api_?)?(?:{KINDS}|sig|signature)=)[^&#\s\"']+", re.IGNORECASE
)
_NAME = lazy_pattern(rf"(^|[._-])(api_?)?{KINDS}$", re.IGNORECASE)
_NAMED = lazy_pattern(
    r"((?:\b(?:x-)?api[-_ ]?key(?: provided)?|\b(?:access|auth|refresh|session)[-_ ]?token"
    r"|\bauthorization|\b(?:client[-_ ])?secret|\bpassword|\bpasswd"
    r"|\b\w+_(?:key|token|secret|password))"
    r"[\"']?\s*[:=]\s*(?:b(?=[\"']))?[\"']?(?:(?:bearer|basic|token)\s+)?+)"
    r"(?![\d.,]{1,7}(?:[\s;)}\"']|$)|none\b|null\b|«)[^\s\"',;&)}]{4,}",
    re.IGNORECASE,
)
"""Pattern of named keys: ``api_key='…'``, ``x-api-key: …``, ``Authorization: Bearer …``."""
_KEY_SHAPED = lazy_pattern(
    r"\b((?:sk|gsk|xai|pplx|nvapi|tvly|glpat|xox[abp])-|(?:hf|ghp|r8|sk_live|sk_test)_"
    r"|github_pat_|AIza|AKIA|Bearer\s+)[\w*.+/=-]{8,}"
)

_remembered: dict[str, str] = {}
"""Value -> name, for each secret that was given in code."""


class SecretRedactor:
    """A redactor that finds the secret values of this process in text and replaces them.

    It also covers values that are registered later with ``register_secret``.
    """

    def __init__(
        self, given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        known = {v: name for name, v in environ.items() if name.upper().endswith(ENDINGS)}
        known.update({value: name for name, value in (given or {}).items()})
        self._known = {value: name for value, name in known.items() if _is_secret(value)}
        self._prepare()

    def _prepare(self) -> None:
        self._num_remembered = len(_remembered)
        names = {
            form: name
            for value, name in {**_remembered, **self._known}.items()
            for form in encoded_secret_forms(value)
        }
        # Longest first, because one secret may contain another.
        self._names = {form: names[form] for form in sorted(names, key=len, reverse=True)}
        self._encoded = [
            msgspec.json.encode(_replace_surrogates(form))[1:-1] for form in self._names
        ]

    def contains_secret(self, line: bytes) -> bool:
        """Return True if a line of encoded JSON contains a known secret of this process.

        The line is searched once for each secret, which is fast.
        """
        if len(_remembered) != self._num_remembered:
            self._prepare()
        for secret in self._encoded:  # noqa: SIM110 -- a generator takes twice as long
            if secret in line:
                return True
        return False

    def redact(self, text: str) -> str:
        """Replace each known secret in ``text`` with a placeholder that contains its name.

        ``"key sk-123…"`` becomes ``"key «redacted OPENAI_API_KEY»"``.
        """
        if len(_remembered) != self._num_remembered:
            self._prepare()
        for value, name in self._names.items():
            if value in text:
                text = text.replace(value, f"«redacted {name}»")
        return text

    def known_secret_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the ``(start, end)`` character offsets of each known secret in ``text``."""
        if len(_remembered) != self._num_remembered:
            self._prepare()
        for value in self._names:
            start = text.find(value)
            while start >= 0:
                yield start, start + len(value)
                start = text.find(value, start + len(value))

    def trim_partial_secret(self, text: str) -> str:
        """Cut off the end of ``text`` if it may be the beginning of a secret, such as ``sk-1`` of
        ``sk-123…``.

        Use this for text that is displayed while it arrives.
        """
        cut = len(text)
        for value in self._names:
            start = text.find(value[:_MIN_BEGINNING], max(0, len(text) - len(value)))
            while start >= 0:
                if value.startswith(text[start:]):
                    cut = min(cut, start)
                    break
                start = text.find(value[:_MIN_BEGINNING], start + 1)
        return text[:cut]


_MIN_BEGINNING = 4
"""Minimum number of characters that count as the beginning of a secret. Fewer characters often
match by chance, so they may be displayed."""


def register_secret(name: str, value: str) -> None:
    """Register a secret, such as a key that was given in code, so that every log and journal
    redacts it from now on."""
    if len(value) >= _MIN_REMEMBERED_CHARS:
        _remembered[value] = name


@functools.lru_cache(256)
def encoded_secret_forms(value: str) -> tuple[str, ...]:
    """Return a secret as is and as encoded in URLs, JSON, ``repr`` and base64."""
    clean = _replace_surrogates(value)
    in_json = msgspec.json.encode(clean).decode()[1:-1]
    forms = (
        value,
        quote(clean),
        quote(clean, safe=""),
        quote_plus(clean),
        in_json,
        json.dumps(clean)[1:-1],
        in_json.replace("/", "\\/"),
        json.dumps(clean)[1:-1].replace("/", "\\/"),
        msgspec.json.encode(in_json).decode()[1:-1],  # JSON in a field of JSON
        repr(value)[1:-1],
        *_in_base64(clean.encode()),
    )
    return tuple(dict.fromkeys(forms))


def _in_base64(value: bytes) -> Iterator[str]:
    """Yield the base64 fragments that reveal a secret in longer text such as ``user:secret``.

    Three bytes become four characters, so each of the three possible offsets has its own fragment.
    """
    for before in range(3):
        encoded = binascii.b2a_base64(bytes(before) + value, newline=False)
        # The first and last characters also depend on the bytes around the value.
        start, end = -(-before * 4 // 3), (before + len(value)) * 8 // 6
        if end - start >= _MIN_BASE64_CHARS:
            text = encoded[start:end].decode()
            yield text
            yield text.replace("+", "-").replace("/", "_")


_MIN_BASE64_CHARS = 8
"""Minimum length of a base64 text to search for. Shorter ones occur in ordinary text."""


def is_secret_field_name(name: str) -> bool:
    """Return True if a field name suggests a secret, such as ``api_key`` or ``judge.token``."""
    return _NAME.search(name) is not None


def redact_likely_secrets(text: str, known: SecretRedactor | None = None) -> str:
    """Redact known secrets in ``text``, and everything that looks like a secret.

    This includes logins and keys in URLs, values after names such as ``api_key``, and strings in
    the format of a provider's keys.

    ``"https://me:pw@host/v1?key=k"`` becomes ``"https://«redacted»@host/v1?key=«redacted»"``.
    """
    text = (known or SecretRedactor()).redact(without_url_secrets(text))
    for pattern in (_NAMED, _KEY_SHAPED):
        text = pattern.sub(rf"\1{MARK}", text)
    return text


def likely_secret_spans(text: str, known: SecretRedactor) -> Iterator[tuple[int, int]]:
    """Yield the ``(start, end)`` offsets of the spans that ``redact_likely_secrets`` redacts.

    For ``"https://h/v1?key=k1"``, this yields ``(17, 19)``.
    """
    yield from known.known_secret_spans(text)
    for login in LOGIN.finditer(text):
        yield login.start() + len("//"), login.end() - len("@")
    for pattern in (QUERY, _NAMED, _KEY_SHAPED):
        for match in pattern.finditer(text):
            yield match.end(1), match.end()


def without_url_secrets(text: str) -> str:
    """Redact logins and keys in URLs.

    Call this before redacting known secrets, because their placeholders contain spaces, which would
    break the URLs.
    """
    return QUERY.sub(rf"\1{MARK}", LOGIN.sub(f"//{MARK}@", text))


def _is_secret(value: str) -> bool:
    """Return True if a value is long and unusual enough to be a secret.

    Short words, plain numbers and paths of key files are not, because they occur in ordinary text.
    """
    return (
        len(value) >= MIN_CHARS
        and not value.isdigit()
        and not (value[0] in "/~." and os.path.exists(value))
    )


def _replace_surrogates(value: str) -> str:
    """Replace the lone surrogates in ``value``, because they cannot be encoded in JSON.

    They come from environment variables that are not UTF-8.
    """
    return value.encode("utf-8", "replace").decode()

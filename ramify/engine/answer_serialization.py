"""Convert a run's answers to the form that its journal stores.

This is JSON, plus the Python types of an answer if JSON would lose them.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ramify.errors import SandboxError
from ramify.sandbox.base import SharedContextValue


def to_jsonable(value: Any) -> Any:
    """Return ``value`` as plain data that can be written as JSON.

    A value that JSON cannot represent is replaced by its text.
    """
    if type(value) is str:
        return value
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_dump_pydantic)
    except Exception:  # noqa: BLE001 -- a model chose the value, which may be anything
        return _text_of(value)
    try:
        msgspec.json.decode(msgspec.json.encode(plain))  # as a reader of the journal will do
    except UnicodeEncodeError:  # a lone surrogate, which a journal writes as an escape
        pass
    except Exception:  # noqa: BLE001 -- such as an integer that JSON cannot hold
        return _text_of(value)
    return plain


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 -- such as an integer with too many digits to print
        return f"(a value of type {type(value).__name__} that has no text: {type(error).__name__})"


def _dump_pydantic(value: Any) -> Any:
    """Return the fields of a pydantic model as plain data.

    msgspec cannot encode the model itself. Raises NotImplementedError for any other type.
    """
    if not hasattr(value, "model_dump"):
        raise NotImplementedError
    return value.model_dump(mode="json")


def pack_typed_answer(answer: Any) -> dict[str, Any] | None:
    """Encode an answer as a record that preserves its Python types.

    Returns None if plain JSON would lose nothing, or if the answer has a type that cannot be
    packed.
    """
    if _is_plain(answer):
        return None
    try:
        return SharedContextValue(answer).to_jsonable()
    except SandboxError:  # of a type of the caller, which gives it again
        return None


def _is_plain(value: Any) -> bool:
    """Return True if ``value`` survives a JSON round trip unchanged."""
    match value:
        case None | str() | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_plain, value))
        case dict():
            return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
        case _:
            return False

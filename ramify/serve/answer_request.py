"""What a caller wants, whichever API it was said in; and the ``ramify`` field, which may only
tighten limits.

    chat.read / responses.read ──> Wanted ──prompt.py──> context and question ──> a run
Fields that change nothing here (``user``, ``metadata``, ``reasoning_effort``, …) are taken and ignored; one that would
change the answer and is not understood is refused by name, so that nobody believes it was heeded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.serve.caller_tools import ToolOffer
from ramify.serve.web import RequestRejected

T = TypeVar("T")

_any = msgspec.json.Decoder(dict[str, Any])


class AttachedFile(msgspec.Struct, frozen=True):
    """A file that came with a message."""

    name: str
    data: str
    """Base64, or a ``data:`` address of it."""
    where: str
    """The field that holds it, for errors: ``messages[0].content[1].file.file_data``."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    parts: tuple[str | AttachedFile, ...]


class RequestLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one request, each at most the server's; None: the server's."""

    max_turns: int | None = None
    max_depth: int | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    max_seconds: float | None = None
    max_children: int | None = None
    max_reply_tokens: int | None = None

    def within(self, limits: Limits, most_cost: float | None) -> Limits:
        """``limits`` of the server, tightened; ``most_cost`` is its dollars for one run. Raises
        Rejected for what would widen them."""
        given = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        for name, value in given.items():
            most = most_cost if name == "max_cost" else getattr(limits, name)
            if most is not None and value > most:
                raise RequestRejected(
                    f"{name}={value!r} is above the server's {most!r}: a request may only lower it",
                    param=f"ramify.limits.{name}",
                )
            if value < 0 or (value == 0 and name != "max_depth"):
                raise RequestRejected(
                    f"{name}={value!r} allows nothing: give more", param=f"ramify.limits.{name}"
                )
        return msgspec.structs.replace(limits, **given)


class RamifyRequestFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field ``ramify`` of a request."""

    limits: RequestLimits = RequestLimits()
    depth: int | None = None
    """The same as ``limits.max_depth``."""
    cite: bool = False
    """Ask for citations, check them, and return them in the field ``ramify`` of the answer."""

    def tighter(self) -> RequestLimits:
        """Raises Rejected where the depth is given twice."""
        if self.depth is None:
            return self.limits
        if self.limits.max_depth is not None:
            raise RequestRejected(
                "the depth is also given as limits.max_depth: leave one out", param="ramify.depth"
            )
        return msgspec.structs.replace(self.limits, max_depth=self.depth)


class AnswerRequest(msgspec.Struct, frozen=True):
    """One request for an answer."""

    said: tuple[ChatMessage, ...]
    stream: bool
    schema: dict[str, Any] | None
    """What the answer must meet."""
    schema_field: str
    """Where the schema was given, for errors."""
    max_tokens: int | None
    """Of the final answer."""
    max_tokens_field: str
    temperature: float | None
    top_p: float | None
    own: RamifyRequestFields
    seed: int | None = None
    stops: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    offer: ToolOffer | None = None
    """Functions that the answer may ask to have called."""
    with_usage: bool = True
    """Of a chat completion's stream: whether its last event has the usage."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestRejected(
                f"the answer may have {self.max_tokens} tokens: give at least 1",
                param=self.max_tokens_field,
            )
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise RequestRejected(
                f"temperature={self.temperature} must be from 0 to 2", param="temperature"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestRejected(
                f"top_p={self.top_p} must be above 0 and at most 1", param="top_p"
            )
        if self.offer is not None and self.own.cite:
            raise RequestRejected(
                "an answer that may be a call of tools cannot be cited: leave one out",
                param="ramify.cite",
            )

    def sampling(self, server: Sampling) -> Sampling:
        """How this run's replies are drawn."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return msgspec.structs.replace(
            server, **{name: value for name, value in given.items() if value is not None}
        )


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises Rejected that names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        found = re.search(r"(?:field|value) [`'](.+?)[`']", text)
        place = path.strip("`").removeprefix("$").removeprefix(".")
        name = found[1] if found and "field" in text else ""
        raise RequestRejected(
            f"{text} ({place or 'the body'})", param=".".join(filter(None, [place, name])) or None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRejected(f"the body is not JSON: {error}") from None


def refuse_unsupported(body: bytes, harmless: Mapping[str, Sequence[Any]]) -> None:
    """Raises Rejected for the first of ``harmless``'s fields that is given with another value than
    those."""
    fields = decode(_any, body)
    for name, values in harmless.items():
        if fields.get(name) is not None and fields[name] not in values:
            raise RequestRejected(
                f"{name}={fields[name]!r:.100} is not supported: leave it out", param=name
            )


def schema_of(format: Any, where: str, *, nested: bool) -> tuple[dict[str, Any] | None, str]:
    """The schema that a response format asks for, and the field it is in. In chat completions it is
    ``nested`` in ``json_schema``."""
    if format is None:
        return None, where
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return None, where
    if kind == "json_object":
        return {"type": "object"}, where
    if kind != "json_schema":
        raise RequestRejected(
            f"a response format of type {kind!r:.60} is not known: give text, json_object or "
            "json_schema",
            param=f"{where}.type",
        )
    where = f"{where}.json_schema" if nested else where
    holder = format.get("json_schema") if nested else format
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestRejected(
            "there is no schema: give a JSON schema as an object", param=f"{where}.schema"
        )
    return schema, f"{where}.schema"

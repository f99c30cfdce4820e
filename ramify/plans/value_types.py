"""Types of the values that flow through a plan.

They are used to check a plan before it runs.

    split ──> list of part ──> map (leaf with an enum) ──> list of text ──> count ──> counts

The type of a model's answer is derived from its JSON schema. ``engine/typed_answers.py`` checks
answers against their schemas, and each step says which types it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import explain_conversion_error


class PlanValueType(msgspec.Struct, frozen=True):
    """The type of a value in a plan, such as text, a number or a list of records."""

    kind: str
    """``text``, ``part``, ``number``, ``boolean``, ``date``, ``record``, ``list``, ``counts``,
    ``pair`` or ``any``."""
    item: PlanValueType | None = None
    """Type of the items of a list, or of the first value of a pair."""
    second: PlanValueType | None = None
    """Type of the second value of a pair."""
    fields: dict[str, PlanValueType] = {}
    """Fields of a record."""
    labels: tuple[str, ...] = ()
    """All possible values of a text. Empty if any text is possible."""
    has_records: bool = False
    """For a part: True if it consists of records."""
    tokens: int = 0
    """For a part: its maximum size in tokens."""

    def __str__(self) -> str:
        match self.kind:
            case "list":
                return f"list of {self.item}"
            case "pair":
                return f"pair of {self.item} and {self.second}"
            case "record" if self.fields:
                inner = ", ".join(f"{name}: {field}" for name, field in self.fields.items())
                return f"record {{{inner}}}"
            case _:
                return self.kind

    def accepts(self, other: PlanValueType) -> bool:
        """Return True if a value of the type ``other`` can be used where this type is required."""
        if "any" in (self.kind, other.kind):
            return True
        if self.kind != other.kind:
            return False
        for mine, theirs in ((self.item, other.item), (self.second, other.second)):
            if mine is not None and theirs is not None and not mine.accepts(theirs):
                return False
        return all(
            name in other.fields and field.accepts(other.fields[name])
            for name, field in self.fields.items()
        )

    def item_type(self, step: str) -> PlanValueType:
        """Return the type of a list's items.

        Raises ConfigError if this is not a list type.
        """
        if self.kind == "any":
            return ANY
        if self.kind != "list" or self.item is None:
            raise ConfigError(
                f"{step} needs a list, but got {self}: put a step before it that gives a list"
            )
        return self.item

    def field_type(self, name: str, step: str) -> PlanValueType:
        """Return the type of one field of a record.

        If ``name`` is empty, return this type itself. Raises ConfigError if there is no such field.
        """
        if self.kind == "any" or not name:
            return self
        if self.kind != "record":
            raise ConfigError(
                f"{step} needs the field '{name}', but got {self}, which has no fields"
            )
        if self.fields and name not in self.fields:
            known = ", ".join(self.fields)
            raise ConfigError(f"{step} needs the field '{name}', but the record has {known}")
        return self.fields.get(name, ANY)


ANY = PlanValueType("any")
TEXT = PlanValueType("text")
NUMBER = PlanValueType("number")
BOOLEAN = PlanValueType("boolean")
DATE = PlanValueType("date")
COUNTS = PlanValueType("counts")


def list_of(item: PlanValueType) -> PlanValueType:
    return PlanValueType("list", item)


def pair_of(first: PlanValueType, second: PlanValueType) -> PlanValueType:
    return PlanValueType("pair", first, second)


def check_field_values(part: msgspec.Struct, what: str) -> None:
    """Raise ConfigError if a field of a struct holds a value of the wrong type.

    ``what`` names the struct in the error.
    """
    for field in msgspec.structs.fields(part):
        value = getattr(part, field.name)
        if field.type is Any:
            continue
        try:
            msgspec.convert(msgspec.to_builtins(value), field.type)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            if isinstance(cause := error.__cause__, ConfigError):
                raise cause from None
            hint = explain_conversion_error(error, field.type).replace("`", "'")
            raise ConfigError(f"{what}: {field.name}={value!r:.60}: {hint}") from None


_KINDS = {"boolean": BOOLEAN, "integer": NUMBER, "number": NUMBER}


def type_of_schema(
    schema: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> PlanValueType:
    """Return the type of the values that match a JSON schema.

    A nullable value has the same type as one that cannot be null.
    """
    whole = schema if whole is None else whole
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name and name in whole.get("$defs", {}):
        return type_of_schema(whole["$defs"][name], whole)
    for union in ("anyOf", "oneOf"):
        others = [each for each in schema.get(union, ()) if each.get("type") != "null"]
        if others:
            return type_of_schema(others[0], whole) if len(others) == 1 else ANY
    labels = schema.get("enum")
    if labels is not None and all(isinstance(label, str) for label in labels):
        return PlanValueType("text", labels=tuple(labels))
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    match kind:
        case "string":
            return DATE if schema.get("format") == "date" else TEXT
        case "array":
            return list_of(type_of_schema(schema.get("items") or {}, whole))
        case "object":
            fields = {n: type_of_schema(f, whole) for n, f in schema.get("properties", {}).items()}
            return PlanValueType("record", fields=fields)
        case _:
            return _KINDS.get(str(kind), ANY)

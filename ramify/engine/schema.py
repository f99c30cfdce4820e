"""JSON schemas, and values checked against them in a bounded number of steps.

A schema of a few lines may take for ever: each of ``{"anyOf": [{"$ref": "#/$defs/b"}, {"$ref":
"#/$defs/b"}]}`` on the way to the last doubles the work. Every keyword that is applied is a step,
dear ones several, and a value may take a number of them that grows with its size: what takes more
is refused, on any machine alike. The clock is not asked.

Schemas of strangers (a session's code, callers of a server) may also be no larger than
``MAX_NODES``, and their regular expressions are matched by ``regex.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from ramify.engine.regex import RegexPattern, UnsupportedRegex
from ramify.errors import ConfigError

MAX_STEPS = 50_000
"""Of one check, about a second …"""
STEPS_PER_NODE = 100
"""… and so many more for each value within the value."""
MAX_NODES = 5_000
"""Values within a stranger's schema."""
_CHARS_PER_STEP = 200
"""Of texts that are compared, and of messages that are written."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaCheckTooLong(Exception):
    """A check that takes more steps than it may."""


class _Budget:
    def __init__(self, steps: int, schema_nodes: int) -> None:
        self._left, self._sizes = steps, dict[int, int]()
        self.schema_nodes = schema_nodes

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise SchemaCheckTooLong

    def size(self, value: Any) -> int:
        """``nodes`` of a part of the schema or of the value, which both outlive this."""
        if id(value) not in self._sizes:
            self._sizes[id(value)] = nodes(value)
        return self._sizes[id(value)]


_budget: ContextVar[_Budget] = ContextVar("budget")


class JsonSchema:
    """One schema, ready to check."""

    def __init__(self, schema: dict[str, Any], *, trusted: bool = True) -> None:
        """Raises ConfigError for what is no schema, or, where it is not ``trusted``, more than is
        taken of strangers."""
        import jsonschema
        import referencing

        self._size = nodes(schema)
        if not trusted:
            _check_stranger(schema, self._size)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            where = "/".join(str(part) for part in error.absolute_path) or "its top"
            raise ConfigError(
                f"the JSON schema is not valid at {where}: {error.message[:500]}"
            ) from None
        except (
            RecursionError,
            OverflowError,
        ) as error:  # nested too deep; a{99999999999} in a pattern
            raise ConfigError(
                f"the JSON schema cannot be read ({type(error).__name__}): make it simpler"
            ) from None
        if "$id" not in json.dumps(schema):
            _check_references(schema, schema)
        registry = (
            referencing.Registry()
        )  # one that fetches nothing: a stranger may give the schema
        self._validator = _counting(kind, trusted)(schema, registry=registry)

    def failure(self, value: Any) -> str | None:
        """What is wrong with ``value``, which is plain JSON; None where it fits. Raises TooLong."""
        import jsonschema
        from referencing.exceptions import Unresolvable

        budget = _Budget(MAX_STEPS + STEPS_PER_NODE * nodes(value), self._size)
        token = _budget.set(budget)
        try:
            found = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
        except (Unresolvable, RecursionError) as error:
            return f"the schema itself cannot be followed ({type(error).__name__})"
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # a number of more digits than Python writes, or a keyword with a value that its check
            # did not expect
            return f"the value cannot be checked ({error})"
        finally:
            _budget.reset(token)
        return None if found is None else f"at {found.json_path}: {found.message[:500]}"


def nodes(value: Any) -> int:
    """How many values there are in ``value``, itself among them; a long text counts as several."""
    count, open_ = 0, [value]
    while open_:
        part = open_.pop()
        count += 1
        if isinstance(part, str):
            count += len(part) // _CHARS_PER_STEP
        elif isinstance(part, Mapping):
            open_ += part.values()
        elif isinstance(part, list):
            open_ += part
    return count


def _check_stranger(schema: Any, size: int) -> None:
    if size > MAX_NODES:
        raise ConfigError(f"the JSON schema has {size:,} values in it: give at most {MAX_NODES:,}")
    named, open_ = dict[str, bool](), [schema]
    while open_:
        part = open_.pop()
        if isinstance(part, list):
            open_ += part
        if not isinstance(part, dict):
            continue
        named |= dict.fromkeys(part, True)
        open_ += part.values()
        patterns = [part.get("pattern")] if isinstance(part.get("pattern"), str) else []
        patterns += (
            part["patternProperties"] if isinstance(part.get("patternProperties"), dict) else []
        )
        for pattern in patterns:
            try:
                _pattern(pattern)
            except UnsupportedRegex as error:
                raise ConfigError(
                    f"the pattern {pattern!r:.100} of the JSON schema is not taken: {error}"
                ) from None
    if "patternProperties" in named and "unevaluatedProperties" in named:
        raise ConfigError(
            "a JSON schema may not have both patternProperties and unevaluatedProperties here"
        )


_pattern = functools.lru_cache(maxsize=256)(RegexPattern)

# --- the counting validator
# ------------------------------------------------------------------------------------------------


@functools.cache
def _counting(kind: Any, trusted: bool) -> Any:
    """A validator of the dialect of ``kind`` that spends the budget of the check that it is in."""
    import attrs
    from jsonschema import validators

    own = dict(kind.VALIDATORS)
    if "uniqueItems" in own:
        own["uniqueItems"] = _unique_items
    if not trusted:
        changed = {
            "pattern": _match,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional,
        }
        own |= {name: function for name, function in changed.items() if name in own}
    is_old = not {"$dynamicRef", "$recursiveRef"} & own.keys()
    counting = validators.create(
        meta_schema=kind.META_SCHEMA,
        validators={name: _counted(name, function) for name, function in own.items()},
        type_checker=kind.TYPE_CHECKER,
        format_checker=kind.FORMAT_CHECKER,
        id_of=kind.ID_OF,
        applicable_validators=_beside_no_reference if is_old else dict.items,
    )

    def evolve(self: Any, **changes: Any) -> Any:
        _budget.get().spend(1)
        return attrs.evolve(
            self, **changes
        )  # jsonschema's own would take a part's $schema, and count no more

    counting.evolve = evolve
    return counting


def _beside_no_reference(schema: dict[str, Any]) -> Any:
    """Up to draft 7, what stands beside a reference does not count."""
    return [("$ref", schema["$ref"])] if "$ref" in schema else schema.items()


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        budget = _budget.get()
        budget.spend(_cost(name, value, instance, budget))
        for error in function(validator, value, instance, schema) or ():
            budget.spend(1 + len(error.message) // _CHARS_PER_STEP)
            yield error

    return counted


def _cost(name: str, value: Any, instance: Any, budget: _Budget) -> int:
    if name in _REFERENCES and isinstance(value, str):
        is_pointer = value == "#" or value.startswith(
            "#/"
        )  # else the whole schema is looked through for it
        return 3 + (len(value) // 20 if is_pointer else budget.schema_nodes)
    if name in ("enum", "const"):
        return budget.size(value)
    if name == "uniqueItems":
        return budget.size(instance)
    return 1 + (_length(value) + _length(instance)) // 10


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _unique_items(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if (
        wanted
        and validator.is_type(instance, "array")
        and len(set(map(_hashable, instance))) < len(instance)
    ):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _hashable(value: Any) -> Any:
    """Equal where JSON Schema has ``value`` equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return (bool, value) if isinstance(value, bool) else value


def _searched(pattern: str, text: str) -> bool:
    budget = _budget.get()
    return _pattern(pattern).search(text, lambda places: budget.spend(1 + places // 10))


def _match(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not _searched(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _: Any
) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, schema in patterns.items():
            for name, each in instance.items():
                if _searched(pattern, name):
                    yield from validator.descend(each, schema, path=name, schema_path=pattern)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        name
        for name in instance
        if name not in named and not any(_searched(each, name) for each in patterns)
    ]
    if isinstance(allowed, dict):
        for name in extras:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and extras:
        shown = ", ".join(map(repr, extras))
        yield ValidationError(
            f"Additional properties are not allowed ({shown} "
            f"{'was' if len(extras) == 1 else 'were'} unexpected)"
        )


# --- references
# --------------------------------------------------------------------------------------------------------------


def _check_references(part: Any, schema: Mapping[str, Any]) -> None:
    """Every ``$ref`` of ``part`` is to a place in ``schema``."""
    if isinstance(part, list):
        for item in part:
            _check_references(item, schema)
    if not isinstance(part, dict):
        return
    for name, item in part.items():
        if name == "$ref" and isinstance(item, str) and not _leads(item, schema):
            raise ConfigError(
                f"the JSON schema refers to {item!r:.200}, which is not in it: put it under its "
                "$defs"
            )
        _check_references(item, schema)


def _leads(reference: str, schema: Any) -> bool:
    """Whether ``reference``, such as ``#/$defs/Item``, names a place in ``schema``. Anchors are not
    looked for."""
    place, *path = reference.split("/")
    if place.startswith("#") and (place != "#" or not path):
        return True
    for step in path:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return False
    return place == "#"

"""JSON schemas, and checks of values against them in a bounded number of steps.

A schema of a few lines can take exponential time: each level of ``{"anyOf": [{"$ref": "#/$defs/b"},
{"$ref": "#/$defs/b"}]}`` doubles the work. Every applied keyword therefore counts as one step, or
several if it is expensive, and the number of steps that a check may take grows with the size of the
value. A check that needs more is rejected. The limit counts steps rather than time, so it is the
same on every machine.

Untrusted schemas (from a session's code or the callers of a server) are also limited to
``MAX_NODES`` values. Their regular expressions are matched here, because Python's matcher tries one
alternative after another, so ``(a+)+$`` takes twice as long for each additional letter. This one
follows all positions at which a part may end at once, so each position is visited once per part and
repetition. Expressions that need more than positions, such as backreferences, are rejected.

    "a|ab"  on "xab", from {0, 1, 2, 3}:   a -> {2}, ab -> {3}   together {2, 3}: it matches
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from ramify.errors import ConfigError

MAX_CHARS = 1000
"""Maximum length of an expression."""
_PARSER = importlib.import_module("re._parser")
_CATEGORIES = {
    name: re.compile(text).fullmatch
    for name, text in {
        "CATEGORY_DIGIT": r"\d",
        "CATEGORY_NOT_DIGIT": r"\D",
        "CATEGORY_SPACE": r"\s",
        "CATEGORY_NOT_SPACE": r"\S",
        "CATEGORY_WORD": r"\w",
        "CATEGORY_NOT_WORD": r"\W",
    }.items()
}
_WORD = re.compile(r"\w").fullmatch
Places = set[int]
"""Offsets in a text, from 0 to its length."""


class UnsupportedRegex(ValueError):
    """The expression is invalid or cannot be matched in bounded time; ``str()`` gives the
    reason."""


class RegexPattern:
    """One compiled expression."""

    def __init__(self, text: str) -> None:
        """Raises UnsupportedRegex."""
        if len(text) > MAX_CHARS:
            raise UnsupportedRegex(
                f"it has {len(text):,} characters, and at most {MAX_CHARS:,} are taken"
            )
        try:
            parsed = _PARSER.parse(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedRegex(str(error)) from None
        if parsed.state.flags & ~re.UNICODE:
            raise UnsupportedRegex("it has flags: write them out, as [Aa] for (?i:a)")
        _check(parsed)
        self._parts = list(parsed)

    def search(self, text: str, spend: Callable[[int], None]) -> bool:
        """True if the expression matches anywhere in ``text``. ``spend`` is called with the number
        of positions visited, and may raise."""
        return bool(_Search(text, spend).through(self._parts, set(range(len(text) + 1))))


class _Search:
    def __init__(self, text: str, spend: Callable[[int], None]) -> None:
        self._text = text
        self._spend = spend

    def through(self, parts: Iterable[Any], places: Places) -> Places:
        """Return where the sequence ``parts`` may end if it starts at ``places``."""
        for kind, value in parts:
            self._spend(1 + len(places))
            if not places:
                break
            places = getattr(self, f"_{kind.name.lower()}", self._one)(value, places, kind)
        return places

    def _one(self, value: Any, places: Places, kind: Any) -> Places:
        text = self._text
        return {
            place + 1
            for place in places
            if place < len(text) and _is_one(kind.name, value, text[place])
        }

    def _branch(self, value: Any, places: Places, _: Any) -> Places:
        return set().union(*(self.through(parts, places) for parts in value[1]))

    def _subpattern(self, value: Any, places: Places, _: Any) -> Places:
        return self.through(value[3], places)

    def _max_repeat(self, value: Any, places: Places, _: Any) -> Places:
        low, high, parts = value
        for _ in range(low):
            after = self.through(parts, places)
            if after == places:  # a fixed point: further repetitions change nothing
                break
            places = after
        reached, fresh = set(places), places
        while fresh and low < high:
            fresh = self.through(parts, fresh) - reached
            reached |= fresh
            low += 1
        return reached

    _min_repeat = _max_repeat

    def _assert(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if self.through(value[1], {place})}

    def _assert_not(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if not self.through(value[1], {place})}

    def _at(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if self._is_at(value.name, place)}

    def _is_at(self, name: str, place: int) -> bool:
        text = self._text
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return place == 0
        if name in ("AT_END", "AT_END_STRING"):
            return place == len(text) or (name == "AT_END" and text[place:] == "\n")
        before, after = text[place - 1 : place], text[place : place + 1]
        is_edge = bool(_WORD(before)) != bool(_WORD(after))
        return is_edge == (name == "AT_BOUNDARY")


def _is_one(kind: str, value: Any, char: str) -> bool:
    match kind:
        case "ANY":
            return char != "\n"
        case "LITERAL":
            return bool(ord(char) == value)
        case "NOT_LITERAL":
            return bool(ord(char) != value)
        case "RANGE":
            return bool(value[0] <= ord(char) <= value[1])
        case "CATEGORY":
            return _CATEGORIES[value.name](char) is not None
    is_negated = value[0][0].name == "NEGATE"
    return bool(
        any(_is_one(item.name, arg, char) for item, arg in value[is_negated:]) != is_negated
    )


_SINGLE = {"ANY", "LITERAL", "NOT_LITERAL", "IN"}
_EDGES = {
    "AT_BEGINNING",
    "AT_BEGINNING_STRING",
    "AT_END",
    "AT_END_STRING",
    "AT_BOUNDARY",
    "AT_NON_BOUNDARY",
}


def _check(parts: Iterable[Any]) -> None:
    """Raise UnsupportedRegex for the first part that ``_Search`` has no rule for."""
    for kind, value in parts:
        match kind.name:
            case "BRANCH":
                for branch in value[1]:
                    _check(branch)
            case "SUBPATTERN" if not value[1] and not value[2]:
                _check(value[3])
            case "MAX_REPEAT" | "MIN_REPEAT":
                _check(value[2])
            case "ASSERT" | "ASSERT_NOT" if value[0] > 0:
                _check(value[1])
            case "AT" if value.name in _EDGES:
                pass
            case name if name not in _SINGLE:
                raise UnsupportedRegex(
                    f"it has a part ({name.lower()}) that cannot be matched in bounded time"
                )


MAX_STEPS = 50_000
"""Steps that any check may take: about a second."""
STEPS_PER_NODE = 100
"""Additional steps for each value within the checked value."""
MAX_NODES = 5_000
"""Maximum number of values within an untrusted schema."""
_CHARS_PER_STEP = 200
"""Characters of compared texts and of written messages that count as one step."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaCheckTooLong(Exception):
    """A check takes more steps than it is allowed."""


class _Budget:
    def __init__(self, steps: int, schema_nodes: int) -> None:
        self._left = steps
        self._sizes = dict[int, int]()
        self.schema_nodes = schema_nodes

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise SchemaCheckTooLong

    def size(self, value: Any) -> int:
        """``nodes`` of a part of the schema or of the value. Both outlive this object."""
        if id(value) not in self._sizes:
            self._sizes[id(value)] = nodes(value)
        return self._sizes[id(value)]


_budget: ContextVar[_Budget] = ContextVar("budget")


class JsonSchema:
    """One compiled schema."""

    def __init__(self, schema: dict[str, Any], *, trusted: bool = True) -> None:
        """Raises ConfigError if ``schema`` is invalid or, unless it is ``trusted``, exceeds the
        limits for untrusted schemas."""
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
        # Nested too deeply, or a{99999999999} in a pattern.
        except (RecursionError, OverflowError) as error:
            raise ConfigError(
                f"the JSON schema cannot be read ({type(error).__name__}): make it simpler"
            ) from None
        if "$id" not in json.dumps(schema):
            _check_references(schema, schema)
        registry = referencing.Registry()  # fetches nothing, because the schema may be untrusted
        self._validator = _counting(kind, trusted)(schema, registry=registry)

    def failure(self, value: Any) -> str | None:
        """Return what is wrong with ``value`` (plain JSON), or None if it matches. Raises
        SchemaCheckTooLong."""
        import jsonschema
        from referencing.exceptions import Unresolvable

        budget = _Budget(MAX_STEPS + STEPS_PER_NODE * nodes(value), self._size)
        token = _budget.set(budget)
        try:
            problem = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
        except (Unresolvable, RecursionError) as error:
            return f"the schema itself cannot be followed ({type(error).__name__})"
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # An integer with too many digits to print, or a keyword whose check did not expect
            # such a value.
            return f"the value cannot be checked ({error})"
        finally:
            _budget.reset(token)
        return None if problem is None else f"at {problem.json_path}: {problem.message[:500]}"


def nodes(value: Any) -> int:
    """Number of values in ``value``, including itself; a long text counts as several."""
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

# --- the counting validator -----------------------------------------------------------------------


@functools.cache
def _counting(kind: Any, trusted: bool) -> Any:
    """Return a validator of the same dialect as ``kind`` that spends the budget of the current
    check."""
    import attrs
    from jsonschema import validators

    checks = dict(kind.VALIDATORS)
    if "uniqueItems" in checks:
        checks["uniqueItems"] = _unique_items
    if not trusted:
        changed = {
            "pattern": _match,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional,
        }
        checks |= {name: function for name, function in changed.items() if name in checks}
    is_old = not {"$dynamicRef", "$recursiveRef"} & checks.keys()
    counting = validators.create(
        meta_schema=kind.META_SCHEMA,
        validators={name: _counted(name, function) for name, function in checks.items()},
        type_checker=kind.TYPE_CHECKER,
        format_checker=kind.FORMAT_CHECKER,
        id_of=kind.ID_OF,
        applicable_validators=_ignore_beside_reference if is_old else dict.items,
    )

    def evolve(self: Any, **changes: Any) -> Any:
        _budget.get().spend(1)
        # The evolve of jsonschema would follow a part's $schema and stop counting.
        return attrs.evolve(self, **changes)

    counting.evolve = evolve
    return counting


def _ignore_beside_reference(schema: dict[str, Any]) -> Any:
    """Up to draft 7, keywords beside a reference are ignored."""
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
        # Any other reference is searched for in the whole schema.
        is_pointer = value == "#" or value.startswith("#/")
        return 3 + (len(value) // 20 if is_pointer else budget.schema_nodes)
    if name in ("enum", "const"):
        return budget.size(value)
    if name == "uniqueItems":
        return budget.size(instance)
    return 1 + (_length(value) + _length(instance)) // 10


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _unique_items(validator: Any, is_required: Any, instance: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if (
        is_required
        and validator.is_type(instance, "array")
        and len(set(map(_hashable, instance))) < len(instance)
    ):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _hashable(value: Any) -> Any:
    """Return a key that is equal if JSON Schema treats the values as equal: 1 and 1.0 are, 1 and
    true are not."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(item)) for name, item in value.items())
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
            for name, item in instance.items():
                if _searched(pattern, name):
                    yield from validator.descend(item, schema, path=name, schema_path=pattern)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        name
        for name in instance
        if name not in named and not any(_searched(pattern, name) for pattern in patterns)
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


# --- references -----------------------------------------------------------------------------------


def _check_references(part: Any, schema: Mapping[str, Any]) -> None:
    """Raise ConfigError unless every ``$ref`` of ``part`` points into ``schema``."""
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
    """True if ``reference``, such as ``#/$defs/Item``, names a place in ``schema``. Anchors are not
    resolved."""
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

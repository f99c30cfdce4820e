"""Check values against JSON schemas in a limited number of steps.

A hostile schema therefore cannot take exponential time. A schema of a few lines can take
exponential time: each level of ``{"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}``
doubles the work. Every applied keyword therefore counts as one step, or several if it is expensive,
and the number of steps that a check may take grows with the size of the value. A check that needs
more is rejected. The limit counts steps rather than time, so it is the same on every machine.

Untrusted schemas (from a session's code or the callers of a server) are also limited to
``MAX_NODES`` values. RE2 matches their regular expressions, in time that is linear in the text:
Python's matcher tries one alternative after another, so ``(a+)+$`` takes twice as long for each
additional letter. RE2 has no backreferences and no look-around; expressions with them are rejected.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from ramify.errors import ConfigError, did_you_mean

MAX_STEPS = 50_000
"""Number of steps that every check may take, about a second of work. ``STEPS_PER_NODE`` adds to
it."""
STEPS_PER_NODE = 100
"""Additional steps allowed for each value inside the checked value."""
MAX_NODES = 5_000
"""Maximum number of values inside an untrusted schema."""
_CHARS_PER_STEP = 200
"""Characters of compared texts or error messages that count as one step."""
_MATCHES_PER_STEP = 1000
"""Cost of a regular-expression match that counts as one step: number of instructions of the
compiled expression, times number of characters searched."""
_REGEX_BYTES = 1 << 20
"""Maximum memory of a compiled regular expression, in bytes."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaCheckTooLong(Exception):
    """Raised if the check of a value takes more steps than allowed."""


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
        """Return the number of JSON values inside ``value``, including itself.

        ``value`` is a part of the schema or of the checked value. Results are cached by the
        object's ``id()``, so the object must outlive the budget.
        """
        if id(value) not in self._sizes:
            self._sizes[id(value)] = count_nodes(value)
        return self._sizes[id(value)]


_budget: ContextVar[_Budget] = ContextVar("budget")


class JsonSchema:
    """A compiled JSON schema, against which values can be checked."""

    def __init__(self, schema: dict[str, Any], *, trusted: bool = True) -> None:
        """Compile the JSON schema ``schema``, so that values can be checked against it.

        Raises ConfigError if the schema is invalid. If not ``trusted``, the schema must also stay
        within the limits for untrusted schemas.
        """
        import jsonschema
        import referencing

        self._size = count_nodes(schema)
        if not trusted:
            _check_stranger(schema, self._size)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"the JSON schema is not valid {_schema_problem(error)}") from None
        # Nested too deeply, or a{99999999999} in a pattern.
        except (RecursionError, OverflowError) as error:
            raise ConfigError(
                f"the JSON schema cannot be read ({type(error).__name__}): make it simpler"
            ) from None
        if "$id" not in json.dumps(schema):
            _check_references(schema, schema)
        registry = referencing.Registry()  # fetches nothing, because the schema may be untrusted
        self._validator = _counting_validator(kind, trusted)(schema, registry=registry)

    def find_mismatch(self, value: Any) -> str | None:
        """Return what is wrong with ``value`` (plain JSON), or None if the value matches the
        schema.

        Raises SchemaCheckTooLong if the check needs too many steps.
        """
        import jsonschema
        from referencing.exceptions import Unresolvable

        budget = _Budget(MAX_STEPS + STEPS_PER_NODE * count_nodes(value), self._size)
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


def _schema_problem(error: Any) -> str:
    """Return where a schema is wrong and why, with the known names if one is misspelled.

    ``error`` is a ``jsonschema.SchemaError``. If none of several forms fits, such as a type or a
    list of types, its ``context`` has the error of each.
    """
    why, open_ = str(error.message[:500]), [error]
    while open_:
        part = open_.pop()
        if part.validator == "enum" and isinstance(part.instance, str):
            given = part.instance[:80]
            error, why = part, f"unknown {given!r}: {did_you_mean(given, part.validator_value)}"
            break
        open_ += part.context
    return f"at {'/'.join(map(str, error.absolute_path)) or 'its top'}: {why}"


def count_nodes(value: Any) -> int:
    """Return the number of JSON values inside ``value``, including itself.

    A long text counts as several values.
    """
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
            _compile_pattern(pattern)
    if "patternProperties" in named and "unevaluatedProperties" in named:
        raise ConfigError(
            "a JSON schema may not have both patternProperties and unevaluatedProperties here"
        )


@functools.lru_cache(maxsize=256)
def _compile_pattern(text: str) -> Any:
    """Compile an untrusted regular expression with RE2.

    Raises ConfigError, with advice, if RE2 does not accept it.
    """
    import re2

    options = re2.Options()
    options.max_mem = _REGEX_BYTES
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0] if isinstance(error, re2.error) else str(error)
        why = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
        raise ConfigError(
            f"the pattern {text!r:.100} of the JSON schema is not accepted: RE2 says "
            f"{why[:200]!r}: {_regex_advice(why)}"
        ) from None


def _regex_advice(why: str) -> str:
    """Return advice on how to replace a regular expression that RE2 rejects.

    ``why`` is the error message of RE2.
    """
    part = why.rpartition(": ")[2]
    if "perl operator" in why and part.startswith(("(?=", "(?!", "(?<")):
        return (
            "it has no look-around: write the texts that are allowed, or one pattern for each "
            "condition, under allOf, and excluded ones under not"
        )
    is_named = "perl operator" in why and part == "(?P"
    if is_named or ("escape sequence" in why and part[1:].isdigit()):
        return "it has no backreferences: write the repeated part out, or the alternatives as enum"
    if part == "\\Z":
        return "write \\z for the end of the text"
    if "perl operator" in why or "bad repetition" in why:
        return "write an ordinary group and plain repetitions: it never tries a text twice"
    if "repetition size" in why:
        return "repeat at most 1,000 times, or use minLength and maxLength"
    if "too large" in why:
        return "shorten it, or use minLength and maxLength"
    return "correct it"


# --- the counting validator -----------------------------------------------------------------------


@functools.cache
def _counting_validator(kind: Any, trusted: bool) -> Any:
    """Return a subclass of the jsonschema validator ``kind`` that counts its steps.

    It stops when the budget of the current check is used up.
    """
    import attrs
    from jsonschema import validators

    checks = dict(kind.VALIDATORS)
    if "uniqueItems" in checks:
        checks["uniqueItems"] = _unique_items
    if not trusted:
        changed = {
            "pattern": _match,
            "patternProperties": _pattern_properties,
            "additionalProperties": _check_additional_properties,
        }
        checks |= {name: function for name, function in changed.items() if name in checks}
    is_old = not {"$dynamicRef", "$recursiveRef"} & checks.keys()
    counting = validators.create(
        meta_schema=kind.META_SCHEMA,
        validators={name: _count_steps(name, function) for name, function in checks.items()},
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
    """Return the keywords that apply in ``schema`` up to draft 7: only ``$ref``, if present.

    In these drafts, a ``$ref`` overrides all keywords next to it.
    """
    return [("$ref", schema["$ref"])] if "$ref" in schema else schema.items()


def _count_steps(name: str, function: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
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
        and len(set(map(_hashable_key, instance))) < len(instance)
    ):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _hashable_key(value: Any) -> Any:
    """Return a hashable key for a JSON value.

    Two values have equal keys if and only if JSON Schema treats them as equal: 1 and 1.0 are equal,
    but 1 and true are not.
    """
    if isinstance(value, dict):
        return frozenset((name, _hashable_key(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable_key, value))
    return (bool, value) if isinstance(value, bool) else value


def _search_pattern(pattern: str, text: str) -> bool:
    regex = _compile_pattern(pattern)
    _budget.get().spend(1 + regex.programsize * len(text) // _MATCHES_PER_STEP)
    return regex.search(text) is not None


def _match(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not _search_pattern(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _: Any
) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, schema in patterns.items():
            for name, item in instance.items():
                if _search_pattern(pattern, name):
                    yield from validator.descend(item, schema, path=name, schema_path=pattern)


def _check_additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        name
        for name in instance
        if name not in named and not any(_search_pattern(pattern, name) for pattern in patterns)
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
    """Raise ConfigError if a ``$ref`` inside ``part`` points to something that ``schema`` does not
    contain."""
    if isinstance(part, list):
        for item in part:
            _check_references(item, schema)
    if not isinstance(part, dict):
        return
    for name, item in part.items():
        if name == "$ref" and isinstance(item, str) and not _is_resolvable(item, schema):
            raise ConfigError(
                f"the JSON schema refers to {item!r:.200}, which is not in it: put it under its "
                "$defs"
            )
        _check_references(item, schema)


def _is_resolvable(reference: str, schema: Any) -> bool:
    """Return True if ``reference``, such as ``#/$defs/Item``, points to an existing part of
    ``schema``.

    References to anchors are accepted without being resolved.
    """
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

"""JSON schemas: legitimate ones of any shape work, and checks that would take exponential time are
stopped.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ramify.engine.typed_answers import TypeMismatch, to_answer_schema
from ramify.errors import ConfigError

LEVELS = 30


def doubling(keyword: str, last: Any, **more: Any) -> dict[str, Any]:
    levels = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2, **more} for i in range(LEVELS)
    }
    return {"$defs": {**levels, f"d{LEVELS}": last}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (doubling("anyOf", {"type": "null"}), 1),
        (doubling("allOf", {}), 1),
        (doubling("oneOf", {}), 1),
        (
            doubling(
                "anyOf", {"type": "null"}, **{"$schema": "http://json-schema.org/draft-07/schema#"}
            ),
            1,
        ),
        ({**doubling("allOf", {}), "unevaluatedProperties": False}, {"a": 1}),
        ({"items": {"enum": [[i] for i in range(2000)]}}, [[-1]] * 3000),
    ],
)
@pytest.mark.parametrize("trusted", [True, False])
def test_exponential_schema_check_is_stopped_by_a_step_limit(
    schema: dict[str, Any], value: Any, trusted: bool
) -> None:
    kind = to_answer_schema(schema, trusted=trusted)
    with pytest.raises(TypeMismatch, match="too many steps"):
        kind.convert(value)


TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}
CHAIN: Any = {}
for _ in range(50):
    CHAIN = {"kids": [CHAIN, {}]}
KINDS = [
    {"properties": {"t": {"const": i}, "x": {"type": "string"}}, "required": ["t"]}
    for i in range(15)
]
OLD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"a": {"type": "integer"}},
}
NAMES = {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "fits", "not_fits"),
    [
        (TREE, CHAIN, {"kids": [{"kids": [{"other": 1}]}]}),
        ({"type": "array", "items": {"anyOf": KINDS}}, [{"t": 14, "x": "y"}] * 100, [{"t": 15}]),
        (
            {**OLD, "properties": {"a": {"$ref": "#/definitions/a", "type": "string"}}},
            {"a": 1},
            {"a": "x"},
        ),
        ({"type": "array", "items": {"type": "integer"}}, [1] * 20_000, [1, "2"]),
        (
            {"uniqueItems": True},
            [1, True, {"a": 1}, {"a": [1]}, *({"n": n} for n in range(2000))],
            [{"a": [1]}, {"a": [1.0]}],
        ),
        ({"pattern": "^[a-z]+(-[a-z]+)*$"}, "a-long-slug" * 20, "a-long-slug" * 20 + "-"),
        ({"pattern": "(a+)+$"}, "a" * 1000, "a" * 1000 + "b"),
        ({"pattern": "^[^@]+@[^@]+$"}, "ä@b", "ä@b@c"),
        (NAMES, {"x-a": "1"}, {"y": "1"}),
    ],
)
@pytest.mark.parametrize("trusted", [True, False])
def test_legitimate_schemas_work(
    schema: dict[str, Any], fits: Any, not_fits: Any, trusted: bool
) -> None:
    if trusted and schema.get("pattern") == "(a+)+$":
        pytest.skip("trusted expressions use Python's re, which takes exponential time here")
    kind = to_answer_schema(schema, trusted=trusted)
    assert kind.convert(fits) == fits
    with pytest.raises(TypeMismatch, match=r"at \$"):
        kind.convert(not_fits)


def test_unserializable_value_is_a_mismatch() -> None:
    kind = to_answer_schema({"type": "string"})
    with pytest.raises(TypeMismatch, match="cannot be checked"):
        kind.convert(10**5000)
    with pytest.raises(TypeMismatch, match="not JSON"):
        to_answer_schema({"type": "array"}).parse_answer("[" * 100_000)
    with pytest.raises(TypeMismatch, match="not JSON"):
        to_answer_schema({"type": "array"}).parse_answer("```" + "\n" * 100_000)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"pattern": "("}, "missing \\)"),
        ({"pattern": "\ud800"}, "surrogates not allowed"),
        ({"pattern": r"(a)\1"}, "invalid escape sequence"),
        ({"items": {"pattern": "^(?!a)"}}, r"invalid perl operator: \(\?!"),
        ({"patternProperties": {"(?<=a)b": {}}}, "invalid perl operator"),
        ({"pattern": "(a{1000}){1000}"}, "invalid repetition size"),
        ({"pattern": "a{1000}" * 100}, "pattern too large"),
        ({"enum": [*range(6000)]}, "give at most 5,000"),
    ],
)
def test_untrusted_schema_with_risky_parts_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        to_answer_schema(json.loads(json.dumps(schema)), trusted=False)


@pytest.mark.parametrize(
    ("pattern", "cure"),
    [
        ("(?=a)b", "no look-around: write .* under allOf, and excluded ones under not"),
        ("(?!a)b", "no look-around"),
        ("(?<!a)b", "no look-around"),
        (r"(a)\1", "no backreferences: write the repeated part out"),
        ("(?P<x>a)(?P=x)", "no backreferences"),
        ("(?>a)", "never tries a text twice"),
        ("a++", "never tries a text twice"),
        (r"a\Z", r"write \\z"),
        ("a{1001}", "minLength and maxLength"),
        ("(", "correct it"),
    ],
)
def test_refused_expression_is_answered_with_what_to_write(pattern: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        to_answer_schema({"type": "string", "pattern": pattern}, trusted=False)


def test_large_expression_over_a_long_text_is_stopped_by_the_step_limit() -> None:
    kind = to_answer_schema({"pattern": "a{999}" * 10}, trusted=False)
    with pytest.raises(TypeMismatch, match=r"at \$"):
        kind.convert("a" * 1000)
    with pytest.raises(TypeMismatch, match="too many steps"):
        kind.convert("a" * 20_000)

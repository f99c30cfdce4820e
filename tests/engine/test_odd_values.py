"""Odd inputs from callers, models and tools: lone surrogates, tools that raise unusual exceptions,
contexts that contain themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Citation, ConfigError, ModelError, Stop, Store
from ramify.engine.typed_answers import citation_error
from tests.engine.helpers import SCAFFOLD, client, code, rlm

HALF = "\ud800"


def test_lone_surrogates_are_handled_everywhere(tmp_path: Path) -> None:
    model = client(
        [
            code(
                "print(ascii(llm_query(context + '!')))", f"'{HALF}'", "raise ValueError(context)"
            ),
            f"said {HALF}",
            code("FINAL([context])"),
        ]
    )
    store = Store(tmp_path)
    with rlm(model, store=store) as r:
        result = r.completion(HALF, f"why {HALF}?")
        assert (result.answer, result.response) == ([HALF], '["\\ud800"]')
        assert model.requests[1].messages[-1].content == "\\ud800!"
        cells = result.trajectory.root.turns[0].cells
        assert [cell.stdout for cell in cells] == ["'said \\\\ud800'\n", "", ""]
        assert str(cells[2].error).endswith("ValueError: \\ud800")
        assert r.replay(result.run_id).answer == [HALF]


def test_cyclic_context_is_refused() -> None:
    context: list[Any] = []
    context.append(context)
    with (
        rlm([]) as r,
        pytest.raises(
            ConfigError, match=r"^the context is nested too deeply or contains itself: flatten it$"
        ),
    ):
        r.completion(context, "?")


@pytest.mark.parametrize("odd", [object(), {"a": print}, [1, {2: lambda: 1}]])
def test_untransferable_context_is_refused(odd: Any) -> None:
    with (
        rlm([]) as r,
        pytest.raises(
            ConfigError, match=r"^the context cannot be given to a session: a value of type \w+ at"
        ),
    ):
        r.completion(odd, "?")


class _Later:
    async def __call__(self) -> str:
        return "later"


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def _cancelled() -> None:
    raise asyncio.CancelledError


def _raises(error: BaseException) -> Any:
    def tool() -> None:
        raise error

    return tool


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (lambda: _Later()(), "later"),
        (_Later(), "later"),
        (_raises(StopIteration(3)), "StopIteration tool: 3"),
        (_raises(SystemExit(3)), "RuntimeError SystemExit: tool: 3"),
        (_raises(_Mute()), "RuntimeError _Mute: tool: (its text cannot be had: RuntimeError)"),
        (_cancelled, "RuntimeError CancelledError: tool: "),
    ],
)
def test_unusual_tool_results_and_exceptions_reach_the_cell(tool: Any, expected: str) -> None:
    cell = "try:\n    print(tool())\nexcept Exception as error:\n    print(type(error).__name__, error)"
    with rlm([code(cell), code("FINAL(1)")], tools={"tool": tool}, scaffold=SCAFFOLD) as r:
        result = r.completion("text", "?")
    assert result.trajectory.root.turns[0].cells[0].stdout == expected + "\n"


def test_session_objects_become_plain_data_in_answers() -> None:
    cell = (
        "import dataclasses, enum\nclass Colour(enum.Enum):\n    RED = 'red'\n"
        "@dataclasses.dataclass\nclass Host:\n    name: str\n    colour: Colour\n"
        "FINAL({'hosts': [Host('web', Colour.RED)], 'all': (1, 2)})"
    )
    with rlm([code(cell)]) as r:
        assert r.completion("text", "?").answer == {
            "hosts": [{"name": "web", "colour": "red"}],
            "all": [1, 2],
        }


@pytest.mark.parametrize(
    ("text", "kind", "answer"),
    [
        ("42", str, "42"),
        ("42", int, 42),
        ('{"a": true}', dict[str, bool], {"a": True}),
        ("{'a': True}", dict[str, bool], {"a": True}),
        ("it is so", str, "it is so"),
    ],
)
def test_answer_given_as_text_is_converted_to_its_type(text: str, kind: Any, answer: Any) -> None:
    with rlm([f"FINAL({text})"]) as r:
        assert r.completion("text", "?", answer_type=kind).answer == answer


def test_type_mismatch_of_text_answer_is_explained_to_the_model() -> None:
    model = client(["FINAL([1, 'x'])", "FINAL([1])"])
    with rlm(model) as r:
        assert r.completion("text", "?", answer_type=list[int]).answer == [1]
    assert "Expected `int`, got `str` - at `$[1]`" in model.requests[1].messages[-1].content


@pytest.mark.parametrize(
    "reference", ["#/$defs/Nothing", "http://127.0.0.1:1/schema.json", "other.json"]
)
def test_schema_with_external_reference_is_refused_without_fetching(reference: str) -> None:
    schema = {"type": "array", "items": {"$ref": reference}}
    with rlm([]) as r, pytest.raises(ConfigError, match="which is not in it: put it under its"):
        r.completion("text", "?", answer_type=schema)
    cell = f"try:\n    llm_query('?', schema={schema!r})\nexcept ValueError as error:\n    print(error)"
    with rlm([code(cell), code("FINAL(1)")]) as r:
        result = r.completion("text", "?")
    assert (
        result.trajectory.root.turns[0]
        .cells[0]
        .stdout.startswith(f"the JSON schema refers to '{reference}'")
    )


def test_circular_schema_is_reported() -> None:
    model = client([code("FINAL(1)"), "FINAL(1)", "text"])
    with rlm(model, limits={"max_turns": 2}) as r:
        result = r.completion("text", "?", answer_type={"$id": "a", "$ref": "#"})
    assert (result.stop, result.answer) == (Stop.MAX_TURNS, None)
    assert (
        "the schema itself cannot be followed (RecursionError)"
        in model.requests[1].messages[-1].content
    )


def test_answer_type_may_be_a_list_of_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    item = pydantic.create_model("Item", a=(int, ...))
    with rlm([code("FINAL([{'a': 1}])")]) as r:
        result = r.completion("text", "?", answer_type=list[item])  # type: ignore[valid-type]
    assert (result.answer, result.response) == ([item(a=1)], '[{"a":1}]')


def test_error_about_an_answer_of_a_wrong_type_is_one_line() -> None:
    pydantic = pytest.importorskip("pydantic")
    item = pydantic.create_model("Item", a=(int, ...), b=(int, ...))
    with RLM(client(["{}"] * 3)) as r, pytest.raises(ModelError) as raised:
        r.completion("?", answer_type=item)
    start = (
        "after 3 replies the value still does not fit its schema: 2 validation errors for Item a "
    )
    assert str(raised.value).startswith(start)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("context", "source", "line", "holds"),
    [
        ("one\x0cmore\ntwo\n", "context", 2, True),
        ("one\r\ntwo\r\n", "context", 2, True),
        ({7: "one\ntwo"}, "7", 2, True),
        (["one\ntwo"], "\N{SUPERSCRIPT TWO}", 2, False),
        (["one\ntwo"], "0", 3, False),
    ],
)
def test_quote_of_a_citation_is_checked_at_its_line(
    context: Any, source: str, line: int, holds: bool
) -> None:
    assert (citation_error(Citation(source, line, line, "two"), context) is None) is holds

"""Any value that a session passes to the host or gives as its answer: the result is an error in its
cell, a note to its model or an answer, never an exception from ``completion``. A child's odd values end neither
its parent nor the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify import RLM, Stop, Store
from ramify.engine.branch_search import vote
from ramify.engine.run_result import as_text
from ramify.types.message import Message
from tests.engine.helpers import client, code, rlm
from tests.sandbox.test_codec import values

ODD = """
import collections, datetime, enum, itertools
class Mute:
    def __str__(self): raise KeyError('mute')
    __repr__ = __str__
class Exits:
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__
class Unequal:
    __hash__ = None
    def __eq__(self, other): raise ZeroDivisionError
class Liar:
    __class__ = property(lambda self: 1 / 0)
class Text(str):
    def __str__(self): return self
class Keyed(dict):
    def items(self): raise OSError('items')
class Unsayable(Exception):
    def __str__(self): raise Unsayable
class Raises:
    def __str__(self): raise Unsayable
class Meta(type):
    __module__ = property(lambda self: 1 / 0)
class Named(metaclass=Meta): pass
cycle = []; cycle.append(cycle)
knot = {}; knot['a'] = [knot]
deep = 1
for _ in range(99): deep = [deep]
"""
SOURCES = [
    "10**5000",
    "-10**3999",
    "2**64",
    "1e400",
    "float('nan')",
    "[float('nan'), '\\ud800']",
    "1j",
    "None",
    "...",
    "b'\\xff'",
    "'\\ud800'",
    "{'\\udfff': '\\ud800'}",
    "{(1, 2): 3}",
    "{None: 1}",
    "{1: 2, '1': 3}",
    "{frozenset({1}): {2}}",
    "cycle",
    "knot",
    "deep",
    "Mute()",
    "Exits()",
    "Unequal()",
    "Liar()",
    "Text('x')",
    "Keyed(a=1)",
    "Raises()",
    "Named()",
    "object()",
    "len",
    "[0] * 500_001",
    "{n * (2**61 - 1) for n in range(2500)}",
    "datetime.datetime.max",
    "datetime.timedelta(-1)",
    "range(3)",
    "collections.Counter('aab')",
    "itertools.repeat(1, 3)",
    "(x for x in 'ab')",
    "bytearray(3)",
    "memoryview(b'x')",
    "type",
    "True",
    "[[]] * 3",
    "'x' * 100_000",
    "{'type': 'object'}",
    "{'$ref': '#'}",
    "{'pattern': '('}",
    "{1: 2}",
    "{'enum': [1j]}",
    "{'const': '\\ud800'}",
]
sources = st.one_of(
    st.sampled_from(SOURCES),
    values.map(repr).filter(lambda text: "nan" not in text and "inf" not in text),
    st.tuples(
        st.sampled_from(["[{}]", "({},)", "{{'a': {}}}", "[1, [{}]]"]), st.sampled_from(SOURCES)
    ).map(lambda pair: pair[0].format(pair[1])),
)
HOST = "__import__('prelude').call_host"
USES = [
    "FINAL({})",
    "answer['content'] = {}",
    "answer.update(content={}, ready=True)",
    "x = {}; FINAL_VAR('x')",
    "FINAL_VAR({})",
    "llm_query({})",
    "llm_query_batched({})",
    "llm_query_batched([{}])",
    "llm_query('q', model={})",
    "llm_query('q', schema={})",
    "rlm_query({})",
    "rlm_query('q', {})",
    "rlm_query('q', [{}])",
    "rlm_query('q', model={})",
    "rlm_query_batched(['q'], {})",
    "rlm_query_batched({}, [1])",
    "tool({})",
    "tool(x={}, name=1, self=2)",
    f"{HOST}({{}})",
    f"{HOST}('history', {{}})",
    f"{HOST}('tool', {{}})",
    f"{HOST}('llm_query_batched', {{}})",
    f"{HOST}('llm_query_batched', ['q'], {{}})",
    f"{HOST}('llm_query_batched', ['q'], None, {{}})",
    f"{HOST}('rlm_query_batched', ['q'], {{}})",
    f"{HOST}('rlm_query_batched', {{}})",
    "raise SubcallError({})",
    "print({})",
    "history[{}]",
]


class Cell:
    """A model whose first message runs ``source`` in the root and ``child`` in each child."""

    source = "1"
    child: str | None = None

    def __call__(self, messages: tuple[Message, ...]) -> str:
        if messages[0].role != "system":
            return "[1]"
        if any(message.role == "assistant" for message in messages):
            return "FINAL('right')"
        is_child = "Question: q\n" in messages[1].content
        return code(self.child or "FINAL('of the child')") if is_child else code(self.source)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RLM, Cell, Store]]:
    cell, store = Cell(), Store(tmp_path_factory.mktemp("runs"))
    with rlm(
        cell, store=store, tools={"tool": lambda *args, **kwargs: 1}, limits={"max_turns": 4}
    ) as r:
        yield r, cell, store


def run_to_final(runs: tuple[RLM, Cell, Store], source: str, child: str | None = None) -> Any:
    r, cell, store = runs
    cell.source, cell.child = f"{ODD}\n{source}", child and f"{ODD}\n{child}"
    result = r.completion("text", "?")
    assert result.stop is Stop.FINAL, result.error
    root = store.load(result.run_id).root
    assert root.stop is Stop.FINAL
    return result


@pytest.mark.parametrize("source", SOURCES)
def test_final_answer_of_any_type_ends_the_run(runs: tuple[RLM, Cell, Store], source: str) -> None:
    run_to_final(runs, f"FINAL({source})")


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_host_survives_an_unprintable_integer(
    runs: tuple[RLM, Cell, Store], use: str
) -> None:
    run_to_final(runs, use.format("10**5000"))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(USES), sources)
def test_every_use_of_the_host_survives_any_value(
    runs: tuple[RLM, Cell, Store], use: str, source: str
) -> None:
    run_to_final(runs, use.format(source))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(USES), sources)
def test_every_use_of_the_host_in_a_child_survives_any_value(
    runs: tuple[RLM, Cell, Store], use: str, source: str
) -> None:
    if "ask" not in use:
        run_to_final(runs, "FINAL([rlm_query('q')])", use.format(source))


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("llm_query(None)", "TypeError: prompt 0 must be a str, not NoneType"),
        ("llm_query(b'x')", "TypeError: prompt 0 must be a str, not bytes"),
        ("llm_query_batched(5)", "TypeError: prompts must be a list of str, not int"),
        (
            "llm_query('q', model=3)",
            "TypeError: model must be the name of a model or None, not int",
        ),
        (
            "llm_query(['q'] * 3, schema={'const': '\\ud800'})",
            "ValueError: schema: it cannot be used (UnicodeEncodeError",
        ),
        (
            "rlm_query_batched(['q'], 5)",
            "TypeError: contexts must be a list with one context for each prompt, not int",
        ),
        (
            "llm_query_batched(['q'] * 10_001)",
            "ValueError: 10,001 prompts at once: give at most 10,000",
        ),
        ("FINAL(10**5000)", "ValueError: an integer of more than 4,000 digits"),
        (f"{HOST}('history', 'a')", "SessionHostCallError: history: seen must be an int, not str"),
        (f"{HOST}('tool', [])", "SessionHostCallError: the name of a tool must be a str, not list"),
    ],
)
def test_invalid_argument_is_named_in_the_cell(
    runs: tuple[RLM, Cell, Store], cell: str, error: str
) -> None:
    result = run_to_final(runs, cell)
    assert result.answer == "right"
    assert f"\n{error}" in result.trajectory.root.turns[0].cells[0].error


def test_oversized_final_variable_becomes_a_note() -> None:
    model = client(
        [code("big = [0] * 500_001"), "FINAL(big)", code("1"), "FINAL_VAR(big)", "FINAL(7)"]
    )
    with rlm(model) as r:
        assert r.completion("text", "?").answer == 7
    notes = [request.messages[-1].content for request in (model.requests[2], model.requests[4])]
    assert "[note] FINAL(big): a value with 500,0" in notes[0]
    assert "[note] FINAL_VAR(big): a value with 500,0" in notes[1]


@pytest.mark.parametrize("kind", [int, list[int], dict[str, Any], {"type": "integer"}])
def test_uncheckable_answer_counts_as_type_mismatch(kind: Any) -> None:
    huge = f"FINAL({hex(10**5000)})"
    model = client(
        [
            huge,
            code("FINAL(1j)"),
            code("FINAL('\\ud800')"),
            code("FINAL({(1, 2): 3})"),
            "FINAL(7)",
            "FINAL(7)",
        ]
    )
    with rlm(model, limits={"max_turns": 6}) as r:
        result = r.completion("text", "?", answer_type=kind)
    assert result.stop in (Stop.FINAL, Stop.MAX_TURNS)
    assert "The answer does not fit its type" in model.requests[1].messages[-1].content


def test_journal_with_integer_at_the_digit_limit_can_be_read(tmp_path: Path) -> None:
    """The answer is given as text, so no session has checked it."""
    with rlm(["FINAL(-1" + "0" * 4299 + ")", "FINAL(7)"], store=Store(tmp_path)) as r:
        result = r.completion("text", "?", answer_type=int)
    assert (Store(tmp_path).load(result.run_id).answer, result.answer) == (7, 7)


def test_odd_answers_can_be_shown_as_text_and_voted_on(tmp_path: Path) -> None:
    huge = 10**5000
    assert [as_text(odd) for odd in (1j, ["\ud800"], float("nan"))] == [
        '"1j"',
        '["\\ud800"]',
        "null",
    ]
    assert "has no text" in json.loads(as_text(huge))
    assert vote([["\ud800"], huge, 1j, ["\ud800"]]) == 0
    with rlm([code("FINAL(['\\ud800', float('nan')])")], store=Store(tmp_path)) as r:
        result = r.completion("text", "?")
    assert Store(tmp_path).load(result.run_id).answer == ["\\ud800", None]


def test_an_answer_that_fails_to_convert_itself_is_recorded_as_its_text() -> None:
    class Odd:
        def model_dump(self, mode: str) -> Any:
            return "\ud800".encode()

        def __str__(self) -> str:
            return "odd"

    assert as_text(Odd()) == '"odd"'

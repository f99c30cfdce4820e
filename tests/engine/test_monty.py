"""The engine with Monty sessions: the supported features, and the errors for unsupported ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ramify import SandboxSpec
from ramify.engine.branch_search import BestOfBranches
from ramify.errors import SandboxError
from ramify.types.message import Message
from ramify.types.trajectory import Cell
from tests.engine.helpers import by_role, client, code, rlm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pydantic_monty") is None, reason="Monty is not installed"
)


def run(script: Any, context: Any = "alpha beta", **options: Any) -> tuple[Any, list[Cell]]:
    """Run ``script`` and return the answer and the cells of the root."""
    with rlm(script, sandbox=SandboxSpec(provider="monty", cell_s=5.0), **options) as r:
        result = r.completion(context, "?")
    return result.answer, [cell for turn in result.trajectory.root.turns for cell in turn.cells]


def test_complete_run_in_monty() -> None:
    script = by_role(
        [
            code("n = context.count('a')\nprint('counted')\nn"),
            code(
                "replies = llm_query_batched([f'{n}?', 'b'])\nllm_query('number', schema={'type': "
                "'integer'})"
            ),
            code("FINAL({'n': n, 'replies': replies})"),
        ],
        lambda prompt: "7" if prompt.startswith("number") else f"re: {prompt}",
    )
    answer, cells = run(script)
    assert answer == {"n": 3, "replies": ["re: 3?", "re: b"]}
    assert [(cell.stdout, cell.value, cell.error) for cell in cells] == [
        ("counted\n", "3", None),
        ("", "7", None),
        ("", None, None),
    ]


def test_children_run_in_monty() -> None:
    root = iter(
        [
            code(
                "got = rlm_query_batched(['child'] * 2, ['ab', 'c']) + "
                "[rlm_query('child')]\nFINAL(got)"
            )
        ]
    )

    def script(messages: tuple[Message, ...]) -> str:
        return code("FINAL(context.upper())") if "child" in messages[1].content else next(root)

    assert run(script, "x")[0] == ["AB", "C", "X"]


def test_tools_and_values_are_available_in_monty() -> None:
    def double(x: int) -> int:
        return 2 * x

    assert run([code("FINAL([double(4), rate])")], tools={"double": double, "rate": 3})[0] == [8, 3]


@pytest.mark.parametrize(
    ("cells", "answer"),
    [
        (["v = [1]", "v = [2]\nFINAL_VAR('v')"], [2]),  # its value at the end of the cell
        (["FINAL_VAR('v')", "FINAL('no v')"], "no v"),
        (
            ["print(1)\nanswer['content'] = 'x'\nanswer['ready'] = True", "y = 2", "FINAL(3)"],
            3,
        ),  # deferred, then withdrawn
        (["answer['content'] = 'x'\nanswer['ready'] = True"], "x"),
        (["print('x' * 20_000)", "FINAL(len(outputs[1]))"], 20_001),
        (["x = 41", "x = 0\nwhile True: pass", "FINAL(x)"], 41),  # an interrupted cell is undone
        (
            ["import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int\nFINAL([A(2)])"],
            [{"n": 2}],
        ),
        (["class A:\n    pass\nFINAL([A()])"], ["<A object>"]),
        (
            ["try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    FINAL(str(e))"],
            "division by zero",
        ),
    ],
)
def test_every_form_of_final_answer_is_accepted(cells: list[str], answer: Any) -> None:
    assert run([*map(code, cells)])[0] == answer


def test_model_sees_that_an_interrupted_cell_was_undone() -> None:
    model = client([code("while True: pass"), code("FINAL(1)")])
    run(model)
    assert (
        "stopped after 5 s of work; what it had bound is undone"
        in model.requests[1].messages[-1].content
    )


def test_session_cannot_change_the_context_of_the_host() -> None:
    context = {"a": "xyz"}
    answer, _ = run([code("context['a'] = 'q'\ncontext['b'] = 'new'"), code("FINAL(1)")], context)
    assert (answer, context) == (1, {"a": "xyz"})


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("def g():\n    yield 1", "does not yet support yield expressions"),
        ("x = 1\ndel x", "does not yet support the 'del' statement"),
        ("import io", "ModuleNotFoundError: No module named 'io'"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("history[0]", "NameError: name 'history' is not defined"),
        (
            "llm_query('q', schema=list[int])",
            "TypeError: no JSON schema for 'list[int]': give a dict",
        ),
        ("open('/etc/passwd').read()", "PermissionError"),
    ],
)
def test_unsupported_feature_is_an_error_in_the_cell(cell: str, expected: str) -> None:
    answer, cells = run([code(cell), code("FINAL('went on')")])
    assert answer == "went on"
    assert expected in str(cells[0].error)


def test_search_can_branch_first_turns_but_not_sessions() -> None:
    first = client([code("FINAL('a')"), code("FINAL('b')"), code("FINAL('b')")])
    with rlm(first, sandbox="monty") as r:
        assert r.completion("x", "?", search=3).answer == "b"
    with (
        rlm([code("x = 1")], sandbox="monty") as r,
        pytest.raises(SandboxError, match="'monty' cannot be forked"),
    ):
        r.completion("x", "?", search=BestOfBranches(2, turn=1))

"""What no sane caller, model or tool gives, and one does: half characters, tools that raise the unraisable, contexts
that contain themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import ConfigError, Store
from tests.engine.helpers import SCAFFOLD, client, code, rlm

HALF = "\ud800"


def test_half_a_surrogate_pair_anywhere(tmp_path: Path) -> None:
    model = client(
        [
            code("print(ascii(llm_query(context + '!')))", f"'{HALF}'", "raise ValueError(context)"),
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


def test_a_context_that_contains_itself() -> None:
    context: list[Any] = []
    context.append(context)
    with (
        rlm([]) as r,
        pytest.raises(ConfigError, match=r"^the context is nested too deep, or contains itself: flatten it$"),
    ):
        r.completion(context, "?")


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
    ("tool", "comes_to"),
    [
        (lambda: _Later()(), "later"),
        (_Later(), "later"),
        (_raises(StopIteration(3)), "StopIteration tool: 3"),
        (_raises(SystemExit(3)), "RuntimeError SystemExit: tool: 3"),
        (_raises(_Mute()), "RuntimeError _Mute: tool: (its text cannot be had: RuntimeError)"),
        (_cancelled, "RuntimeError CancelledError: tool: "),
    ],
)
def test_odd_tools(tool: Any, comes_to: str) -> None:
    cell = "try:\n    print(tool())\nexcept Exception as error:\n    print(type(error).__name__, error)"
    with rlm([code(cell), code("FINAL(1)")], tools={"tool": tool}, scaffold=SCAFFOLD) as r:
        result = r.completion("text", "?")
    assert result.trajectory.root.turns[0].cells[0].stdout == comes_to + "\n"

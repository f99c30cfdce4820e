"""A session that dies in the middle of a cell: the earlier cells are restored, and no model is
asked twice.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ramify import SandboxSpec, Stop, Store
from ramify.engine.branch_search import BestOfBranches
from ramify.sandbox.base import provider_spec
from ramify.types.event import (
    AnyEvent,
    CallStarted,
    CellRan,
    NoteAdded,
    RequestStarted,
    ToolAnswered,
)
from ramify.types.message import Message, ToolCall
from tests.engine.helpers import SCAFFOLD, client, code, rlm

ABORT = "import os\nos.abort()"
PROVIDERS = ("jail", "process")
REBUILT = (
    "What this cell did is lost. The cells before it were run again in a new session, with the "
    "answers that their calls "
    "had been given: their variables are back."
)


def spec(provider: str = "jail", **options: Any) -> SandboxSpec:
    return provider_spec({"provider": provider, "allow_weaker": True, **options})


def script(root: list[str]) -> Any:
    """Return a model that picks the root's line by turn number, so that it can serve resumed runs;
    a child answers from its context."""

    def answer(messages: tuple[Message, ...]) -> str:
        if messages[0].role != "system":
            return f"re: {messages[-1].content}"
        if "Question: child" in messages[1].content:
            return code("FINAL([len(context), context[:1]])")
        return root[sum(message.role == "assistant" for message in messages)]

    return answer


ASKING = [
    code("import random\nclass C: pass\nc = C()\nluck = random.random()\nprint('bound', c)"),
    code("a = llm_query('one')", "b = rlm_query_batched(['child'] * 2, ['xyz', 'yz'])"),
    code("n = tick(7)\ntry: tick('bad')\nexcept Exception as e: why = repr(e)\nlen(history)"),
    code("lost = llm_query('lost')\nprint('so far', flush=True)\n" + ABORT),
    code("d = llm_query('two')"),
    code(
        "FINAL([a, b, n, why, type(c).__name__, luck, d, 'lost' in globals(), random.random() != "
        "luck])"
    ),
]
ANSWER = ["re: one", [[3, "x"], [2, "y"]], 1, "ValueError('tick: no number')", "C"]


class Ticker:
    """A tool with a side effect: it counts its calls."""

    def __init__(self) -> None:
        self.num = 0

    def tool(self) -> Any:
        def tick(value: Any) -> int:
            self.num += 1
            if not isinstance(value, int):
                raise ValueError("no number")
            return self.num

        return tick


@pytest.mark.parametrize("provider", PROVIDERS)
def test_variables_are_restored_without_repeating_calls(provider: str, tmp_path: Path) -> None:
    store, ticker, model = Store(tmp_path), Ticker(), client(script(ASKING))
    with rlm(model, store=store, tools=[ticker.tool()], sandbox=spec(provider)) as r:
        result = r.completion("text", "?")
        replayed = r.replay("last")
    luck = result.answer[5]
    assert result.answer == [*ANSWER, luck, "re: two", False, True]
    asked = Counter(request.messages[-1].content for request in model.requests)
    assert [asked[text] for text in ("one", "lost", "two")] == [1, 1, 1]
    assert (ticker.num, max(asked.values()), result.usage) == (2, 1, model.served)

    [died] = [cell for turn in result.trajectory.root.turns for cell in turn.cells if cell.died]
    assert (died.stdout, died.value) == ("so far\n", None)
    assert died.error is not None
    assert died.error.startswith("SessionDied: the session ended in the middle of a cell: ")
    assert "killed by signal" in died.error
    assert died.error.endswith(f"\n{REBUILT}")
    assert REBUILT in result.trajectory.conversation(result.trajectory.root, 4)[-2].content

    events = list(store.events("last"))
    assert len(_all(events, CellRan)) == 7 + 2
    assert len(_all(events, RequestStarted)) == 6 + 3 + 2
    assert len(_all(events, ToolAnswered)) == 2
    assert [call.id for call in result.trajectory.calls] == ["0", *(f"0.{n}" for n in range(5))]
    assert [event.id for event in _all(events, CallStarted)] == [
        call.id for call in result.trajectory.calls
    ]
    assert [event.text for event in _all(events, NoteAdded)] == [
        "the session died and was rebuilt: 4 cells were run again"
    ]
    assert store.load("last") == result.trajectory

    assert (replayed.answer, replayed.usage, ticker.num) == (result.answer, result.usage, 2)
    assert _cells(replayed.trajectory) == _cells(result.trajectory)
    assert len(model.requests) == result.usage.calls


def _all(events: list[AnyEvent], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _cells(trajectory: Any) -> list[Any]:
    return [(call.id, [turn.cells for turn in call.turns]) for call in trajectory.calls]


def test_run_with_session_death_can_be_resumed_from_any_cut(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm(client(script(ASKING)), store=store, tools=[Ticker().tool()]) as r:
        whole = r.completion("text", "?")
    journal = next(tmp_path.rglob("*.jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    after = next(i for i, line in enumerate(lines) if b'"died":true' in line)
    for num_lines in (after - 1, after, after + 1, len(lines) - 3):
        journal.write_bytes(b"".join(lines[:num_lines]))
        ticker, model = Ticker(), client(script(ASKING))
        with rlm(model, store=store, tools=[ticker.tool()]) as r:
            resumed = r.resume("last")
        assert (resumed.answer, ticker.num) == (whole.answer, 0)
        assert not {"one", "lost"} & {request.messages[-1].content for request in model.requests}
        assert _texts(store.load("last")) == _texts(whole.trajectory)


def _texts(trajectory: Any) -> list[Any]:
    return [
        (
            call.id,
            [
                [(cell.code, cell.stdout, cell.value, cell.died) for cell in turn.cells]
                for turn in call.turns
            ],
        )
        for call in trajectory.calls
    ]


@pytest.mark.parametrize(
    ("killer", "reason", "options"),
    [
        ("import os; os._exit(3)", "exited with status 3", {}),
        ("import os; os.abort()", "killed by signal", {}),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV", {}),
        (
            "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: "
            "time.sleep(0.01)",
            "did not stop within 0.2 s of an interrupt (time)",
            {"cell_s": 5.0, "grace_s": 0.2},
        ),
    ],
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_model_sees_reason_of_session_death(
    killer: str, reason: str, options: dict[str, Any], provider: str
) -> None:
    model = client(
        [code("x = [1]"), code(f"print('so far', flush=True)\n{killer}"), code("FINAL(x)")]
    )
    with rlm(model, sandbox=spec(provider, **options)) as r:
        assert r.completion("text", "?").answer == [1]
    shown = model.requests[2].messages[-1].content
    assert shown.startswith("so far\nSessionDied: ")
    assert reason in shown
    assert REBUILT in shown


def test_total_memory_limit_is_named_as_reason_of_death() -> None:
    bomb = "print('so far', flush=True)\nb = bytearray(400 << 20)\nb[:] = bytes([1]) * len(b)\nimport time; time.sleep(60)"
    model = client([code("x = [1]"), code(bomb), code("FINAL(x)")])
    with rlm(model, sandbox=spec(all_memory_bytes=200 << 20)) as r:
        assert r.completion("text", "?").answer == [1]
    shown = model.requests[2].messages[-1].content
    assert shown.startswith("so far\nSessionDied: ")
    assert "all sessions together used" in shown


def test_rollback_restores_the_fork_taken_before_the_cell() -> None:
    lines = [
        code("x = [1]\nimport time; started = time.time()"),
        code("x.append(2)\n" + ABORT),
        code("FINAL((x, started))"),
    ]
    model = client(lines)
    with rlm(model, sandbox=spec(rollback=True)) as r:
        result = r.completion("text", "?")
    assert result.answer[0] == [1]
    assert result.trajectory.root.turns[1].cells[0].died
    assert "The session is as it was before this cell." in model.requests[2].messages[-1].content
    assert REBUILT not in model.requests[2].messages[-1].content


def test_session_survives_repeated_deaths() -> None:
    """Cell numbers continue: the tracebacks and ``outputs`` of the rebuilt session are as
    before."""
    model = client(
        [
            code("x = 1"),
            code(ABORT),
            code("y = x + 1\nprint('z' * 300)"),
            code(ABORT),
            code("FINAL((x, y, sorted(outputs)))"),
        ]
    )
    scaffold = SCAFFOLD.__class__(
        system="You drive to FINAL. {{tools}}{{limits}}", direct_chars=0, max_output_chars=100
    )
    with rlm(model, scaffold=scaffold) as r:
        result = r.completion("text", "?")
    assert result.answer == (1, 2, [2])
    assert "the whole is in outputs[2]" in model.requests[3].messages[-1].content


def test_third_session_death_ends_call_with_best_answer_so_far() -> None:
    lines = ["answer['content'] = 'half'", ABORT, "y = 1", ABORT, ABORT]
    with rlm(client([code(line) for line in lines])) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer) == (Stop.ERROR, "half")
    assert result.error is not None
    assert result.error.startswith("call 0 lost its session 3 times; last error: SessionDied: ")
    assert [cell.died for turn in result.trajectory.root.turns for cell in turn.cells] == [
        False,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (
            "import time; print(time.perf_counter_ns()); x = 1",
            "cell 2, run again, gave another output than before",
        ),
        (
            "import time; x = llm_query(str(time.perf_counter_ns()))",
            "cell 2, run again, asked something of llm_query_batched that it had not asked before",
        ),
        (
            "import os, tempfile\nif not os.path.exists('/tmp/was-here') and not "
            "os.path.exists('was-here'):\n"
            "  x = llm_query('one')\nx = 1",
            None,
        ),
    ],
)
def test_rerun_with_different_behaviour_starts_a_fresh_session(
    first: str, problem: str | None
) -> None:
    model = client(
        script(
            [
                code("a = 1"),
                code(first),
                code(ABORT),
                code("FINAL(sorted({'a', 'x'} & set(globals())))"),
            ]
        )
    )
    with rlm(model) as r:
        result = r.completion("text", "?")
    shown = model.requests[-1].messages[-1].content
    if problem is None:
        assert (result.answer, REBUILT in shown) == (["a", "x"], True)
        return
    assert result.answer == []
    assert (
        "A new session was started: `context` is there, your variables and imports are not. "
        f"({problem})" in shown
    )
    notes = [event for event in result.trajectory.errors if "died" in event]
    assert notes == [], "a death is no error of the run"


def test_only_cells_after_a_fresh_start_are_rerun() -> None:
    lines = ["import time; print(time.perf_counter_ns())", ABORT, "y = 2", ABORT, "FINAL(y)"]
    with rlm(client([code(line) for line in lines])) as r:
        assert r.completion("text", "?").answer == 2


def test_rerun_allows_calls_of_threads_in_another_order() -> None:
    first = (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
        "  got = list(pool.map(llm_query, [f'q{i % 4}' for i in range(8)]))"
    )
    model = client(script([code(first), code(ABORT), code("FINAL(got)")]))
    with rlm(model) as r:
        assert r.completion("text", "?").answer == [f"re: q{i % 4}" for i in range(8)]
    assert len(model.requests) == 3 + 8


def test_interrupted_cell_is_interrupted_again_on_rerun() -> None:
    lines = ["import time\nn = 1\nwhile True: time.sleep(0.01)", ABORT, "FINAL(n)"]
    with rlm(client([code(line) for line in lines]), sandbox=spec(cell_s=5.0, grace_s=60.0)) as r:
        assert r.completion("text", "?").answer == 1


def test_variables_are_restored_in_branches_and_later_questions() -> None:
    def branching(messages: tuple[Message, ...]) -> str:
        num = sum(message.role == "assistant" for message in messages)
        return (
            code(["x = llm_query('once')", ABORT, "FINAL(x)"][num])
            if messages[0].role == "system"
            else "got"
        )

    model = client(branching)
    with rlm(model) as r:
        result = r.completion("text", "?", search=BestOfBranches(3, turn=1))
        assert [call.answer for call in result.trajectory.calls if call.kind == "rlm"] == [
            "got"
        ] * 3
        assert sum(request.messages[-1].content == "once" for request in model.requests) == 1
    with (
        rlm([code("x = 1\nFINAL(x)"), code(ABORT), code("FINAL(x + 1)")]) as r,
        r.conversation("text") as c,
    ):
        assert [c.ask("?").answer, c.ask("and?").answer] == [1, 2]


def test_native_tool_call_is_answered_after_session_death() -> None:
    def native(text: str) -> Message:
        return Message(
            "assistant", "", tool_calls=(ToolCall("c1", "repl", '{"code": "' + text + '"}'),)
        )

    scaffold = SCAFFOLD.__class__(
        system="You drive to FINAL. {{tools}}{{limits}}", direct_chars=0, native_tools=True
    )
    model = client([native("x = 1"), native("import os; os.abort()"), native("FINAL(x)")])
    with rlm(model, scaffold=scaffold) as r:
        assert r.completion("text", "?").answer == 1
    assert model.requests[2].messages[-1].role == "tool"


def test_replay_repeats_recorded_death_of_a_cell_that_would_now_survive(tmp_path: Path) -> None:
    """The cell was too slow when it was recorded. Its variable must be missing in the replay, too,
    because the later replies were given without it."""
    store = Store(tmp_path)
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nuntil = time.time() + 8.0\n"
    lines = [
        "x = 1",
        stubborn + "while time.time() < until: time.sleep(0.01); y = 2",
        "FINAL((x, 'y' in globals()))",
    ]
    with rlm(
        client([code(line) for line in lines]), store=store, sandbox=spec(cell_s=5.0, grace_s=0.2)
    ) as r:
        result = r.completion("text", "?")
    assert (result.answer, result.trajectory.root.turns[1].cells[0].died) == ((1, False), True)
    with rlm(client([]), store=store, sandbox=spec()) as r:
        replayed = r.replay("last")
    assert replayed.answer == (1, False)
    assert _cells(replayed.trajectory) == _cells(result.trajectory)

"""The scaffold ``tiny``: replies are raw code and observations bare output; and how a task prepares
a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import ramify
from ramify import Scaffold, Stop
from ramify.engine.observation_messages import terse_cell_report
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import ConfigError, ModelError
from ramify.sandbox.base import Session
from ramify.tasks.base import RolloutInitialState
from ramify.types.message import Message
from ramify.types.trajectory import Cell
from tests.engine.helpers import client, rlm

TINY = SCAFFOLDS["tiny"]


def roles_and_texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_complete_run_has_minimal_messages() -> None:
    model = client(["print(context[:3])", "x=len(context)\nx/0", "FINAL(x)"])
    with rlm(model, scaffold="tiny") as r:
        result = r.completion("alpha", "how long?")
    assert (result.answer, result.stop) == (5, Stop.FINAL)
    assert roles_and_texts(model.requests[-1].messages) == [
        ("user", "how long?\nlen 5"),
        ("assistant", "print(context[:3])"),
        ("user", "alp"),
        ("assistant", "x=len(context)\nx/0"),
        ("user", "ZeroDivisionError: division by zero"),
    ]


def test_description_of_the_context_is_shown_only_if_the_scaffold_asks(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("alpha")
    loaded = ramify.load(tmp_path / "rows.txt")
    first_messages = []
    for first in (TINY.first, "{{question}} ({{about}})"):
        model = client(["FINAL(1)"])
        with rlm(model, scaffold=msgspec.structs.replace(TINY, first=first)) as r:
            r.completion(loaded, "how long?")
        first_messages.append(model.requests[0].messages[0].content)
    assert first_messages[0] == "how long?\nlen 5"
    assert first_messages[1].startswith("how long? (It is the text of")


def test_children_get_minimal_first_messages() -> None:
    def model(messages: tuple[Message, ...]) -> str:
        if messages[0].content == "count\nlen 7":
            return (
                "A=rlm_query_batched(['size']*2,context.split(' '))\nprint(A)"
                if len(messages) == 1
                else "FINAL(A)"
            )
        return "FINAL(len(context))"

    with rlm(model, scaffold="tiny") as r:
        result = r.completion("ab cdef", "count")
    assert result.answer == [2, 4]
    assert [
        result.trajectory.conversation(call)[0].content for call in result.trajectory.calls
    ] == [
        "count\nlen 7",
        "size\nlen 2",
        "size\nlen 4",
    ]


def test_limit_requests_no_last_word() -> None:
    model = client(["1"] * 10)
    with rlm(model, scaffold="tiny", limits={"max_turns": 3}) as r:
        result = r.completion("alpha", "?")
    assert (result.answer, result.stop, len(model.requests)) == (None, Stop.MAX_TURNS, 3)
    model = client(["answer['content']=4", "1", "1"])
    with rlm(model, scaffold="tiny", limits={"max_turns": 2}) as r:
        assert r.completion("alpha", "?").answer == 4


def test_type_mismatch_and_session_death_are_shown_in_one_line() -> None:
    model = client(["FINAL('four')", "import os; os._exit(3)", "FINAL(4)"])
    with rlm(model, scaffold="tiny") as r:
        assert r.completion("alpha", "?", answer_type=int).answer == 4
    first, second = (model.requests[turn].messages[-1].content for turn in (1, 2))
    assert first.startswith("The answer does not fit its type: ")
    assert second.startswith(
        "SessionDied: the session ended in the middle of a cell: its process exited with status 3"
    )
    assert max(len(first), len(second)) <= 90


@pytest.mark.parametrize(
    "reply", ["", "   ", "```repl\nFINAL(1)\n```", "FINAL(", "\x00", "I think that it is 4"]
)
def test_reply_that_is_not_code_is_an_error_in_the_session(reply: str) -> None:
    model = client([reply, "FINAL(2)"])
    with rlm(model, scaffold="tiny") as r:
        result = r.completion("alpha", "?")
    assert result.answer == 2
    shown = model.requests[1].messages[-1].content
    assert len(shown) <= 90
    assert shown == "" or "Error: " in shown


def test_a_long_history_is_never_summarised() -> None:
    model = client(["print('x'*90)"] * 5 + ["FINAL(1)"], window=200)
    with rlm(model, scaffold="tiny", limits={"max_reply_tokens": 50}) as r:
        assert r.completion("alpha", "?").answer == 1
    assert all(len(request.messages) == 2 * turn + 1 for turn, request in enumerate(model.requests))


def test_history_beyond_the_window_ends_the_run() -> None:
    model = client(["print('x'*90)", "answer['content'] = 7"] + ["print('x'*90)"] * 90, window=60)
    with rlm(model, scaffold="tiny", limits={"max_reply_tokens": 10}) as r:
        result = r.completion("alpha", "?")
        assert (result.stop, result.answer) == (Stop.MAX_TOKENS, 7)
        assert "tokens and the window 60" in str(result.error)
        with pytest.raises(ModelError, match="tokens and the window 60"):  # nothing was done yet
            r.completion("alpha", "?" * 400)


def test_messages_of_a_recursive_run() -> None:
    """The root tries, fails, splits, calls a child for each document, and adds up; a child looks at
    its context before it answers."""
    root = [
        "print(context[:70])",
        "R=[l.split(',') for l in context]\nr=sum(int(x[1]) for x in R)",
        "P=context.split('###')\nA=rlm_query_batched(['sum "
        "qty']*len(P),P)\nr=sum(A)\nprint(A)\nprint('y'*200)",
        "FINAL(r)",
    ]
    child = ["print(context)", "FINAL(sum(int(l.split(',')[1]) for l in context.split(';')))"]

    def script(messages: tuple[Message, ...]) -> str:
        turn = sum(message.role == "assistant" for message in messages)
        return (root if " in all docs" in messages[0].content else child)[turn]

    with rlm(client(script), scaffold="tiny") as r:
        result = r.completion("ann,1;bob,2###cat,30", "sum qty in all docs")
    trajectory = result.trajectory
    assert (result.answer, result.stop) == (33, Stop.FINAL)
    assert {
        call.id: roles_and_texts(tuple(trajectory.conversation(call))) for call in trajectory.calls
    } == {
        "0": [
            ("user", "sum qty in all docs\nlen 20"),
            ("assistant", root[0]),
            ("user", "ann,1;bob,2###cat,30"),
            ("assistant", root[1]),
            ("user", "IndexError: list index out of range"),
            ("assistant", root[2]),
            ("user", "[3, 30]\n" + "y" * 82),
            ("assistant", root[3]),
        ],
        "0.0": [
            ("user", "sum qty\nlen 11"),
            ("assistant", child[0]),
            ("user", "ann,1;bob,2"),
            ("assistant", child[1]),
        ],
        "0.1": [
            ("user", "sum qty\nlen 6"),
            ("assistant", child[0]),
            ("user", "cat,30"),
            ("assistant", child[1]),
        ],
    }


def test_later_question_has_the_format_of_the_first() -> None:
    model = client(["x=1\nFINAL(x)", "FINAL(x+1)"])
    with rlm(model, scaffold="tiny") as r, r.conversation("alpha") as c:
        assert [c.ask("one").answer, c.ask("two").answer] == [1, 2]
    assert roles_and_texts(model.requests[1].messages) == [
        ("user", "one\nlen 5"),
        ("assistant", "x=1\nFINAL(x)"),
        ("user", "two\nlen 5"),
    ]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (Cell("", "0123456789" * 9), "0123456789" * 2),
        (Cell("", "ab\n\n", "7"), "ab\n7"),
        (
            Cell("", "0123456789" * 9, None, "Traceback\n  x\nValueError: " + "y" * 50),
            "012345678\nValueError",
        ),
        (Cell("", "ab", None, "ValueError: " + "y" * 50), "ab\nValueError: yyyyy"),
        (Cell("", "", None, "ValueError: " + "y" * 50), "ValueError: yyyyyyyy"),
        (Cell(""), ""),
    ],
)
def test_terse_shortens_output_and_error(cell: Cell, shown: str) -> None:
    assert terse_cell_report(cell, 20) == shown


def test_question_may_contain_template_markers() -> None:
    assert (
        TINY.first_message("{{chars}} and {{question}}", "abc")
        == "{{chars}} and {{question}}\nlen 3"
    )


def test_contradictory_scaffold_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="raw_code makes each reply plain code"):
        Scaffold(raw_code=True, native_tools=True)
    with pytest.raises(ConfigError, match="terse_chars=5 is too small to show anything"):
        Scaffold(terse_chars=5)


def test_a_task_prepares_every_session() -> None:
    """Includes the sessions of children, and the session that replaces a dead one."""
    seen: list[Session] = []

    async def on_session(session: Session) -> None:
        seen.append(session)
        await session.set("K", len(seen), reserved=True)

    start = RolloutInitialState(
        context="alpha", tools={"double": lambda x: 2 * x, "base": 40}, on_session=on_session
    )
    script: Any = [
        "A=rlm_query('x')\nprint(A)",
        "FINAL(double(K))",
        "import os\nos._exit(1)",
        "print(K, base)",
        "FINAL(K+base)",
    ]
    with rlm(client(script), scaffold="tiny") as r:
        result = r.completion(start, "how long?")
    outputs = [cell.stdout for turn in result.trajectory.root.turns for cell in turn.cells]
    assert (result.answer, outputs[0], outputs[2]) == (43, "4\n", "3 40\n")
    assert result.trajectory.call("0.0").answer == 4


def test_trajectory_records_its_task() -> None:
    model = client(["FINAL(1)"])
    with rlm(model, scaffold=msgspec.structs.replace(TINY, name="other")) as r:

        async def ask() -> Any:
            return await r.start("alpha", "?", metadata={"task": "ledger/test/3"}).result()

        import asyncio

        assert asyncio.run(ask()).trajectory.task == "ledger/test/3"

"""The live view: its model of a run, and its output on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

from ramify.cli.live_run_view import CallTreeRowBuilder, budget_row
from ramify.progress import ReplyTextDelta
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    RunStarted,
)
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallSite, Cell, Stop
from tests.cli.helpers import Shell, code

AT_ROOT = CallSite("0", 0, 0)


def call_started(id: str, kind: str = "rlm", parent: CallSite | None = AT_ROOT) -> CallStarted:
    return CallStarted(
        id=id, kind=kind, model="a:m", depth=int(parent is not None), question="q", parent=parent
    )  # type: ignore[arg-type]


def tree(*events: AnyEvent) -> CallTreeRowBuilder:
    made = CallTreeRowBuilder()
    for event in events:
        made.apply(event)
    return made


def test_plain_calls_are_counted_at_their_calling_node() -> None:
    plain: list[AnyEvent] = [call_started(f"0.{n}", "lm") for n in range(500)]
    ended: list[AnyEvent] = [
        CallEnded(id=f"0.{n}", stop=Stop.ERROR if n < 3 else Stop.FINAL) for n in range(312)
    ]
    (node,) = tree(call_started("0", parent=None), *plain, *ended).nodes.values()
    assert node.plain.text("llm_query") == "llm_query × 500: 309 done, 3 failed"


def test_leaves_of_a_plan_are_counted_at_its_root() -> None:
    begun = [
        call_started("0", parent=None),
        call_started("0.0", "leaf"),
        call_started("0.1", "leaf"),
    ]
    (node,) = tree(*begun, CallEnded(id="0.0", stop=Stop.FINAL)).nodes.values()
    assert node.leaves.text("leaf") == "leaf × 2: 1 done"
    assert node.state == "asking"


def test_a_plan_in_a_session_has_a_row_that_counts_its_leaves() -> None:
    begun = [
        call_started("0", parent=None),
        call_started("0.0", "strategy"),
        call_started("0.0.0", "leaf", CallSite("0.0", 0, 0)),
    ]
    root, plan = tree(*begun).nodes.values()
    assert plan.leaves.text("leaf") == "leaf × 1: 0 done"
    assert (root.plain.started, root.children.started) == (0, 0)


def test_node_state_follows_events_of_its_call() -> None:
    reply = Reply(Message("assistant", code("x = 1")))
    steps: list[tuple[AnyEvent, tuple[int, str, str]]] = [
        (call_started("0", parent=None), (0, "starting", "")),
        (RequestStarted(call="0", turn=0, reused=0, prompt=(), prompt_hash=""), (1, "asking", "")),
        (ReplyReceived(call="0", turn=0, reply=reply), (1, "running code", "x = 1")),
        (CellRan(call="0", turn=0, cell=0, result=Cell("x = 1")), (1, "running code", "x = 1")),
        (
            RequestStarted(
                call="0", turn=1, reused=2, prompt=(), prompt_hash="", last_word=Stop.DEADLINE
            ),
            (2, "last word", "x = 1"),
        ),
        (CellEnded := CallEnded(id="0", stop=Stop.DEADLINE), (2, "done", "x = 1")),
    ]
    assert CellEnded
    watched = CallTreeRowBuilder()
    for event, expected in steps:
        watched.apply(event)
        node = watched.nodes["0"]
        assert (node.turn, node.state, node.code) == expected


def test_raw_code_replies_are_shown_whole() -> None:
    watched = tree(
        RunStarted(id="r", question="q", started_at=0.0, config={"scaffold": {"raw_code": True}}),
        call_started("0", parent=None),
        call_started("0:1", parent=None),
        RequestStarted(call="0", turn=0, reused=0, prompt=(), prompt_hash=""),
        ReplyReceived(call="0", turn=0, reply=Reply(Message("assistant", "x = 1"))),
    )
    assert [(node.call.id, node.code, node.state) for node in watched.nodes.values()] == [
        ("0", "x = 1", "running code"),
        ("0:1", "", "starting"),
    ]


def test_overflowing_tree_hides_ended_calls_first() -> None:
    children: list[AnyEvent] = [call_started(f"0.{n}") for n in range(6)]
    watched = tree(
        call_started("0", parent=None),
        *children,
        CallEnded(id="0.0", stop=Stop.FINAL),
        NoteAdded(call="0", text="hm"),
    )
    nodes, hidden = watched.visible_rows(4)
    assert ([node.call.id for node in nodes], hidden, watched.notice) == (
        ["0", "0.1", "0.2", "0.3"],
        3,
        "hm",
    )
    assert watched.visible_rows(7)[1] == 0


def test_budget_row_shows_spent_and_limit() -> None:
    row = budget_row(
        [
            ("calls", 312, 1000),
            ("tokens", 45_210, 2e7),
            ("dollars", 4.6, 5.0),
            ("seconds", 12, 1800),
        ]
    )
    assert row.plain == "requests 312/1,000 · tokens 45.2k/20M · $4.60/$5.00 · 12.0 s/30 min"
    assert "red" in {str(span.style) for span in row.spans}


SHOWN = (
    r"│ # \[bold\]not markup\[/\] wiped",
    r"llm_query × 20: 20 done",
    r"\[dim\]child\[/\]",
    r"0\.20 scripted:sub\.json · turn \d · ",
    r"requests \d+/1,000 · tokens [\d,]+/20M · \$0\.00/\$5\.00 · [\d.]+ s/30 min",
)
"""Patterns that the view of the run below shows before its last cell ends."""


def without_escapes(written: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace"))


def output_on_terminal(shell: Shell, *arguments: str) -> str:
    """Run a command with a terminal as stdout and stderr and return its output. As soon as all of
    ``SHOWN`` has appeared, a file named ``shown`` is written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = shell.start(*arguments, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 1 << 16):
            written += block
            if all(re.search(each, without_escapes(written)) for each in SHOWN):
                shell.write("shown", "")
    except OSError:
        pass  # Linux raises this once the other end is closed
    os.close(ours)
    assert process.wait(100) == 0
    return written.decode()


def test_live_view_neutralizes_control_sequences_and_markup(shell: Shell) -> None:
    evil = "[bold]not markup[/] \x1b]0;stolen title\x07\x1b[2Jwiped"
    # The child lasts until the view has shown it.
    wait = (
        "import os, time\nfor _ in range(1000):\n"
        f"    if not os.path.exists({str(shell.folder / 'shown')!r}): time.sleep(0.05)\n"
    )
    child = {"match": r"\[dim\]child", "reply": code(f"{wait}FINAL('seen')")}
    sub = shell.model([child, {"match": "", "reply": evil}], "sub.json")
    first = code(
        f"# {evil}\nreplies = llm_query_batched(['x'] * 20)\n"
        f"child = rlm_query('[dim]child[/]', context='y')\n{wait}"
    )
    shell.write("log.txt", "abc")
    model = shell.model([first, code(f"FINAL({evil!r})")])
    here = ("--sandbox", "process", "--allow-weaker")  # its sessions can see the file
    written = output_on_terminal(
        shell, "ask", "-m", model, "--sub-model", sub, *here, "--no-direct", "q?", "log.txt"
    )
    assert "\x1b]0;" not in written  # the title is harmless as text, in code that the view shows
    assert "\x1b[2J" not in written
    shown = without_escapes(written.encode())
    assert [each for each in SHOWN if not re.search(each, shown)] == []
    *_, answer, summary = shown.strip().splitlines()
    assert answer.endswith("[bold]not markup[/] wiped")
    assert summary.startswith("final · 2 turns, ")


def test_runs_table_on_terminal_shows_markup_literally(shell: Shell) -> None:
    shell.ask(["x"], "is [bold]this[/]?")
    written = output_on_terminal(shell, "runs")
    assert "is [bold]this[/]?" in written
    assert "\t" not in written


def test_arriving_reply_is_shown_until_it_is_whole() -> None:
    shown = tree(
        RunStarted(id="r", question="q", started_at=0.0),
        call_started("0", parent=None),
        RequestStarted(call="0", turn=0, reused=0, prompt=(), prompt_hash=""),
    )
    shown.append_streamed_text(ReplyTextDelta("r", "0", 0, "let me ", "", True))
    shown.append_streamed_text(ReplyTextDelta("r", "0", 0, "look", "", False))
    shown.append_streamed_text(ReplyTextDelta("r", "0.1", 0, "of a plain call", "", True))
    assert shown.nodes["0"].arriving == "let me look"
    shown.append_streamed_text(ReplyTextDelta("r", "0", 0, "again", "", True))  # another attempt
    assert shown.nodes["0"].arriving == "again"
    shown.apply(ReplyReceived(call="0", turn=0, reply=Reply(Message("assistant", "again"))))
    assert shown.nodes["0"].arriving == ""
    shown.append_streamed_text(ReplyTextDelta("r", "0", 0, "late", "", False))
    assert shown.nodes["0"].arriving == ""

"""A short run, and a process that writes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ramify.store.folder_store import Store
from ramify.store.journal import FileRunJournal
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunStarted,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Cell, ContextRef, Stop


def short_run(
    id: str, question: str = "Why?", digest: str | None = None, ended: bool = True
) -> list[AnyEvent]:
    """One call with one turn; with ``digest`` as its context."""
    context = ContextRef(digest, 4, "str") if digest else None
    whole: list[AnyEvent] = [
        RunStarted(id=id, question=question, started_at=1000.0, context=context),
        CallStarted(id="0", kind="rlm", model="scripted:m", depth=0, question=question),
        RequestStarted(
            at_s=0.25,
            call="0",
            turn=0,
            reused=0,
            prompt=(Message("user", question),),
            prompt_hash="h0",
        ),
        ReplyReceived(
            at_s=0.5,
            call="0",
            turn=0,
            reply=Reply(Message("assistant", "so"), Usage(10, 2, calls=1), cost=0.25),
        ),
        CellRan(at_s=0.75, call="0", turn=0, cell=0, result=Cell("1", value="1")),
        CallEnded(at_s=1.0, id="0", stop=Stop.FINAL, answer="so"),
        RunEnded(at_s=1.0, stop=Stop.FINAL, answer="so", usage=Usage(10, 2, calls=1), cost=0.25),
    ]
    return whole if ended else whole[:3]


def write_run(store: Store, id: str, **how: object) -> None:
    with store.create(id) as journal:
        append_all(journal, short_run(id, **how))  # type: ignore[arg-type]


def append_all(journal: FileRunJournal, events: list[AnyEvent]) -> None:
    for event in events:
        journal.append(event)


WRITER = """
import sys, time
from pathlib import Path
from ramify.store.folder_store import Store
from tests.store.helpers import short_run, append_all
root, id, num_events = sys.argv[1], sys.argv[2], int(sys.argv[3])
journal = Store(root).create(id)
append_all(journal, short_run(id)[:num_events])
print("ready", flush=True)
sys.stdin.readline()
append_all(journal, short_run(id)[num_events:])
journal.close()
"""


def start_writer(root: Path, id: str, num_events: int) -> subprocess.Popen[str]:
    """Start a process that has written ``num_events`` of a short run and continues after a line of
    input."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), id, str(num_events)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process

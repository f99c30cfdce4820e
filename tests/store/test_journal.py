"""Writing journals: no lost events, one writer, no torn lines, no secrets."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ramify.errors import RunInUse, StoreError
from ramify.store.folder_store import Store
from ramify.store.journal import find_writer_process, this_process, writer_process_file
from ramify.types.event import CallEnded, CellRan, NoteAdded, ReplyReceived, RunEnded
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Cell, Stop
from tests.store.helpers import append_all, short_run, start_writer, write_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def test_appended_events_are_read_back(store: Store):
    write_run(store, "r1")
    assert list(store.events("r1")) == short_run("r1")
    trajectory = store.load("r1")
    assert (trajectory.answer, trajectory.stop, trajectory.usage.calls) == ("so", Stop.FINAL, 1)


def test_an_event_can_be_read_before_the_journal_is_closed(store: Store):
    with store.create("r1") as journal:
        for count, event in enumerate(short_run("r1"), start=1):
            journal.append(event)
            assert len(list(store.events("r1"))) == count


def test_files_are_readable_by_owner_only(store: Store):
    write_run(store, "r1")
    store.blobs.put(b"text")
    store.runs()
    with store.create("r2"):
        modes = {path: path.stat().st_mode & 0o777 for path in [store.root, *store.root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_torn_last_line_is_ignored_and_removed_on_reopen(store: Store):
    write_run(store, "r1", ended=False)
    path = store.path("r1")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"Replied","call":"0","tu')
    assert list(store.events("r1")) == short_run("r1", ended=False)
    with store.reopen("r1") as journal:
        assert path.read_bytes() == whole
        append_all(journal, short_run("r1")[3:])
    assert list(store.events("r1")) == short_run("r1")


@pytest.mark.parametrize("tail", [b"x" * 200_000, b"x" * 65_535, b"\0" * 70_000, b"{"])
def test_torn_line_of_any_length_is_removed(store: Store, tail: bytes):
    write_run(store, "r1", ended=False)
    path = store.path("r1")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    store.reopen("r1").close()
    assert path.read_bytes() == whole
    path.write_bytes(tail)
    store.reopen("r1").close()
    assert path.read_bytes() == b""


def test_one_writer_at_a_time_in_one_process(store: Store):
    with (
        store.create("r1"),
        pytest.raises(StoreError, match=rf"run r1 is being written by process {os.getpid()} on "),
    ):
        store.reopen("r1")
    store.reopen("r1").close()


def test_one_writer_at_a_time_across_processes(store: Store):
    process = start_writer(store.root, "r1", 3)
    with process:
        with pytest.raises(
            StoreError, match=rf"run r1 is being written by process {process.pid} on .*: stop that"
        ):
            store.reopen("r1")
        with pytest.raises(StoreError, match="is being written"):
            store.remove("r1")
        process.communicate("\n")
    assert list(store.events("r1")) == short_run("r1")
    store.reopen("r1").close()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_journal_that_is_deleted_while_its_lock_is_awaited_is_not_written(
    store: Store, is_replaced: bool
):
    write_run(store, "r1", ended=False)
    path = store.path("r1")
    before, holder = path.read_bytes(), os.open(path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    outcome: list[object] = []

    def reopen() -> None:
        while not outcome:
            try:
                with store.reopen("r1") as journal:
                    append_all(journal, short_run("r1")[3:])
                outcome.append("written")
            except RunInUse:
                continue  # it waits only for a moment
            except StoreError as error:
                outcome.append(str(error))

    thread = threading.Thread(target=reopen)
    thread.start()
    while sum(is_open_on(path, fd) for fd in os.listdir("/proc/self/fd")) < 2:
        time.sleep(0.001)  # until the other thread has opened the journal
    path.unlink()
    if is_replaced:
        path.write_bytes(before)
    os.close(holder)
    thread.join()
    if is_replaced:
        assert outcome == ["written"]
        assert list(store.events("r1")) == short_run("r1")
    else:
        assert "r1" in str(outcome)
        assert not path.exists()


def is_open_on(path: Path, fd: str) -> bool:
    """Whether the descriptor ``fd`` of this process is open on ``path``."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


def test_a_killed_writer_leaves_its_events_and_no_lock(store: Store):
    process = start_writer(store.root, "r1", 4)
    with process:
        assert store.runs()[0].alive
        process.send_signal(signal.SIGKILL)
    assert [(run.stop, run.alive) for run in store.runs()] == [(None, False)]
    with store.reopen("r1") as journal:
        append_all(journal, short_run("r1")[4:])
    assert list(store.events("r1")) == short_run("r1")


def test_create_refuses_duplicate_and_invalid_names(store: Store):
    write_run(store, "r1")
    with pytest.raises(StoreError, match="run r1 already exists"):
        store.create("r1")
    for name in ("", "../r", ".r", "a/b", "x" * 129, "a b"):
        with pytest.raises(StoreError, match="cannot name a run"):
            store.create(name)


def test_appending_to_closed_journal_is_an_error(store: Store):
    journal = store.create("r1")
    journal.close()
    journal.close()
    with pytest.raises(StoreError, match=r"is closed: open it again with store.reopen"):
        journal.append(NoteAdded(call="0", text="late"))


def test_a_journal_whose_writer_file_was_deleted_can_be_closed(store: Store):
    journal = store.create("r1")
    append_all(journal, short_run("r1"))
    journal.path.with_suffix(".writer").unlink()
    journal.close()
    assert list(store.events("r1")) == short_run("r1")


def test_concurrent_threads_write_whole_lines(store: Store):
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:2])
        note = "x" * 10_000

        def write(name: str) -> None:
            for number in range(50):
                journal.append(NoteAdded(call=name, text=f"{number}{note}"))

        threads = [threading.Thread(target=write, args=(str(index),)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    notes = [event for event in store.events("r1") if isinstance(event, NoteAdded)]
    for name in map(str, range(8)):
        assert [note.text for note in notes if note.call == name] == [
            f"{n}{'x' * 10_000}" for n in range(50)
        ]


def test_many_journals_share_one_flusher_thread(store: Store):
    before = threading.active_count()
    journals = [store.create(f"r{index}") for index in range(50)]
    for journal in journals:
        append_all(journal, short_run(journal.id))
    assert threading.active_count() <= before + 1
    for journal in journals:
        journal.close()
    assert {run.stop for run in store.runs()} == {Stop.FINAL}


FULL = """
import resource, signal, sys
from ramify.errors import StoreError
from ramify.store.folder_store import Store
from ramify.types.event import NoteAdded
from tests.store.helpers import short_run, append_all
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Store(sys.argv[1]).create("r1")
append_all(journal, short_run("r1", ended=False))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    journal.append(NoteAdded(call="0", text="x" * 5000))
except StoreError as error:
    print(error)
try:
    journal.append(NoteAdded(call="0", text="fits"))
except StoreError as error:
    print(error)
journal.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with Store(sys.argv[1]).reopen("r1") as journal:
    journal.append(NoteAdded(call="0", text="there is space again"))
"""


def test_full_disk_error_names_file_and_leaves_no_partial_line(
    store: Store,
):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(store.root)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith(f"cannot write {store.path('r1')}: File too large; free some space")
    assert list(store.events("r1")) == [
        *short_run("r1", ended=False),
        NoteAdded(call="0", text="there is space again"),
    ]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


RESERVE = """
import resource, signal, sys
from ramify.errors import StoreError
from ramify.store.durable_files import RESERVE_BYTES, release_reserve, disk_reserve_bytes
from ramify.store.folder_store import Store
from ramify.types.event import NoteAdded, RunEnded
from ramify.types.trajectory import Stop
from tests.store.helpers import short_run, append_all
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store(sys.argv[1])
journal = store.create("r1")
append_all(journal, short_run("r1", ended=False))
print(journal.trouble, disk_reserve_bytes(store.root) == RESERVE_BYTES)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    journal.append(NoteAdded(call="0", text="x" * 5000))
except StoreError as error:
    print(type(journal.trouble).__name__, disk_reserve_bytes(store.root))
try:
    journal.append(RunEnded(stop=Stop.FINAL))
except StoreError as error:
    print("refused")
journal.append(RunEnded(stop=Stop.SUSPENDED))
journal.close()
with store.create("r2") as other:
    release_reserve(store.root)
    try:
        other.append(NoteAdded(call="0", text="x" * 5000))
    except StoreError as error:
        print("refused", other.trouble)
"""


def test_on_a_full_disk_the_reserve_is_freed_and_only_a_suspension_is_written_after_a_gap(
    store: Store,
):
    done = subprocess.run(
        [sys.executable, "-c", RESERVE, str(store.root)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "None True",
        "StoreError 0",
        "refused",
        "refused None",  # nothing was left to use up
    ]
    last = list(store.events("r1"))[-1]
    assert isinstance(last, RunEnded)
    assert last.stop is Stop.SUSPENDED


def test_secrets_from_environment_are_redacted(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOP_API_KEY", 'sk-"quoted"-0123456789')
    monkeypatch.setenv("SHORT_KEY", "secret")
    monkeypatch.setenv("NUMBER_TOKEN", "123456789012")
    monkeypatch.setenv("PATH_KEY", str(store.root))
    text = f'it is sk-"quoted"-0123456789, secret 123456789012 {store.root} tok-abcdefghij'
    with store.create("r1", secrets={"given": "tok-abcdefghij"}) as journal:
        append_all(journal, short_run("r1"))
        journal.append(CellRan(call="0", turn=0, cell=1, result=Cell("env", stdout=text)))
    assert b"0123456789," not in store.path("r1").read_bytes()
    last = list(store.events("r1"))[-1]
    assert isinstance(last, CellRan)
    assert last.result.stdout == (
        f"it is «redacted SHOP_API_KEY», secret 123456789012 {store.root} «redacted given»"
    )


def test_lone_surrogates_are_written_escaped(store: Store):
    with store.create("r1") as journal:
        append_all(journal, short_run("r1"))
        journal.append(CellRan(call="0", turn=0, cell=1, result=Cell("x", stdout="a\udc80b ü")))
    last = list(store.events("r1"))[-1]
    assert isinstance(last, CellRan)
    assert last.result.stdout == "a\\udc80b ü"


def test_infinite_logprobs_are_written_as_finite(store: Store):
    reply = Reply(Message("assistant", "x"), token_ids=(1, 2), logprobs=(-0.5, -math.inf))
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:3])
        journal.append(ReplyReceived(call="0", turn=0, reply=reply))
    last = list(store.events("r1"))[-1]
    assert isinstance(last, ReplyReceived)
    assert last.reply.logprobs == (-0.5, -sys.float_info.max)


def test_event_that_json_cannot_represent_is_not_written(store: Store):
    nan = Reply(Message("assistant", "x"), token_ids=(1,), logprobs=(math.nan,))
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:3])
        with pytest.raises(
            StoreError, match="a Replied event cannot be written as JSON: a number in it is NaN"
        ):
            journal.append(ReplyReceived(call="0", turn=0, reply=nan))
        with pytest.raises(
            StoreError, match=r"a CallEnded event cannot be written as JSON: .*object"
        ):
            journal.append(CallEnded(id="0", stop=Stop.FINAL, answer=object()))
    assert list(store.events("r1")) == short_run("r1")[:3]


def test_any_json_answer_round_trips(store: Store):
    answer = {"big": 10**40, "deep": [[["ü", None, True, 1.5]]], "empty": {}}
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:-1])
        journal.append(RunEnded(stop=Stop.FINAL, answer=answer))
    last = list(store.events("r1"))[-1]
    assert isinstance(last, RunEnded)
    assert last.answer == answer or last.answer == {**answer, "big": float(10**40)}


def test_numbers_and_text_that_json_lacks_are_replaced_everywhere(store: Store):
    answer = ["\udc80", math.nan, math.inf, -math.inf, {"\udc80": [math.inf]}, True, None, 3]
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:-1])
        journal.append(RunEnded(stop=Stop.FINAL, answer=answer))
    most = sys.float_info.max
    expected = ["\\udc80", None, most, -most, {"\\udc80": [most]}, True, None, 3]
    assert store.load("r1").answer == expected


def test_a_reply_with_nan_is_refused_whatever_else_is_in_it(store: Store):
    text = Message("assistant", "\udc80")
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:3])
        for logprobs in ((-0.5, math.nan), (-math.inf, math.nan)):
            reply = Reply(text, token_ids=(1, 2), logprobs=logprobs)
            with pytest.raises(
                StoreError, match="cannot be written as JSON: a number in it is NaN"
            ):
                journal.append(ReplyReceived(call="0", turn=0, reply=reply))


def test_a_writer_is_known_only_while_it_holds_the_journal(store: Store):
    with store.create("r1") as journal:
        path = journal.path
        assert {find_writer_process(path)} == {this_process()}
        named = writer_process_file(path).read_bytes()
        writer_process_file(path).write_bytes(b"{")
        assert find_writer_process(path) is None
        with pytest.raises(RunInUse, match="run r1 is being written by another process: stop that"):
            store.reopen("r1")
        writer_process_file(path).write_bytes(named)
    assert not writer_process_file(path).exists()
    writer_process_file(path).write_bytes(named)  # as a killed writer leaves it
    assert find_writer_process(path) is None
    path.unlink()
    assert find_writer_process(path) is None


def test_a_closed_journal_is_free_although_its_descriptor_was_copied(store: Store):
    """As by a fork."""
    journal = store.create("r1")
    own = [fd for fd in os.listdir("/proc/self/fd") if is_open_on(journal.path, fd)]
    copies = [os.dup(int(fd)) for fd in own]
    journal.close()
    journal.close()
    store.reopen("r1").close()
    for fd in copies:
        os.close(fd)
    assert len(copies) == 1

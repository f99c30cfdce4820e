"""Replies that are shown while they arrive, of a plain ``ramify ask`` in another process."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ramify import Store, testing
from ramify.secret_redaction import SecretRedactor
from ramify.store.journal import find_writer_process
from ramify.store.live_replies import (
    MAX_CHARS,
    ArrivingReply,
    LiveReplyFileReader,
    LiveReplyFileWriter,
)
from tests.viewer.browser import Loop, served, tab
from tests.viewer.page_helpers import HACKED

T = TypeVar("T")
EVIL = "<img src=x onerror='window.hacked=1'><script id=evil>window.hacked=1</script>\u202eabc "
REPLY = "BEGIN " + EVIL + "word " * 300 + "END"
QUESTION = "How many days has May?"


def until(holds: Callable[[], T | None], seconds: float = 100) -> T:
    """Wait for a condition and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def asked(
    store: Path,
) -> Iterator[tuple[subprocess.Popen[bytes], Path, testing.ScriptedServer]]:
    """A ``ramify ask`` whose reply has begun to arrive, its journal, and the server. The whole
    reply takes two minutes, unless the test sets ``server.piece_s``: on a busy machine a page may
    need many seconds until it follows."""
    loop = Loop()
    server = testing.ScriptedServer(lambda _: REPLY, pieces=1_200, piece_s=0.1)
    loop.run(server.__aenter__())
    command = [sys.executable, "-m", "ramify", "ask", QUESTION, "-m", f"vllm:m@{server.url}"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "RAMIFY_HOME": str(store)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: server.answered)
        yield process, until(lambda: next((store / "runs").glob("*.jsonl"), None)), server
    finally:
        process.kill()
        process.wait(30)
        loop.run(server.__aexit__(None, None, None))
        loop.close()


def followed(reader: LiveReplyFileReader) -> ArrivingReply:
    """The reply, once a part of it has arrived."""
    return until(lambda: next(iter(reader.read() or ()), None))


def live_files(journal: Path) -> list[Path]:
    return list(journal.parent.glob("*.live"))


def test_page_shows_a_reply_while_it_arrives(browser: Any, tmp_path: Path) -> None:
    """The text grows, is never removed before the recorded reply is there, and stays text."""
    with asked(tmp_path) as (process, journal, model), served(tmp_path) as server:
        with tab(browser) as shown:
            page = shown.open(f"{server.url}#/run/{journal.stem}")
            page.evaluate("""() => {
              window.lengths = [];
              new MutationObserver(() => {
                const box = document.querySelector(".said.arriving");
                const reply = document.querySelector(".turn:not(.pending) .said.reply");
                window.lengths.push(reply ? -1 : box && !box.hidden ? box.textContent.length : 0);
              }).observe(document.body, {
                subtree: true, childList: true, characterData: true, attributes: true,
              });
            }""")
            # The first piece that the page shows may be shorter.
            arriving = page.locator(".said.arriving", has_text="BEGIN <img src=x")
            arriving.wait_for()
            first = arriving.text_content()
            assert first.startswith("BEGIN <img src=x")
            page.wait_for_function(
                "(n) => document.querySelector('.said.arriving')?.textContent.length > n",
                arg=len(first),
            )
            model.piece_s = 0.001
            page.locator(".said.reply", has_text="END").wait_for()
            assert page.locator(".said.arriving").count() == 0
            lengths = page.evaluate("window.lengths")
            growing = lengths[: lengths.index(-1)]
            assert growing == sorted(growing)
            assert len(set(growing)) > 2
            assert page.evaluate(HACKED) == [None, 0]
        assert process.wait(100) == 0
        until(lambda: not live_files(journal))


def test_run_without_a_page_leaves_no_file(tmp_path: Path) -> None:
    with asked(tmp_path) as (process, journal, model):
        model.piece_s = 0.001
        while process.poll() is None:
            assert live_files(journal) == []
            time.sleep(0.02)
        assert process.returncode == 0


def test_file_is_private_and_outside_of_the_record(tmp_path: Path) -> None:
    with asked(tmp_path) as (process, journal, model):
        reader, store = LiveReplyFileReader(journal), Store(tmp_path)
        assert followed(reader).call == "0"
        (file,) = live_files(journal)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [run.id for run in store.runs()] == [journal.stem]
        assert store.check(journal).num_damaged == 0
        store.prune()
        assert file.exists()  # a page follows
        model.piece_s = 0.001
        assert process.wait(100) == 0
        assert not file.exists()
        assert b"ArrivingReply" not in journal.read_bytes()
        reader.close()
        assert store.load(journal.stem).calls[0].turns[0].reply.message.content == REPLY


def test_run_stops_writing_when_its_page_was_killed(tmp_path: Path) -> None:
    follow = (
        "import sys, time; from pathlib import Path; from ramify.store.live_replies import *\n"
        "reader = LiveReplyFileReader(Path(sys.argv[1]))\n"
        "while not reader.read(): time.sleep(0.02)\n"
        "print('read', flush=True); time.sleep(1000)"
    )
    with asked(tmp_path) as (process, journal, _):
        page = subprocess.Popen([sys.executable, "-c", follow, journal], stdout=subprocess.PIPE)
        with page:
            assert page.stdout is not None
            assert page.stdout.readline() == b"read\n"
            assert live_files(journal)
            page.kill()
        until(lambda: not live_files(journal))
        assert process.poll() is None


def test_page_removes_the_file_of_a_killed_run(tmp_path: Path) -> None:
    with asked(tmp_path) as (process, journal, _):
        reader = LiveReplyFileReader(journal)
        assert followed(reader).text.startswith("BEGIN")
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert find_writer_process(journal) is None
        reader.close()
        assert live_files(journal) == []


def test_file_that_both_left_is_pruned_and_never_shown(tmp_path: Path) -> None:
    store = Store(tmp_path)
    journal = store.create("run").path
    reader, run = LiveReplyFileReader(journal), LiveReplyFileWriter(journal, SecretRedactor({}, {}))
    assert reader.read() is None
    assert run.is_followed()
    run.write([ArrivingReply("0", 0, "old")])
    (file,) = live_files(journal)
    left = file.read_bytes()
    reader.close()
    file.write_bytes(left)
    again = LiveReplyFileReader(journal)
    assert again.read() is None
    again.close()
    file.write_bytes(left)
    store.prune()
    assert not file.exists()


def test_file_is_bounded_and_holds_no_secret(tmp_path: Path) -> None:
    """Also no beginning of a secret that has not arrived in full."""
    journal, secret = tmp_path / "run.jsonl", "sk-0123456789abcdef"
    reader = LiveReplyFileReader(journal)
    run = LiveReplyFileWriter(journal, SecretRedactor({"A_KEY": secret}, {}))
    assert reader.read() is None
    assert run.is_followed()
    texts = []
    for end in range(1, len(secret) + 1):
        run.write([ArrivingReply("0", 0, f"the key {secret[:end]}")])
        texts += [reply.text for reply in reader.read() or ()]
    assert texts == [
        "the key s", "the key sk", "the key sk-", "the key ", "the key «redacted A_KEY»",
    ]  # fmt: skip
    run.write([ArrivingReply(str(number), 0, "é" * 9_000) for number in range(500)])
    replies = reader.read() or ()
    assert len(replies) == 500
    assert live_files(journal)[0].stat().st_size < 200_000
    run.write([ArrivingReply("0", 0, "x" * 9_000 + "end")])
    (shown,) = reader.read() or ()
    assert (len(shown.text), shown.is_cut) == (MAX_CHARS, True)
    assert shown.text.endswith("xend")
    run.delete()
    reader.close()
    assert live_files(journal) == []


def test_half_written_file_is_not_shown(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    reader, run = LiveReplyFileReader(journal), LiveReplyFileWriter(journal, SecretRedactor({}, {}))
    assert reader.read() is None
    assert run.is_followed()
    run.write([ArrivingReply("0", 0, "first text")])
    assert reader.read()
    (file,) = live_files(journal)
    file.write_bytes(file.read_bytes().replace(b"first", b"other"))
    assert reader.read() is None
    run.delete()
    reader.close()


def test_a_place_that_cannot_be_written_is_only_not_live(tmp_path: Path) -> None:
    reader = LiveReplyFileReader(tmp_path / "none" / "run.jsonl")
    assert reader.read() is None
    reader.close()

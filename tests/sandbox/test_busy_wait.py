"""Quick answers are read without the event loop, and never at the cost of what else runs in it."""

import asyncio
import functools
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ramify.errors import SessionDied
from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.sandbox.guest.busy_wait import BUSY_S, AdaptiveBusyWait
from ramify.sandbox.host.transport import SandboxConnectionState, SocketStream
from tests.sandbox.jail_helpers import answer

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="sessions are measured on Linux")


class Stream:
    """A stream and the other end of its socket."""

    def __init__(self, shared: SandboxConnectionState) -> None:
        ours, self.guest = socket.socketpair()
        self.stream = SocketStream(ours, shared)
        self.wait = shared.busy_wait
        self.got: list[bytes] = []
        self.stream.start_reading(
            lambda data: self.got.append(bytes(data)), lambda: self.got.append(b"lost")
        )

    def ask(self, reply: bytes = b"") -> list[bytes]:
        """Write, let the guest reply, and return what was read without the loop."""
        self.stream.write([b"?"])
        if reply:
            self.guest.send(reply)
        self.stream.busy_wait_for_answer()
        got, self.got = self.got, []
        return got


def begin_to_wait(wait: AdaptiveBusyWait) -> None:
    """The first waits are left out."""
    while not wait.until(lambda: True):
        pass


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        async def main() -> None:
            await test()

        asyncio.run(main())

    return run


@contextmanager
def streams(count: int) -> Iterator[list[Stream]]:
    shared = SandboxConnectionState()
    begin_to_wait(shared.busy_wait)
    with ExitStack() as stack:
        made = [Stream(shared) for _ in range(count)]
        for each in made:
            stack.callback(each.guest.close)
            stack.callback(each.stream.close)
        yield made


@in_loop
async def test_answer_that_is_there_is_read_without_the_loop() -> None:
    with streams(1) as (one,):
        assert one.ask(b"0") == []  # it might be one of many
        await asyncio.sleep(0.01)
        assert one.got == [b"0"]
        one.got.clear()
        assert one.ask(b"1") == [b"1"]
        one.stream.busy_wait_for_answer()  # nothing is expected
        assert one.got == []
        one.guest.close()
        assert one.ask() == [b"lost"]


@in_loop
async def test_stream_does_not_wait_while_another_one_expects_an_answer() -> None:
    with streams(2) as (one, other):
        assert other.ask() == []
        for _ in range(3):
            assert one.ask(b"1") == []
            await asyncio.sleep(0.01)
            assert one.got == [b"1"]
            one.got.clear()
        other.stream.close()  # it will not answer
        assert one.ask(b"2") == [b"2"]


@in_loop
async def test_streams_that_take_turns_do_not_wait() -> None:
    with streams(2) as both:
        for _ in range(3):
            for one in both:
                assert not one.stream.is_only_active()
                assert one.ask(b"1") == []
                await asyncio.sleep(0.01)
                assert one.got == [b"1"]
                one.got.clear()
        assert both[1].stream.is_only_active()
        assert both[1].ask(b"2") == [b"2"]


@in_loop
async def test_loop_runs_after_some_answers_in_a_row() -> None:
    with streams(1) as (one,):
        one.ask()
        at_once = [one.ask(b"1") for _ in range(40)]
        assert 0 < at_once.index([]) <= 16
        await asyncio.sleep(0.01)
        assert b"".join(one.got) == b"1" * at_once.count([])
        one.got.clear()
        assert one.ask(b"1") == [b"1"]


@in_loop
async def test_paused_stream_reads_nothing() -> None:
    with streams(1) as (one,):
        one.ask()
        one.stream.pause()
        assert one.ask(b"1") == []


def test_wait_is_short_and_is_left_out_after_misses() -> None:
    wait, calls = AdaptiveBusyWait(), 0
    assert not wait.until(lambda: True)
    begin_to_wait(wait)

    def nothing() -> bool:
        nonlocal calls
        calls += 1
        return False

    began = time.thread_time()
    waited = [not wait.until(nothing) for _ in range(200)]
    assert all(waited)
    assert time.thread_time() - began < 12 * BUSY_S + 0.01
    assert calls > 0
    begin_to_wait(wait)
    assert all(wait.until(lambda: True) for _ in range(100))


@on_linux
@in_loop
async def test_cells_in_a_row_let_other_tasks_run() -> None:
    sandbox = open_sandbox(SandboxSpec())
    turns: list[float] = []

    async def tick() -> None:
        while True:
            turns.append(time.perf_counter())
            await asyncio.sleep(0)

    try:
        session = await sandbox.open()
        ticking = asyncio.create_task(tick())
        seen = []
        for _ in range(300):
            assert (await session.run("x = 1", answer=answer)).cell.error is None
            seen.append(len(turns))
        ticking.cancel()
        assert all(later > sooner for sooner, later in zip(seen, seen[20:], strict=False))
    finally:
        await sandbox.close()


@on_linux
@in_loop
async def test_sessions_that_died_or_were_cut_off_expect_no_answer() -> None:
    sandbox: Any = open_sandbox(SandboxSpec(grace_s=0.3))
    try:
        dying, cut, last = [await sandbox.open() for _ in range(3)]
        with pytest.raises(SessionDied):
            await dying.run("import os; os._exit(3)", answer=answer)
        running = asyncio.create_task(cut.run("while True: pass", answer=answer))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await dying.close()
        await cut.close()
        assert (await last.run("1 + 1", answer=answer)).cell.value == "2"
        assert sandbox.buffers.num_expected == 0
    finally:
        await sandbox.close()

"""Small processes that answer requests over their pipes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from subprocess import Popen

import pytest

from ramify.actors.child_process import kill_and_reap
from ramify.actors.helper_process import answer_requests, ask, start_python_process


def serve() -> None:
    answer_requests(answered)


def answered(request: list[bytes]) -> list[bytes]:
    if request == [b"wait"]:
        signal.pause()
    if request == [b"no memory"]:
        raise MemoryError
    if request == [b"end"]:
        os._exit(3)
    return [*reversed(request), b"%d" % len(request)]


@pytest.fixture
def process() -> Iterator[Popen[bytes]]:
    process = start_python_process(f"{__name__}:serve")
    yield process
    kill_and_reap(process)


def test_a_process_answers_requests_of_any_parts(process: Popen[bytes]) -> None:
    large = bytes(range(256)) * 4096  # more than a pipe holds
    for request in ([], [b""], [b"a\n", b"\x00b"], [large, b"x"]):
        assert ask(process, request, 60.0) == [*reversed(request), b"%d" % len(request)]


@pytest.mark.parametrize(
    ("request_", "limit_s", "error"),
    [(b"wait", 0.05, TimeoutError), (b"no memory", 60.0, EOFError), (b"end", 60.0, EOFError)],
)
def test_a_process_that_does_not_answer(
    process: Popen[bytes], request_: bytes, limit_s: float, error: type[Exception]
) -> None:
    assert ask(process, [b"ready"], 60.0) == [b"ready", b"1"]
    with pytest.raises(error):
        ask(process, [request_], limit_s)


def test_a_process_ends_when_its_input_is_closed(process: Popen[bytes]) -> None:
    ask(process, [b"ready"], 60.0)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60.0) == 0

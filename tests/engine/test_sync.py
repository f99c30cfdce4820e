"""The synchronous face: what may happen at any line, in any thread, never blocks it."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from typing import Any

import pytest

from ramify.engine import threads
from tests.engine.helpers import code, rlm


async def _collect() -> int:
    return gc.collect()


def test_one_that_was_forgotten_is_collected_on_the_loop() -> None:
    """The collector runs wherever it likes, also in the thread that closing has to wait for."""
    forgotten: Any = rlm(["one"])
    assert forgotten.completion("A question?").response == "one"
    forgotten.itself = forgotten
    del forgotten
    assert asyncio.run_coroutine_threadsafe(_collect(), threads.loop()).result(10)
    with rlm(["two"]) as r:
        assert r.completion("Another?").response == "two"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_can_ask() -> None:
    """``multiprocessing`` forks by default, and the loop's thread stays with the parent."""
    with rlm(["one", code("FINAL(len(context))"), "two"]) as r:
        assert r.completion("A question?").response == "one"

        def ask() -> None:
            answers = r.completion("text", "How long?").answer, r.completion("A question?").answer
            assert answers == (4, "two")

        child = multiprocessing.get_context("fork").Process(target=ask)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert r.completion("text", "How long?").answer == 4


def test_a_callback_on_the_loop_cannot_wait_for_it() -> None:
    """The callback gets an error instead of waiting forever, and the run that it watches
    continues."""
    other = rlm(["never asked"])

    def ask_again(event: Any) -> None:
        other.completion("A question?")

    with (
        rlm(["one"]) as r,
        pytest.warns(UserWarning, match="cannot wait for it: use the async form"),
    ):
        assert r.completion("A question?", on_event=ask_again).response == "one"
    other.close()

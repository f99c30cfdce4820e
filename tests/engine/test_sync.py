"""The synchronous API does not deadlock with garbage collection or callbacks."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from typing import Any

import pytest

from ramify.engine import event_loop_thread
from tests.engine.helpers import code, rlm


async def _collect() -> int:
    return gc.collect()


def test_unclosed_rlm_can_be_collected_on_the_event_loop() -> None:
    """The garbage collector may run in any thread, even in the one that closing must wait for."""
    forgotten: Any = rlm(["one"])
    assert forgotten.completion("A question?").response == "one"
    forgotten.itself = forgotten
    del forgotten
    assert asyncio.run_coroutine_threadsafe(_collect(), event_loop_thread.background_loop()).result(
        10
    )
    with rlm(["two"]) as r:
        assert r.completion("Another?").response == "two"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_can_ask() -> None:
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


def test_callback_on_the_event_loop_cannot_block_on_it() -> None:
    """The callback gets an error instead of waiting forever, and the run that it watches
    continues."""
    other = rlm(["never asked"])

    def ask_again(event: Any) -> None:
        other.completion("A question?")

    with (
        rlm(["one"]) as r,
        pytest.warns(UserWarning, match="cannot make a blocking call: use the async form"),
    ):
        assert r.completion("A question?", on_event=ask_again).response == "one"
    other.close()

"""A run whose event loop is blocked past its deadline is ended from outside and can be resumed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ramify import Limits, RunSuspendedError, SandboxSpec, Stop, Store
from ramify.errors import EventLoopBlockedError
from ramify.tasks.base import RolloutInitialState
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, code, rlm

LIMITS = {"max_seconds": 2, "stall_s": 0.2}
SANDBOX = SandboxSpec("inprocess", allow_weaker=True)
ROOT = code("FINAL([llm_query('a'), llm_query('b')])")


class BlockingModel:
    """Blocks the event loop when it is asked for ``b``, until ``freed`` is set."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        self.replies: Counter[str] = Counter()

    def reply(self, messages: tuple[Message, ...]) -> str:
        prompt = messages[-1].content
        if prompt == "b":
            self.freed.wait()
        self.replies[prompt[:1]] += 1
        return ROOT if messages[0].role == "system" else f"r {prompt}"


def test_blocked_run_releases_its_caller_and_can_be_resumed(tmp_path: Path) -> None:
    model, store = BlockingModel(), Store(tmp_path)
    try:
        with rlm(model.reply, store=store, limits=LIMITS, sandbox=SANDBOX) as r:
            with pytest.raises(RunSuspendedError) as raised:
                r.completion("text", "?")
            assert "max_seconds=2), at " in str(raised.value)
            assert f"called from {__file__}:" in str(raised.value)
            assert [run.stop for run in store.runs()] == [Stop.SUSPENDED]
            model.freed.set()
            resumed = r.resume("last", limits=Limits())
        assert resumed.answer == ["r a", "r b"]
        # The provider may have charged for the request that was in flight.
        assert resumed.usage.unknown_calls == 1
        # The blocked request is answered only after its run has ended.
        assert model.replies["a"] == 1
        assert [run.stop for run in store.runs()] == [Stop.FINAL]
    finally:
        model.freed.set()


def test_blocked_run_without_store_names_the_blocking_code() -> None:
    model = BlockingModel()
    try:
        with (
            rlm(model.reply, limits=LIMITS, scaffold=None) as r,
            pytest.raises(
                EventLoopBlockedError, match=r"in reply, called from|called from .* in reply: "
            ),
        ):
            r.completion("b")
    finally:
        model.freed.set()


def test_blocked_run_on_the_callers_loop_ends_when_the_loop_advances(tmp_path: Path) -> None:
    model, store = BlockingModel(), Store(tmp_path)

    def free() -> None:
        """Frees the loop once the journal is closed."""
        while not store.runs() or store.runs()[0].stop is None:
            model.freed.wait(0.02)
        model.freed.set()

    async def main() -> None:
        async with rlm(model.reply, store=store, limits=LIMITS, sandbox=SANDBOX) as r:
            threading.Thread(target=free).start()
            with pytest.raises(
                RunSuspendedError, match=r"has been blocked for 0\.2 s past its deadline"
            ):
                await r.acompletion("text", "?")
            assert (await r.aresume("last", limits=Limits())).answer == ["r a", "r b"]

    asyncio.run(main())
    assert model.replies["a"] == 1


def test_run_waiting_past_its_deadline_is_suspended(tmp_path: Path) -> None:
    """Its loop is not blocked: the run waits for something that ignores the end of the run."""

    async def prepare(session: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with rlm([ROOT], store=Store(tmp_path), limits=LIMITS, sandbox=SANDBOX) as r:
            with pytest.raises(
                RunSuspendedError, match=r"did not end within 0.2 s .* it waits at .*:\d+"
            ):
                await r.acompletion(RolloutInitialState(context="text", on_session=prepare), "?")

    asyncio.run(main())


def test_blocked_command_exits_with_one_line_and_resume_hint(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys, time
        from ramify import RLM, Limits, SandboxSpec, Scaffold, ScriptedClient, Store
        from ramify.cli.ask_runner import QuestionRunRequest, run
        from ramify.cli.progress_display import ProgressDisplay
        from ramify.cli.terminal_text import StderrMessageWriter
        from ramify.engine.question import RunOptions

        def reply(messages):
            if messages[0].role == "system":
                return {ROOT!r}
            if messages[-1].content == "b":
                time.sleep(3600)
            return "r a"

        rlm = RLM(
            ScriptedClient(reply), store=Store(),
            scaffold=Scaffold(name={SCAFFOLD.name!r}, system={SCAFFOLD.system!r}),
            limits=Limits(max_seconds=2, stall_s=0.2), sandbox=SandboxSpec('inprocess', allow_weaker=True),
        )
        asked = QuestionRunRequest("?", None, RunOptions(direct=False))
        with ProgressDisplay(StderrMessageWriter(), "lines") as screen:
            sys.exit(run(rlm, asked, screen, as_json=False))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAMIFY_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    [run] = Store(tmp_path).runs()
    [line] = done.stderr.splitlines()
    again = f"ramify ask --resume {run.id}"
    assert (done.returncode, done.stdout, run.stop) == (5, "", Stop.SUSPENDED)
    assert line.startswith("ramify: suspended: the run's event loop has been blocked for 0.2 s")
    assert line.endswith(f": code on the loop must not block; continue with: {again}")

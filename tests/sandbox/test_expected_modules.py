"""A module that a jail expects its sessions to install is run once, before they are forked."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ramify import RLM, Limits, Scaffold, ScriptedClient
from ramify.errors import SandboxError
from ramify.sandbox.base import SharedContextValue, expect_module
from ramify.sandbox.host.process_transport import pid_of_pidfd
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.sandbox.providers.jail import JailSandbox
from ramify.types.message import Message
from tests.sandbox.jail_helpers import answer, descendants, value, with_jail

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THE JAIL IS NOT TESTED HERE: it needs Linux"
)
MODULE = """
import os
__all__ = ["echo", "here", "seen"]
here, seen = os.getpid, []
made_in = os.getpid()
namespace.setdefault("free", 1)

def echo(x):
    return call_host("echo", x)

def after_cell():
    seen.append(1)
    return {"cells": len(seen), "in": made_in}
"""
OTHER = "__all__ = ['echo']\nmade_in = -1\ndef echo(x): return 'other'\n"


async def opened(sandbox: JailSandbox, source: str = MODULE, **options: Any) -> Any:
    """Open a session after the fork server had time to prepare some, and install a module."""
    for _ in range(2):
        await (await sandbox.open()).close()
    await asyncio.sleep(0.3)
    session = await sandbox.open(**options)
    await session.install("m", source)
    return session


async def ran_in(session: GuestSessionProxy) -> Any:
    """Return the process in which the session's module was run, as the session numbers it."""
    ran = await session.run("None", answer=answer)
    assert ran.note is not None
    return ran.note["m"]["in"]


@pytest.mark.parametrize("tier", ["A", "B", "C"])
@pytest.mark.parametrize("chars", [0, 10, 2_000_000])
def test_expected_module_is_run_once_for_all_sessions(tier: str, chars: int) -> None:
    """Also for sessions with a large context, which are forked from a separate process."""

    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", MODULE)
        context = SharedContextValue("x" * chars) if chars else None
        first, second = [await opened(sandbox, context=context) for _ in range(2)]
        assert await ran_in(first) == await ran_in(second) != int(await value(first, "here()"))
        assert await value(first, "echo(3)") == "[3]"
        assert not chars or await value(first, "len(context)") == str(chars)

    with_jail(test, tier)


def test_sessions_share_nothing_of_an_expected_module() -> None:
    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", MODULE)
        first, second = [await opened(sandbox) for _ in range(2)]
        await value(first, "seen += [1, 2, 3]; free = 2; __import__('m').made_in = 0")
        assert await value(second, "(len(seen), free)") == "(0, 1)"
        assert await ran_in(second) > 0

    with_jail(test)


def test_cells_see_an_expected_module_as_if_they_had_installed_it() -> None:
    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", MODULE)
        session = await opened(sandbox)
        ran = await session.run("echo = 1", answer=answer)
        assert ran.cell.restored == ("echo",)
        assert ran.note["m"]["cells"] == 1
        assert await value(session, "echo(1)") == "[1]"
        branch = await session.fork()
        assert await value(branch, "(echo(2), len(seen))") == "([2], 2)"

    with_jail(test)


def test_another_module_of_that_name_replaces_the_expected_one() -> None:
    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", MODULE)
        session = await opened(sandbox, OTHER)
        assert await value(session, "echo(1), [n for n in ('here', 'free') if n in globals()]") == (
            "('other', [])"
        )
        assert (await session.run("None", answer=answer)).note is None
        await session.install("m", MODULE)
        assert await ran_in(session) == int(await value(session, "here()"))

    with_jail(test)


def test_expected_module_that_fails_is_reported_by_the_session_that_installs_it() -> None:
    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", "__all__ = ['x']\nx = 1\n1/0")
        session = await opened(sandbox, OTHER)
        assert await value(session, "echo(1)") == "'other'"
        with pytest.raises(SandboxError, match=r"(?s)could not be installed.*ZeroDivisionError"):
            await opened(sandbox, "__all__ = ['x']\nx = 1\n1/0")

    with_jail(test)


def test_server_that_was_killed_gets_the_module_again() -> None:
    async def test(sandbox: JailSandbox) -> None:
        expect_module(sandbox, "m", MODULE)
        session = await opened(sandbox)
        for pid in descendants(os.getpid()) - {pid_of_pidfd(session.pidfd)}:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        again = await opened(sandbox)
        assert await ran_in(again) != int(await value(again, "here()"))

    with_jail(test)


def test_runs_are_equal_whether_their_session_had_the_names_before() -> None:
    """The first run installs them; later ones find them there."""
    cells = (
        "context = 'mine'; budget = 5; print(len(SHOW_VARS())); print('y' * 300)",
        "print(own_context, len(context), len(outputs[1]), budget, llm_query('q'))",
        "FINAL((SHOW_VARS(), last_replies))",
    )
    turns = [f"```repl\n{cell}\n```" for cell in cells]

    def reply(messages: Sequence[Message]) -> str:
        if messages[-1].content == "q":
            return "r"
        return turns[sum(message.role == "assistant" for message in messages)]

    scaffold = Scaffold(direct_chars=0, max_output_chars=100)
    with RLM(ScriptedClient(reply), scaffold=scaffold, limits=Limits(max_calls=50)) as rlm:
        results = [rlm.completion("a context", "What is there?") for _ in range(5)]
    ends = {
        (result.response, *((cell.stdout, cell.value, cell.error) for cell in cells_of(result)))
        for result in results
    }
    assert len(ends) == 1
    assert "mine 9 303 5 r" in next(iter(ends))[2][0]


def test_engine_expects_its_names_in_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[tuple[str, str]] = []
    monkeypatch.setattr(
        JailSandbox, "expect_module", lambda _, module, source: expected.append((module, source))
    )
    client = ScriptedClient(["```repl\nFINAL(1)\n```"])
    with RLM(client, scaffold=Scaffold(direct_chars=0)) as rlm:
        assert rlm.completion("a context", "What is there?").response == "1"
    [(module, source)] = expected
    assert module == "prelude"
    assert "def FINAL(" in source


def cells_of(result: Any) -> list[Any]:
    return [cell for turn in result.trajectory.root.turns for cell in turn.cells]

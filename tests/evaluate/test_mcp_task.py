"""MCP servers as tools of a task: their lifetime, their end, and their failures. Real servers in
separate processes."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import pytest

from ramify import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.evaluate.mcp_task import TaskWithMcpTools
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState, generated
from ramify.testing import ScriptedClient

SERVER = """\
import os, subprocess, sys
from mcp.server import MCPServer

with open(sys.argv[1], "a") as file:
    child = subprocess.Popen(["sleep", "1000"])
    file.write(f"{os.getpid()} {child.pid}\\n")
server = MCPServer("counter", log_level="ERROR")
num = 0

@server.tool()
def count() -> int:
    "Count the calls of this server."
    global num
    num += 1
    return num

server.run()
"""
SCRIPT = ["```repl\nFINAL(count())\n```"] * 4


@pytest.fixture
def server(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return f"{sys.executable} {tmp_path}/server.py {tmp_path}/pids"


def task(**changes: object) -> DatasetTask:
    splits = generated("mine", lambda rng: Item("How often?", f"text {rng.random()}", gold=1))
    return DatasetTask("mine", splits, lambda answer, item: float(answer == 1), **changes)  # type: ignore[arg-type]


async def answers(made: TaskWithMcpTools, num: int) -> list[object]:
    """The answers of ``num`` rollouts, one after another."""
    async with RLM(
        ScriptedClient(SCRIPT), sandbox=SandboxSpec(provider="inprocess", allow_weaker=True)
    ) as rlm:
        items = [made.splits["train"][index] for index in range(num)]
        found = [await attempt(rlm, made, item) for item in items]
    assert [each.errors for each in found] == [[]] * num
    return [each.answer for each in found]


def living(folder: Path) -> list[int]:
    """Processes of servers, and their children, that have not ended."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_for_the_end(folder: Path) -> None:
    until = time.monotonic() + 30
    while living(folder):
        assert time.monotonic() < until, f"still alive: {living(folder)}"
        time.sleep(0.05)


def test_each_rollout_has_its_own_server_which_ends_with_its_children(
    server: str, tmp_path: Path
) -> None:
    assert asyncio.run(answers(TaskWithMcpTools(task(), server), 2)) == [1, 1]
    assert len((tmp_path / "pids").read_text().splitlines()) == 2
    wait_for_the_end(tmp_path)


def test_servers_of_the_process_are_shared_and_closed_at_its_end(
    server: str, tmp_path: Path
) -> None:
    made = TaskWithMcpTools(task(), server, lifetime="process")
    assert asyncio.run(answers(made, 3)) == [1, 2, 3]
    assert len((tmp_path / "pids").read_text().splitlines()) == 1
    assert len(living(tmp_path)) == 2
    made.close()
    wait_for_the_end(tmp_path)


def test_cancelled_rollout_ends_its_server(server: str, tmp_path: Path) -> None:
    """on_end is then called on the event loop, which must not wait for the server."""

    async def cancelled() -> None:
        made = TaskWithMcpTools(task(), server)
        start = await made.prepare(made.splits["train"][0])
        assert start.on_end is not None
        assert start.on_end(None) == {}

    asyncio.run(cancelled())
    wait_for_the_end(tmp_path)


def test_on_end_of_the_task_is_called_too(server: str, tmp_path: Path) -> None:
    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(context=item.context, on_end=lambda answer: {"seen": answer})

    async def run() -> object:
        made = TaskWithMcpTools(task(begin=begin), server)
        start = await made.prepare(made.splits["train"][0])
        assert [*start.tools] == ["count"]
        assert start.on_end is not None
        return await asyncio.to_thread(start.on_end, 7)

    assert asyncio.run(run()) == {"seen": 7}
    wait_for_the_end(tmp_path)


def test_hanging_server_is_one_line_within_its_time(tmp_path: Path) -> None:
    """A server that says nothing; its rollout fails, and the process is gone."""
    (tmp_path / "hang.py").write_text(
        "import os, sys, time\nopen(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(1000)\n"
    )
    made = TaskWithMcpTools(
        task(),
        f"TOKEN=secret-value {sys.executable} {tmp_path}/hang.py {tmp_path}/pids",
        start_s=2.0,
    )

    async def run() -> list[str]:
        async with RLM(ScriptedClient(SCRIPT)) as rlm:
            return list((await attempt(rlm, made, made.splits["train"][0])).errors)

    (error,) = asyncio.run(run())
    assert re.search(
        r"the MCP server TOKEN= .*hang.py .* cannot be used \(no answer within 2 s\)", error
    )
    assert "\n" not in error
    assert "secret-value" not in error
    wait_for_the_end(tmp_path)


def test_wrong_mcp_tasks_are_refused(server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task 'mine' names no MCP server"):
        TaskWithMcpTools(task())
    with pytest.raises(ConfigError, match="lifetime='session' of its MCP servers is not 'rollout'"):
        TaskWithMcpTools(task(), server, lifetime="session")  # type: ignore[arg-type]

    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(tools={"count": lambda: 0})

    made = TaskWithMcpTools(task(begin=begin), server)
    with pytest.raises(ConfigError, match="both have a tool 'count': rename the task's"):
        asyncio.run(made.prepare(made.splits["train"][0]))
    wait_for_the_end(tmp_path)


def test_missing_command_is_one_line() -> None:
    made = TaskWithMcpTools(task(), "no_such_command_at_all")
    with pytest.raises(
        ConfigError, match=r"^the MCP server no_such_command_at_all cannot be used"
    ) as found:
        asyncio.run(made.prepare(made.splits["train"][0]))
    assert "\n" not in str(found.value)

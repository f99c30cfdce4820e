"""Processes in placement slots, on this machine and through a node agent: starting them, asking for
their state, and ending them with all their descendants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.child_process import ChildProcess, ProcessHandle, wait_then_kill
from ramify.actors.launcher import LocalLauncher, NodeAgent, NodeProcessHandle, RoleInstanceId
from ramify.errors import ConfigError
from tests.actors.test_child_process import is_running, lines

SCRIPT = "echo begins with $GIVEN; sleep 1000 & echo $!; wait"
MEMBER = RoleInstanceId("rollouts", 3)
Start = Callable[[list[str], dict[str, str], Path], ProcessHandle]


def start_by_agent(agent: Any) -> Start:
    def start(command: list[str], environment: dict[str, str], log: Path) -> ProcessHandle:
        pid = agent.start("it", command, environment, str(log), sys.executable, "/")
        assert isinstance(pid, int), pid

        def ask(method: str, *arguments: Any) -> Any:
            return getattr(agent, method)(*arguments)

        return NodeProcessHandle(ask, "it", pid, "there", is_here=False)

    return start


@pytest.fixture(params=["local", "agent"])
def start(request: pytest.FixtureRequest) -> Any:
    if request.param == "local":
        launcher = LocalLauncher()
        yield lambda *arguments: launcher.start(MEMBER, *arguments)
        launcher.close()
    else:
        agent = NodeAgent()
        yield start_by_agent(agent)
        agent.end_all()


def test_ended_process_takes_its_descendants_along(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "it.log"
    process = start(["sh", "-c", SCRIPT], {"GIVEN": "this"}, log)
    assert process.where.startswith("process ")
    first, child = lines(log, 2)
    assert (first, process.poll(), is_running(int(child))) == ("begins with this", None, True)
    process.end(30.0)
    assert process.poll() in (-15, 143)
    assert process.exit_reason().endswith(f"; its log ends: begins with this | {child}")
    assert not is_running(int(child))
    process.end(30.0)


def test_suspended_process_can_be_ended(start: Start, tmp_path: Path) -> None:
    process = start(["sleep", "1000"], {}, tmp_path / "log")
    process.signal(19)
    process.end(30.0)
    assert process.exit_reason() == "was killed by signal 15; its log ends: (it is empty)"


def test_processes_that_do_not_finish_in_time_are_killed(start: Start, tmp_path: Path) -> None:
    process = start(["sleep", "1000"], {}, tmp_path / "log")
    wait_then_kill([process], 0.1)
    assert process.poll() == -9


def test_closing_launcher_ends_its_processes(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    process = launcher.start(MEMBER, ["sleep", "1000"], {}, tmp_path / "log")
    launcher.close()
    assert process.poll() == -15
    launcher.close()


def test_missing_program_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="rollouts 3 cannot be started: nonesuch: No such file or directory"
    ):
        LocalLauncher().start(MEMBER, ["nonesuch"], {}, tmp_path / "log")
    agent = NodeAgent()
    found = agent.start("it", ["nonesuch"], {}, str(tmp_path / "log"), sys.executable, "/")
    assert found == "nonesuch: No such file or directory"


def test_node_agent_replaces_process_of_same_name_and_uses_its_own_python(tmp_path: Path) -> None:
    agent = NodeAgent()
    first = agent.start("it", ["sleep", "1000"], {}, str(tmp_path / "1"), "python-there", "/")
    command = ["python-there", "-c", "import sys; print(sys.executable)"]
    agent.start("it", command, {}, str(tmp_path / "2"), "python-there", "/")
    assert not is_running(int(first))
    assert lines(tmp_path / "2", 1) == [sys.executable]
    agent.end_all()


def test_process_is_lost_when_its_node_agent_is_gone(tmp_path: Path) -> None:
    process = NodeProcessHandle(lambda *_: None, "it", 4711, "node-2", is_here=True)
    assert (process.poll(), process.exit_reason()) == (-9, "ended with its node agent")
    process.end(1.0)


def test_child_process_implements_process_protocol(tmp_path: Path) -> None:
    child: ProcessHandle = ChildProcess(["true"])
    child.end(1.0)
    assert child.poll() is not None

"""Processes of a small run, each with two child processes: ``python -m tests.actors.members
ROLE FOLDER …``. They are started and watched like those of a real run, but compute nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from ramify.actors.child_process import ForegroundProcess, pythonpath_environment
from ramify.actors.connect_back import ConnectBackListener, connect_back, read_ticket
from ramify.actors.launcher import LocalLauncher, RoleInstanceId
from ramify.actors.rank_group import RankGroup, serve_rank_zero
from ramify.actors.rank_monitor import RankConnection, RankProgress
from ramify.actors.run_channel import connect

ROLES = ("trainer", "rank", "engine", "worker", "service", "supervisor")
BELOW = "sleep 1000 & setsid sleep 1000 &"
ENGINE = 'echo $$ > "$0/engine"; ' + BELOW + " wait"
SERVICE = """
import os, socket, subprocess, sys, time
subprocess.Popen(["sh", "-c", sys.argv[4]])
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
open(os.path.join(sys.argv[3], "service"), "w").write(str(os.getpid()))
time.sleep(1000)
"""


class Verbs:
    """Methods that all ranks execute together."""

    def add(self, number: int) -> int:
        return number + 1


def here(role: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.actors.members", role, str(folder)]


def begin(role: str, folder: Path) -> None:
    """Start two child processes and write this process's id to a file: it is up."""
    if role not in ("supervisor", "trainer"):
        subprocess.Popen(["sh", "-c", BELOW])
    (folder / role).write_text(str(os.getpid()))


def supervisor(folder: Path) -> int:
    with ForegroundProcess() as process:
        begin("supervisor", folder)
        return process.run(here("trainer", folder)) and 1


def rank(folder: Path) -> None:
    ticket = read_ticket()
    talk, watch = (connect(ticket.address, ticket.key, ticket.name) for _ in range(2))
    begin("rank", folder)
    serve_rank_zero(Verbs(), RankProgress(), talk, watch, 1, 60.0)


def worker(folder: Path) -> None:
    channel = connect_back()
    begin("worker", folder)
    channel.receive(str)


async def trainer(folder: Path) -> None:
    """Work until a rank, the engine or the worker is lost."""
    from ramify.inference.http.engine_process import EngineProcess
    from ramify.inference.http.inference_spec import InferenceSpec
    from ramify.train.placement.placement_spec import RewardServiceSpec
    from ramify.train.placement.reward_services import RewardServiceManager

    launcher, log = LocalLauncher(), folder / "log"
    command = (sys.executable, "-S", "-c", SERVICE, "{host}", "{port}", str(folder), BELOW)
    judge = RewardServiceSpec(command=command, variable="RAMIFY_TEST_JUDGE")
    services = RewardServiceManager(launcher, {"judge": judge}, folder, restarts=0)
    await services.start()
    spec = InferenceSpec(command=("sh", "-c", ENGINE, str(folder)))
    engine = EngineProcess(launcher, spec, 0, folder, "float32", 64, folder / "engine.log")
    with ConnectBackListener() as listener:
        ticket = listener.create_ticket("0")
        one = launcher.start(RoleInstanceId("trainer", 1), here("rank", folder), {}, log, ticket)
        talk, watch = (listener.accept(str, 60.0)[0] for _ in range(2))
        other = launcher.start(
            RoleInstanceId("rollouts", 0),
            here("worker", folder),
            pythonpath_environment(),
            log,
            ticket,
        )
        channel, _ = listener.accept(str, 60.0)
    link = RankConnection(1, talk, watch, one.where)
    ranks = RankGroup(Verbs(), RankProgress(), [link], [one], 60.0, folder)
    begin("trainer", folder)
    try:
        while engine.exit_status is None and other.poll() is None:
            assert ranks.call("add", 1) == [2, 2]
            await asyncio.sleep(0.05)
    finally:
        channel.close()
        ranks.close()
        await services.close()
        launcher.close()


def main(role: str, folder: str) -> None:
    at = Path(folder)
    match role:
        case "supervisor":
            sys.exit(supervisor(at))
        case "trainer":
            asyncio.run(trainer(at))
        case "rank":
            rank(at)
        case "worker":
            worker(at)


if __name__ == "__main__":
    main(*sys.argv[1:])

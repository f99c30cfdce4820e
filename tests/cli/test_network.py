"""The sockets on which each command listens, compared with the table of docs/serve.md.

Each command of the table is started; while it works, the listening sockets of its processes are read
from ``/proc/net``. Not here: the sockets that libraries open in training runs over several
processes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ramify.cli.main import COMMANDS
from ramify.cli.main import load_subcommand as command_named
from ramify.models.load import save_policy
from tests.cli.helpers import Shell, code
from tests.cli.test_train import RECIPE, SHORT
from tests.inference.helpers import policy

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
LISTENING = "0A"
"""State of a listening TCP socket in /proc/net/tcp."""
ACCEPTS = 1 << 16
"""Flag of a listening socket in /proc/net/unix."""
MODEL = ["--model", "scripted:script.json"]
ASKED = ["q?", "rows.txt", *MODEL, "--no-direct"]
INITIALIZE = b"""{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": \
"2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}}\n"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")


def rows() -> list[tuple[str, str]]:
    """(command, address or "nothing") of each row of the first table about ports."""
    found = []
    section = PAGE.read_text().partition("\n## Ports and sockets\n")[2]
    for line in section.partition("\n### ")[0].splitlines():
        if line.startswith("| `"):
            commands, listens = (cell.strip() for cell in line.split("|")[1:3])
            address = re.match(r"`([^`]+)`", listens)
            found += [
                (each, address[1] if address else "nothing")
                for each in re.findall(r"`([^`]+)`", commands)
            ]
    return found


def family(process: int) -> set[int]:
    """Ids of a process and of all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, ahead = set(), [process]
    while ahead:
        each = ahead.pop()
        found.add(each)
        ahead += children.get(each, [])
    return found


def listening(process: int) -> set[str]:
    """Addresses on which a process or one that it has started listens."""
    inodes = set()
    for each in family(process):
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{each}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for name, family_of in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.add(f"{socket.inet_ntop(family_of, b''.join(words))}:{int(port, 16)}")
    for line in Path(f"/proc/{process}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & ACCEPTS and fields[6] in inodes:
            found.add(fields[7] if len(fields) > 7 else f"unnamed {fields[6]}")
    return found


def is_answered(shell: Shell) -> bool:
    """Whether a model has replied, so that a session works."""
    journals = (shell.folder / "store").rglob("*.jsonl")
    return any(b'"Replied"' in journal.read_bytes() for journal in journals)


def is_ready(shell: Shell) -> bool:
    """Whether a server has printed its address."""
    return b"Ctrl-C to stop" in (shell.folder / "stderr").read_bytes()


def is_training(shell: Shell) -> bool:
    return (shell.folder / "out" / "metrics.jsonl").exists()


STARTS: dict[str, tuple[list[str], Callable[[Shell], bool]]] = {
    "ask": (ASKED, is_answered),
    "eval": (["needle", *MODEL, "--items", "1", "--concurrency", "1"], is_answered),
    "mcp": (["data", *MODEL], lambda shell: bool((shell.folder / "stdout").read_bytes())),
    "mcp --http": (["data", *MODEL], is_ready),
    "serve": (MODEL, is_ready),
    "serve --meter MODEL": (["scripted:script.json"], is_ready),
    "eval … --with SYSTEM": (["true {question} {context_file}"], is_answered),
    "serve-policy": (["mine"], is_ready),
    "view": ([], is_ready),
    "train": (
        ["small.py", "--out", "out", *SHORT, "rl.steps=100000", "schedule.evaluate_every=1"],
        is_training,
    ),
}
"""Command -> its further arguments, and how to see that it works."""
WORDS = {
    "serve --meter MODEL": ["serve", "--meter"],
    "eval … --with SYSTEM": [
        *("eval", "needle", *MODEL, "--items", "1", "--concurrency", "1", "--max-tokens", "200000"),
        *("--yes", "--with"),
    ],
}
"""Words of a command whose name on the page has a placeholder."""


def started(shell: Shell, words: list[str], ready: Callable[[Shell], bool]) -> Iterator[set[str]]:
    """Yield the listening sockets of a command again and again, until it works."""
    with (
        (shell.folder / "stderr").open("wb") as err,
        (shell.folder / "stdout").open("wb") as out,
    ):
        process = shell.start(*words, stdin=subprocess.PIPE, stdout=out, stderr=err)
        assert process.stdin is not None
        try:
            if words[0] == "mcp" and "--http" not in words:
                process.stdin.write(INITIALIZE)
                process.stdin.flush()
            until = time.monotonic() + 200
            is_last = False
            while not is_last and time.monotonic() < until:
                assert process.poll() is None, (shell.folder / "stderr").read_text()
                is_last = ready(shell)
                yield listening(process.pid)
                time.sleep(0.02)
            assert is_last, (shell.folder / "stderr").read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()


@pytest.mark.parametrize(("named", "address"), rows(), ids=[name for name, _ in rows()])
def test_command_listens_on_what_the_page_says(shell: Shell, named: str, address: str) -> None:
    name = named.removeprefix("ramify ").removesuffix(" --unix-socket")
    words, ready = STARTS[name]
    shell.write("data/rows.txt", "red\n")
    shell.write("rows.txt", "red\n" * 10_000)
    shell.write("small.py", RECIPE)
    shell.model([{"match": "", "reply": code("import time; time.sleep(100)")}])
    if name == "serve-policy":
        save_policy(policy(), shell.folder / "mine")
    if name in ("ask", "eval", "train", "mcp", "eval … --with SYSTEM"):
        options: list[str] = []
    else:
        options = ["--unix-socket"] if named.endswith("--unix-socket") else ["--port", "0"]
    seen: set[str] = set()
    for found in started(shell, [*WORDS.get(name, name.split()), *words, *options], ready):
        seen |= found
    if address == "nothing":
        assert seen == set()
    elif address.startswith("STORE/"):
        assert seen == {address.replace("STORE", str(shell.folder / "store"))}
    else:
        host, _, port = address.rpartition(":")
        (one,) = seen
        assert one.rpartition(":")[0] == host
        if port == "PORT":  # a free one
            return
        about = command_named(name.split()[0]).parser().format_help()
        assert f"(default: {port})" in " ".join(about.split())


def test_page_lists_each_command_that_serves() -> None:
    """A command with an option for its port is in the table, also with its Unix socket."""
    serving = [
        each for each in COMMANDS if any(o.name == "port" for o in command_named(each).options)
    ]
    named = {name for name, _ in rows()}
    for each in serving:
        http = " --http" if each == "mcp" else ""
        assert {f"ramify {each}{http}", f"ramify {each}{http} --unix-socket"} <= named

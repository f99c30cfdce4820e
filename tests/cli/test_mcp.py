"""``ramify mcp`` as a process, called by the official client; and ``--mcp``, which gives a session
the tools of a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.cli.helpers import SESSION_SCRIPT, Shell, code

SERVER = """\
from mcp.server import MCPServer

server = MCPServer("sums", log_level="ERROR")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run()
"""


TASK = """\
from ramify.tasks.base import Item, generated
from ramify.tasks.scoring import numeric
from ramify.tasks.base import DatasetTask

sums = DatasetTask("sums", generated("sums", lambda rng: Item("40 + 2?", "text", gold=42)), numeric)
"""


def client_for(shell: Shell, *arguments: str, said: Any) -> Client:
    given = StdioServerParameters(
        command=sys.executable,
        args=["-m", "ramify", "mcp", *arguments],
        env=shell.env,
        cwd=shell.folder,
    )
    return Client(stdio_client(given, errlog=said))


@contextmanager
def over_http(shell: Shell, *arguments: str) -> Iterator[tuple[str, str]]:
    """Yield (URL, key) of a server."""
    process = shell.start("mcp", "--http", "--port", "0", *arguments)
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        said = [process.stderr.readline().decode().split() for _ in range(2)]
        yield said[0][2], said[1][1]
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        process.stdout.close()


def text(result: Any) -> str:
    (block,) = result.content
    return str(block.text)


def test_questions_are_answered_over_http_with_the_key(shell: Shell) -> None:
    shell.write("data/rows.txt", "red\n" * 10_000)
    model = shell.model(list(SESSION_SCRIPT))

    async def ask(url: str, key: str) -> Any:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        headers = {"Authorization": f"Bearer {key}"}
        async with (
            create_mcp_http_client(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            return await client.call_tool("ask", {"question": "how long?", "paths": ["rows.txt"]})

    with over_http(shell, "data", "--model", model, "--no-direct") as (url, key):
        assert text(asyncio.run(ask(url, key))) == "40000"
        for wrong, status in (({}, 401), ({"Authorization": f"Bearer {key}", "Host": "a.b"}, 403)):
            request = urllib.request.Request(
                url, b"{}", {"Content-Type": "application/json", **wrong}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            with refused.value:
                assert refused.value.code == status
                assert "message" in json.load(refused.value)["error"]


def test_questions_about_files_are_answered_over_stdio(shell: Shell) -> None:
    """Runs use the jail and are stored; progress is reported; paths that lead out are refused."""
    shell.write("data/rows.txt", "red\n" * 10_000)
    shell.write("data/more/a.log", "blue")
    shell.write("secret.txt", "the key")
    os.symlink(shell.folder / "secret.txt", shell.folder / "data" / "link.txt")
    model = shell.model(
        [
            {"match": "How long", "reply": SESSION_SCRIPT[0]},
            {"match": "", "reply": SESSION_SCRIPT[1]},
        ]
    )

    async def test() -> None:
        said: list[str | None] = []

        async def progress(_: float, __: float | None, message: str | None) -> None:
            said.append(message)

        with open(shell.folder / "said", "w") as errors:  # noqa: ASYNC230
            async with client_for(
                shell, "data", "--model", model, "--no-direct", said=errors
            ) as client:
                (tool,) = (await client.list_tools()).tools
                assert tool.name == "ask"
                assert str(shell.folder / "data") in (tool.description or "")
                asked = {"question": "How long?", "paths": ["rows.txt"]}
                result = await client.call_tool("ask", asked, progress_callback=progress)
                assert (text(result), result.is_error) == ("40000", False)
                assert result.structured_content is not None
                assert (result.structured_content["answer"], result.structured_content["stop"]) == (
                    40000,
                    "final",
                )
                assert any("print(len(context))" in (each or "") for each in said)
                everything = await client.call_tool("ask", {"question": "How long?"})
                assert text(everything) == "2"  # number of files, without the link that leads out
                schema = {
                    "question": "How long?",
                    "paths": ["*.txt"],
                    "answer_schema": {"type": "integer"},
                }
                assert text(await client.call_tool("ask", schema)) == "40000"
                wrong = {
                    "../secret.txt": "is outside what may be read",
                    str(shell.folder / "secret.txt"): "is outside what may be read",
                    "link.txt": "is outside what may be read",
                    "../*.txt": "is outside what may be read",
                    "nowhere.txt": "nowhere.txt does not exist in",
                }
                for path, says in wrong.items():
                    result = await client.call_tool("ask", {"question": "What?", "paths": [path]})
                    assert result.is_error
                    assert says in text(result)

    asyncio.run(test())
    assert len(shell.run("runs", "--json").out.splitlines()) == 3
    assert (shell.folder / "said").read_text() == ""


def test_model_failure_is_a_tool_error(shell: Shell) -> None:
    shell.write("rows.txt", "red\n")
    model = shell.model([{"fail": "refused", "status": 401, "text": "wrong key"}])

    async def test() -> None:
        with open(os.devnull, "w") as errors:  # noqa: ASYNC230
            async with client_for(shell, "--model", model, said=errors) as client:
                result = await client.call_tool("ask", {"question": "How long?"})
                assert result.is_error
                assert "wrong key" in text(result)

    asyncio.run(test())


def test_session_gets_tools_of_an_mcp_server(shell: Shell) -> None:
    """A resumed run gets them too; values of environment variables are never recorded."""
    server = f"TOKEN=sk-of-mine {sys.executable} {shell.folder / shell.write('server.py', SERVER)}"
    script = [code("x = add(40, 1)"), {"fail": "refused", "status": 401, "text": "wrong key"}]
    failed = shell.ask(script, "How much?", "--mcp", server)
    assert failed.code == 5
    assert "wrong key" in failed.err
    (journal,) = (shell.folder / "store" / "runs").glob("*.jsonl")
    recorded = journal.read_text()
    assert "sk-of-mine" not in recorded
    lines = recorded.splitlines()
    cut = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "CellRan")
    journal.write_text("\n".join(lines[: cut + 1]) + "\n")  # as if it had been killed there
    shell.model([code("FINAL(add(x, 1))")])
    resumed = shell.run("ask", "--resume", "last")
    assert (resumed.out, resumed.code) == ("42\n", 0), resumed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mcp"], "no model is set"),
        (["mcp", "nowhere", "--model", "scripted:script.json"], "nowhere does not exist"),
        (
            ["ask", "x", "--model", "scripted:script.json", "--mcp", "nowhere-at-all"],
            "MCP server nowhere-at-all cannot",
        ),
    ],
)
def test_setup_errors_exit_with_usage_code(shell: Shell, arguments: list[str], says: str) -> None:
    shell.model(["x"])
    done = shell.run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_evaluation_gets_tools_of_an_mcp_server(shell: Shell) -> None:
    """The plan and each run name the servers, but not the values of environment variables."""
    shell.write("task.py", TASK)
    server = f"TOKEN=sk-of-mine {sys.executable} {shell.folder / shell.write('server.py', SERVER)}"
    model = shell.model([{"match": "", "reply": [code("FINAL(add(40, 2))")]}])
    asked = (
        "eval",
        "task.py:sums",
        "--model",
        model,
        "--items",
        "2",
        "--no-direct",
        "-q",
        "--no-validate",
    )
    done = shell.run(*asked, "--mcp", server, "--json")
    assert json.loads(done.out)["rows"][0]["average"]["value"] == 1.0, done.err
    stored = [path.read_text() for path in (shell.folder / "store").rglob("*.jsonl")]
    assert [text.count("TOKEN= ") for text in stored] == [1, 1, 1]
    assert not any("sk-of-mine" in text for text in stored)

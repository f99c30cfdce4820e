"""MCP servers as tools in a session: a real server in a separate process, used through the official
SDK.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator

import pytest

from ramify.engine.mcp_tools import McpTools, redacted_server, to_function_name
from ramify.errors import ConfigError
from tests.engine.helpers import code, rlm

SERVER = '''\
import os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent, ImageContent

server = MCPServer("sums", log_level="ERROR")

@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b

@server.tool(name="say-hello")
def hello(names: list[str]) -> str:
    """Greet."""
    return "Hello " + " and ".join(names)

@server.tool()
def row() -> dict[str, int]:
    """A row."""
    return {"red": 3}

@server.tool()
def fail(text: str):
    """Fail."""
    raise ToolError(text)

@server.tool()
def secret() -> str:
    """What the environment has."""
    return os.environ.get("TOKEN", "nothing") + os.environ.get("OPENAI_API_KEY", "")

@server.tool()
def picture() -> CallToolResult:
    """A picture."""
    return CallToolResult(content=[ImageContent(type="image", data="aGk=", mime_type="image/png")])

@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)

server.run()
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return f"{sys.executable} {path}"


@pytest.fixture(scope="module")
def tools(server: str) -> Iterator[McpTools]:
    with McpTools(server) as tools:
        yield tools


def test_session_calls_mcp_tools(tools: McpTools) -> None:
    model = rlm(
        [
            code("print(add(40), add(1, b=5), say_hello(['Ada', 'Bo']), row()['red'])"),
            code("FINAL(add(a=20, b=22))"),
        ],
        tools=tools,
    )
    with model:
        result = model.completion("How much?")
    assert result.answer == 42
    (shown,) = result.trajectory.root.turns[0].cells
    assert shown.stdout == "42 6 Hello Ada and Bo 3\n"
    prompt = result.trajectory.root.turns[0].prompt[0].content
    assert "- `add(a: int, b: int = 2)`: Add two numbers." in prompt


def test_mcp_errors_become_exceptions_in_the_session(server: str) -> None:
    cells = [
        "try:\n    fail('too big')\nexcept RuntimeError as e: print('E1', e)",
        "try:\n    add(1, 2, 3)\nexcept TypeError as e: print('E2', e)",
        "try:\n    add('x')\nexcept RuntimeError as e: print('E3', e)",
        "try:\n    die()\nexcept RuntimeError as e: print('E4', e)",
    ]
    with McpTools(server) as tools, rlm([code(*cells), code("FINAL(1)")], tools=tools) as model:
        result = model.completion("x")
    said = "".join(cell.stdout for cell in result.trajectory.root.turns[0].cells)
    assert "E1 " in said
    assert "too big" in said
    assert "E2 add: too many positional arguments" in said
    assert "E3 " in said
    assert "valid integer" in said
    assert "E4 " in said, said
    assert result.answer == 1


def test_mcp_tools_work_from_any_event_loop(tools: McpTools) -> None:
    async def ask() -> object:
        async with rlm([code("FINAL(add(1))")], tools={**tools, "own": lambda: 5}) as model:
            return (await model.acompletion("x")).answer

    assert asyncio.run(ask()) == 3


def test_non_text_results_and_signatures_are_preserved(tools: McpTools) -> None:
    (block,) = asyncio.run(tools["picture"]())
    assert (block["type"], block["data"]) == ("image", "aGk=")
    assert inspect.signature(tools["fail"]).parameters["text"].annotation is str


def test_two_servers_have_separate_names_and_environments(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colliding names get the name of the server; a server gets only the given variables, and no
    provider keys."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    monkeypatch.setenv("TOKEN", "from-here")
    with McpTools(f"TOKEN=abc {server}", f"TOKEN= {server}") as tools:
        assert asyncio.run(tools["secret"]()) == "abc"
        assert asyncio.run(tools["sums_secret"]()) == "from-here"
        assert [each.split()[0] for each in tools.servers] == ["TOKEN=", "TOKEN="]
        assert len(tools) == 14
    with pytest.raises(RuntimeError, match="is no longer connected"):
        asyncio.run(tools["secret"]())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere-to-be-found --x", "MCP server nowhere-to-be-found --x cannot be used"),
        (
            f"{sys.executable} -c 'raise SystemExit(\"no such table\")'",
            "its last output: no such table",
        ),
        ("TOKEN=abc", "has no command"),
        ("serve 'x", "is not a command"),
        ("http://127.0.0.1:9/mcp", "http://127.0.0.1:9/mcp cannot be used"),
    ],
)
def test_unusable_server_is_reported(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        McpTools(given)


def test_tool_names_and_recorded_commands_are_sanitized() -> None:
    assert [to_function_name(each) for each in ("git-log", "2d", "import", "context", "größe")] == [
        "git_log",
        "_2d",
        "import_",
        "context_",
        "gr__e",
    ]
    assert redacted_server("A=1 B='x y' cmd 'a b'") == "A= B= cmd 'a b'"
    assert redacted_server("https://user:pw@host/mcp?key=1") == "https://host/mcp"
    with pytest.raises(ConfigError, match="no MCP server"):
        McpTools()
    assert os.environ.get("B") is None

"""MCP servers of the user's as tools in a session, through the official SDK (the extra ``mcp``).

    with ramify.McpTools("uvx mcp-server-git", "https://host/mcp") as tools:
        ramify.RLM("openai:gpt-5-mini", tools=tools).completion("What changed last week?")

    session ── git_log(max_count=5) ──> host ──> the connection's own loop and task ──> server
A server runs with the rights of whoever named it, so only a user names one, never a model. A tool is a function with its
parameters from the tool's schema; what it returns is the structured result where there is one, else its text. What an MCP
server may ask of its client besides (sampling, elicitation, roots) is not offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import keyword
import os
import re
import shlex
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ramify.engine import event_loop_thread
from ramify.engine.tool_set import RESERVED
from ramify.errors import ConfigError, RamifyError

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult, Tool

CONNECT_S = 120.0
"""For a server to start: some fetch themselves first."""
_MOST_CHARS = 600
"""Of a tool's description that a model is shown."""
_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class McpTools(Mapping[str, Callable[..., Any]]):
    """The tools of one or more MCP servers, by name: for ``RLM(tools=…)``, alone or as ``{**tools,
    "own": own}``.

    Connected as soon as it is made, which waits (in an event loop: ``await
    asyncio.to_thread(McpTools, …)``), and until ``close``."""

    def __init__(self, *servers: str, timeout_s: float = 300.0) -> None:
        """A server is a command, with ``NAME=VALUE`` before it for its environment (``NAME=`` takes
        this process's value), or an ``http(s)://`` address. ``timeout_s`` is the most that one call
        may take. Raises ConfigError for a server that cannot be had."""
        if not servers:
            raise ConfigError("no MCP server: give a command or an address")
        need_extra("MCP servers")
        self.servers = tuple(map(recorded, servers))
        """What was given, without the values of variables: for a record."""
        self._functions: dict[str, Callable[..., Any]] = {}
        self._keepers = [_McpConnection(server, timeout_s) for server in servers]
        self._finalizer = weakref.finalize(self, _close, self._keepers)
        try:
            for keeper in self._keepers:
                for tool in event_loop_thread.run(keeper.open()):
                    self._add(keeper, tool)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._finalizer()

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, keeper: _McpConnection, tool: Tool) -> None:
        name = function_name(tool.name)
        if name in self._functions:
            name = function_name(f"{keeper.name}_{tool.name}")
        number, unique = 2, name
        while unique in self._functions:
            unique, number = f"{name}_{number}", number + 1
        self._functions[unique] = _function(self, keeper, tool, unique)


class _McpConnection:
    """One connection, in a task of its own: the SDK wants it closed by the task that opened it."""

    def __init__(self, server: str, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self.name = ""
        """The server's own name."""
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None

    async def open(self) -> list[Tool]:
        """Connect, and list the tools. Raises ConfigError."""
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(self._keep(ready))
        return await ready

    async def _keep(self, ready: asyncio.Future[list[Tool]]) -> None:
        assert self._stop is not None
        with tempfile.TemporaryFile("w+") as said:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(CONNECT_S):
                        client = await stack.enter_async_context(_client(self._server, said))
                        tools = await _listed(client)
                    self._client = client
                    self.name = client.server_info.name if client.server_info else ""
                    ready.set_result(tools)
                    await self._stop.wait()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 -- what the SDK raises is of many kinds, groups among them
                if not ready.done():
                    ready.set_exception(_unreachable(self._server, error, said))
            finally:
                self._client = None

    async def close(self) -> None:
        if self._stop is not None and self._task is not None:
            self._stop.set()
            await asyncio.wait({self._task}, timeout=10)
            self._task.cancel()

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """On the connection's loop."""
        if self._client is None:
            raise RuntimeError(f"the MCP server {recorded(self._server)} is not connected any more")
        return await self._client.call_tool(tool, arguments, read_timeout_seconds=self._timeout_s)


def need_extra(what: str) -> None:
    """Raises ConfigError where the SDK is not installed."""
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise ConfigError(f"{what} need the official SDK: pip install 'ramify[mcp]'")


def recorded(server: str) -> str:
    """``"TOKEN=abc serve --x"`` -> ``"TOKEN= serve --x"``; of an address without what may be a
    secret in it."""
    if _is_address(server):
        return re.sub(r"//[^/@]*@", "//", server).partition("?")[0]
    variables, words = _split(server)
    return shlex.join([*(f"{name}=" for name in variables), *words]) if variables else server


def function_name(tool: str) -> str:
    """``"git-log"`` -> ``"git_log"``: a name that a session can use."""
    name = re.sub(r"\W", "_", tool, flags=re.ASCII) or "tool"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


def _is_address(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _split(server: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words."""
    try:
        words = shlex.split(server)
    except ValueError as error:
        raise ConfigError(f"the MCP server {server!r} is not a command: {error}") from None
    variables = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value or os.environ.get(name, "")
    if not words:
        raise ConfigError(
            f"the MCP server {server!r} has no command: give one, or an http(s):// address"
        )
    return variables, words


def _client(server: str, said: Any) -> Client:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if _is_address(server):
        return Client(server)
    variables, (command, *arguments) = _split(server)
    given: StdioServerParameters = StdioServerParameters(
        command=command, args=arguments, env=variables
    )
    return Client(stdio_client(given, errlog=said))


async def _listed(client: Client) -> list[Tool]:
    """All tools, page by page."""
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(100):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _unreachable(server: str, error: BaseException, said: Any) -> ConfigError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said.seek(0)
    last = " ".join((said.read().strip().splitlines() or [""])[-1].split())[:300]
    why = (
        f"nothing within {CONNECT_S:g} s"
        if isinstance(error, TimeoutError)
        else f"{type(error).__name__}: {error}"
    )
    return ConfigError(
        f"the MCP server {recorded(server)} cannot be had "
        f"({why}{f'; it said: {last}' if last else ''}): check the command"
    )


def _function(owner: McpTools, keeper: _McpConnection, tool: Tool, name: str) -> Callable[..., Any]:
    """A function for the session, as its model sees it. It keeps its ``owner``, and so the
    connection."""
    schema = tool.input_schema
    signature = _signature(schema)

    async def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.pop("more", {})}
        asked = asyncio.run_coroutine_threadsafe(
            keeper.call(tool.name, arguments), event_loop_thread.loop()
        )
        return _value(await asyncio.wrap_future(asked), tool)

    call.owner = owner  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = _described(tool, schema)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(schema: Mapping[str, Any]) -> inspect.Signature:
    """What must be given comes first; names that Python cannot have go into ``**more``."""
    required = set(schema.get("required", ()))
    fields = schema.get("properties", {})
    usable = [
        name
        for name in fields
        if name.isidentifier() and not keyword.iskeyword(name) and name != "more"
    ]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if name in required else fields[name].get("default"),
            annotation=_TYPES.get(str(fields[name].get("type")), inspect.Parameter.empty),
        )
        for name in sorted(usable, key=lambda name: name not in required)
    ]
    if len(usable) < len(fields) or (not fields and schema.get("additionalProperties")):
        parameters.append(inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _described(tool: Tool, schema: Mapping[str, Any]) -> str:
    """One paragraph: what it does, and what its parameters are."""
    about = " ".join((tool.description or tool.title or "a tool of an MCP server").split())
    fields = [
        (name, field.get("description")) for name, field in schema.get("properties", {}).items()
    ]
    notes = "; ".join(
        f"{name}: {' '.join(text.split())}" for name, text in fields if isinstance(text, str)
    )
    text = f"{about} ({notes})" if notes else about
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def _value(result: CallToolResult, tool: Tool) -> Any:
    """What the session gets. Raises RuntimeError with the tool's own text where it failed."""
    texts = [each.text for each in result.content if each.type == "text"]
    if result.is_error:
        raise RuntimeError("\n".join(texts) or "the tool failed without a word")
    structured = result.structured_content
    if structured is not None:
        is_wrapped = isinstance(structured, dict) and [*structured] == ["result"]
        return structured["result"] if is_wrapped else structured
    if len(texts) == len(result.content):
        return "\n".join(texts)
    return [each.model_dump(mode="json", exclude_none=True) for each in result.content]


def _close(keepers: list[_McpConnection]) -> None:
    for keeper in keepers:
        with contextlib.suppress(RamifyError, RuntimeError):
            event_loop_thread.run(keeper.close())

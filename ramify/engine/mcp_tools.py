"""Offer the tools of MCP servers in a session as Python functions.

This uses the official MCP SDK (the extra ``mcp``).

    with ramify.McpTools("uvx mcp-server-git", "https://host/mcp") as tools:
        ramify.RLM("openai:gpt-5-mini", tools=tools).completion("What changed last week?")

    session ── git_log(max_count=5) ──> host ──> the connection's task ──> server

A server runs with the permissions of the user who configured it, so only users name servers, never
a model. Each tool becomes a function with parameters from the tool's schema. It returns the
structured result if there is one, otherwise the text. Requests of an MCP server to its client
(sampling, elicitation, roots) are not supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import keyword
import os
import re
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ramify.engine import event_loop_thread
from ramify.engine.tool_set import RESERVED
from ramify.errors import ConfigError, RamifyError
from ramify.pip_install_command import install_command

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult, Tool

CONNECT_S = 120.0
"""Default time limit in seconds for the start of an MCP server. Some servers are downloaded when
they are started."""
_MOST_CHARS = 600
"""Maximum characters of a tool's description that the model sees."""
_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class McpTools(Mapping[str, Callable[..., Any]]):
    """A mapping from names to the tools of one or more MCP servers.

    Pass it as ``RLM(tools=…)``, alone or combined with other tools: ``{**tools, "own": own}``.

    Creating it connects to the servers and blocks until all are connected (in an event loop, use
    ``await asyncio.to_thread(McpTools, …)``). The connections last until ``close``.

    Example:
        with ramify.McpTools("uvx mcp-server-git", timeout_s=60) as tools:
            rlm = ramify.RLM("openai:gpt-5-mini", tools=tools)
    """

    def __init__(self, *servers: str, timeout_s: float = 300.0, start_s: float = CONNECT_S) -> None:
        """Connect to the given MCP servers and wait until all of them have listed their tools.

        A server is an ``http(s)://`` address, or a command that may be preceded by ``NAME=VALUE``
        for its environment (``NAME=`` uses the value of this process). ``timeout_s`` limits each
        call, ``start_s`` the start of each server. Raises ConfigError for an unreachable one.
        """
        if not servers:
            raise ConfigError("no MCP server: give a command or an address")
        require_mcp_sdk("MCP servers")
        self.servers = tuple(map(redacted_server, servers))
        """Servers as written to the run's record, without the values of environment variables."""
        self._functions: dict[str, Callable[..., Any]] = {}
        self._connections = [_McpConnection(server, timeout_s, start_s) for server in servers]
        self._finalizer = weakref.finalize(self, _close, self._connections)
        try:
            for connection in self._connections:
                for tool in event_loop_thread.run(connection.open()):
                    self._add(connection, tool)
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
        """Disconnect from the MCP servers that provide the tools.

        Calling it again has no effect.
        """
        self._finalizer()

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, connection: _McpConnection, tool: Tool) -> None:
        name = to_function_name(tool.name)
        if name in self._functions:
            name = to_function_name(f"{connection.name}_{tool.name}")
        number, unique = 2, name
        while unique in self._functions:
            unique, number = f"{name}_{number}", number + 1
        self._functions[unique] = _function(self, connection, tool, unique)


class _McpConnection:
    """One connection to an MCP server, held open by its own asyncio task.

    The SDK requires that the task that opens a connection also closes it.
    """

    def __init__(self, server: str, timeout_s: float, start_s: float) -> None:
        self._server = server
        self._start_s = start_s
        self._timeout_s = timeout_s
        self.name = ""
        """The name that the server reports."""
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None

    async def open(self) -> list[Tool]:
        """Connect to the MCP server and return the list of its tools.

        Raises ConfigError on failure.
        """
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(self._hold_open(ready))
        return await ready

    async def _hold_open(self, ready: asyncio.Future[list[Tool]]) -> None:
        assert self._stop is not None
        with tempfile.TemporaryFile("w+") as errors:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(self._start_s):
                        client = await stack.enter_async_context(_client(self._server, errors))
                        tools = await _all_tools(client)
                    self._client = client
                    self.name = client.server_info.name if client.server_info else ""
                    ready.set_result(tools)
                    await self._stop.wait()
            except asyncio.CancelledError:
                raise
            except ConfigError as error:
                ready.set_exception(error)
            except BaseException as error:  # noqa: BLE001 -- the SDK raises many types and groups
                if not ready.done():
                    ready.set_exception(
                        _unreachable_error(self._server, error, errors, self._start_s)
                    )
            finally:
                self._client = None

    async def close(self) -> None:
        if self._stop is not None and self._task is not None:
            self._stop.set()
            await asyncio.wait({self._task}, timeout=10)
            # A server that does not end within that time must not block the caller.
            self._task.cancel()

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call the MCP tool ``tool`` on the server and return its result.

        Must run on the event loop of the connection.
        """
        if self._client is None:
            raise RuntimeError(
                f"the MCP server {redacted_server(self._server)} is no longer connected"
            )
        return await self._client.call_tool(tool, arguments, read_timeout_seconds=self._timeout_s)


def require_mcp_sdk(what: str) -> None:
    """Raise ConfigError if the MCP SDK is not installed.

    ``what`` names the feature that needs the SDK.
    """
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise ConfigError(
            f"{what}: the official MCP SDK is not installed: {install_command('mcp')}"
        )


def redacted_server(server: str) -> str:
    """Remove the secrets from a server's command or address, so that it can be recorded.

    For example, ``"TOKEN=abc serve --x"`` becomes ``"TOKEN= serve --x"``, and an address loses its
    user and query.
    """
    if _is_address(server):
        return re.sub(r"//[^/@]*@", "//", server).partition("?")[0]
    variables, words = _split(server)
    return shlex.join([*(f"{name}=" for name in variables), *words]) if variables else server


def to_function_name(tool: str) -> str:
    """Convert the name of a tool to a valid name for a function in a session; ``"git-log"`` becomes
    ``"git_log"``."""
    name = re.sub(r"\W", "_", tool, flags=re.ASCII) or "tool"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


def _is_address(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _split(server: str) -> tuple[dict[str, str], list[str]]:
    """Split a server's command line into its environment variables and the words of the command.

    The variables precede the command in the form ``NAME=VALUE``. Raises ConfigError if the command
    is missing.
    """
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


def _client(server: str, errors: Any) -> Client:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if _is_address(server):
        return Client(server)
    variables, (command, *arguments) = _split(server)
    if shutil.which(command, path=variables.get("PATH")) is None:
        raise ConfigError(
            f"the MCP server {redacted_server(server)} cannot be used: no program "
            f"{command!r} was found "
            "here: install it, or give its whole path"
        )
    if os.name == "posix" and shutil.which(command):
        # The SDK starts a session for the server, and ends the server alone when its input ends:
        # the shell then ends what the server leaves in the session's process group.
        arguments = ["-c", '"$@"; kill -KILL 0', "sh", command, *arguments]
        command = "/bin/sh"
    parameters: StdioServerParameters = StdioServerParameters(
        command=command, args=arguments, env=variables
    )
    return Client(stdio_client(parameters, errlog=errors))


async def _all_tools(client: Client) -> list[Tool]:
    """Return all tools of an MCP server, which lists them in pages."""
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(100):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _unreachable_error(
    server: str, error: BaseException, errors: Any, start_s: float
) -> ConfigError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    errors.seek(0)
    last = " ".join((errors.read().strip().splitlines() or [""])[-1].split())[:300]
    why = (
        f"no answer within {start_s:g} s"
        if isinstance(error, TimeoutError)
        else f"{type(error).__name__}: {error}"
    )
    return ConfigError(
        f"the MCP server {redacted_server(server)} cannot be used "
        f"({why}{f'; its last output: {last}' if last else ''}): check the command"
    )


def _function(
    owner: McpTools, connection: _McpConnection, tool: Tool, name: str
) -> Callable[..., Any]:
    """Return a Python function that calls an MCP tool.

    The function keeps a reference to ``owner``, so the connection stays open as long as the
    function exists.
    """
    schema = tool.input_schema
    signature = _signature(schema)

    async def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.pop("more", {})}
        future = asyncio.run_coroutine_threadsafe(
            connection.call(tool.name, arguments), event_loop_thread.background_loop()
        )
        return _convert_result(await asyncio.wrap_future(future), tool)

    call.owner = owner  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = _describe_tool(tool, schema)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(schema: Mapping[str, Any]) -> inspect.Signature:
    """Return the Python signature of a tool with the given JSON schema.

    Required parameters come first. Names that are invalid in Python are passed through ``**more``.
    """
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


def _describe_tool(tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return one paragraph for the model that describes a tool and its parameters."""
    about = " ".join((tool.description or tool.title or "a tool of an MCP server").split())
    fields = [
        (name, field.get("description")) for name, field in schema.get("properties", {}).items()
    ]
    notes = "; ".join(
        f"{name}: {' '.join(text.split())}" for name, text in fields if isinstance(text, str)
    )
    text = f"{about} ({notes})" if notes else about
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def _convert_result(result: CallToolResult, tool: Tool) -> Any:
    """Convert the result of an MCP tool to a Python value for the session.

    Raises RuntimeError with the tool's message if the tool failed.
    """
    texts = [block.text for block in result.content if block.type == "text"]
    if result.is_error:
        raise RuntimeError("\n".join(texts) or "the tool failed without a word")
    structured = result.structured_content
    if structured is not None:
        is_wrapped = isinstance(structured, dict) and [*structured] == ["result"]
        return structured["result"] if is_wrapped else structured
    if len(texts) == len(result.content):
        return "\n".join(texts)
    return [block.model_dump(mode="json", exclude_none=True) for block in result.content]


def _close(connections: list[_McpConnection]) -> None:
    for connection in connections:
        with contextlib.suppress(RamifyError, RuntimeError):
            event_loop_thread.run(connection.close())

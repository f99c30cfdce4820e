"""Make the user's functions callable from session code.

They execute in this process, with its permissions.

A tool is a function (plain or ``async``) or another value. To replace the description in a tool's
docstring, give ``{"tool": f, "description": "…"}``. Each plain function runs in a separate thread,
so a slow function, or one that never returns, blocks nothing else. A tool's return value must be
supported by the session's codec.

Tools that come with a context may have further attributes (``sources/text_search.py``):

    prepare()        is called when a session is opened
    is_optional      True if only scaffolds that list the tools have it; a repeated run creates it
                     again
    is_replaceable   True if a cell may bind the tool's name to another value
    session_source   source code of a module that defines the tool in the session
    prompt_entry     the tool's text in the prompt, in place of its signature and docstring
    strategy(…)      returns an object that answers one call of the tool by small questions to a
                     model; these are recorded in place of a result (see
                     ``engine/session_host_calls.py``)
"""

from __future__ import annotations

import asyncio
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ramify.engine import observation_messages
from ramify.engine.event_loop_thread import run_in_daemon_thread
from ramify.errors import ConfigError, HostCallError, did_you_mean

Tools = Mapping[str, Any] | Sequence[Callable[..., Any]]
"""Functions by name, or a list of named functions. Values other than functions are passed to the
session unchanged."""

RESERVED = frozenset(
    {
        "FINAL",
        "FINAL_VAR",
        "SHOW_VARS",
        "SubcallError",
        "answer",
        "context",
        "history",
        "llm_query",
        "llm_query_batched",
        "outputs",
        "rlm_query",
        "rlm_query_batched",
    }
)


def optional_tool_names(tools: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that are marked as optional.

    Optional tools come with a context and can be created again when a run is repeated.
    """
    return [name for name, tool in tools.items() if getattr(tool, "is_optional", False)]


_CALL = """\
import builtins

def _call(name, args, kwargs):
    try:
        return call_host('tool', name, *args, **kwargs)
    except SessionHostCallError as error:
        kind = getattr(builtins, error.kind, None)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind(str(error)) if known else RuntimeError(f'{error.kind}: {error}')) from None
"""


_REPLACEABLE = """\
if globals().get('namespace_is_live', True):
    namespace.update({{name: globals()[name] for name in {names!r}}})
else:
    __all__ += {names!r}
"""


class ToolSet:
    """A validated set of the tools that session code can use.

    The host executes functions when session code calls them, and sends other values to the session
    once.
    """

    def __init__(self, tools: Tools | None) -> None:
        if tools is not None and not isinstance(tools, Iterable):
            raise ConfigError(
                f"tools is a {type(tools).__name__}: give a list of functions, or a dict by name"
            )
        named = (
            dict(tools)
            if isinstance(tools, Mapping)
            else {_name_of(tool): tool for tool in tools or ()}
        )
        for name in named:
            if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
                why = (
                    "the session already has this name"
                    if name in RESERVED
                    else "it is not a Python name"
                )
                raise ConfigError(f"a tool cannot be called '{name}': {why}")
        self.descriptions: dict[str, str] = {}
        """Name of a tool -> the description that the user gave. Other tools are described by their
        docstrings."""
        for name, tool in named.items():
            if isinstance(tool, Mapping) and tool.keys() == {"tool", "description"}:
                if not isinstance(tool["description"], str):
                    kind = type(tool["description"]).__name__
                    raise ConfigError(f"the description of tool '{name}' is a {kind}: give a text")
                named[name] = tool["tool"]
                self.descriptions[name] = " ".join(tool["description"].split())
        self.functions: dict[str, Callable[..., Any]] = {
            name: tool for name, tool in named.items() if callable(tool)
        }
        self.values: dict[str, Any] = {
            name: tool for name, tool in named.items() if not callable(tool)
        }

    def plus(self, tools: Mapping[str, Any]) -> ToolSet:
        return ToolSet({**self._user_tools(), **tools})

    def overrides_optional(self, name: str, tool: Any) -> bool:
        """Return True if ``tool`` is optional and the user has passed another tool of the same
        name."""
        is_taken = name in self.functions or name in self.values
        return is_taken and getattr(tool, "is_optional", False)

    def _user_tools(self) -> dict[str, Any]:
        """Return the tools and their descriptions in the form in which the user passed them."""
        return {
            name: {"tool": tool, "description": self.descriptions[name]}
            if name in self.descriptions
            else tool
            for name, tool in {**self.functions, **self.values}.items()
        }

    def only(self, names: Sequence[str]) -> ToolSet:
        """Return a tool set that contains only the tools with the given names.

        Raises ConfigError for an unknown name.
        """
        every = self._user_tools()
        for name in names:
            if name not in every:
                raise ConfigError(f"depths: unknown tool '{name}': {did_you_mean(name, every)}")
        return ToolSet({name: every[name] for name in names})

    def without_optional(self) -> ToolSet:
        """Return the set without optional tools, for scaffolds whose prompt does not list tools."""
        every = self._user_tools()
        optional = optional_tool_names(self.functions)
        return ToolSet({n: t for n, t in every.items() if n not in optional}) if optional else self

    def warm_up(self) -> None:
        """Let each tool start its background work, such as indexing, while a session opens."""
        for tool in self.functions.values():
            if hasattr(tool, "prepare"):
                tool.prepare()

    @property
    def servers(self) -> list[str]:
        """The MCP servers whose functions are in this set, in their recorded form without
        secrets."""
        owners = (getattr(tool, "owner", None) for tool in self.functions.values())
        return [
            *dict.fromkeys(server for owner in owners for server in getattr(owner, "servers", ()))
        ]

    def journal_record(self) -> dict[str, str]:
        """Return what the journal records about each tool: a function's code hash or a value's
        type.

        Functions of MCP servers are not included.
        """
        own = {name: f for name, f in self.functions.items() if not hasattr(f, "owner")}
        values = {name: type(value).__name__ for name, value in self.values.items()}
        return {name: _hash_of(tool) for name, tool in own.items()} | values

    def describe(self) -> str:
        """Return the lines of the system prompt that describe the tools.

        Empty if there are no tools.
        """
        lines = [
            getattr(tool, "prompt_entry", "")
            or f"- `{name}{_signature(tool)}`: {self._summary(name)}"
            for name, tool in self.functions.items()
        ]
        lines += [
            f"- `{name}`: {self.descriptions.get(name) or f'a {type(value).__name__}'}"
            for name, value in self.values.items()
        ]
        return "\n".join(["Also in the session:", *lines, ""]) if lines else ""

    def _summary(self, name: str) -> str:
        return self.descriptions.get(name) or _summary(self.functions[name])

    def module_sources(self) -> dict[str, str]:
        """Return the source code of the modules to install in a session, by module name.

        One module has a function for each tool that the host executes. The others belong to tools
        with their own source code.
        """
        sources = {
            name: tool.session_source
            for name, tool in self.functions.items()
            if hasattr(tool, "session_source")
        }
        called = [name for name in self.functions if name not in sources]
        return {**({"tools": self._source(called)} if called else {}), **sources}

    def _source(self, names: Sequence[str]) -> str:
        functions = {name: self.functions[name] for name in names}
        replaceable = [n for n, f in functions.items() if getattr(f, "is_replaceable", False)]
        reserved = [name for name in names if name not in replaceable]
        parts = [
            f"def {name}(*args, **kwargs):\n    "
            f"{(f'{name}{_signature(tool)}: ' + self._summary(name))!r}\n"
            f"    return _call({name!r}, args, kwargs)\n"
            for name, tool in functions.items()
        ]
        bound = _REPLACEABLE.format(names=replaceable) if replaceable else ""
        return "\n".join([_CALL, *parts, f"__all__ = {reserved!r}\n{bound}"])

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Execute a tool that session code has called, and return its result.

        If the tool raises an exception, raise HostCallError with the exception's type and text.
        """
        tool = self.functions.get(name)
        if tool is None:
            raise HostCallError("NameError", observation_messages.NO_TOOL.format(name=name))
        result, error = await _execute_tool(tool, args, kwargs)
        if error is not None:
            text = _text_of(error)
            # The tools of sources, such as sql, name themselves.
            text = text if text.startswith(f"{name}: ") else f"{name}: {text}"
            raise HostCallError(type(error).__name__, text) from error
        return result


def _hash_of(tool: Any) -> str:
    import hashlib

    try:
        source = inspect.getsource(tool)
    except (OSError, TypeError):  # a callable object, or a function that was typed in
        source = getattr(getattr(tool, "__code__", None), "co_code", type(tool).__qualname__)
    return hashlib.sha256(repr(source).encode()).hexdigest()[:16]


async def _execute_tool(
    tool: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Execute a tool and return its result and its exception, one of which is always None.

    The exception is returned as a value because a future cannot hold StopIteration, and SystemExit
    would end the event loop.
    """

    def run() -> tuple[Any, Any]:
        try:
            return tool(*args, **kwargs), None
        except BaseException as error:  # noqa: BLE001 -- shown to the model, whatever it is
            return None, error

    result, error = run() if inspect.iscoroutinefunction(tool) else await run_in_daemon_thread(run)
    if not inspect.isawaitable(result):
        return result, error
    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    try:
        return await result, None
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        if task.cancelling() > cancels:
            raise
        return None, raised


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 -- a user-defined exception
        return f"(its text cannot be had: {type(worse).__name__})"


def _name_of(tool: Callable[..., Any]) -> str:
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"the tool {tool!r} has no usable name: give tools as a dict of name to function"
        )
    return name


def _signature(tool: Callable[..., Any]) -> str:
    # Prefer evaluated annotations over their text, if they can be evaluated.
    for eval_str in (True, False):
        try:
            return str(inspect.signature(tool, eval_str=eval_str))
        except (TypeError, ValueError, NameError, AttributeError, SyntaxError):
            continue
    return "(…)"


def _summary(tool: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(tool) or "no description").split("\n\n")[0].split())

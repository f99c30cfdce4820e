"""The commands ``ramify serve`` and ``ramify mcp``: servers that answer each request with a run.

``serve`` offers the OpenAI API; ``mcp`` offers a tool, over stdin and stdout or over HTTP, that
answers questions over files. The first Ctrl-C or SIGTERM stops new requests and gives the current
runs a grace period; the second ends the server at once. The servers themselves are in
``ramify/serve/recursive_run_server.py`` and ``ramify/serve/mcp_server.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.ask import (
    KINDS,
    NO_MODEL,
    OF_SOURCES,
    SETTINGS,
    connect_mcp_tools,
    make_rlm,
    open_folder_store,
    sandbox_spec,
)
from ramify.cli.listen_options import (
    client_access_key,
    listen_address,
    listen_options,
    print_server_address,
)
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError, parse_size
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings, unknown_variable_warnings
from ramify.cli.stop_signals import add_stop_handler, enforce_run_deadlines
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import StderrMessageWriter, pluralize, write_stderr
from ramify.cli.traffic_recording_options import (
    RECORD_OPTIONS,
    open_recorder,
    parse_recording_options,
    require_single_policy,
)
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger, run_log
from ramify.store.durable_files import make_folder
from ramify.trained_policy_settings import local_model_folder

if TYPE_CHECKING:
    from ramify.clients.base import Client
    from ramify.engine.mcp_tools import McpTools
    from ramify.engine.rlm import RLM
    from ramify.serve.api_keys import ServerApiKeys
    from ramify.serve.recursive_run_server import RecursiveRunServer
    from ramify.serve.traffic_recorder import ServedTrafficRecorder
    from ramify.store.folder_store import Store


_OF_ONE_QUESTION = ("cite", "cache", "json", "verbose", "progress", *OF_SOURCES)
LIMITS = tuple(option for option in SETTINGS if option.name not in _OF_ONE_QUESTION)
"""Options of ``ask`` that a server accepts: its models, limits and sandbox."""


_MMAP_THRESHOLD = -3
"""The parameter ``M_MMAP_THRESHOLD`` of the C function mallopt(3)."""
_LARGE_BLOCK_BYTES = 1 << 20


def _map_large_blocks() -> None:
    """Make malloc return freed blocks of 1 MB or more to the system immediately.

    Otherwise the GNU C library may keep up to 64 MB for each thread that has read a large context.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def read_server_settings(
    given: dict[str, Any], command: str
) -> tuple[dict[str, Any] | None, StderrMessageWriter]:
    """Read the settings of a command that starts a server, and create its stderr writer.

    If no model is set, print how to set one, and return None in place of the settings.
    """
    _map_large_blocks()
    settings = fill_missing_settings(given, KINDS)
    notes = StderrMessageWriter(bool(settings.get("quiet")))
    notes.show_warnings_and_logs()
    for line in unknown_variable_warnings(KINDS):
        notes.warning(line)
    if not settings.get("model"):
        write_stderr(NO_MODEL.replace("ramify ask", f"ramify {command}"))
        return None, notes
    return settings, notes


PORT = 8000
_log = ComponentLogger("serve")
OF_A_SERVER = (
    *listen_options(PORT),
    CliOptionSpec(
        "meter",
        str,
        "serve plain replies of this model, and count what each caller spends: --max-calls, "
        "--max-tokens and --max-cost then limit each caller",
        "MODEL",
    ),
    CliOptionSpec(
        "meter_record",
        str,
        "file in which --meter records requests (default: in the store, if there is one)",
        "FILE",
    ),
    CliOptionSpec(
        "keys", str, "TOML file with keys for several clients, each with its own limits", "FILE"
    ),
    CliOptionSpec("name", str, "model name in responses (default: that of --model)"),
    CliOptionSpec(
        "max_runs", int, "maximum concurrent runs (default: what this machine can hold, up to 256)"
    ),
    CliOptionSpec("max_body", str, "maximum size of a request (default: 64MB)", "SIZE"),
    CliOptionSpec(
        "grace", float, "seconds that current runs get after the first Ctrl-C (default: 30)"
    ),
    CliOptionSpec(
        "log", str, "log file (default: serve.log in the store, if there is one)", "FILE"
    ),
    *RECORD_OPTIONS,
)


def serve(words: list[str], **given: Any) -> int:
    server_options = {option.name: given.pop(option.name) for option in OF_A_SERVER}
    is_meter = server_options["meter"] is not None
    if is_meter and given["model"] is not None:
        raise UsageError("--meter names the model: remove --model")
    if not is_meter and server_options["meter_record"] is not None:
        raise UsageError("--meter-record needs --meter: add it")
    settings, notes = read_server_settings(
        {**given, "model": server_options["meter"]} if is_meter else given, "serve"
    )
    if settings is None:
        return ExitCode.USAGE
    if is_meter:
        from ramify.cli.metering_proxy_command import serve_meter

        return serve_meter(
            settings, server_options, open_folder_store(settings, "ramify serve"), PORT, notes
        )
    server_options["max_body"] = parse_size(server_options["max_body"] or "64MB", "--max-body")
    for name, least in (("max_runs", 1), ("grace", 0), ("max_body", 1)):
        value = server_options[name]
        if value is not None and not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least {least}")
    grace_s = 30.0 if server_options["grace"] is None else server_options["grace"]
    store = open_folder_store(settings, "ramify serve")
    logged = _log_to_file(server_options["log"], store)
    with logged, span_export_context(notes), connect_mcp_tools(settings) as tools:
        server = _server(settings, server_options, store, tools, notes)
        with enforce_run_deadlines("ramify ask --resume {run}"):
            asyncio.run(_serve(server, grace_s, notes))
    return ExitCode.ANSWERED


@contextlib.contextmanager
def _log_to_file(given: str | None, store: Store | None) -> Iterator[None]:
    """Write the server's log records to a file within a ``with`` block.

    The file is the one that ``--log`` names, or one in the store's folder. Raises UsageError if the
    folder of the named file does not exist.
    """
    if given is not None and (not Path(given).parent.is_dir() or Path(given).is_dir()):
        raise UsageError(f"--log {given}: give a file in a folder that exists")
    if store is not None and given is None:
        given = str(make_folder(store.root) / "serve.log")
    if given is None:
        yield
        return
    with run_log(Path(given), f"serve-{os.getpid()}") as log:
        log.release_held_records()
        yield


def _server(
    settings: dict[str, Any],
    options: dict[str, Any],
    store: Store | None,
    tools: McpTools | None,
    notes: StderrMessageWriter,
) -> RecursiveRunServer:
    from ramify.clients.base import Sampling
    from ramify.http_server.machine_capacity import raise_descriptor_limit
    from ramify.serve.recursive_run_server import RecursiveRunServer

    raise_descriptor_limit()
    rlm = make_rlm(settings, sandbox_spec(settings), store, tools)
    return RecursiveRunServer(
        rlm,
        name=options["name"] or settings["model"],
        address=listen_address(options, "serve", PORT, store.root if store is not None else None),
        keys=_keys(options, store.root if store is not None else None),
        max_body_bytes=options["max_body"],
        max_runs=options["max_runs"],
        sampling=Sampling(temperature=settings.get("temperature")),
        open_recorder=_recorder_opener(settings, options, notes),
    )


def _recorder_opener(
    settings: dict[str, Any], options: dict[str, Any], notes: StderrMessageWriter
) -> Callable[[Sequence[Client]], ServedTrafficRecorder] | None:
    """Return a function that opens the conversation recorder once the policy is loaded.

    Returns None without ``--record``. Raises ConfigError at once if the model is not local.
    """
    recording = parse_recording_options(options)
    if recording is None:
        return None
    if local_model_folder(settings["model"]) is None:
        raise ConfigError(
            f"--record keeps token ids, but {settings['model']} returns none: serve a local "
            "policy (--model local:FOLDER), or leave --record out"
        )
    return lambda clients: open_recorder(
        options["record"], recording, require_single_policy(clients), notes
    )


def _keys(options: dict[str, Any], root: Path | None) -> ServerApiKeys:
    from ramify.serve.api_keys import ApiKey, ServerApiKeys, read_keys

    keys = read_keys(options["keys"]) if options["keys"] else {}
    if options["keys"] and not keys:
        raise ConfigError(
            f'the key file {options["keys"]} has no keys: add a table [NAME] with key = "…"'
        )
    if keys and options["open_to_this_machine"]:
        raise UsageError("--open-to-this-machine cannot be combined with --keys: remove one")
    single = client_access_key(options)
    if single:
        if "default" in keys:
            raise ConfigError(
                "the key file has a key named 'default', which is the name of the key of "
                "--key-file: rename it"
            )
        keys = {**keys, "default": ApiKey(key=single)}
    return ServerApiKeys(keys, root / "served.json" if root is not None and keys else None)


async def _serve(server: RecursiveRunServer, grace_s: float, notes: StderrMessageWriter) -> None:
    first_stop = asyncio.Event()
    second_stop = asyncio.Event()

    def stop() -> None:
        (second_stop if first_stop.is_set() else first_stop).set()

    add_stop_handler(stop)
    async with contextlib.AsyncExitStack() as stack:
        with ProgressDisplay(
            notes, choose_display_form(None, notes)
        ):  # a local policy is loaded here
            await stack.enter_async_context(server)
        print_server_address(server.name, server.url, server.address, server.key)
        if left := await asyncio.to_thread(server.unfinished_runs):
            num = pluralize(len(left), "run")
            notes.say(
                f"ramify: {num} ended with their server, before they had an answer; a "
                f"client continues its own with ramify.resume, and you with: ramify ask --resume "
                f"{left[-1]}"
            )
        _log.info("server_ready", f"{server.name} answers at {server.url}", url=server.url)
        await first_stop.wait()
        _log.info("server_ending", f"{server.num_runs} runs may end", runs=server.num_runs)
        draining = asyncio.ensure_future(server.drain(grace_s))
        stopping_now = asyncio.ensure_future(second_stop.wait())
        if server.num_runs:
            notes.say(
                f"ramify: {pluralize(server.num_runs, 'run')} may continue for up to "
                f"{grace_s:g} s; Ctrl-C again to end now"
            )
        await asyncio.wait({draining, stopping_now}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, stopping_now):
            task.cancel()
        await asyncio.gather(draining, stopping_now, return_exceptions=True)


def mcp(words: list[str], **given: Any) -> int:
    http = given.pop("http")
    listening = {option.name: given.pop(option.name) for option in listen_options(PORT)}
    unused = next((name for name, value in listening.items() if value is not None), None)
    if unused is not None and not http:
        raise UsageError(f"--{unused.replace('_', '-')} needs --http: add it")
    settings, notes = read_server_settings(given, "mcp")
    if settings is None:
        return ExitCode.USAGE
    from ramify.engine.mcp_tools import require_mcp_sdk

    require_mcp_sdk("ramify mcp")
    from ramify.serve.mcp_server import run_stdio

    with span_export_context(notes), connect_mcp_tools(settings) as tools:
        store = open_folder_store(settings, "ramify mcp")
        rlm = make_rlm(settings, sandbox_spec(settings), store, tools)
        roots = words or ["."]
        with enforce_run_deadlines("ramify ask --resume {run}"):
            if http:
                asyncio.run(_mcp_http(rlm, roots, listening, store))
            else:
                asyncio.run(run_stdio(rlm, roots))
    return ExitCode.ANSWERED


async def _mcp_http(
    rlm: RLM, roots: list[str], listening: dict[str, Any], store: Store | None
) -> None:
    from ramify.http_server.machine_capacity import raise_descriptor_limit
    from ramify.serve.mcp_http import McpHttpServer

    raise_descriptor_limit()
    stopped = asyncio.Event()
    add_stop_handler(stopped.set)
    address = listen_address(listening, "mcp", PORT, store.root if store is not None else None)
    key = client_access_key(listening)
    async with McpHttpServer(rlm, roots, address=address, key=key) as server:
        print_server_address("mcp", server.url, address, "" if key else server.key)
        await stopped.wait()


COMMANDS = (
    SubcommandSpec(
        name="serve",
        about="""\
Serve recursive runs over an OpenAI-compatible API: chat completions and responses, with streaming.
Point any OpenAI client at this server's base URL. The options of ask limit each request.

With --meter, serve one model instead, and let no caller spend more than its budget.""",
        run=serve,
        options=(*OF_A_SERVER, *LIMITS),
    ),
    SubcommandSpec(
        name="mcp",
        about="""\
Run an MCP (Model Context Protocol) server over standard input and output, or over HTTP. Its tool
`ask` answers questions over the files below each ROOT (default: the current folder). The options of
ask set the limits of each question.""",
        run=mcp,
        words="ROOT…",
        max_words=None,
        options=(
            CliOptionSpec("http", bool, "serve over HTTP, at the path /mcp", has_no=False),
            *listen_options(PORT),
            *LIMITS,
        ),
    ),
)

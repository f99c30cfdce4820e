"""``ramify serve``: whole recursive runs behind an OpenAI-compatible address, until it is stopped.

Ctrl-C or SIGTERM once: no more requests are taken, and runs may end for a while. Twice: it ends at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from ramify.cli.ask import make_rlm, mcp_tools, open_store, sandbox_spec
from ramify.cli.exit_codes import ExitCode
from ramify.cli.parse_units import parse_size
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError
from ramify.cli.progress_screen import ProgressScreen, form_of
from ramify.cli.serving import LIMITS, begin, on_stop
from ramify.cli.stderr_notes import StderrNotes, write
from ramify.cli.telemetry import exporting
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from ramify.engine.mcp_tools import McpTools
    from ramify.serve.keys import ApiKeys
    from ramify.serve.run_server import RunServer
    from ramify.store.store import Store

_KEY = "RAMIFY_SERVE_KEY"
OF_A_SERVER = (
    OptionSpec("host", str, "address to listen on (default: 127.0.0.1; others need a key)", "HOST"),
    OptionSpec("port", int, "port to listen on; 0 takes a free one (default: 8000)"),
    OptionSpec("api_key", str, f"key that callers must send (default: ${_KEY})", "KEY"),
    OptionSpec(
        "keys", str, "keys of several callers, each with limits of its own; a TOML file", "FILE"
    ),
    OptionSpec("name", str, "the model's name in answers (default: that of --model)"),
    OptionSpec("max_runs", int, "questions answered at once (default: 256)"),
    OptionSpec("max_body", str, "of one request (default: 64MB)", "SIZE"),
    OptionSpec("grace", float, "seconds that runs may go on after the first Ctrl-C (default: 30)"),
)


def serve(words: list[str], **given: Any) -> int:
    own = {option.name: given.pop(option.name) for option in OF_A_SERVER}
    settings, notes = begin(given, "serve")
    if settings is None:
        return ExitCode.USAGE
    own["max_body"] = parse_size(own["max_body"] or "64MB", "--max-body")
    for name, least in (("max_runs", 1), ("grace", 0), ("max_body", 1)):
        if own[name] is not None and not own[name] >= least:
            raise UsageError(f"--{name.replace('_', '-')} {own[name]}: give at least {least}")
    with exporting(notes), mcp_tools(settings) as tools:
        server = _server(settings, own, open_store(settings), tools)
        asyncio.run(_serve(server, 30.0 if own["grace"] is None else own["grace"], notes))
    return ExitCode.ANSWERED


def _server(
    settings: dict[str, Any], own: dict[str, Any], store: Store | None, tools: McpTools | None
) -> RunServer:
    from ramify.clients.base import Sampling
    from ramify.serve.run_server import RunServer

    rlm = make_rlm(settings, sandbox_spec(settings), store, tools)
    return RunServer(
        rlm,
        name=own["name"] or settings["model"],
        host=own["host"] or "127.0.0.1",
        port=8000 if own["port"] is None else own["port"],
        keys=_keys(own, store.root if store is not None else None),
        max_body_bytes=own["max_body"],
        max_runs=own["max_runs"] or 256,
        sampling=Sampling(temperature=settings.get("temperature")),
    )


def _keys(own: dict[str, Any], root: Path | None) -> ApiKeys:
    from ramify.serve.keys import ApiKey, ApiKeys, read_keys

    keys = read_keys(own["keys"]) if own["keys"] else {}
    if own["keys"] and not keys:
        raise ConfigError(
            f'the file of keys {own["keys"]} has none: add a table [NAME] with key = "…"'
        )
    single = own["api_key"] or os.environ.get(_KEY)
    if single:
        if "default" in keys:
            raise ConfigError(
                "the file of keys has one called 'default', which is the name of --api-key: rename "
                "it"
            )
        keys = {**keys, "default": ApiKey(key=single)}
    return ApiKeys(keys, root / "served.json" if root is not None and keys else None)


async def _serve(server: RunServer, grace_s: float, notes: StderrNotes) -> None:
    asked, again = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (again if asked.is_set() else asked).set()

    on_stop(stop)
    async with contextlib.AsyncExitStack() as stack:
        with ProgressScreen(
            notes, form_of(None, notes)
        ):  # a policy of this machine's is loaded now
            await stack.enter_async_context(server)
        write(f"{server.name} at {server.url} (Ctrl-C to stop)")
        await asked.wait()
        draining, at_once = (
            asyncio.ensure_future(server.drain(grace_s)),
            asyncio.ensure_future(again.wait()),
        )
        if server.num_runs:
            notes.say(
                f"ramify: {server.num_runs} runs go on for {grace_s:g} s at most; Ctrl-C again to "
                "end now"
            )
        await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
        for each in (draining, at_once):
            each.cancel()
        await asyncio.gather(draining, at_once, return_exceptions=True)


COMMAND = CommandSpec(
    name="serve",
    about="""\
Serve whole recursive runs as an OpenAI-compatible API: chat completions and responses, also streamed. A
client needs nothing but another base URL. The options of ask set what a request may spend at most.""",
    run=serve,
    options=(*OF_A_SERVER, *LIMITS),
)

"""``ramify mcp``: questions over files as a tool for any client of the Model Context Protocol, over
stdin and stdout."""

from __future__ import annotations

import asyncio
from typing import Any

from ramify.cli.ask import make_rlm, mcp_tools, open_store, sandbox_spec
from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec
from ramify.cli.serving import LIMITS, begin
from ramify.cli.telemetry import exporting


def mcp(words: list[str], **given: Any) -> int:
    settings, notes = begin(given, "mcp")
    if settings is None:
        return ExitCode.USAGE
    from ramify.engine.mcp_tools import need_extra

    need_extra("ramify mcp")
    from ramify.serve.mcp_server import run

    with exporting(notes), mcp_tools(settings) as tools:
        asyncio.run(
            run(
                make_rlm(settings, sandbox_spec(settings), open_store(settings), tools),
                words or ["."],
            )
        )
    return ExitCode.ANSWERED


COMMAND = CommandSpec(
    name="mcp",
    about="""\
Offer questions over the files below each ROOT (default: this folder) as the tool `ask` of the Model Context
Protocol, over standard input and output. The options of ask set what a question may spend at most.""",
    run=mcp,
    words="ROOT…",
    max_words=None,
    options=LIMITS,
)

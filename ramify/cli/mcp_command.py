"""``ramify mcp``: an MCP server over stdin and stdout that answers questions over files.

Not here: the server and its tool (see ramify/serve/mcp_server.py).
"""

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
Run an MCP (Model Context Protocol) server over standard input and output. Its tool `ask` answers
questions over the files below each ROOT (default: the current folder). The options of ask set the
limits of each question.""",
    run=mcp,
    words="ROOT…",
    max_words=None,
    options=LIMITS,
)

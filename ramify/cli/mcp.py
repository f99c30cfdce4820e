"""``ramify mcp``: questions over files as a tool for any client of the Model Context Protocol, over stdin and stdout."""

from __future__ import annotations

import asyncio
from typing import Any

from ramify.cli.ask import KINDS, NO_MODEL, SETTINGS, make_rlm, mcp_tools, open_store, sandbox_spec
from ramify.cli.exits import Exit
from ramify.cli.notes import Notes, write
from ramify.cli.parser import Command
from ramify.cli.settings import fill, unknown_variables

_NOT_HERE = ("cite", "cache", "json", "verbose")


def mcp(words: list[str], **given: Any) -> int:
    settings = fill(given, KINDS)
    notes = Notes(bool(settings.get("quiet")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.say(f"ramify: warning: {line}")
    if not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", "ramify mcp"))
        return Exit.ERROR
    from ramify.engine.mcp import need_extra

    need_extra("ramify mcp")
    from ramify.serve.mcp import run

    with mcp_tools(settings) as tools:
        asyncio.run(run(make_rlm(settings, sandbox_spec(settings), open_store(settings), tools), words or ["."]))
    return Exit.ANSWERED


COMMAND = Command(
    name="mcp",
    about="""\
Offer questions over the files below each ROOT (default: this folder) as the tool `ask` of the Model Context
Protocol, over standard input and output. The options of ask set what a question may spend at most.""",
    run=mcp,
    words="ROOT…",
    max_words=None,
    options=tuple(option for option in SETTINGS if option.name not in _NOT_HERE),
)

"""Rebuilds the ``RLM`` of a stored run from its journal, to resume it, or to replay it: ``ramify
replay``.

Models, limits, prompts, sandbox and sampling are those recorded in the journal. Tools over files
(``sql``) are loaded again from the recorded paths, and MCP servers are started again. A replay
calls no model, so it uses placeholder clients that need no key. It re-runs the cells against the
recorded replies, writes nothing, and names the call, turn and cell of each difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.cli.parser import CommandSpec, ExitCode, OptionSpec
from ramify.cli.terminal_text import StderrNotes, clean, many, one_line
from ramify.clients.base import Price, Request, Sampling
from ramify.clients.providers import PriceTable
from ramify.engine.limits import Limits
from ramify.engine.rlm import RLM
from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError, ReplayDiverged, SourceError
from ramify.sandbox.base import SandboxSpec
from ramify.store.recorded_replies import RecordedReplies
from ramify.store.store import Store
from ramify.types.event import RunStarted
from ramify.types.message import Reply
from ramify.types.trajectory import Call, Trajectory


def find(run: str) -> tuple[Store, RecordedReplies]:
    """Open the default store and read the recorded replies of ``run``."""
    store = Store()
    return store, RecordedReplies(store.events(run))


def rebuild(
    started: RunStarted,
    store: Store,
    *,
    stand_ins: bool = False,
    with_tools: bool = True,
    allow_weaker: bool = False,
) -> RLM:
    """Build the RLM that ``started`` describes.

    ``stand_ins`` replaces the models with placeholders. ``allow_weaker`` accepts a sandbox that is
    weaker than the recorded one. Raises ConfigError if this version cannot read the recorded
    settings, and SourceError if the input of the run's file tools is gone.
    """
    config = started.config
    models = [*config.get("model", [])]
    subs = [*config.get("sub_model", [])]
    if not models:
        raise ConfigError(f"run {started.id} does not record its model: ask the question again")
    try:
        sandbox = msgspec.convert(config.get("sandbox", {}), SandboxSpec)
        return RLM(
            [PlaceholderClient(name) for name in models] if stand_ins else models,
            sub_model=([PlaceholderClient(name) for name in subs] if stand_ins else subs) or None,
            limits=msgspec.convert(config.get("limits", {}), Limits),
            scaffold=msgspec.convert(config.get("scaffold", {}), Scaffold),
            sandbox=msgspec.structs.replace(
                sandbox, allow_weaker=sandbox.allow_weaker or allow_weaker
            ),
            sampling=msgspec.convert(config.get("sampling", {}), Sampling),
            tools=(_tools(started) if with_tools else None) or None,
            store=store,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the recorded settings of run {started.id} are invalid here: {error}; "
            "ask the question again"
        ) from None


def _tools(started: RunStarted) -> dict[str, Any]:
    sources, servers = started.config.get("sources") or {}, started.config.get("mcp") or ()
    tools: dict[str, Any] = {}
    if servers:
        from ramify.engine.mcp_tools import McpTools

        tools |= McpTools(*servers)  # stays connected until the process ends
    if not sources.get("tools"):
        return tools
    from ramify.sources.load_sources import load

    if "-" in sources["paths"]:
        raise SourceError(
            f"run {started.id} used {', '.join(sources['tools'])} over standard input, which is "
            "gone: ask the question again"
        )
    return {**tools, **load(sources["paths"]).tools}


class PlaceholderClient:
    """Client for replays: it has a name, a window and a price, but cannot answer a request."""

    def __init__(self, name: str) -> None:
        prices = PriceTable.load()
        self.name = name
        self.window = prices.window(name) or 128_000
        self.price: Price | None = prices.price(name)

    async def complete(self, request: Request) -> Reply:
        raise ReplayDiverged(f"{self.name} received a request that the run did not record")

    async def close(self) -> None:
        """Do nothing: a placeholder holds no connection."""


_SHOWN = 10


def replay(words: list[str], json: bool | None, allow_weaker: bool | None) -> int:
    run = words[0]
    StderrNotes().take_warnings()
    store, recorded = find(run)
    rlm = rebuild(recorded.started, store, stand_ins=True, allow_weaker=bool(allow_weaker))

    async def repeat() -> Trajectory:
        async with rlm:
            return (await rlm.areplay(run)).trajectory

    new, old = asyncio.run(repeat()), store.load(run)
    changes = list(differences(old, new))
    if json:
        report = {"run": old.id, "same": not changes, "differences": changes}
        print(msgspec.json.encode(report).decode())
    else:
        print(_verdict(old, changes))
    return ExitCode.ERROR if changes else ExitCode.ANSWERED


def differences(old: Trajectory, new: Trajectory) -> Iterator[str]:
    """Yield a line for each cell, call and answer that differs between the two runs."""
    calls = {call.id: call for call in new.calls}
    for call in old.calls:
        replayed = calls.pop(call.id, None)
        if replayed is None:
            yield f"call {call.id} was not made again"
        else:
            yield from _call_differences(call, replayed)
    yield from (f"call {id} is new" for id in calls)
    if old.answer != new.answer:
        yield f"the answer was {_shown(old.answer)} and is now {_shown(new.answer)}"


def _call_differences(old: Call, new: Call) -> Iterator[str]:
    if len(old.turns) != len(new.turns):
        yield f"call {old.id} took {len(old.turns)} turns and now takes {len(new.turns)}"
    for turn, (old_turn, new_turn) in enumerate(zip(old.turns, new.turns, strict=False)):
        for cell, cells in enumerate(zip(old_turn.cells, new_turn.cells, strict=False)):
            for name in ("stdout", "value", "error"):
                before, after = (getattr(result, name) for result in cells)
                if before != after:
                    place = f"call {old.id}, turn {turn}, cell {cell}"
                    yield f"{place}: {name} was {_shown(before)} and is now {_shown(after)}"
    if (old.answer, old.stop) != (new.answer, new.stop):
        yield (
            f"call {old.id} ended {old.stop} with {_shown(old.answer)} "
            f"and now ends {new.stop} with {_shown(new.answer)}"
        )


def _verdict(old: Trajectory, changes: list[str]) -> str:
    cells = sum(len(turn.cells) for call in old.calls for turn in call.turns)
    if not changes:
        return f"same: {many(len(old.calls), 'call')}, {many(cells, 'cell')}, and the answer"
    more = [f"… and {len(changes) - _SHOWN:,} more"] if len(changes) > _SHOWN else []
    return clean(
        "\n".join(
            [
                f"different in {many(len(changes), 'place')}:",
                *(f"  {line}" for line in changes[:_SHOWN]),
                *more,
            ]
        )
    )


def _shown(value: Any) -> str:
    return one_line(repr(value), 100)


COMMAND = CommandSpec(
    "replay",
    """\
Re-run a stored run's code against its recorded replies, and compare the results. No model is
called. The exit code is 0 if every result is the same, 1 if not.""",
    replay,
    "RUN",
    1,
    1,
    (
        OptionSpec("json", bool, "print one JSON object", has_no=False),
        OptionSpec("allow_weaker", bool, "accept weaker isolation than the run had", has_no=False),
    ),
)

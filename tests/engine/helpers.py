"""Shared by the tests of the engine: an RLM with a scripted model, and short forms of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ramify import RLM, Limits, Scaffold, ScriptedClient
from ramify.types.message import Message

SCAFFOLD = Scaffold(
    name="test", system="You drive a session; FINAL ends it. {{tools}}{{limits}}", direct_chars=0
)


def code(*cells: str) -> str:
    """A message that runs ``cells``."""
    return "\n".join(f"```repl\n{cell}\n```" for cell in cells)


def client(script: list[Any] | Callable[..., Any], **options: Any) -> ScriptedClient:
    return ScriptedClient(script, **options)


def rlm(script: list[Any] | Callable[..., Any] | ScriptedClient, **options: Any) -> RLM:
    """An RLM that always works in a session. ``limits`` may be a dict."""
    model = script if isinstance(script, ScriptedClient) else client(script)
    limits = options.pop("limits", {})
    options.setdefault("scaffold", SCAFFOLD)
    return RLM(model, limits=limits if isinstance(limits, Limits) else Limits(**limits), **options)


def at_once(num: int, reply: Callable[[Any], str]) -> Callable[..., Any]:
    """Return a script that replies only after ``num`` requests have arrived."""
    here, all_here = 0, asyncio.Event()

    async def together(messages: Any) -> str:
        nonlocal here
        here += 1
        if here == num:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)
        return reply(messages)

    return together


def by_role(
    root: list[Any], other: Callable[[str], Any] = lambda prompt: f"re: {prompt}"
) -> Callable[..., Any]:
    """Return a script that gives the lines of ``root`` in turn to a session, and ``other(prompt)``
    to a plain call."""
    lines = iter(root)

    def script(messages: tuple[Message, ...]) -> Any:
        return next(lines) if messages[0].role == "system" else other(messages[-1].content)

    return script

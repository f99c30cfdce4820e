"""``Item(context="")`` is an item without a context, wherever items go; and the pages that list the
fields of an item and the scaffolds list all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Limits, Message, SandboxSpec, ScriptedClient
from ramify.engine.prompt_scaffold import SCAFFOLDS, scaffold_of
from ramify.evaluate.attempt import attempt
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState, Task
from ramify.tasks.data import dataset
from ramify.tasks.scoring import exact
from ramify.tasks.text_env import env_task

DOCS = Path(__file__).parents[2] / "docs"
SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
ONE_TURN = Limits(max_turns=1, max_depth=0)
REPLIES = {
    "default": "```repl\nFINAL(repr(globals().get('context')))\n```",
    "minimal": "```repl\nFINAL(repr(globals().get('context')))\n```",
    "plans": "```repl\nFINAL(repr(globals().get('context')))\n```",
    "tiny": "FINAL(repr(globals().get('context')))",
    "bare": "FINAL(repr(globals().get('context')))",
    "retool": "<code>print(globals().get('context'))</code>",
    "retool_native": "<code>print(globals().get('context'))</code>",
}


class OneStep:
    """An environment in the form of Gymnasium."""

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 1.0, True, False, {}


def plain(item: Item) -> Task:
    return DatasetTask("t", {"test": [item]}, exact)


def begun(item: Item) -> Task:
    """A task that begins its rollouts itself, with an empty text."""

    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(context=item.context or "")

    return DatasetTask("t", {"test": [item]}, exact, begin=begin)


def with_tools(item: Item) -> Task:
    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(
            context=item.context or "", tools={"twice": lambda number: 2 * number}
        )

    return DatasetTask("t", {"test": [item]}, exact, begin=begin)


def environment(item: Item) -> Task:
    return env_task("t", {"test": [item]}, lambda item: OneStep())


def asked(make: Callable[[Item], Task], item: Item, scaffold: str, direct: bool = False) -> Any:
    """(first prompt that the model got, the answer, what its code printed)"""
    prompts: list[tuple[Message, ...]] = []

    def reply(messages: tuple[Message, ...]) -> str:
        prompts.append(messages)
        return REPLIES[scaffold]

    async def run() -> Any:
        model = ScriptedClient(reply)
        async with RLM(model, scaffold=scaffold, sandbox=SANDBOX, limits=ONE_TURN) as rlm:
            return await attempt(rlm, make(item), item, direct=direct)

    trajectory = asyncio.run(run())
    printed = [cell.stdout for turn in trajectory.root.turns for cell in turn.cells]
    return prompts[0], trajectory.answer, printed


@pytest.mark.parametrize("scaffold", sorted(SCAFFOLDS))
@pytest.mark.parametrize("make", [plain, begun, with_tools, environment])
def test_empty_context_is_no_context_in_a_session(
    make: Callable[[Item], Task], scaffold: str
) -> None:
    without, empty = (
        asked(make, Item("How many?", **given, gold="1", id="t/test/0"), scaffold)
        for given in ({}, {"context": ""})
    )
    assert without == empty
    prompt, answer, printed = empty
    assert answer == "None" or printed == ["None\n"]
    assert not any("`context` is a str" in message.content for message in prompt)


def test_empty_context_is_no_context_in_a_plain_call() -> None:
    found = [
        asked(plain, Item("2 + 2?", context, gold="4", id="t/test/0"), "default", direct=True)
        for context in (None, "")
    ]
    assert found[0] == found[1]
    assert [message.content for message in found[0][0]][-1] == "2 + 2?"


def test_empty_context_is_no_context_in_rows_and_in_stored_items(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 2?", "context": "", "answer": "4"}\n' * 40)
    task = dataset(str(path), context="context", gold="answer", reward="exact")
    (rows,) = task.splits.values()
    assert [item.context for item in rows[:3]] == [None] * 3
    stored = msgspec.json.decode(b'{"question": "?", "context": ""}', type=Item)
    assert stored.context is None
    assert msgspec.structs.replace(Item("?", "text"), context="").context is None


def test_page_lists_every_field_of_an_item() -> None:
    page = (DOCS / "tasks.md").read_text(encoding="utf-8")
    table = page.partition("| field | holds |")[2].partition("\n- ")[0]
    assert sorted(re.findall(r"^ *\| `(\w+)` \|", table, re.MULTILINE)) == sorted(
        Item.__struct_fields__
    )


def test_page_and_listing_describe_every_scaffold() -> None:
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    table = page.partition("## Scaffolds")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(SCAFFOLDS)
    for name in SCAFFOLDS:
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert ("all of which runs" in row) == scaffold_of(name).raw_code

"""Items that are conversations, and data sets in the formats of other libraries."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Message, ScriptedClient, Store
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.data import dataset
from ramify.tasks.scoring import exact
from ramify.tasks.validation import validate

TALK = [
    {"role": "system", "content": "Reply with a number alone."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
]
ITEM = Item(messages=TALK, gold="4", id="t/test/0")  # type: ignore[arg-type]
TASK = DatasetTask("t", {"test": [ITEM]}, exact)


def test_last_message_is_the_question() -> None:
    assert ITEM.question == "2 + 2?"
    assert ITEM.messages == (
        Message("system", "Reply with a number alone."),
        Message("user", "1 + 1?"),
        Message("assistant", "2"),
    )
    own = Item("3 + 3?", messages=TALK[:3])  # type: ignore[arg-type]
    assert (own.question, own.messages) == ("3 + 3?", ITEM.messages)
    assert validate(TASK) == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:3], "it has no question, and its last message, .* is not the user's"),
        ([{"role": "human", "content": "?"}], "Invalid enum value 'human'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is read"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Item(messages=messages)


async def asked(
    *, direct: bool, code: str = "```repl\nFINAL(4)\n```", **options: Any
) -> tuple[list[tuple[Message, ...]], Any]:
    """The prompts that a model received for ``TASK``, and the trajectory."""
    prompts: list[tuple[Message, ...]] = []

    def reply(messages: tuple[Message, ...]) -> str:
        prompts.append(messages)
        return "4" if direct else code

    async with RLM(ScriptedClient(reply), sandbox="inprocess", **options) as rlm:
        trajectory = await attempt(rlm, TASK, ITEM, direct=direct)
    return prompts, trajectory


async def one_plain_call() -> None:
    (prompt,), trajectory = await asked(direct=True)
    assert prompt == (*ITEM.messages, Message("user", "2 + 2?"))
    assert trajectory.rewards == {"correct": 1.0}
    assert trajectory.root.turns[0].prompt == prompt
    (prompt,), _ = await asked(direct=True, instructions="Be brief.")
    assert prompt[0].content.startswith("Instructions of the user:\nBe brief.")
    assert prompt[0].content.endswith("\n\nReply with a number alone.")
    assert [message.role for message in prompt] == ["system", "user", "assistant", "user"]


async def session() -> None:
    (prompt,), trajectory = await asked(direct=False)
    assert [message.role for message in prompt] == ["system", "user", "assistant", "user"]
    assert "FINAL(value)" in prompt[0].content
    assert prompt[0].content.endswith("\n\nReply with a number alone.")
    assert prompt[1:3] == ITEM.messages[1:]
    assert prompt[3].content.startswith("Question: 2 + 2?")
    assert trajectory.rewards == {"correct": 1.0}
    (prompt,), _ = await asked(
        direct=False, code="FINAL(4)", scaffold="bare"
    )  # it has no system message
    assert prompt == (*ITEM.messages, Message("user", "2 + 2?"))


def test_one_plain_call_gets_the_messages_unchanged() -> None:

    asyncio.run(one_plain_call())


def test_session_gets_the_messages_before_its_question() -> None:

    asyncio.run(session())


def test_stored_run_is_replayed_with_its_messages(tmp_path: Path) -> None:
    """A replay computes the same prompts, or it would diverge."""

    async def run() -> None:
        store = Store(tmp_path)
        _, trajectory = await asked(direct=False, store=store)
        async with RLM(ScriptedClient([]), sandbox="inprocess", store=store) as rlm:
            again = await rlm.areplay(trajectory.id)
        assert again.answer == 4

    asyncio.run(run())


TRL = {"prompt": TALK, "ground_truth": "4", "difficulty": 3}
VERIFIERS = {"prompt": TALK, "answer": "4", "info": {"level": 3}, "task": "sums"}
PRIME_RL = {"question": "2 + 2?", "answer": "4", "info": {"level": 3}}
SKYRL = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "env_class": "gsm8k",
    "reward_model": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
    "data_source": "openai/gsm8k",
}


@pytest.mark.parametrize(
    ("row", "num_before", "metadata"),
    [
        (TRL, 3, {}),
        (VERIFIERS, 3, {"info": {"level": 3}}),
        (PRIME_RL, 0, {"info": {"level": 3}}),
        (SKYRL, 0, {"extra_info": {"index": 7}, "data_source": "openai/gsm8k"}),
        ({"messages": TALK, "solution": "4"}, 3, {}),
        ({"problem": "2 + 2?", "answer": "4"}, 0, {}),
    ],
)
def test_rows_of_other_libraries_are_read_unchanged(
    row: dict[str, Any], num_before: int, metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(msgspec.json.encode(row) + b"\n")
    (split,) = dataset(str(path)).splits.values()
    (item,) = split
    assert (item.question, item.gold, dict(item.metadata)) == ("2 + 2?", "4", metadata)
    assert len(item.messages) == num_before


def test_column_that_no_library_has_is_named() -> None:
    task = dataset({"test": [{"q": "2 + 2?", "a": "4"}]})
    with pytest.raises(ConfigError, match="it has no column 'question'; its columns are q, a"):
        task.splits["test"][0]

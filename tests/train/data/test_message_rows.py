"""Demonstrations from conversation files: reading, filtering, packing, and errors that name the
row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.train.advantages.sft import SFT
from ramify.train.config import PolicySpec, Run, SftSpec
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.policy_dependent_defaults import scratch_model_config, vocabulary_size_for_chars
from ramify.train.sft_training_data import message_demonstrations, num_demo_items
from ramify.types.trajectory import Trajectory
from tests.train.small import assemble, small

USER = {"role": "user", "content": "2 + 2?"}


def reply_row(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


ROWS = [
    {"messages": [USER, reply_row("4")], "reward": 1.0},
    {"messages": [USER, reply_row("5")], "reward": 0.0},
    {
        "messages": [
            USER,
            reply_row("Hm.", weight=0),
            USER,
            reply_row("4"),
            USER,
            reply_row("Still 4."),
        ],
        "reward": 1.0,
    },
]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def learned(shown: Trajectory) -> list[tuple[int, list[str], str]]:
    """Return (number of reused messages, new messages, reply) of each turn."""
    return [
        (turn.reused, [each.content for each in turn.prompt], turn.reply.message.content)
        for turn in shown.calls[0].turns
    ]


def parts_of(demos: str, **sft: Any) -> tuple[Run, PreparedTrainingRun]:
    run = small(policy=PolicySpec(), warmup=None, rl=None, sft=SftSpec(demos=demos, **sft))
    return run, assemble(run)


def test_jsonl_and_parquet_give_the_same_demonstrations(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    files = (jsonl(tmp_path / "d.jsonl", ROWS), str(tmp_path / "d.parquet"))
    for file in files:
        first, _, last = message_demonstrations(file, 9)
        assert (first.rewards, learned(first)) == ({"reward": 1.0}, [(0, ["2 + 2?"], "4")])
        assert learned(last) == [
            (0, ["2 + 2?", "Hm.", "2 + 2?"], "4"),
            (4, ["2 + 2?"], "Still 4."),
        ]
    assert len(list(message_demonstrations(files[0], 2))) == 2


def test_tool_calls_text_parts_and_named_rewards_are_read(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    row = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
            USER,
            reply_row("", tool_calls=calls, reasoning_content="Add."),
            {"role": "tool", "content": "4", "tool_call_id": "call_0"},
            reply_row("4"),
        ],
        "rewards": {"right": 1, "judged": None},
    }
    (shown,) = message_demonstrations(jsonl(tmp_path / "d.jsonl", [row]), 9)
    call = shown.calls[0]
    reply = call.turns[0].reply.message
    assert [message.role for message in call.turns[0].prompt] == ["system", "user"]
    assert call.turns[0].prompt[0].content == "Be brief."
    assert (reply.reasoning, reply.tool_calls[0].name) == ("Add.", "add")
    assert (reply.tool_calls[0].id, reply.tool_calls[0].arguments) == ("call_0", '{"a":1}')
    assert (shown.question, shown.rewards) == ("2 + 2?", {"right": 1.0})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "x", "completion": "y"},
            r"d.jsonl, line 2: .*it has prompt and completion; write each row as \{.*row\[.prompt",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            "line 2: .*it has conversations with from and value .ShareGPT.; write each row as",
        ),
        (
            {"instruction": "x", "input": "", "output": "y"},
            "line 2: .*it has instruction and output .Alpaca.; write each row as",
        ),
        ({"text": "x"}, "it has the columns text, but needs messages, each with role and content$"),
        ({"messages": [USER]}, "d.jsonl, line 2: .*it has no reply to learn"),
        ({"messages": []}, "d.jsonl, line 2: .*it has no reply to learn"),
        ({"messages": [USER, reply_row("4", weight=0)]}, "it has no reply to learn"),
        ({"messages": [USER, reply_row("")]}, "d.jsonl, line 2: .*the reply in message 1 is empty"),
        (
            {"messages": [USER, reply_row(None)]},
            "d.jsonl, line 2: .*the reply in message 1 is empty",
        ),
        ({"messages": [reply_row("4")]}, "its first message is the assistant's"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            "line 2: .*'human'.*known: assistant, d",
        ),
        ({"messages": [USER, reply_row("4")], "reward": "high"}, r"Expected `float \| null`"),
    ],
)
def test_malformed_row_is_named_in_the_error(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(message_demonstrations(jsonl(tmp_path / "d.jsonl", [ROWS[0], row]), 9))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "4"}]},
        {"messages": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "4"}]},
        {"instruction": "a", "input": "b", "output": "4"},
        {"instruction": "a\nb", "output": "4"},
        {"prompt": "a\nb", "completion": "4"},
        {"prompt": [{**USER, "content": "a\nb"}], "completion": [reply_row("4")]},
        {"question": "a\nb", "answer": "4"},
    ],
)
def test_suggested_conversion_of_another_form_gives_a_conversation(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        list(message_demonstrations(jsonl(tmp_path / "d.jsonl", [row]), 1))
    converted = eval(str(raised.value).partition("write each row as ")[2], {"row": row})
    (shown,) = message_demonstrations(jsonl(tmp_path / "d.jsonl", [converted]), 1)
    assert learned(shown) == [(0, ["a\nb"], "4")]


def test_batch_smaller_than_most_demonstrations_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demos = jsonl(tmp_path / "d.jsonl", ROWS)
    for batch_tokens, num in ((2048, 0), (4, 1)):
        caplog.clear()
        parts_of(demos, batch_tokens=batch_tokens)
        found = [each.getMessage() for each in caplog.records if "batch_tokens" in each.msg]
        assert len(found) == num
    assert found[0].startswith("sft.batch_tokens=4 is less than 3 of 3 demonstration sequences")


def test_message_that_the_format_lacks_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    brief = {"messages": [{"role": "system", "content": "Be brief."}, USER, reply_row("4")]}
    with pytest.raises(
        ConfigError, match=r"d\.jsonl, line 2: the scratch format has no system message"
    ):
        parts_of(jsonl(tmp_path / "d.jsonl", [ROWS[0], brief]))


def test_folder_is_answered_with_the_option_that_reads_stored_runs(tmp_path: Path) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    folder = str(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"is a folder.*set sft\.trajectories=.*/run/rollouts"):
        parts_of(folder)
    with pytest.raises(ConfigError, match=r"training run: .*sft\.trajectories=.*/run/rollouts"):
        parts_of("", trajectories=folder)


def test_new_policy_is_sized_by_conversations_that_are_filtered_and_packed(
    tmp_path: Path,
) -> None:
    file = jsonl(tmp_path / "d.jsonl", ROWS)
    run, parts = parts_of(file, algorithm=SFT(min_reward=1.0), batch_tokens=64)
    config = parts.policy.config
    assert (config.vocab_size, config.hidden_size) == (len(parts.policy.tokenizer), 128)
    assert (config.num_hidden_layers, parts.policy.window) == (3, 512)
    assert len(parts.rows) == 2  # the wrong answer is not trained on
    (batch,) = pack(parts.rows, PackingSpec())
    assert len(batch.token_ids) <= sum(map(len, parts.rows))
    assert parts.fixed[0].num_steps == 1
    # A file demonstrates no item of the task, so that rollouts begin with the first one.
    assert (num_demo_items(run.sft), num_demo_items(SftSpec(demos="ledger", num=7))) == (0, 7)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS, "none of 3 trajectories .* with min_reward=2: the best reward is 1$"),
        ([{"messages": ROWS[0]["messages"]}], "none of 1 .* with min_reward=2: none has a reward$"),
    ],
)
def test_demonstrations_that_all_fail_the_filter_are_rejected(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"sft has nothing to learn from: {message}"):
        parts_of(jsonl(tmp_path / "d.jsonl", rows), algorithm=SFT(min_reward=2.0))


def test_vocabulary_and_model_size_grow_with_the_demonstrations() -> None:
    sizes = [vocabulary_size_for_chars(10**power) for power in (3, 6, 8, 12)]
    assert sizes == [512, 512, 8192, 32_768]
    shapes = [scratch_model_config(tokens, 1000) for tokens in (10**4, 10**7, 10**8)]
    assert [(each["hidden_size"], each["num_hidden_layers"]) for each in shapes] == [
        (128, 3),
        (256, 4),
        (512, 8),
    ]
    assert [
        scratch_model_config(0, longest)["max_position_embeddings"] for longest in (9, 500, 10**6)
    ] == [
        512,
        1024,
        32_768,
    ]
    with pytest.raises(ConfigError, match=r"policy: give path .*, shape .*, or sft"):
        small(policy=PolicySpec(), sft=None)

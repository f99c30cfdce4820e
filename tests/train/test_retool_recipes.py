"""The recipes of the math agent: their settings, and one step of each on a tiny checkpoint with
Qwen's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from ramify.errors import ConfigError, SourceError
from ramify.models.load import from_config, save_policy
from ramify.train.config import Run, to_plain_data
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_recipe
from tests.models.templates import tokenizer_of
from tests.shown import train
from tests.train.small import assemble

RECIPES = Path(__file__).parents[2] / "recipes"
SOLVED = (
    "I compute it.\n<code>\n```python\nprint(6*7)\n```\n</code>\n<interpreter>\n42\n</interpreter>\n"
    "<answer>\n\\boxed{42}\n</answer>"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of a few thousand parameters and files in the formats of public datasets."""
    folder = tmp_path_factory.mktemp("retool")
    tokenizer = tokenizer_of("qwen3")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    save_policy(from_config(config, tokenizer, 0), folder / "policy")
    asked = "Solve it.\n*user question:*\nWhat is 6*7?\n\nRemember to place the final answer in the last part …"
    rows: dict[str, list[Any]] = {
        "sft": [
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": SOLVED},
                ]
            }
        ]
        * 3,
        "train": [
            {
                "prompt": [{"role": "user", "content": f"What is {n}+1?"}],
                "reward_model": {"ground_truth": str(n + 1)},
            }
            for n in range(4)
        ],
        "validation": [{"problem": "What is 2+2?", "answer": "4"}],
        "test": [{"Problem": "What is 3+3?", "Answer": 6}],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return {
        "policy": str(folder / "policy"),
        **{name: str(folder / f"{name}.jsonl") for name in rows},
    }


def short(name: str, files: dict[str, str]) -> Run:
    overrides = [
        f"policy.path={files['policy']}",
        *(f"task.options.{split}={files[split]}" for split in ("train", "validation", "test")),
        "evaluate.num=1",
        "evaluate.attempts=1",
        "threads=1",
        "limits.max_reply_tokens=24",
        "limits.max_turns=2",
        "limits.max_seconds=300",
        "compute.precision=fp32",
        "compute.max_tokens=2048",
    ]
    if name == "retool_sft":
        overrides += [
            f"sft.options.source={files['sft']}",
            "sft.epochs=1",
            "sft.optim.warmup_steps=0",
        ]
    else:
        overrides += [
            "rl.steps=1",
            "rl.sample.items=2",
            "rl.sample.minibatches=1",
            "rl.rollout.group=2",
            "schedule.evaluate_every=null",
        ]
    return load_recipe(RECIPES / f"{name}.py", overrides)


def leaves(data: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items() if isinstance(data, dict) else ():
        yield from leaves(value, f"{at}.{name}".lstrip("."))
    if not isinstance(data, dict):
        yield at, data


def test_retool_recipes_have_the_settings_of_the_study() -> None:
    sft, grpo = (
        dict(leaves(to_plain_data(load_recipe(RECIPES / f"{name}.py"))))
        for name in ("retool_sft", "retool_grpo")
    )
    assert [
        sft[f"sft.{name}"] for name in ("epochs", "optim.lr", "optim.betas", "optim.schedule")
    ] == [
        3,
        1e-5,
        [0.9, 0.95],
        "cosine",
    ]
    assert [
        grpo[f"rl.{name}"]
        for name in ("sample.items", "rollout.group", "sample.minibatches", "optim.lr")
    ] == [
        32,
        8,
        2,
        1e-6,
    ]
    others = (
        "rl.loss.policy.clip_high",
        "rl.loss.kl_beta",
        "limits.max_turns",
        "evaluate.attempts",
    )
    assert [grpo[name] for name in others] == [0.28, 0.01, 16, 16]
    hybrid = load_recipe(
        RECIPES / "retool_hybrid.py", ["rl.signals.process.judge.model=vllm:q@http://h/v1"]
    )
    assert hybrid.rl is not None
    assert [term.signal for term in hybrid.rl.algorithm.terms] == ["process", "teacher"]
    assert hybrid.rl.signals["process"].judge.model == "vllm:q@http://h/v1"


def test_demonstrations_are_trained_on_without_tool_output(
    files: dict[str, str], tmp_path: Path
) -> None:
    run = short("retool_sft", files)
    made = assemble(run)
    row = made.rows[0]
    assert row.ce is not None
    tokenizer = made.policy.tokenizer
    learnt = tokenizer.decode(
        [int(id) for id, weight in zip(row.token_ids, row.ce, strict=True) if weight]
    )
    whole = tokenizer.decode([int(id) for id in row.token_ids])
    assert "code_interpreter" in whole.partition("<|im_start|>user")[0]  # the tool is offered
    assert "<tool_response>\n<interpreter>\n42\n</interpreter>\n</tool_response>" in whole
    assert learnt == (
        'I compute it.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6*7)"}}\n</tool_call><|im_end|>'
        "\\boxed{42}<|im_end|>"
    )
    train(run, tmp_path / "out")
    assert any("ce_loss" in each.values for each in read_metrics(tmp_path / "out"))


@pytest.mark.parametrize("name", ["retool_grpo", "retool_hybrid"])
def test_retool_recipe_runs_one_rl_step_in_the_jail(
    name: str, files: dict[str, str], tmp_path: Path
) -> None:
    reported: list[str] = []
    train(short(name, files), tmp_path, say=reported.append)
    rows = list(read_metrics(tmp_path))
    step = next(row for row in rows if row.stage == "rl" and "reward" in row.values)
    assert step.values["failed_rollouts"] == 0
    assert step.values["turns_per_call"] >= 1
    assert any(row.stage == "last" and "test/metric tool_calls" in row.values for row in rows)
    if name == "retool_hybrid":
        assert "teacher/hint_rate" in step.values


def test_missing_files_are_named(files: dict[str, str]) -> None:
    with pytest.raises(SourceError, match=r"file data/.* does not exist"):
        assemble(load_recipe(RECIPES / "retool_sft.py", [f"policy.path={files['policy']}"]))
    given = [f"task.options.{split}={files[split]}" for split in ("train", "validation", "test")]
    with pytest.raises(ConfigError, match=r"needs a file: give sft\.options\.source"):
        assemble(
            load_recipe(
                RECIPES / "retool_sft.py",
                [
                    f"policy.path={files['policy']}",
                    *given,
                    "sft.options={}",
                    "evaluate.num=1",
                ],
            )
        )

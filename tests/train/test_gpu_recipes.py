"""The recipes for one GPU and for eight: each plan fits its devices, and a small version of each
runs from a checkpoint on CPU ranks, with ``ramify serve-policy`` instead of vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ramify.extras.cluster.plan import ClusterPlanOptions, plan
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_recipe
from tests.shown import train
from tests.train.checkpoints import chat_checkpoint

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("1gpu", "8gpu_split", "8gpu_async", "8gpu_colocated")
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CUT = (
    "task.name=tests.train.small:even",
    "task.options={}",
    "rl.steps=2",
    "rl.sample.items=2",
    "rl.sample.max_items=null",
    "rl.rollout.group=2",
    "rl.rollout.concurrency=4",
    "rl.algorithm.overlong=punish",
    "limits.max_turns=2",
    "limits.max_reply_tokens=12",
    "evaluate.num=2",
    "evaluate.first=[]",
    "policy.slots=4",
    "policy.cache_bytes=null",
    "policy.device=cpu",
    "compute.max_tokens=4096",
    "sandbox.provider=inprocess",
    "sandbox.allow_weaker=true",
    "threads=1",
)


@pytest.mark.parametrize("name", NAMES)
def test_gpu_recipe_plan_fits_its_devices(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    run = load_recipe(RECIPES / f"qwen3_8b_{name}.py", [f"policy.path={tmp_path}"])
    planned = plan(run, ClusterPlanOptions(device="h100"))
    assert planned.shape.parameters == 8_190_735_360
    assert planned.too_large == []
    num = {part.role: part.count for part in planned.parts if part.device != "cpu"}
    assert sum(num.values()) == {"1gpu": 1, "8gpu_colocated": 16}.get(name, 8)


@pytest.mark.parametrize("name", NAMES)
def test_page_has_the_memory_and_seconds_of_the_plan(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    run = load_recipe(RECIPES / f"qwen3_8b_{name}.py", [f"policy.path={tmp_path}"])
    planned = plan(run, ClusterPlanOptions(device="h100"))
    memory = ", ".join(
        f"{part.role} {part.memory.total / 1e9:.0f} GB"
        for part in planned.parts
        if part.device != "cpu"
    )
    if planned.together:
        memory = f"together {planned.together[0].peak_memory_phase[1] / 1e9:.0f} GB"
    assert planned.seconds is not None
    assert run.rl is not None
    rollouts = run.rl.sample.items * run.rl.rollout.group
    row = f"| `{name}` | {memory} | {planned.seconds.step:.0f} for {rollouts} rollouts |"
    assert row in (RECIPES.parent / "docs/scale.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_small_gpu_recipe_runs_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    changes = [f"policy.path={chat_checkpoint(tmp_path / 'llama')}", *CUT]
    if name != "1gpu":
        changes += ["compute.shard.ranks=2", "inference={}"]
    if name == "8gpu_colocated":
        changes += ["inference.sleep=learn"]
    run = load_recipe(RECIPES / f"qwen3_8b_{name}.py", changes)
    warned: list[str] = []
    state = train(run, tmp_path / "out", say=warned.append)
    # The doctor is right about random weights: control tokens are inside of replies.
    assert (state.step, [text for text in warned if ": wrong_template: " not in text]) == (2, [])
    rows = [row.values for row in read_metrics(tmp_path / "out") if "work_s" in row.values]
    assert len(rows) == 2
    assert sum(row["failed_rollouts"] for row in rows) == 0
    assert (tmp_path / "out/policy/config.json").exists()

"""The plan of a recipe: placement, memory and step time, computed by hand and measured from a run;
and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import Qwen3MoeConfig

from ramify.cli.main import load_subcommand
from ramify.cli.parser import UsageError
from ramify.errors import ConfigError
from ramify.extras.cluster import step_time_estimate
from ramify.extras.cluster.model_and_device_specs import (
    DeviceEfficiency,
    DeviceHardwareSpec,
    ModelParameterCounts,
    device_of,
    model_shape_from_config,
)
from ramify.extras.cluster.plan import ClusterPlanOptions, format_plan_lines, plan
from ramify.extras.cluster.step_time_estimate import StepTokenCounts
from ramify.extras.cluster.trainer_mesh_estimates import estimate_meshes
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.sandbox.base import SandboxSpec
from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore
from ramify.train.config import Run, to_plain_data
from ramify.train.metrics import MetricsFile
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec, RoleSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from tests.extras.cluster.test_memory import half
from tests.train.small import small

COLOCATED = PlacementSpec(
    pools={"main": NodePoolSpec(nodes=1, gpus=2, cpus=8)},
    trainer=RoleSpec(gpus=1),
    inference=RoleSpec(gpus=1),
    colocate=(("trainer", "inference"),),
)
RECIPE = """
from tests.extras.cluster.test_plan import placed
def run():
    return placed()
"""
TOY = ModelParameterCounts(
    parameters=1000, inside=800, products=1000, largest_layer=400, outside=200, layers=2, width=10, mlp=20, heads=2,
    head_size=5, kv_heads=1, vocabulary=20, window=100,
)  # fmt: skip
SLOW = DeviceHardwareSpec("slow", 1, tflops=1e-6, gb_per_s=1e-3)
"""1e6 FLOP/s and 1e6 bytes/s."""


def placed(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "compute": TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2), max_tokens=8192),
        "inference": InferenceSpec(num=2),
        "placement": COLOCATED,
    }
    return half(**(fields | changes))


def test_plan_shows_placement_and_memory_of_each_role() -> None:
    found = plan(placed())
    assert [
        (placement_slot.pool, placement_slot.node, [tuple(each) for each in placement_slot.members])
        for placement_slot in found.placement_slots
    ] == [
        ("main", 0, [("trainer", 0), ("inference", 0)]),
        ("main", 0, [("trainer", 1), ("inference", 1)]),
    ]
    assert [(part.role, part.count, part.device) for part in found.parts] == [
        ("rank 0", 1, "h100"),
        ("other ranks", 1, "h100"),
        ("engine", 2, "h100"),
        ("sessions", 1, "cpu"),
    ]
    text = "\n".join(format_plan_lines(found))
    assert (
        "pool main node 0 (2 GPUs, 8 CPUs)\n  placement slot 0: 1 GPUs, 2 CPUs: trainer 0, inference 0\n"
        in text
    )
    assert "494,032,768 parameters, 24 layers of width 896, window 32768" in text
    assert found.parts[-1].memory.parts == {"128 sessions, empty": 128 * 2_500_000}
    assert text.split("  sessions x 1 (cpu): ")[1].splitlines()[:3] == [
        "320 MB",
        "    128 sessions, empty       320 MB",
        "    contents of sessions are extra; limits: one session (sandbox.memory_bytes) 2.15 GB, all "
        "together "
        "(sandbox.all_memory_bytes) three quarters of the machine's",
    ]
    weak = plan(placed(sandbox=SandboxSpec("process", allow_weaker=True)))
    assert weak.parts[-1].limits["all together, each at its limit"] == 128 * (2 << 30)
    assert found.too_large == []
    large = TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2), max_tokens=16_384)
    small_ones = plan(placed(compute=large), ClusterPlanOptions(device="l4"))
    assert "share a device of 24 GB and hold" in small_ones.too_large[-1]


def test_number_of_nodes_can_be_given_for_the_only_pool() -> None:
    four = placed(
        compute=TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=4)),
        inference=InferenceSpec(num=4),
    )
    with pytest.raises(
        ConfigError, match="trainer and inference 4 x 1 = 4 GPUs, but it has 1 x 2 = 2"
    ):
        plan(four)
    assert [
        placement_slot.node
        for placement_slot in plan(four, ClusterPlanOptions(nodes=2)).placement_slots
    ] == [0, 0, 1, 1]


def test_engines_over_two_gpus_share_them_with_two_ranks() -> None:
    """Each GPU holds half of an engine; the sum of both roles is compared with one device."""
    over_two = msgspec.structs.replace(COLOCATED, inference=RoleSpec(gpus=2))
    one = InferenceSpec(num=1, engine="vllm")
    found = plan(placed(placement=over_two, inference=one), ClusterPlanOptions(device="l4"))
    text = "\n".join(format_plan_lines(found))
    assert "  placement slot 0: 2 GPUs, 3 CPUs: trainer 0, trainer 1, inference 0\n" in text
    rank, engine = found.parts[0].memory, found.parts[2].memory
    assert engine.room == 2 * rank.room == 48 * 10**9
    assert engine.total == int(0.9 * 48e9)
    assert found.too_large[-1].startswith("trainer and inference share a device of 24 GB and hold")


def test_step_time_matches_hand_calculation() -> None:
    """TOY on a device of 10^6 FLOP/s and 10^6 bytes/s at half efficiency: 400 sampled tokens in
    10 rollouts, 600 prompt tokens.

    a token forward          2 x 1,000 + 4 x 2 x 10 x length / 2: 6,000 at a mean length of 100, 4,000 at 50
    learning on 2 ranks      1,000 tokens x 3 x 6,000 / (2 x 5 x 10^5)                                      = 18 s
    prompts, 1 engine        600 x 4,000 / (5 x 10^5)                                                       = 4.8 s
    a round of 8 tokens      products: 8 x 4,000 / (5 x 10^5) = 0.064 s
                             memory: (1,000 x 4 + 8 x 50 x 80) / (5 x 10^5) = 0.072 s, which is slower
    sampling                 4.8 + 400 / 8 x 0.072                                                          = 8.4 s
    sync                     4,000 bytes at 10^4 bytes/s                                                    = 0.4 s
    """
    run = small(
        policy=msgspec.structs.replace(small().policy, slots=8),
        rl=msgspec.structs.replace(
            small().rl, rollout=msgspec.structs.replace(small().rl.rollout, concurrency=64)
        ),
    )
    tokens, shares = StepTokenCounts(400, 600, 10, "given"), DeviceEfficiency(0.5, 0.5, 0.5)
    found = step_time_estimate.estimate_step_seconds(
        run, TOY, 2, 1, (SLOW, SLOW), tokens, shares=shares, link_gb_per_s=1e-5
    )
    assert (found.learning, found.sampling, found.sync) == pytest.approx((18.0, 8.4, 0.4))
    assert found.step == pytest.approx(26.8)
    apart = msgspec.structs.replace(
        run, rl=msgspec.structs.replace(run.rl, sample=RolloutBatchSpec(max_staleness=1))
    )
    assert step_time_estimate.estimate_step_seconds(
        apart, TOY, 2, 1, (SLOW, SLOW), tokens, shares=shares, link_gb_per_s=1e-5
    ).step == pytest.approx(18.4)
    again = msgspec.structs.replace(run, compute=TrainerComputeSpec(recompute=True))
    assert step_time_estimate.estimate_step_seconds(
        again, TOY, 2, 1, (SLOW, SLOW), tokens, shares=shares
    ).learning == pytest.approx(24.0)


def test_step_time_is_scaled_from_a_measured_run(tmp_path: Path) -> None:
    """One rank trained on 300 tokens per second and one engine sampled 50; two of each halve the
    time."""
    checkpoints = CheckpointStore(tmp_path, 1, 0)
    checkpoints.save(CheckpointedProgress(step=3, config=to_plain_data(small())), {})
    written = MetricsFile(tmp_path)
    for step, work_s in enumerate((40.0, 4.0, 4.0)):  # the first step is an outlier
        values = {
            "work_s": work_s,
            "learn_s": 2.0,
            "sampled_tokens": 200.0,
            "packed_tokens": 600.0,
            "length_mean": 20.0,
        }
        written.write(step, "rl", 0.0, values)
    found = plan(placed(), ClusterPlanOptions(measured=tmp_path))
    assert found.seconds is not None
    assert (found.seconds.sampling, found.seconds.learning) == (2.0, 1.0)
    assert found.tokens.rollouts == 10
    assert f"measured over 2 steps of {tmp_path}" in "\n".join(format_plan_lines(found))
    (tmp_path / "metrics.jsonl").write_text("")
    zero_variance = MetricsFile(tmp_path)
    for step in range(3):
        zero_variance.write(
            step, "rl", 0.0, {"work_s": 4.0, "learn_s": 0.0, "sampled_tokens": 200.0}
        )
    with pytest.raises(ConfigError, match=r"no step of .* trained the policy"):
        plan(placed(), ClusterPlanOptions(measured=tmp_path))
    with pytest.raises(
        ConfigError, match=r"--measured .*nowhere is not a run's folder: it has no metrics\.jsonl"
    ):
        plan(placed(), ClusterPlanOptions(measured=tmp_path / "nowhere"))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no step of reinforcement learning"):
        plan(placed(), ClusterPlanOptions(measured=tmp_path))


def test_thousand_ranks_are_limited_by_rollouts_and_weight_traffic() -> None:
    """20 rollouts keep only 20 ranks busy. Communication, not computation, limits the step: 8 bytes
    of gradients and gathered weights per parameter, over a network of 25 GB/s."""
    large = PlacementSpec(
        pools={"main": NodePoolSpec(nodes=125, gpus=8, cpus=96)}, trainer=RoleSpec(gpus=1)
    )
    run = placed(
        compute=TrainerComputeSpec(backend="fsdp", precision="bf16", shard=FsdpSpec(ranks=1000)),
        inference=InferenceSpec(urls=("http://127.0.0.1:9",)),
        placement=large,
    )
    tokens = StepTokenCounts(20_000, 20_000, 20, "given")
    found = plan(run, ClusterPlanOptions(tokens=tokens))
    text = list(format_plan_lines(found))
    assert text[1] == (
        "pool main: 125 nodes of 8 GPUs and 96 CPUs, 1000 placement slots: 1000 x trainer"
    )
    assert found.seconds is not None
    gathers = 0.999 * ((2 * 494_032_768 - 136_135_552) * 2 + 494_032_768 * 4) / 25e9
    assert found.seconds.learning == pytest.approx(gathers, rel=1e-3)
    assert "on 20 of 1000 x h100" in found.seconds.why["learning"]
    best = found.meshes[0]
    assert best.fits
    assert best.seconds == min(each.seconds for each in found.meshes if each.fits)
    assert best.seconds < found.seconds.learning
    fields = " ".join(f"compute.shard.{name}={size}" for name, size in best.fields.items())
    assert f"  fastest that fits: {fields}" in text


def test_moe_mesh_traffic_matches_hand_calculation() -> None:
    """A mixture of experts on two ranks: the bytes that each mesh sends, and the share of experts
    that a rank gathers."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_experts=4, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    shape = model_shape_from_config(config)
    assert (shape.experts, shape.experts_per_token) == (2 * 4 * 3 * 16 * 32, 2)
    run = placed(
        compute=TrainerComputeSpec(backend="fsdp", precision="fp32", shard=FsdpSpec(ranks=2))
    )
    tokens = StepTokenCounts(400, 600, 10, "given")
    found = {
        (each.fields["replicas"], each.fields["tensor"], each.fields["experts"]): each
        for each in estimate_meshes(run, shape, config, 2, SLOW, tokens, DeviceEfficiency())
    }
    assert sorted(found) == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 1)]
    dense, experts = shape.parameters - shape.experts, shape.experts
    halves = 0.5 * ((2 * dense - shape.outside) * 4 + dense * 4)
    assert found[1, 1, 1].sent.total == halves + 0.5 * (2 * experts * 4 + experts * 4)
    # 500 tokens of each rank go twice to experts and back, forward and backward, in two layers
    assert found[1, 1, 2].sent.shard == halves
    assert found[1, 1, 2].sent.experts == 4 * 0.5 * 2 * 500 * 2 * 32 * 4
    assert found[2, 1, 1].sent.replicas == shape.parameters * 4
    # 16 sums of the 1,000 tokens' hidden states, and the logits of 400
    assert found[1, 2, 1].sent.total == 16 * 1000 * 32 * 4 + 0.5 * 400 * 64 * 4


def test_invalid_efficiency_and_unknown_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train=1\.5 must be above 0 and at most 1"):
        DeviceEfficiency(train=1.5)
    with pytest.raises(ConfigError, match="unknown device 'h10': did you mean 'h100'"):
        device_of("h10")


def test_plan_command_prints_json_or_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    plan_command = load_subcommand("cluster plan")
    assert plan_command.call([str(recipe), "--json", "--device", "h200", "--mfu", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"][0]["device"] == "h200"
    assert found["placement_slots"][0]["members"] == [["trainer", 0], ["inference", 0]]
    assert plan_command.call([str(recipe)]) == 0
    assert "  placement slot 1: 1 GPUs, 2 CPUs: trainer 1, inference 1\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="= 2 GPUs, but it has 1 x 1 = 1"):
        plan_command.call([str(recipe), 'placement.pools={"main": {"gpus": 1, "cpus": 8}}'])
    with pytest.raises(UsageError, match="give exactly one recipe"):
        plan_command.call(["rl.steps=1"])
    with pytest.raises(UsageError, match="--mfu 3: give a fraction above 0 and at most 1"):
        plan_command.call([str(recipe), "--mfu", "3"])

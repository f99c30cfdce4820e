"""LoRA adapters: a no-op at first, the only trained weights, and merged when saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ramify.errors import ConfigError
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.lora import attach, merged_weights
from ramify.train.backends.single_device import SingleBackend
from ramify.train.backends.trained_model import InProcessTrainedModel
from ramify.train.data.pack import pack
from ramify.train.losses.total_loss import LossSpec
from tests.train.backends.small import policy as small_policy
from tests.train.backends.small import tree
from tests.train.checkpoints import chat_checkpoint

FP32 = TrainerComputeSpec(precision="fp32")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"up": nn.Linear(6, 10), "down": nn.Linear(10, 6, bias=False), "lm_head": nn.Linear(6, 4)}
    )


def run(modules: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(modules, nn.ModuleDict)
    return modules["lm_head"](modules["down"](modules["up"](x).relu()))  # type: ignore[no-any-return]


def test_merged_weights_are_base_plus_scaled_adapter_product() -> None:
    plain, adapted = model(), model()
    num = attach(adapted, rank=2, alpha=6, targets="all-linear")
    assert num == 2 * (6 + 10) + 2 * (10 + 6)
    x = torch.randn(3, 6)
    assert torch.equal(run(plain, x), run(adapted, x))
    names = dict(plain.named_parameters())
    assert {name: tuple(weight.shape) for name, weight in merged_weights(adapted)} == {
        n: tuple(w.shape) for n, w in names.items()
    }
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        run(adapted, x).square().sum().backward()
        optimizer.step()
    sums = dict(merged_weights(adapted))
    low = adapted["up"].parametrizations.weight[0]  # type: ignore[index]
    torch.testing.assert_close(sums["up.weight"], names["up.weight"] + 3 * low.B @ low.A)
    assert not torch.equal(sums["up.weight"], names["up.weight"])
    for name in ("up.bias", "lm_head.weight", "lm_head.bias"):
        assert torch.equal(sums[name], names[name])
    copied = model()
    copied.load_state_dict(sums)
    torch.testing.assert_close(run(copied, x), run(adapted, x))


def test_targets_select_linear_layers_and_unknown_ones_are_rejected() -> None:
    assert attach(model(), 1, 1, targets=("down",)) == 16
    with pytest.raises(
        ConfigError, match=r"lora.targets=\('q_proj',\): no linear .* choose from down, lm_head, up"
    ):
        attach(model(), 1, 1, targets=("q_proj",))
    untouched = model()
    assert [name for name, _ in merged_weights(untouched)] == [
        name for name, _ in untouched.named_parameters()
    ]


@pytest.mark.parametrize("with_critic", [False, True])
def test_reference_is_the_policy_without_its_adapters(with_critic: bool, tmp_path: Path) -> None:
    """The reference is not loaded (its folder does not exist); after some steps its outputs are
    bit-identical to the policy's before it had adapters, and the policy trains on. If more than
    adapters was trained before, the reference must be a second model."""
    policy, plain = small_policy(), SingleBackend(small_policy(), None, FP32)
    attach(policy.model, 2, 6.0, "all-linear", 3)
    here = InProcessTrainedModel(policy, FP32, tmp_path)
    backend = (
        here.with_critic(OptimizerSpec(lr=0.01), None)
        if with_critic
        else here.backend(OptimizerSpec(lr=0.01))
    )
    rows = tree()
    for row in rows:
        row.streams |= {name: np.zeros(len(row), np.float32) for name in ("values", "returns")}
    batches = pack(rows, backend.packing)
    reference = here.reference(tmp_path / "nowhere", is_base=True)
    for _ in range(2):
        backend.forward_backward(batches, LossSpec())
        backend.optim_step()
    moved = backend.logprobs(batches)
    for ours, wanted, now in zip(
        reference.logprobs(batches), plain.logprobs(batches), moved, strict=True
    ):
        np.testing.assert_array_equal(ours, wanted)
        assert np.abs(now - wanted).max() > 1e-3
    for now, again in zip(moved, backend.logprobs(batches), strict=True):
        np.testing.assert_array_equal(now, again)
    with pytest.raises(ConfigError):
        here.reference(tmp_path / "nowhere", is_base=False)


def test_same_seed_gives_same_adapters() -> None:
    first, again, other = model(), model(), model()
    for each, seed in ((first, 1), (again, 1), (other, 2)):
        attach(each, 2, 2, seed=seed)
    a, b, c = (each["up"].parametrizations.weight[0].A for each in (first, again, other))  # type: ignore[index]
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_hf_grpo_recipe_trains_a_llama_checkpoint(
    tmp_path: Path, lora: dict[str, float] | None
) -> None:
    """``recipes/hf_grpo.py`` on a small Llama with a chat template, in fp32 on the CPU."""
    import msgspec
    from transformers import AutoModelForCausalLM

    from ramify.train.recipe import load_recipe
    from tests.shown import train

    checkpoint = chat_checkpoint(tmp_path / "llama")
    run = load_recipe(
        Path(__file__).parents[3] / "recipes/hf_grpo.py",
        [
            f"policy.path={checkpoint}",
            "task.name=tests.train.small:even",
            "task.options={}",
            "rl.steps=2",
            "rl.sample.items=2",
            "rl.sample.max_items=null",
            "rl.rollout.group=3",
            "limits.max_turns=2",
            "limits.max_reply_tokens=12",
            "evaluate.num=2",
            "evaluate.first=[]",
            "policy.slots=8",
            "sandbox.provider=inprocess",
            "sandbox.allow_weaker=true",
            "rl.algorithm.overlong=punish",
            "rl.optim.lr=0.01",
            "threads=1",
        ],
    )
    if lora is not None:
        from ramify.train.config import LoraSpec

        policy = msgspec.structs.replace(run.policy, lora=msgspec.convert(lora, LoraSpec))
        run = msgspec.structs.replace(run, policy=policy)
    warned: list[str] = []
    shown: list[str] = []
    state = train(run, tmp_path / "out", say=warned.append, inform=shown.append)
    high = "rl.optim.lr=0.01 is 1e+0"
    # The doctor is right: a random policy does not write its end token.
    others = [text[: len(high)] for text in warned if "endless_replies" not in text]
    assert (state.step, others) == (2, [high])
    heads = [text.partition(":")[0] for text in shown]
    assert ("adapters of rank 2" in heads) == (lora is not None)
    before = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters())
    last = tmp_path / "out/checkpoints/step-000002/policy"  # not necessarily the best one
    after = dict(AutoModelForCausalLM.from_pretrained(last).named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert moved <= linear if lora is not None else "model.norm.weight" in moved

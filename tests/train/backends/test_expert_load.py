"""Load-balancing loss and expert load of mixtures of experts: equal to those of transformers on
separate rows, however a step is packed, with gradients checked against plain fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ramify.errors import ConfigError
from ramify.inference.local.engine import InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.model_runner import create_runner
from ramify.models.load import Policy
from ramify.models.moe_routing import MoeRouters
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import PackingCostModel, PackingSpec, pack
from ramify.train.losses import ImportanceSamplingLoss
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, TokenSequence
from tests.train.backends.small import MIXTURE_SIZES, policy, row, tree

SIZES: dict[str, Any] = {
    **MIXTURE_SIZES,
    "pad_token_id": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}
QWEN = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, norm_topk_prob=True)
FAMILIES = [
    QWEN,
    MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=4, sliding_window=None),
    OlmoeConfig(**SIZES, intermediate_size=16, num_experts=4),
    GptOssConfig(
        **SIZES, intermediate_size=16, num_local_experts=4, layer_types=["full_attention"] * 2
    ),
]
FREE = PackingCostModel(pair=0.0, share=0.0, join=0.0)
LOSS = LossSpec(entropy=0.01)
EXACT = TrainerComputeSpec(precision="fp32")


def separate() -> list[TokenSequence]:
    """Return rows of different lengths without shared prefixes."""
    rng = np.random.default_rng(3)
    return [row(f"{index}", [index, 9, 9], 6 + 5 * index, rng) for index in range(4)]


def learn(config: Any, batches: list[Batch], **compute: Any) -> tuple[dict[str, float], Any]:
    """Return (metrics, gradient by parameter name)."""
    backend = SingleBackend(policy(config), compute=TrainerComputeSpec(precision="fp32", **compute))
    measured = backend.forward_backward(batches, LOSS)
    return measured, {name: each.grad for name, each in backend.model.named_parameters()}


def without_router_loss(config: Any) -> Any:
    other = type(config)(**config.to_dict())
    other.output_router_logits = False
    return other


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("share", [True, False], ids=["forest", "rows"])
def test_router_loss_matches_transformers_on_padded_rows(config: Any, share: bool):
    """The value and every gradient, with several batches per step; the reference is in fp64."""
    rows = separate()
    batches = pack(rows, PackingSpec(max_tokens=40, share=share))
    assert len(batches) > 1
    measured, gradients = learn(config, batches)
    model: Any = policy(config).model.double()
    model.set_experts_implementation("eager")  # others have no fp64
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length)
    for index, each in enumerate(rows):
        ids[index, : len(each)] = torch.from_numpy(each.token_ids)
        mask[index, : len(each)] = 1
    out = model(ids, attention_mask=mask, output_router_logits=True)
    balance = 0.3 * load_balancing_loss_func(out.router_logits, 4, 2, mask)
    wanted = float(balance.detach())
    assert measured["router_loss"] == pytest.approx(wanted, rel=1e-5)
    balance.backward()
    plain, without = learn(without_router_loss(config), batches)
    assert "router_loss" not in plain
    assert measured["loss"] == pytest.approx(plain["loss"] + wanted, rel=1e-5)
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and float(parameter.grad.norm()) > 1e-7:
            found = gradients[name] - without[name]
            apart = float((found - parameter.grad).norm() / parameter.grad.norm())
            assert apart < 2e-4, name  # a difference of two fp32 gradients
            compared += 1
    assert compared > 10
    router = next(name for name in gradients if name.endswith(("gate.weight", "router.weight")))
    assert float((gradients[router] - without[router]).norm()) > 1e-3


def test_router_loss_counts_each_token_once_however_packed():
    """Shared prefixes are computed once, per row, or again after a tree was cut."""
    rows = tree()
    wanted, gradients = learn(QWEN, pack(rows, PackingSpec(cost=FREE)))
    ways = {
        "rows": (pack(rows, PackingSpec(share=False)), {}),
        "cut": (pack(rows, PackingSpec(max_tokens=50, cost=FREE)), {}),
        "a row at a time": (pack(rows, PackingSpec(max_tokens=1)), {}),
        "recomputed": (pack(rows, PackingSpec(max_tokens=90)), {"recompute": True}),
    }
    for way, (batches, compute) in ways.items():
        measured, found = learn(QWEN, batches, **compute)
        for name in ("loss", "router_loss", "expert_load_max", "experts_idle"):
            assert measured[name] == pytest.approx(wanted[name], rel=1e-5), way
        for name, gradient in gradients.items():
            apart = float((found[name] - gradient).abs().max() / gradient.abs().max())
            assert apart < 1e-5, (way, name)


def test_expert_load_counts_the_experts_routers_choose():
    """Routers that always choose experts 0 and 1 leave two experts idle per layer; the busiest has
    twice the mean load."""
    fixed = policy(without_router_loss(QWEN))
    layers = fixed.model.model.layers
    with torch.no_grad():
        layers[0].mlp.gate.weight.zero_()  # top-k of equal numbers
        layers[1].mlp.gate.weight.zero_()
    rows = separate()
    measured = SingleBackend(fixed, compute=EXACT).forward_backward(pack(rows), LOSS)
    assert (measured["expert_load_max"], measured["experts_idle"]) == (2.0, 4.0)
    assert "router_loss" not in measured


def test_token_weights_sum_to_the_tokens_of_the_forest():
    rows = tree()
    whole = sum(len(batch) for batch in pack(rows, PackingSpec(cost=FREE)))
    for packing in (PackingSpec(share=False), PackingSpec(max_tokens=50, cost=FREE)):
        batches = pack(rows, packing)
        assert sum(len(batch) for batch in batches) > whole
        total = sum(float(batch.token_weights.sum()) for batch in batches)  # type: ignore[union-attr]
        assert total == pytest.approx(whole, rel=1e-6)


def test_router_aux_loss_coef_is_rejected_for_dense_models():
    batches = pack(separate())
    loss = LossSpec(entropy=0.01, router_aux_loss_coef=0.3)
    backend = SingleBackend(policy(without_router_loss(QWEN)), compute=EXACT)
    found = backend.forward_backward(batches, loss)["router_loss"]
    assert found == pytest.approx(learn(QWEN, batches)[0]["router_loss"])
    with pytest.raises(ConfigError) as refused:
        SingleBackend(policy(), compute=EXACT).forward_backward(batches, loss)
    assert str(refused.value) == (
        "loss.router_aux_loss_coef=0.3 needs a mixture-of-experts model whose routers "
        "transformers records, which qwen3 is not: remove it"
    )
    with pytest.raises(ConfigError, match=r"coef=-1 cannot be negative"):
        LossSpec(router_aux_loss_coef=-1.0)


def sampled_by_engine(served: Policy, prompt: list[int], num: int) -> TokenSequence:
    """Sample a reply with the engine and return it with its routes."""
    generation = GenerationState(prompt, max_tokens=num, seed="0")
    room = InferenceEngineLimits(
        slots=2, prefill_tokens=64, cache_bytes=1 << 24, window=64, reuse=True
    )
    engine = LocalEngine(create_runner(served.model), room)
    routers = engine.runner.routers = MoeRouters.of_model(served.model)
    assert routers is not None
    routers.start_recording()
    engine.add(generation)
    while not engine.is_idle:
        engine.step()
    ids = np.array(generation.ids)
    mask = np.arange(len(ids)) >= len(prompt)
    columns = np.zeros((2, len(ids)), np.float32)
    columns[0, mask], columns[1, mask] = generation.logprobs, 1
    routes = np.full((len(ids), 4), -1)
    routes[mask] = generation.routes
    return TokenSequence(
        token_ids=ids,
        mask=mask,
        sampler_logprobs=columns[0],
        advantages=columns[1],
        rl=columns[1],
        routes=routes,
    )


def send(router: Any, given_Tk: Tensor) -> None:
    """Make a Qwen router use the given experts for tokens (-1: its own choice)."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, 32) @ router.weight.T
        chances = logits.softmax(-1)
        experts = torch.where(given_Tk >= 0, given_Tk, chances.topk(2)[1])
        weights = chances.gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    router.forward = forward


@pytest.mark.parametrize("share", [True, False], ids=["forest", "rows"])
def test_training_replays_expert_routes_reported_by_the_engine(share: bool):
    """After the routers changed, sampled tokens still go to the experts that the engine chose, but
    with the weights and gradients of the new routers."""
    config = without_router_loss(QWEN)
    served = policy(config)
    sequence = sampled_by_engine(served, [3, 1, 4, 1, 5], 12)
    assert sequence.routes is not None
    ours, plain = policy(config), policy(config)
    with torch.no_grad():
        for module in (ours.model, plain.model):
            for layer in module.model.layers:  # type: ignore[union-attr]
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    given_TLk = torch.from_numpy(sequence.routes[1:]).view(-1, 2, 2)
    for index, layer in enumerate(plain.model.model.layers):  # type: ignore[union-attr]
        send(layer.mlp.gate, given_TLk[:, index])
    logits = plain.model(input_ids=torch.from_numpy(sequence.token_ids[None, :-1])).logits[0]
    targets = torch.from_numpy(sequence.token_ids[1:, None])
    wanted = logits.log_softmax(-1).gather(1, targets)[4:, 0]
    trained = SingleBackend(ours, compute=EXACT)
    batches = pack([sequence], PackingSpec(share=share))
    found = torch.from_numpy(trained.logprobs(batches)[0])
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-4)
    trained.forward_backward(batches, LossSpec(policy=ImportanceSamplingLoss()))
    ratio = (wanted - torch.from_numpy(sequence.sampler_logprobs[5:])).exp()
    (-ratio.mean()).backward()
    gates = zip(ours.model.model.layers, plain.model.model.layers, strict=True)  # type: ignore[union-attr]
    for mine, theirs in gates:
        torch.testing.assert_close(
            mine.mlp.gate.weight.grad, theirs.mlp.gate.weight.grad, rtol=1e-3, atol=1e-5
        )
    sequence.routes = None
    free = trained.logprobs(pack([sequence], PackingSpec(share=share)))[0]
    assert float((torch.from_numpy(free) - wanted.detach()).abs().max()) > 0.01

"""The decoder of small models on a CPU computes what ``DenseModel`` computes, for all families and
whatever happens to the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from ramify.inference.local import cpu_optimized_decoder
from ramify.inference.local.cpu_optimized_decoder import CpuOptimizedDecoder
from ramify.models import onednn_products
from ramify.models.dense import DenseModel
from tests.inference.helpers import causal
from tests.models.configs import configs


def model(config: Any, seed: int = 0) -> DenseModel:
    """Return a model with random parameters, norms and biases too."""
    torch.manual_seed(seed)
    made = DenseModel(config)
    made.load_state_dict(AutoModelForCausalLM.from_config(config).state_dict())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0)
                )
    return made


@torch.inference_mode()
def logits(
    decoder: DenseModel | CpuOptimizedDecoder, num: int, rows: list[int] | None = None
) -> Tensor:
    """Return the logits of some tokens, all of them or ``rows``."""
    ids = torch.arange(num) * 7 % 97
    rows_N = None if rows is None else torch.tensor(rows, dtype=torch.long)
    return decoder.logits(decoder.hidden(ids, torch.arange(num), causal, rows_N)).clone()


@pytest.mark.parametrize("name", list(configs()))
def test_logits_are_those_of_the_model(name: str) -> None:
    made = model(configs()[name])
    decoder = CpuOptimizedDecoder(made)
    for num in (1, 40, 3):  # fewer tokens after more use the same memory
        torch.testing.assert_close(logits(decoder, num), logits(made, num), rtol=0, atol=1e-5)
    for rows in ([0, 20, 39], []):
        assert logits(decoder, 40, rows).shape == (len(rows), 97)
        torch.testing.assert_close(
            logits(decoder, 40, rows), logits(made, 40, rows), rtol=0, atol=1e-5
        )


@pytest.mark.skipif(not onednn_products.is_available(), reason="no oneDNN in this PyTorch")
@pytest.mark.parametrize("name", list(configs()))
def test_logits_of_many_tokens_by_onednn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(configs()[name])
    decoder = CpuOptimizedDecoder(made)
    expected = {
        (num, step): logits(made, num, list(range(0, num, step)))
        for num in (70, 300)
        for step in (1, 5)
    }
    monkeypatch.setattr(onednn_products, "is_faster_on_cpu", lambda: True)
    monkeypatch.setattr(cpu_optimized_decoder, "_LEAST_MULTIPLICATIONS", 0)
    for (num, step), wanted in expected.items():
        found = logits(decoder, num, list(range(0, num, step)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits(decoder, 70), expected[70, 1], rtol=0, atol=2e-5)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def change_in_place(made: DenseModel) -> None:
    with torch.no_grad():
        made.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(2)


def replace_memory(made: DenseModel) -> None:
    weight = made.get_parameter("model.layers.0.self_attn.k_norm.weight")
    weight.data = weight.data * 2


def load_others(made: DenseModel) -> None:
    made.load_state_dict(model(configs()["qwen3-tied"], seed=1).state_dict())


def adapt(made: DenseModel) -> None:
    parametrize.register_parametrization(made.get_submodule("lm_head"), "weight", Doubled())


def convert(made: DenseModel) -> None:
    made.double()


@pytest.mark.parametrize("change", [change_in_place, replace_memory, load_others, adapt, convert])
def test_changed_weights_apply_at_once(change: Callable[[DenseModel], None]) -> None:
    made = model(configs()["qwen3-tied"])
    decoder = CpuOptimizedDecoder(made)
    before = logits(decoder, 9)
    change(made)
    after = logits(decoder, 9)
    torch.testing.assert_close(after, logits(made, 9), rtol=0, atol=1e-5)
    assert not torch.allclose(before, after, rtol=0, atol=1e-3) or change is convert


def test_changed_biases_apply_at_once() -> None:
    made = model(configs()["qwen2"])
    decoder = CpuOptimizedDecoder(made)
    before = logits(decoder, 9)
    with torch.no_grad():
        made.get_parameter("model.layers.0.self_attn.q_proj.bias").add_(0.5)
        made.get_parameter("model.layers.0.self_attn.v_proj.bias").add_(0.5)
    after = logits(decoder, 9)
    torch.testing.assert_close(after, logits(made, 9), rtol=0, atol=1e-5)
    assert not torch.allclose(before, after, rtol=0, atol=1e-3)


def test_forget_notices_what_has_no_trace() -> None:
    """Memory that others write to, such as weights that engines share, has no version."""
    made = model(configs()["qwen3-tied"])
    decoder = CpuOptimizedDecoder(made)
    logits(decoder, 9)
    made.get_parameter("model.layers.0.self_attn.q_proj.weight").data.mul_(2)
    decoder.drop_weight_copies()
    torch.testing.assert_close(logits(decoder, 9), logits(made, 9), rtol=0, atol=1e-5)


def test_only_small_models_on_a_cpu_in_fp32_are_prepared() -> None:
    config = configs()["qwen3-tied"]
    assert CpuOptimizedDecoder.is_worthwhile_for(model(config))
    assert not CpuOptimizedDecoder.is_worthwhile_for(model(config).bfloat16())
    assert not CpuOptimizedDecoder.is_worthwhile_for(model(config).to("meta"))
    config.vocab_size = 200_000
    assert not CpuOptimizedDecoder.is_worthwhile_for(model(config))

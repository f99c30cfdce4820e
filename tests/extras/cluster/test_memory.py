"""Estimated bytes against the real ones of small models, optimizers and engines; and one large
model computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from ramify.extras.cluster import memory_estimates
from ramify.extras.cluster.model_and_device_specs import (
    ModelParameterCounts,
    device_of,
    model_shape_from_config,
    policy_config,
)
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.generation_request import GenerationState
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.config import LoraSpec, PolicySpec, RlSpec, Run
from ramify.train.data.pack import pack
from ramify.train.losses.total_loss import LossSpec
from tests.inference import helpers
from tests.train.backends.small import CONFIG, policy, tree
from tests.train.small import small

CPU, H100 = device_of("cpu"), device_of("h100")
QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
"""Qwen2.5-0.5B."""


def half(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "policy": PolicySpec(shape=QWEN_05B, dtype="bfloat16"),
        "rl": RlSpec(),
    }
    return Run(**(fields | changes))


def stepped(optim: OptimizerSpec) -> SingleBackend:
    """Return a backend after one step, so that its optimizer has allocated its state."""
    single = SingleBackend(policy(), optim, TrainerComputeSpec(precision="fp32"))
    rows = tree()
    single.forward_backward(pack(rows, single.packing, {"rl": 9.0, "ce": 3.0}), LossSpec())
    single.optim_step()
    return single


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_trainer_memory_matches_real_backend(kind: Any) -> None:
    optim = OptimizerSpec(kind=kind)
    run = small(warmup=None, sft=None, rl=RlSpec(optim=optim))
    found = memory_estimates.estimate_rank_memory(
        run, model_shape_from_config(CONFIG), CPU, ranks=1
    ).parts
    single = stepped(optim)
    weights = sum(tensor.nbytes for _, tensor in single.weights())
    state = 0
    for each in single.trained_parameters_and_optimizer[1].optimizers:
        for of_one in each.state.values():
            state += sum(
                value.nbytes
                for value in of_one.values()
                if isinstance(value, torch.Tensor) and value.dim()
            )
    assert (found["weights"], found["gradients"], found["optimizer"]) == (weights, weights, state)


def test_engine_cache_memory_matches_real_engine() -> None:
    model, slots = helpers.policy(), 4
    running = helpers.engine(model, slots=slots)
    running.add(GenerationState([5, 6, 7], max_tokens=helpers.WINDOW - 3))
    running.step()
    real = running.runner.cache_bytes  # type: ignore[attr-defined]
    shape = model_shape_from_config(model.config)
    assert memory_estimates.kv_cache_bytes(shape, CPU, 4, slots, None) == real
    run = small(policy=msgspec.structs.replace(small().policy, slots=slots))
    assert (
        memory_estimates.estimate_rank_memory(run, shape, CPU, 1).parts["keys and values"] == real
    )


def test_memory_limit_reduces_the_number_of_full_window_slots() -> None:
    shape = model_shape_from_config(CONFIG)
    one = shape.cache_bytes_per_token(4) * shape.window
    assert memory_estimates.kv_cache_bytes(shape, CPU, 4, 128, 5 * one + 1) == 5 * one
    assert memory_estimates.kv_cache_bytes(shape, CPU, 4, 3, 5 * one) == 3 * one


def test_memory_of_qwen_05b_matches_hand_calculation() -> None:
    """Qwen2.5-0.5B on four ranks.

    embedding, tied with the output      151,936 x 896                       136,134,656
    a layer: q and o with a bias for q   2 x 896 x 896 + 896                   1,606,528
             k and v with biases         2 x (896 x 128 + 128)                   229,632
             gate, up and down           3 x 896 x 4,864                      13,074,432
             two norms                   2 x 896                                   1,792
    24 layers                            24 x 14,912,384                     357,897,216
    the last norm                                                                    896
                                                                             494,032,768
    """
    run = half(
        compute=TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=4), max_tokens=16_384)
    )
    shape = model_shape_from_config(policy_config(run))
    assert shape == ModelParameterCounts(
        parameters=494_032_768, inside=24 * 14_909_440, products=24 * 14_909_440 + 136_134_656,
        largest_layer=14_912_384, outside=136_135_552, layers=24, width=896, mlp=4864, heads=14, head_size=64, kv_heads=2,
        vocabulary=151_936, window=32_768,
    )  # fmt: skip
    found = memory_estimates.estimate_rank_memory(run, shape, H100, ranks=4, rank=1).parts
    quarter = 123_508_192 * 4
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        quarter,
        quarter,
        2 * quarter,
    )
    # bf16: two layers and all that is outside of layers; gradients of one layer and of the latter
    assert found["gathered"] == 2 * (2 * 14_912_384 + 136_135_552) + 2 * (14_912_384 + 136_135_552)
    # a token keeps ten vectors of 896 and four of 4,864 in each of 24 layers, in bf16
    assert found["activations, at most"] == 16_384 * 24 * 2 * (8_960 + 19_456)
    # 2 x 24 layers x 2 heads x 64 x 2 bytes = 12,288 a token; a third of 80 GB is 66 slots of
    # 32,768 tokens
    engine = memory_estimates.estimate_engine_memory(
        msgspec.structs.replace(run, inference=InferenceSpec()), shape, H100
    )
    assert engine.parts == {"weights": 988_065_536, "keys and values": 66 * 32_768 * 12_288}
    assert engine.fits
    assert memory_estimates.estimate_rank_memory(half(), shape, device_of("l4"), 1).fits is False


def test_only_lora_adapters_have_gradients_and_optimizer_state() -> None:
    """Rank 8 on q of every layer: 8 x (896 + 896) in each of 24 layers."""
    spec = LoraSpec(rank=8, targets=("q_proj",))
    run = half(policy=PolicySpec(shape=QWEN_05B, lora=spec))
    shape = model_shape_from_config(policy_config(run), spec)
    assert shape.adapters == 24 * 8 * (896 + 896)
    found = memory_estimates.estimate_rank_memory(run, shape, CPU, 1).parts
    assert found["gradients"] == shape.adapters * 4
    assert found["optimizer"] == shape.adapters * 8


def test_kl_reference_model_is_counted() -> None:
    rl = RlSpec(loss=LossSpec(kl_beta=0.1))
    with_kl, without = (
        memory_estimates.estimate_rank_memory(
            small(rl=each), model_shape_from_config(CONFIG), CPU, 1
        ).parts
        for each in (rl, RlSpec())
    )
    assert with_kl["reference"] == with_kl["weights"]
    assert "reference" not in without

"""Two ranks with tensor or expert parallelism match one process to 1e-5; sizes that do not fit are
rejected with the arithmetic. For larger meshes see ``benchmarks/meshes.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen3MoeConfig

from ramify.errors import ConfigError
from ramify.models.weights import read_weights, tensors_fingerprint
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.fsdp import FsdpRanks, ShardedTrainedModel
from ramify.train.backends.lora import attach
from ramify.train.backends.mesh import DeviceMeshSizes
from ramify.train.backends.sharded_lora import AdapterSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses import DppoTv
from ramify.train.losses.total_loss import LossSpec
from ramify.train.preflight import check_engine_memory
from tests.train.backends.small import CONFIG, MIXTURE_SIZES, policy, tree

LOSS = LossSpec(policy=DppoTv(pull=0.1), entropy=0.01)
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
MOE = Qwen3MoeConfig(
    **MIXTURE_SIZES, **BALANCED, moe_intermediate_size=16, num_experts=4, norm_topk_prob=True
)
MIXTRAL = MixtralConfig(
    **MIXTURE_SIZES,
    intermediate_size=16,
    num_local_experts=4,
    sliding_window=None,
    tie_word_embeddings=True,
    **BALANCED,
)
OPTIM = OptimizerSpec(lr=1e-5, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpRanks]:
    torch.set_num_threads(1)
    found = FsdpRanks(
        TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=2, timeout_s=200)),
        dumps=tmp_path_factory.mktemp("dumps"),
    )
    yield found
    found.close()


def compute(**shard: Any) -> TrainerComputeSpec:
    return TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=2, **shard))


@pytest.mark.parametrize(
    ("config", "shard", "share"),
    [
        (CONFIG, {"tensor": 2}, True),
        (CONFIG, {"tensor": 2, "gather": "step"}, False),
        (MOE, {"experts": 2}, True),
        (MOE, {"tensor": 2, "experts": 2}, False),
        (MIXTRAL, {"experts": 2}, False),
    ],
    ids=["tensor-forest", "tensor-rows", "experts-forest", "both-rows", "mixtral-rows"],
)
def test_training_steps_match_single_process(
    ranks: FsdpRanks, config: Any, shard: Any, share: bool
):
    """Losses, every gradient, gradient norm and clipping, with several batches per step."""
    model = ranks.shard_model(
        config, dict(policy(config).model.state_dict()), compute=compute(**shard)
    )
    ours = model.create_backend(OPTIM)
    single = SingleBackend(policy(config), OPTIM, TrainerComputeSpec(precision="fp32"))
    batches = pack(tree(), PackingSpec(max_tokens=60, share=share))
    for _ in range(2):
        found, wanted = (each.forward_backward(batches, LOSS) for each in (ours, single))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        gradients = {name: each.grad for name, each in single.model.named_parameters()}
        for name, gradient in model.gradients():
            theirs = gradients.pop(name)
            assert theirs is not None
            assert float((gradient - theirs).norm()) <= 1e-5 * max(1e-3, float(theirs.norm())), name
        assert gradients == {}
        assert ours.optim_step() == pytest.approx(single.optim_step(), rel=1e-5)
    model.drop()


def test_adapters_are_sharded_like_their_layers(ranks: FsdpRanks):
    """A colwise layer splits B, a rowwise layer splits A; the steps match one process."""
    lora = AdapterSpec(rank=2, alpha=4.0)
    weights = {name: each.clone() for name, each in policy().model.state_dict().items()}
    model = ranks.shard_model(CONFIG, weights, lora, compute(tensor=2))
    ours = model.create_backend(OPTIM)
    theirs = policy()
    attach(theirs.model, lora.rank, lora.alpha, lora.targets, lora.seed)
    single = SingleBackend(theirs, OPTIM, TrainerComputeSpec(precision="fp32"))
    batches = pack(tree(), PackingSpec(max_tokens=60))
    for _ in range(3):
        found, wanted = (each.forward_backward(batches, LOSS) for each in (ours, single))
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert ours.optim_step() == pytest.approx(single.optim_step(), rel=1e-5)
    model.drop()


def test_sharded_mixture_is_loaded_exported_and_copied_bit_identically(
    ranks: FsdpRanks, tmp_path: Path
):
    """Each rank reads its own experts. Gathered, exported and copied weights are bit-identical on
    every mesh, so an engine gets the same fingerprint."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MIXTRAL)
    module.save_pretrained(tmp_path / "whole")
    wanted = {name: each.detach() for name, each in module.named_parameters()}
    for index, shard in enumerate(({}, {"tensor": 2}, {"tensor": 2, "experts": 2})):
        model = ranks.shard_model(MIXTRAL, tmp_path / "whole", compute=compute(**shard))
        assert tensors_fingerprint(model.weights()) == tensors_fingerprint(wanted.items())
        copied = ranks.shard_model(MIXTRAL, model, compute=compute(**shard), critic=True)
        assert tensors_fingerprint(copied.weights()) == tensors_fingerprint(wanted.items())
        model.export(tmp_path / f"{index}")
        assert tensors_fingerprint(
            read_weights(tmp_path / f"{index}").items()
        ) == tensors_fingerprint(read_weights(tmp_path / "whole").items())


def test_checkpoint_resumes_on_another_mesh(ranks: FsdpRanks, tmp_path: Path):
    batches = pack(tree(), PackingSpec(max_tokens=60))

    def backend_on(**shard: Any) -> Any:
        weights = dict(policy(MOE).model.state_dict())
        return ranks.shard_model(MOE, weights, compute=compute(**shard)).create_backend(OPTIM)

    first = backend_on(tensor=2)
    first.forward_backward(batches, LOSS)
    first.optim_step()
    wait = first.save(tmp_path / "saved")
    wait()
    wanted = [first.forward_backward(batches, LOSS), first.optim_step()]
    for shard in ({"experts": 2}, {}):
        again = backend_on(**shard)
        again.load(tmp_path / "saved")
        found = [again.forward_backward(batches, LOSS), again.optim_step()]
        assert again.version == 2
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_embedded_engine_too_large_for_its_device_is_rejected():
    config = MixtralConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    with pytest.raises(ConfigError) as refused:
        check_engine_memory(config, "float32", "cpu")
    assert re.fullmatch(
        r"the engine of this process holds the whole policy: [\d,]+ parameters x 4 bytes = "
        r"[\d.e+]+ GB, but its device \(cpu\) has [\d.]+ GB: use engines over HTTP, which spread "
        r"it over several devices: inference.engine=vllm, or inference.urls=\[…\]",
        str(refused.value),
    )
    check_engine_memory(CONFIG, "auto", "cpu")


# --- configurations rejected before any rank starts


@pytest.mark.parametrize(
    ("config", "shard", "message"),
    [
        (
            CONFIG,
            {"ranks": 3, "tensor": 3},
            "compute.shard.tensor=3 does not divide num_attention_heads=4 of qwen3 "
            "(4 = 3 x 1 + 1): use one of 1, 2",
        ),
        (
            MOE,
            {"ranks": 3, "experts": 3},
            "compute.shard.experts=3 does not divide num_experts=4 of qwen3_moe (4 = 3 x 1 + 1): "
            "use one of 1, 2, 4",
        ),
        (
            CONFIG,
            {"ranks": 2, "experts": 2},
            "compute.shard.experts=2, but qwen3 has no experts: leave it out",
        ),
        (
            GPT2Config(n_embd=32, n_head=4, n_layer=2),
            {"ranks": 2, "tensor": 2},
            "compute.shard.tensor=2: gpt2 has no plan for it in transformers (base_model_tp_plan): "
            "give rules in compute.shard.tensor_plan, such as model.layers.*.mlp.up_proj=colwise, "
            "or use tensor=1",
        ),
        (
            CONFIG,
            {"ranks": 2, "tensor": 2, "tensor_plan": {"model.blocks.*.mlp": "colwise"}},
            "compute.shard: `tp_plan` keys ['model.blocks.*.mlp'] match nothing in "
            "Qwen3ForCausalLM.",
        ),
    ],
    ids=["heads", "experts", "no experts", "no plan", "a rule that matches nothing"],
)
def test_model_that_cannot_be_sharded_is_rejected(config: Any, shard: Any, message: str):
    spec = TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(**shard))
    with pytest.raises(ConfigError) as refused:
        ShardedTrainedModel.check_model(config, spec, "cpu", None, [])
    assert str(refused.value) == message


def test_adapter_on_layer_with_unsupported_split_is_rejected():
    plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    spec = TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2, tensor=2, tensor_plan=plan))
    lora = AdapterSpec(rank=2, alpha=4.0)
    with pytest.raises(ConfigError) as refused:
        ShardedTrainedModel.check_model(CONFIG, spec, "cpu", lora, [])
    assert str(refused.value) == (
        "policy.lora: compute.shard.tensor splits 'model.layers.0.mlp.up_proj' as "
        "'packed_colwise', which is not supported for adapters (only colwise, "
        "colwise_gather_output, rowwise are): leave it out of lora.targets, or use tensor=1"
    )
    ShardedTrainedModel.check_model(
        CONFIG, spec, "cpu", msgspec.structs.replace(lora, targets=("q_proj",)), []
    )


def test_muon_is_rejected_with_tensor_parallelism():
    spec = TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2, tensor=2))
    with pytest.raises(ConfigError, match="muon needs whole matrix columns"):
        ShardedTrainedModel.check_model(CONFIG, spec, "cpu", None, [OptimizerSpec(kind="muon")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ranks": 6, "tensor": 4},
            "compute.shard: 6 ranks do not fit a mesh of 1 replicas x 4 tensor: 6 = 4 x 1 + 2",
        ),
        (
            {"ranks": 8, "tensor": 2, "experts": 3},
            "compute.shard.experts=3 must be a multiple of tensor=2 and divide the 8 ranks of a "
            "replica (8 / 1): use one of 2, 4, 8",
        ),
        ({"tensor": 0}, "compute.shard.tensor=0 must be at least 1"),
    ],
)
def test_mesh_that_does_not_match_its_ranks_is_rejected(fields: Any, message: str):
    with pytest.raises(ConfigError) as refused:
        FsdpSpec(**fields)
    assert str(refused.value) == message


def test_mesh_place_of_a_rank():
    sizes = DeviceMeshSizes.from_rank_count(8, replicas=2, tensor=2, experts=4)
    assert (sizes.shard, sizes.num_expert_shards, sizes.num_batches) == (2, 1, 4)
    assert sizes.rank_coordinates(6) == "replicate 1, shard 1, tensor 0, experts 2"
    assert DeviceMeshSizes.from_rank_count(2, 1, 1, 1).rank_coordinates(1) == "shard 1"

"""FSDP over two gloo processes matches one process to 1e-5; resuming is bit-identical; errors name
the lost rank.

All tests share one launch and run in this order, except for the last ones, which start by killing
a rank.
"""

from __future__ import annotations

import copy
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from ramify.errors import ConfigError, TrainError
from ramify.models.load import Policy
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.fsdp import FsdpRanks
from ramify.train.backends.fsdp_model import FsdpBackend, FsdpModel
from ramify.train.backends.lora import attach, merged_weights
from ramify.train.backends.sharded_lora import AdapterSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.backends.trained_model import PolicyWithSeparateCritic
from ramify.train.data.pack import PackingCostModel, PackingSpec, pack
from ramify.train.data.pack import copy_to_sequences as attach_stream
from ramify.train.losses import DppoTv, Gmpo, Gspo, KlCov
from ramify.train.losses.total_loss import LossSpec
from tests.train.backends.fsdp_checks import FP32, LOSS, check_gradients, check_steps, shard, spread
from tests.train.backends.small import CONFIG, VOCAB, policy, tree

GPT2 = GPT2Config(
    vocab_size=VOCAB,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=128,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpRanks]:
    torch.set_num_threads(1)
    found = FsdpRanks(
        TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=2, timeout_s=200)),
        dumps=tmp_path_factory.mktemp("dumps"),
    )
    yield found
    found.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers checkpoint of a model that runs as transformers' own module."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_steps_match_single_process(ranks: FsdpRanks, kind: Any):
    """Five batches on two ranks, so one rank is idle for one round."""
    batches = pack(tree(), PackingSpec(max_tokens=60))
    assert len(batches) == 5
    optim = OptimizerSpec(kind=kind, lr=1e-4, weight_decay=0.1, schedule="linear", num_steps=20)
    model = spread(ranks)
    fsdp, single = model.create_backend(optim), SingleBackend(policy(), optim, FP32)
    check_steps(model, fsdp, single, batches, 8 if kind == "adamw" else 4)
    for (name, ours), (other, theirs) in zip(fsdp.weights(), single.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert fsdp.version == single.version


def test_training_steps_from_transformers_checkpoint_match_single_process(
    ranks: FsdpRanks, checkpoint: Path
):
    """Each rank reads only its own rows of the file."""
    module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    single = SingleBackend(Policy(module, None, None, GPT2, 0, "gpt2"), OptimizerSpec(), FP32)  # type: ignore[arg-type]
    model = ranks.shard_model(GPT2, checkpoint)
    fsdp = model.create_backend(OptimizerSpec())
    assert fsdp.packing.share == single.packing.share
    check_steps(model, fsdp, single, pack(tree(), PackingSpec(max_tokens=100)), 4)


@pytest.mark.parametrize("way", [{"gather": "step"}, {"replicas": 2}, {"recompute": True}], ids=str)
def test_gather_replica_and_recompute_options_do_not_change_results(ranks: FsdpRanks, way: Any):
    """Weights gathered once per step, two replicas, and recomputed activations."""
    model = spread(ranks, shard(**way))
    check_steps(
        model,
        model.create_backend(OptimizerSpec()),
        SingleBackend(policy(), OptimizerSpec(), FP32),
        pack(tree(), PackingSpec(max_tokens=60)),
        2,
    )


@pytest.mark.parametrize(
    "formula", [Gspo(), Gmpo(), KlCov(share=0.2)], ids=lambda formula: type(formula).__name__
)
def test_sequence_and_step_level_losses_match_single_process(ranks: FsdpRanks, formula: Any):
    """Losses over whole sequences and over the whole step; the idle rank has no sequence."""
    rows = [msgspec.structs.replace(each, ce=None) for each in tree()]
    batches, loss = (
        pack(rows, PackingSpec(max_tokens=60, cost=PackingCostModel(share=0.0, join=0.0))),
        LossSpec(policy=formula),
    )
    model, single = spread(ranks), SingleBackend(policy(), None, FP32)
    ours, theirs = (
        each.forward_backward(batches, loss) for each in (model.create_backend(), single)
    )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    check_gradients(model, single)


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_critic_matches_single_process(ranks: FsdpRanks, kind: str, tmp_path: Path):
    """A critic on the policy's layers and a separate one: values, training steps and checkpoint."""
    rows = tree()
    for row in rows:
        row.ce = None
        row.streams["values"] = np.zeros(len(row), np.float32)
        row.streams["returns"] = np.where(
            row.rl != 0, 0.7 if row.name.startswith("fork") else -0.3, 0
        ).astype("f4")
    batches, optim = pack(rows, PackingSpec(max_tokens=60)), OptimizerSpec(lr=1e-3)
    single: Any = SingleBackend(policy(), optim, FP32, critic=True)

    def over_ranks() -> Any:
        weights = policy().model.state_dict()
        critic = ranks.shard_model(CONFIG, weights, critic=True).create_backend(optim, critic=True)
        return (
            critic
            if kind == "shared"
            else PolicyWithSeparateCritic(spread(ranks).create_backend(optim), critic)
        )

    if kind == "own":
        single = PolicyWithSeparateCritic(SingleBackend(policy(), optim, FP32), single)
    ours = over_ranks()
    for step in range(4):
        for here, there in zip(ours.values(batches), single.values(batches), strict=True):
            np.testing.assert_allclose(here, there, atol=2e-5)
            assert (step == 0) == (not here.any())
        measured = [each.forward_backward(batches, LOSS) for each in (ours, single)]
        assert measured[0] == pytest.approx(measured[1], rel=1e-3, abs=1e-4)
        measured = [each.optim_step() for each in (ours, single)]
        assert measured[0] == pytest.approx(measured[1], rel=1e-3)
    assert [name for name, _ in ours.weights()] == [name for name, _ in single.weights()]
    wait = ours.save(tmp_path)
    assert wait is not None
    wait()
    again = over_ranks()
    again.load(tmp_path)
    for here, there in zip(again.values(batches), ours.values(batches), strict=True):
        np.testing.assert_array_equal(here, there)
    with pytest.raises(ConfigError, match="this backend has no critic: create it with one"):
        spread(ranks).create_backend().values(batches)


def test_bf16_loss_is_close_to_fp32(ranks: FsdpRanks):
    """Weights are gathered and multiplied in bf16; gradients are reduced in fp32 or bf16."""
    batches = pack(tree(), PackingSpec(max_tokens=60))
    wanted = SingleBackend(policy(), None, FP32).forward_backward(batches, LOSS)["loss"]
    for reduce in ("fp32", "bf16"):
        compute = TrainerComputeSpec(precision="bf16", shard=FsdpSpec(ranks=2, reduce=reduce))  # type: ignore[arg-type]
        fsdp = spread(ranks, compute).create_backend()
        assert fsdp.forward_backward(batches, LOSS)["loss"] == pytest.approx(wanted, rel=0.02)
        assert fsdp.optim_step()["grad_norm"] > 0


def test_critic_values_in_bf16_are_close_to_fp32(ranks: FsdpRanks):
    """The policy's layers compute in bf16, the value head does not: after some steps its values are
    close to those of one process in fp32, and are not rounded to bf16."""
    rows = tree()
    for row in rows:
        row.ce = None
        row.streams["values"] = np.zeros(len(row), np.float32)
        row.streams["returns"] = np.where(
            row.rl != 0, 0.7 if row.name.startswith("fork") else -0.3, 0
        ).astype("f4")
    batches, optim = pack(rows, PackingSpec(max_tokens=60)), OptimizerSpec(lr=1e-3)
    single = SingleBackend(policy(), optim, FP32, critic=True)
    for gather in ("layer", "step"):
        compute = TrainerComputeSpec(precision="bf16", shard=FsdpSpec(ranks=2, gather=gather))  # type: ignore[arg-type]
        fsdp = ranks.shard_model(
            CONFIG, policy().model.state_dict(), compute=compute, critic=True
        ).create_backend(optim, critic=True)
        backends = (fsdp, single) if single.version == 0 else (fsdp,)
        for _ in range(4):
            measured = [
                each.forward_backward(batches, LOSS) | each.optim_step() for each in backends
            ]
            assert measured[0]["value_loss"] == pytest.approx(measured[-1]["value_loss"], rel=0.02)
        ours, wanted = (np.concatenate(each.values(batches)) for each in (fsdp, single))
        np.testing.assert_allclose(ours, wanted, atol=0.05 * np.abs(wanted).max())
        assert not np.array_equal(ours, torch.tensor(ours).bfloat16().float().numpy())


def test_fewer_batches_than_ranks(ranks: FsdpRanks):
    """One batch on two ranks, and no batch at all."""
    model = spread(ranks)
    fsdp, single = (
        model.create_backend(OptimizerSpec()),
        SingleBackend(policy(), OptimizerSpec(), FP32),
    )
    check_steps(model, fsdp, single, pack(tree(), single.packing), 2)
    assert fsdp.forward_backward([], LOSS) == {"loss": 0}
    assert fsdp.logprobs([]) == []
    assert len(pack(tree(), fsdp.packing)) % 2 == 0


def test_logprobs_use_the_current_weights(ranks: FsdpRanks):
    """Weights gathered for one pass are not reused after they have changed."""
    model, rows = spread(ranks), tree()
    fsdp = model.create_backend()
    batches = pack(rows, PackingSpec(max_tokens=60))
    for seed in (0, 1):
        other = policy(seed=seed)
        fsdp.load_weights(other.model.state_dict())
        for ours, theirs in zip(
            fsdp.logprobs(batches), SingleBackend(other, None, FP32).logprobs(batches), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    attach_stream(rows, batches, "old_logprobs", fsdp.logprobs(batches))
    with pytest.raises(ConfigError, match=r"the update has no tensor 'model.embed_tokens.weight'"):
        fsdp.load_weights({})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resuming_is_bit_identical(ranks: FsdpRanks, kind: Any, tmp_path: Path):
    """The checkpoint is written in the background while training continues."""
    optim = OptimizerSpec(
        kind=kind, lr=0.01, weight_decay=0.1, schedule="linear", warmup_steps=2, num_steps=6
    )
    batches = pack(tree(), PackingSpec(max_tokens=60))

    def steps(backend: FsdpBackend, num: int) -> list[dict[str, float]]:
        return [backend.forward_backward(batches, LOSS) | backend.optim_step() for _ in range(num)]

    model = spread(ranks)
    whole = model.create_backend(optim)
    steps(whole, 2)
    wait = whole.save(tmp_path / "state")
    assert wait is not None
    went_on = steps(whole, 2)
    wait()
    again = ranks.shard_model(
        CONFIG, policy(seed=1).model.state_dict(), compute=shard(save_async=False)
    )
    resumed = again.create_backend(optim)
    resumed.load(tmp_path / "state")
    assert resumed.version == 2
    assert steps(resumed, 2) == went_on
    for (name, ours), (_, theirs) in zip(resumed.weights(), whole.weights(), strict=True):
        assert torch.equal(ours, theirs), name
    assert resumed.save(tmp_path / "other") is None
    assert sorted(path.name for path in (tmp_path / "other/shards").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def test_loading_mismatched_checkpoint_is_rejected(
    ranks: FsdpRanks, checkpoint: Path, tmp_path: Path
):
    fsdp = spread(ranks, shard(save_async=False)).create_backend()
    fsdp.save(tmp_path)
    wider = copy.deepcopy(CONFIG)
    wider.intermediate_size = 64
    other = ranks.shard_model(wider, policy(wider).model.state_dict())
    with pytest.raises(
        ConfigError,
        match=r"'model.layers.0.mlp.down_proj.weight' is \(32, 48\) there, but \(32, 64\)",
    ):
        other.create_backend().load(tmp_path)
    with pytest.raises(ConfigError, match=r"saved with optim\.kind=adamw, but this run has muon"):
        spread(ranks).create_backend(OptimizerSpec(kind="muon")).load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"nowhere holds no sharded training state: trainer\.pt is missing"
    ):
        fsdp.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"gpt2\d has no tensor 'model.embed_tokens.weight'"):
        ranks.shard_model(CONFIG, checkpoint)


def test_export_writes_a_plain_transformers_checkpoint(
    ranks: FsdpRanks, checkpoint: Path, tmp_path: Path
):
    ids = torch.arange(20)[None] % VOCAB
    for config, source in ((CONFIG, policy().model.state_dict()), (GPT2, checkpoint)):
        model = ranks.shard_model(config, source)
        model.export(tmp_path / "out")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert loaded.dtype == torch.float32
        wanted = AutoModelForCausalLM.from_config(config).eval()
        weights = (
            source
            if isinstance(source, dict)
            else loaded.__class__.from_pretrained(checkpoint).state_dict()
        )
        wanted.load_state_dict(weights)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids).logits, wanted(input_ids=ids).logits)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft uses an old name of transformers
def test_lora_training_matches_single_process(ranks: FsdpRanks, tmp_path: Path):
    """Same steps as with ``train/backends/lora.py``; the base model is left unchanged."""
    lora = AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "down_proj"), seed=3)
    model = ranks.shard_model(CONFIG, policy().model.state_dict(), lora)
    fsdp = model.create_backend(OptimizerSpec(lr=0.01))
    adapted = policy()
    assert attach(adapted.model, 2, 6.0, ("q_proj", "down_proj"), 3) == sum(
        each.numel() for _, each in model.adapters()
    )
    single = SingleBackend(adapted, OptimizerSpec(lr=0.01), FP32)
    batches = pack(tree(), PackingSpec(max_tokens=60))
    base = fsdp.logprobs(batches)
    for _ in range(3):
        ours, theirs = (each.forward_backward(batches, LOSS)["loss"] for each in (fsdp, single))
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert fsdp.optim_step() == pytest.approx(single.optim_step(), rel=1e-5)
    wanted = dict(merged_weights(adapted.model))
    assert [name for name, _ in model.weights()] == list(wanted)
    for name, weight in model.weights():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-6)
    assert float(np.abs(fsdp.logprobs(batches)[0] - base[0]).max()) > 0.01
    for ours, theirs in zip(fsdp.base_reference().logprobs(batches), base, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    check_peft_loads_export(model, tmp_path)


def check_peft_loads_export(model: FsdpModel, folder: Path) -> None:
    """Check that peft can load the exported adapters onto the base model."""
    from peft import PeftModel

    model.export(folder)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG).eval()
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    ids = torch.arange(20)[None] % VOCAB
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_resumed_adapter_is_bit_identical(ranks: FsdpRanks, tmp_path: Path):
    """The checkpoint holds only the trained adapters."""
    lora = AdapterSpec(rank=2, alpha=4.0)
    batches = pack(tree(), PackingSpec(max_tokens=60))
    first, second = (
        ranks.shard_model(
            CONFIG, policy().model.state_dict(), lora, shard(save_async=False)
        ).create_backend()
        for _ in range(2)
    )
    first.forward_backward(batches, LOSS)
    first.optim_step()
    first.save(tmp_path)
    second.load(tmp_path)
    assert first.forward_backward(batches, LOSS) == second.forward_backward(batches, LOSS)
    with pytest.raises(
        ConfigError, match=r"'model.embed_tokens.weight' is None there, but \(61, 32\) in this run"
    ):
        spread(ranks).create_backend().load(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"lora.targets=\('qproj',\): no linear module has that name: choose from down_proj",
    ):
        ranks.shard_model(
            CONFIG, policy().model.state_dict(), msgspec.structs.replace(lora, targets=("qproj",))
        )


def test_non_finite_loss_fails_the_step_on_all_ranks_and_training_can_continue(ranks: FsdpRanks):
    rows = tree()
    rows[4].sampler_logprobs[:] = np.nan
    fsdp = spread(ranks).create_backend()
    with pytest.raises(
        TrainError,
        match="step 1 is not finite at 7 entries, the first being token 23 of sequence sib",
    ):
        fsdp.forward_backward(pack(rows, PackingSpec(max_tokens=60)), LOSS)
    assert fsdp.optim_step()["grad_norm"] == 0.0
    batches = pack(tree(), PackingSpec(max_tokens=60))
    single = SingleBackend(policy(), OptimizerSpec(), FP32)
    assert fsdp.forward_backward(batches, LOSS)["loss"] == pytest.approx(
        single.forward_backward(batches, LOSS)["loss"], rel=1e-5
    )


def test_killed_rank_is_named_and_training_resumes_with_fewer_ranks(
    ranks: FsdpRanks, tmp_path: Path
):
    """One rank loads the checkpoint of two ranks and makes the same steps as two would have."""
    optim = OptimizerSpec(lr=0.01)
    batches = pack(tree(), PackingSpec(max_tokens=60))
    fsdp = spread(ranks, shard(save_async=False)).create_backend(optim)
    fsdp.forward_backward(batches, LOSS)
    fsdp.optim_step()
    fsdp.save(tmp_path)
    wanted = [fsdp.forward_backward(batches, LOSS)["loss"], fsdp.optim_step()["grad_norm"]]
    wanted.append(fsdp.forward_backward(batches, LOSS)["loss"])
    (process,) = ranks.rank_group.processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(
        TrainError,
        match=rf"rank 1 \(shard 1, process {process.pid} on .*\) is lost: .*killed by signal 9",
    ):
        fsdp.forward_backward(batches, LOSS)
    with pytest.raises(TrainError, match=r"rank 1 .* is lost"):
        fsdp.logprobs(batches)
    ranks.close()
    alone = FsdpRanks(
        TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=1, save_async=False))
    )
    try:
        resumed = alone.shard_model(CONFIG, policy(seed=1).model.state_dict()).create_backend(optim)
        resumed.load(tmp_path)
        found = [resumed.forward_backward(batches, LOSS)["loss"], resumed.optim_step()["grad_norm"]]
        found.append(resumed.forward_backward(batches, LOSS)["loss"])
        assert found == pytest.approx(wanted, rel=1e-5)
    finally:
        alone.close()


class Sleeper(DppoTv, frozen=True, kw_only=True, tag="sleeper"):
    """A loss in which every rank but 0 sleeps."""

    def per_token(self, tokens: Any) -> Tensor:
        if torch.distributed.get_rank():
            import time

            time.sleep(600)
        return super().per_token(tokens)


@pytest.mark.slow
def test_stalled_rank_is_named_with_its_stack(tmp_path: Path):
    ranks = FsdpRanks(
        TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=2, timeout_s=10)),
        dumps=tmp_path,
    )
    try:
        fsdp = spread(ranks).create_backend()
        loss = LossSpec(policy=Sleeper())  # type: ignore[arg-type]
        with pytest.raises(TrainError) as caught:
            fsdp.forward_backward(pack(tree(), PackingSpec(max_tokens=60)), loss)
        told = str(caught.value)
        assert told.startswith(
            "no rank made progress for 10 s in 'accumulate_gradient'. rank 1 (shard 1, process "
        )
        assert "in per_token" in told
        stacks = (tmp_path / "stalled-ranks.txt").read_text()
        assert "time.sleep(600)" in stacks
        assert "all_reduce" in stacks
    finally:
        ranks.close()


def test_invalid_shard_specs_are_rejected_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ConfigError, match=r"6 ranks do not fit a mesh of 4 replicas: 6 = 4 x 1 \+ 2"
    ):
        FsdpSpec(ranks=6, replicas=4)
    with pytest.raises(ConfigError, match=r"1 ranks do not fit a mesh of 2 replicas"):
        FsdpRanks(TrainerComputeSpec(shard=FsdpSpec(replicas=2)))
    with pytest.raises(
        ConfigError, match="offload moves weights from a GPU to main memory; this run has no GPU"
    ):
        FsdpRanks(TrainerComputeSpec(shard=FsdpSpec(offload=True)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port={port} is not available .*another run may use it"
        ):
            FsdpRanks(TrainerComputeSpec(shard=FsdpSpec(ranks=2, port=port)))
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"compute.shard.ranks=2, but torchrun started 4"):
        FsdpRanks(TrainerComputeSpec(shard=FsdpSpec(ranks=2)))


def test_fsdp2_is_a_deprecated_alias_of_fsdp():
    with pytest.warns(DeprecationWarning, match="fsdp2 is called fsdp here"):
        assert TrainerComputeSpec(backend="fsdp2") == TrainerComputeSpec(backend="fsdp")

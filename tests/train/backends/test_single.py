"""The reference backend: same loss and gradient however a step is packed; bit-identical resume;
non-finite values stop the step.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, MistralConfig

from ramify.errors import ConfigError, TrainError
from ramify.models.dense import compile_layers
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import PackingCostModel, PackingSpec, copy_to_sequences, pack
from ramify.train.losses import DppoTv, PpoClip
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, SamplingMask, TokenSequence
from tests.train.backends.small import CONFIG, VOCAB, as_module, policy, row, tree

LOSS = LossSpec(policy=DppoTv(pull=0.1), entropy=0.01)
FREE = PackingCostModel(pair=0.0, share=0.0, join=0.0)


def learn(
    batches: list[Batch], backend: SingleBackend | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return (loss, gradient by parameter name)."""
    backend = backend or SingleBackend(policy())
    measured = backend.forward_backward(batches, LOSS)
    return measured["loss"], {name: each.grad for name, each in backend.model.named_parameters()}


def check_same(
    found: tuple[float, dict[str, Tensor]],
    wanted: tuple[float, dict[str, Tensor]],
    most: float = 1e-5,
) -> None:
    """Compare losses to 1e-6 and gradients to ``most`` of their largest entry."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-6, abs=1e-7)
    for name, gradient in wanted[1].items():
        difference = float((found[1][name] - gradient).abs().max() / gradient.abs().max())
        assert difference < most, name


def stepwise(rows: list[TokenSequence]) -> list[Batch]:
    """Cut each row into one row per three tokens, each with its full prefix, as in trainers without
    a tree."""
    whole = pack(rows)
    parts = []
    for each in rows:
        for end in range(3, len(each) + 3, 3):
            here = (np.arange(len(each)) >= end - 3)[:end]
            cut = {
                name: getattr(each, name)[:end]
                for name in ("token_ids", "mask", "sampler_logprobs", "advantages")
            }
            weights = {name: getattr(each, name)[:end] * here for name in ("rl", "ce")}
            part = TokenSequence(name=each.name, **cut, **weights)
            parts += pack([part], PackingSpec(share=False), whole[0].denominators)
    return parts


def test_loss_and_gradient_do_not_depend_on_packing():
    rows = tree()
    wanted = learn(pack(rows, PackingSpec(share=False)))
    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    ways = {
        "shared": pack(rows, PackingSpec(cost=FREE)),
        "in another order": pack(shuffled, PackingSpec(cost=FREE)),
        "shared where it pays": pack(rows),
        "cut small": pack(rows, PackingSpec(max_tokens=50, cost=FREE)),
        "a row at a time": pack(rows, PackingSpec(max_tokens=1)),
        "step by step": stepwise(rows),
    }
    tokens = {name: sum(map(len, batches)) for name, batches in ways.items()}
    assert (
        tokens["shared"] < tokens["cut small"] < tokens["a row at a time"] < tokens["step by step"]
    )
    for batches in ways.values():
        check_same(learn(batches), wanted)


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
CONFIGS = pytest.mark.parametrize(
    "config", [CONFIG, GPT2], ids=["Dense", "a module of transformers"]
)


@CONFIGS
def test_recomputing_activations_changes_nothing(config: Any):
    """Also if a backend on the same model then runs without recomputation."""
    wanted = learn(pack(tree()), SingleBackend(policy(config)))
    model = policy(config)
    for compute in (
        TrainerComputeSpec(recompute=True),
        TrainerComputeSpec(recompute=True),
        TrainerComputeSpec(max_logits=VOCAB * 5),
    ):
        backend = SingleBackend(model, compute=compute)
        check_same(learn(pack(tree()), backend), wanted)
        backend.model.zero_grad()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler imports what torch itself has deprecated
def test_compiled_layers_give_the_same_gradients():
    """For any number of tokens, in a copy of the model too, and after another backend's step. The
    compiler ends before it makes kernels, which takes minutes on a CPU; ``scripts/gpu train`` does
    all of it."""
    rows = tree()
    backend = SingleBackend(policy())
    for batches in (pack(rows), pack(rows, PackingSpec(share=False)), pack(rows[:2])):
        wanted = learn(batches)
        backend = SingleBackend(dataclasses.replace(policy(), model=copy.deepcopy(backend.model)))
        compile_layers(backend.model, "aot_eager")
        check_same(learn(batches, backend), wanted, 1e-4)
        backend.model.zero_grad()
    compile_layers(backend.model, None)
    check_same(learn(batches, backend), wanted)


def test_compile_option_names_the_compiler_of_each_layer():
    model = policy()
    for compile, compiler in ((True, "inductor"), (False, None)):
        made = SingleBackend(model, compute=TrainerComputeSpec(compile=compile)).model
        assert {layer.compiler for layer in made.model.layers} == {compiler}


def test_compiling_another_model_is_rejected():
    with pytest.raises(ConfigError, match="this model is a GPT2LMHeadModel: remove it"):
        SingleBackend(policy(GPT2), compute=TrainerComputeSpec(compile=True))


def test_compile_under_shard_is_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="is called compute.compile here"):
        assert TrainerComputeSpec(shard=FsdpSpec(compile=True)).compile


def test_transformers_module_gets_same_gradients_on_forest_and_rows():
    wanted = learn(pack(tree(), PackingSpec(share=False)), SingleBackend(policy(GPT2)))
    check_same(learn(pack(tree(), PackingSpec(cost=FREE)), SingleBackend(policy(GPT2))), wanted)


def test_model_without_prefix_sharing_is_packed_as_rows():
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=8,
        attention_dropout=0.0,
    )
    backend = SingleBackend(as_module(config))
    assert not backend.packing.share
    loss, gradient = learn(pack(tree(), backend.packing), backend)
    one_by_one = SingleBackend(as_module(config), compute=TrainerComputeSpec(max_tokens=1))
    check_same(learn(pack(tree(), one_by_one.packing), one_by_one), (loss, gradient))


def test_bf16_loss_and_gradient_are_close_to_fp32():
    loss, gradient = learn(pack(tree()))
    other, rough = learn(
        pack(tree()), SingleBackend(policy(), compute=TrainerComputeSpec(precision="bf16"))
    )
    assert other == pytest.approx(loss, rel=0.1)
    whole, whole_rough = (
        torch.cat([each.flatten() for each in found.values()]) for found in (gradient, rough)
    )
    assert float((whole - whole_rough).norm() / whole.norm()) < 0.1


@CONFIGS
def test_logprobs_match_plain_softmax(config: Any):
    rows = tree()
    backend = SingleBackend(policy(config))
    batches = pack(rows, backend.packing)
    copy_to_sequences(rows, batches, "old_logprobs", backend.logprobs(batches))
    for each in rows:
        ids = torch.from_numpy(each.token_ids)
        with torch.no_grad():
            if isinstance(config, GPT2Config):
                logits = backend.model(input_ids=ids[None]).logits[0]
            else:
                logits = backend.trunk.logits(hidden_states(backend, each))
        wanted = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0] * torch.from_numpy(
            each.rl[1:] > 0
        )
        np.testing.assert_allclose(each.streams["old_logprobs"][1:], wanted, atol=1e-5)


def hidden_states(backend: SingleBackend, each: TokenSequence) -> Tensor:
    (batch,) = pack([each])
    every = torch.arange(len(each))
    return backend.trunk.hidden(torch.from_numpy(each.token_ids), every, batch.segments, every)


def test_logprobs_use_the_samplers_temperature_and_kept_sets():
    """The sampler drew at temperature 0.5 from a few ids: given its own log-probabilities, every
    ratio is 1."""
    rng = np.random.default_rng(0)
    plain = row("a", [1, 2, 3], 9, rng, ce=None)
    sets = [[*rng.choice(VOCAB, 4, replace=False).tolist(), int(id)] for id in plain.token_ids]
    sizes = [len(each) if drawn else 0 for each, drawn in zip(sets, plain.mask, strict=True)]
    kept = SamplingMask(
        np.cumsum([0, *sizes]),
        np.array([id for each, size in zip(sets, sizes, strict=True) if size for id in each]),
    )
    backend = SingleBackend(policy())
    with torch.no_grad():
        logits = backend.trunk.logits(hidden_states(backend, plain)) / 0.5
    drawn = np.flatnonzero(plain.mask)
    sampler = np.zeros(len(plain), np.float32)
    for token in drawn:
        row_logits = logits[token - 1][torch.tensor(sets[token])]
        sampler[token] = row_logits.log_softmax(0)[-1]
    same = TokenSequence(
        name="a",
        token_ids=plain.token_ids,
        mask=plain.mask,
        sampler_logprobs=sampler,
        advantages=plain.advantages,
        rl=plain.rl,
        temperature=0.5,
        kept=kept,
    )
    measured = backend.forward_backward(pack([same]), LossSpec(policy=PpoClip()))
    assert measured["mismatch_max"] < 1e-5
    assert measured["ess"] == pytest.approx(1.0)
    assert measured["entropy"] < np.log(5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resuming_is_bit_identical(kind: Any, tmp_path: Path):
    optim = OptimizerSpec(
        kind=kind, lr=0.01, weight_decay=0.1, schedule="linear", warmup_steps=2, num_steps=6
    )
    batches = pack(tree(), PackingSpec(max_tokens=60))

    def steps(backend: SingleBackend, num: int) -> list[dict[str, float]]:
        return [backend.forward_backward(batches, LOSS) | backend.optim_step() for _ in range(num)]

    whole = SingleBackend(policy(), optim)
    steps(whole, 2)
    whole.save(tmp_path / "state")
    resumed = SingleBackend(policy(seed=1), optim)
    resumed.load(tmp_path / "state")
    assert resumed.version == 2
    assert steps(resumed, 3) == steps(whole, 3)
    for (name, ours), (_, theirs) in zip(resumed.weights(), whole.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_loading_mismatched_checkpoint_is_rejected(tmp_path: Path):
    SingleBackend(policy()).save(tmp_path)
    wider = copy.deepcopy(CONFIG)
    wider.intermediate_size = 64
    with pytest.raises(
        ConfigError,
        match=r"'model.layers.0.mlp.down_proj.weight' is \(32, 48\) there, but \(32, 64\) in this run",
    ):
        SingleBackend(policy(wider)).load(tmp_path)
    with pytest.raises(ConfigError, match=r"saved with optim\.kind=adamw, but this run has muon"):
        SingleBackend(policy(), OptimizerSpec(kind="muon")).load(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no trainer state: backend\.pt is missing"):
        SingleBackend(policy()).load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_steps_reduce_the_loss(kind: Any):
    backend = SingleBackend(policy(), OptimizerSpec(kind=kind, lr=0.01))
    rows = [
        row(str(index), [5, 6], 12, np.random.default_rng(index), rl=np.zeros(14, np.float32))
        for index in range(4)
    ]
    batches = pack(rows)
    losses = []
    for _ in range(15):
        losses.append(backend.forward_backward(batches, LossSpec())["ce_loss"])
        backend.optim_step()
    assert losses[-1] < 0.6 * losses[0]


def test_gradient_is_clipped_to_max_grad_norm():
    batches = pack(tree())
    found = []
    for norm in (None, 1e-3):
        backend = SingleBackend(
            policy(), OptimizerSpec(kind="adamw", lr=1e-3, eps=1.0, max_grad_norm=norm)
        )
        before = {name: each.clone() for name, each in backend.weights()}
        backend.forward_backward(batches, LOSS)
        grad_norm = backend.optim_step()["grad_norm"]
        moved = torch.cat([(each - before[name]).flatten() for name, each in backend.weights()])
        found.append((grad_norm, float(moved.abs().max())))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[1][1] < 0.1 * found[0][1]


def test_non_finite_loss_stops_the_step_and_names_the_sequence(tmp_path: Path):
    rows = tree()
    rows[4].sampler_logprobs[:] = np.nan
    backend = SingleBackend(policy(), dumps=tmp_path)
    before = {name: each.clone() for name, each in backend.weights()}
    batches = pack(rows)
    with pytest.raises(
        TrainError,
        match="step 1 is not finite at 7 entries, the first being token 23 of sequence sibling=1",
    ):
        backend.forward_backward(batches, LOSS)
    dump = np.load(tmp_path / "not-finite-step-1.npz")
    assert dump["token_ids"].tolist() == batches[0].token_ids.tolist()
    assert "4 sibling=1" in dump["sequences"].tolist()
    assert backend.optim_step()["grad_norm"] == 0.0
    assert all(torch.equal(each, before[name]) for name, each in backend.weights())


def test_non_finite_gradient_stops_before_weights_change():
    backend = SingleBackend(policy())
    batches = pack(tree())
    backend.forward_backward(batches, LOSS)
    name, first = next(backend.model.named_parameters())
    first.grad.fill_(torch.inf)
    kept = dict(backend.weights())[name].clone()
    with pytest.raises(TrainError, match="gradient of step 1 is not finite"):
        backend.optim_step()
    assert torch.equal(dict(backend.weights())[name], kept)


def test_path_longer_than_the_window_is_rejected():
    long = row("long", [1], 130, np.random.default_rng(0))
    with pytest.raises(
        ConfigError,
        match="a sequence of 131 tokens does not fit the policy's window of 128; it is one of: long",
    ):
        SingleBackend(policy()).forward_backward(pack([long]), LOSS)


def test_learning_rate_schedules():
    rates = OptimizerSpec(
        lr=1.0, schedule="linear", warmup_steps=2, num_steps=6, final_fraction=0.0
    )
    assert [rates.lr_at(step) for step in range(8)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    rates = OptimizerSpec(lr=1.0, schedule="cosine", num_steps=4, final_fraction=0.2)
    assert [round(rates.lr_at(step), 6) for step in range(6)] == [
        1,
        0.882843,
        0.6,
        0.317157,
        0.2,
        0.2,
    ]
    assert [OptimizerSpec(lr=3.0).lr_at(step) for step in (0, 100)] == [3.0, 3.0]
    with pytest.raises(
        ConfigError, match=r"schedule=linear needs more steps than the 5 of warm-up, but has 5"
    ):
        OptimizerSpec(schedule="linear", warmup_steps=5, num_steps=5)
    with pytest.raises(ConfigError, match=r"optim.lr=-1 must be a finite number, at least 0"):
        OptimizerSpec(lr=-1)

"""Two ranks against one process: equal results, identical bits after a resume, and time per step.


Ranks are processes on this machine that communicate by gloo. The dense policy has half a million
parameters; the checkpoint is a transformers model that runs as its own module (GPT-2). Gradients
are compared by norm over the whole model before each step.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trees
from figures import Figure
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from ramify.errors import TrainError
from ramify.models.dense import DenseModel
from ramify.models.load import Policy
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.fsdp import FsdpRanks
from ramify.train.backends.fsdp_model import FsdpBackend, FsdpModel
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch

STEPS = 20
LOSS = LossSpec(entropy=0.01)
OPTIM = OptimizerSpec(lr=2e-5, weight_decay=0.1)
"""A learning rate for fine-tuning. At higher rates AdamW amplifies rounding errors even in one
process: see ``rounding``."""
FAST = OptimizerSpec(lr=1e-3, weight_decay=0.1)
DENSE = Qwen3Config(
    vocab_size=trees.VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    bos_token_id=None,
    eos_token_id=3,
    pad_token_id=0,
)
GPT2 = GPT2Config(
    vocab_size=trees.VOCAB,
    n_embd=128,
    n_layer=3,
    n_head=4,
    n_positions=2048,
    bos_token_id=1,
    eos_token_id=2,
)


def figures(quick: bool, compiled: bool) -> Iterator[Figure]:
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    ranks = FsdpRanks(compute_spec(2))
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield from same_numbers(ranks, Path(folder))
            yield from rounding(ranks)
            yield from same_bits(ranks, Path(folder))
            yield from times(ranks, 3 if quick else 9)
            if compiled:
                yield from compiling(ranks)
            yield from killed_rank(ranks, Path(folder))
    finally:
        ranks.close()


def compute_spec(num: int, **shard: Any) -> TrainerComputeSpec:
    return TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=num, **shard))


def dense(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    model = DenseModel(DENSE)
    model.load_state_dict(AutoModelForCausalLM.from_config(DENSE).state_dict())
    return Policy(model.eval(), None, None, DENSE, 0, "dense")  # type: ignore[arg-type]


def batches(max_tokens: int, prompt: int = 64) -> list[Batch]:
    rows = [row for seed in range(3) for row in trees.group(4, 8, prompt, seed)]
    for row in rows:
        row.ce = row.rl / 2
    return pack(rows, PackingSpec(max_tokens=max_tokens))


# --- equal results --------------------------------------------------------------------------------


def same_numbers(ranks: FsdpRanks, folder: Path) -> Iterator[Figure]:
    checkpoint = folder / "gpt2"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2).save_pretrained(checkpoint)
    module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    given = Policy(module, None, None, GPT2, 0, "gpt2")  # type: ignore[arg-type]
    start = dense().model.state_dict()
    sides = {
        "dense policy, AdamW": (OPTIM, dense(), ranks.shard_model(DENSE, start)),
        "dense policy, Muon": (
            OptimizerSpec(kind="muon", lr=1e-4),
            dense(),
            ranks.shard_model(DENSE, start),
        ),
        "two replicas": (
            OPTIM,
            dense(),
            ranks.shard_model(DENSE, start, compute=compute_spec(2, replicas=2)),
        ),
        "checkpoint of transformers": (OPTIM, given, ranks.shard_model(GPT2, checkpoint)),
    }
    for name, (optim, policy, model) in sides.items():
        loss, gradient, tensor = largest_differences(
            model, SingleBackend(policy, optim, compute_spec(1)), optim
        )
        yield Figure(
            f"{name}: loss of two ranks off by, {STEPS} steps, relative", loss, "", {}, 1e-5
        )
        beside: dict[str, float | str] = {"one tensor at worst": tensor}
        yield Figure(f"{name}: gradient off by, by norm", gradient, "", beside, 1e-5)


def rounding(ranks: FsdpRanks) -> Iterator[Figure]:
    """Compare, at a learning rate for training from scratch, with one process whose batches come in
    reverse order."""
    _, gradient, _ = largest_differences(
        ranks.shard_model(DENSE, dense().model.state_dict()),
        SingleBackend(dense(), FAST, compute_spec(1)),
        FAST,
    )
    forth, back = (SingleBackend(dense(), FAST, compute_spec(1)) for _ in range(2))
    work, control = batches(300), 0.0
    for _ in range(STEPS):
        forth.forward_backward(work, LOSS)
        back.forward_backward(work[::-1], LOSS)
        control = max(control, relative_differences(gradients(back), gradients(forth))[0])
        for each in (forth, back):
            each.optim_step()
    beside: dict[str, float | str] = {"one process, its batches in the opposite order": control}
    yield Figure(
        f"learning rate {FAST.lr:g}: gradient off by after {STEPS} steps, by norm",
        gradient,
        "",
        beside,
    )


def largest_differences(
    model: FsdpModel, single: SingleBackend, optim: OptimizerSpec
) -> tuple[float, float, float]:
    """Return the largest differences over the steps: of the loss, of the whole gradient by norm,
    and of one tensor's gradient by norm."""
    fsdp, work = model.create_backend(optim), batches(300)
    work = work[: len(work) - 1 + len(work) % 2]  # an odd number: one rank has an idle round
    worst = [0.0, 0.0, 0.0]
    for _ in range(STEPS):
        ours, theirs = (each.forward_backward(work, LOSS)["loss"] for each in (fsdp, single))
        found = (
            abs(ours - theirs) / abs(theirs),
            *relative_differences(dict(model.gradients()), gradients(single)),
        )
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
        for each in (fsdp, single):
            each.optim_step()
    model.drop()
    return worst[0], worst[1], worst[2]


def gradients(single: SingleBackend) -> dict[str, torch.Tensor]:
    return {
        name: each.grad for name, each in single.model.named_parameters() if each.grad is not None
    }


def relative_differences(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the relative differences by norm: (of all tensors together, of the worst tensor)."""
    off = {name: float((gradient - theirs[name]).norm()) for name, gradient in ours.items()}
    norms = {name: float(each.norm()) for name, each in theirs.items()}
    whole = math.hypot(*off.values()) / math.hypot(*norms.values())
    return whole, max(off[name] / norm for name, norm in norms.items() if norm)


# --- identical bits after a resume ----------------------------------------------------------------


def same_bits(ranks: FsdpRanks, folder: Path) -> Iterator[Figure]:
    """Compare five steps with the same steps after a resume from a checkpoint written during
    them."""
    whole = ranks.shard_model(DENSE, dense().model.state_dict())
    backend = whole.create_backend(OPTIM)
    steps(backend, 5)
    wait = backend.save(folder / "state")
    steps(backend, 5)
    assert wait is not None
    wait()
    resumed = ranks.shard_model(DENSE, dense(1).model.state_dict())
    again = resumed.create_backend(OPTIM)
    again.load(folder / "state")
    steps(again, 5)
    differ = sum(
        not torch.equal(ours, theirs)
        for (_, ours), (_, theirs) in zip(resumed.weights(), whole.weights(), strict=True)
    )
    yield Figure("tensors that differ after a resume", float(differ), "tensors", {}, 0)


def steps(backend: FsdpBackend, num: int) -> None:
    work = batches(300)
    for _ in range(num):
        backend.forward_backward(work, LOSS)
        backend.optim_step()


# --- times ----------------------------------------------------------------------------------------


def times(ranks: FsdpRanks, rounds: int) -> Iterator[Figure]:
    """Time a step of two batches of about 3,000 tokens, in turns with one process."""
    work = pack(
        [row for seed in range(2) for row in trees.group(8, 8, 256, seed)],
        PackingSpec(max_tokens=1 << 20, fill_tokens=3000),
    )
    single = SingleBackend(dense(), OPTIM, compute_spec(1))
    sides: dict[str, Callable[[], object]] = {"single": lambda: step(single, work)}
    for gather in ("layer", "step"):
        backend = ranks.shard_model(
            DENSE, dense().model.state_dict(), compute=compute_spec(2, gather=gather)
        ).create_backend(OPTIM)
        sides[gather] = lambda backend=backend: step(backend, work)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(rounds + 1):
        for name, side in sides.items() if round % 2 else reversed(sides.items()):
            started = time.perf_counter()
            side()
            if round:
                seconds[name].append(time.perf_counter() - started)
    ratio = {
        name: median(a / b for a, b in zip(seconds[name], seconds["single"], strict=True))
        for name in ("layer", "step")
    }
    beside: dict[str, float | str] = {
        "gathered once per step": ratio["step"],
        "single, s": f"{median(seconds['single']):.3g}",
    }
    yield Figure("time of a step, two ranks to one process", ratio["layer"], "×", beside)


def step(backend: SingleBackend | FsdpBackend, work: list[Batch]) -> None:
    backend.forward_backward(work, LOSS)
    backend.optim_step()


def compiling(ranks: FsdpRanks) -> Iterator[Figure]:
    model = ranks.shard_model(
        DENSE, dense().model.state_dict(), compute=compute_spec(2, compile=True)
    )
    loss, gradient, _ = largest_differences(
        model, SingleBackend(dense(), OPTIM, compute_spec(1)), OPTIM
    )
    yield Figure(
        "compiled layers: loss off by, relative", loss, "", {"gradient, by norm": gradient}, 1e-5
    )


# --- failure --------------------------------------------------------------------------------------


def killed_rank(ranks: FsdpRanks, folder: Path) -> Iterator[Figure]:
    """Measure the time from the kill of a rank to the error, and resume with one rank from the
    checkpoint of two."""
    model = ranks.shard_model(
        DENSE, dense().model.state_dict(), compute=compute_spec(2, save_async=False)
    )
    backend = model.create_backend(OPTIM)
    steps(backend, 2)
    backend.save(folder / "of two")
    work = batches(300)
    wanted = [backend.forward_backward(work, LOSS)["loss"]]
    backend.optim_step()
    wanted.append(backend.forward_backward(work, LOSS)["loss"])
    os.kill(ranks.rank_group.processes[0].pid, signal.SIGKILL)
    started = time.perf_counter()
    told = ""
    try:
        backend.forward_backward(work, LOSS)
    except TrainError as error:
        told = str(error)
    seconds = time.perf_counter() - started
    yield Figure(
        "a killed rank is an error that names it, after", seconds, "s", {}, None, "rank 1 " in told
    )
    ranks.close()
    alone = FsdpRanks(compute_spec(1))
    try:
        again = alone.shard_model(copy.deepcopy(DENSE), dense(1).model.state_dict()).create_backend(
            OPTIM
        )
        again.load(folder / "of two")
        found = [again.forward_backward(work, LOSS)["loss"]]
        again.optim_step()
        found.append(again.forward_backward(work, LOSS)["loss"])
    finally:
        alone.close()
    off = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, wanted, strict=True))
    yield Figure(
        "two steps by one rank from the checkpoint of two: loss off by, relative", off, "", {}, 1e-5
    )

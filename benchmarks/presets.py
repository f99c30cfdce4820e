"""Presets against the other trainers: the same loss and gradients on random batches, in fp64.

    python benchmarks/presets.py           the largest difference for each preset, over 20 batches

A batch has three items with four rollouts of one call each, of 1 to 6 tokens, and the model is a
table of logits. Ours goes through the package: rewards, advantages, packing, the head and the loss.
The others are written here as their code computes them, and TRL's own code runs, too, if ``trl`` is
installed (``requirements-trl.txt``): its ``GRPOTrainer`` scores the completions and computes the
loss, with the defaults of its ``GRPOConfig``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from engine import Figure, show
from torch import Tensor

from ramify import train
from ramify.models.trunk import HeadRequest, entry_logprobs
from ramify.train.advantages.base import finish
from ramify.train.data.compile import token_sequences
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses.loss import LossEntries, compute
from ramify.train.presets import PRESETS
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn

ITEMS, GROUP, PROMPT, MOST, VOCAB = 3, 4, 2, 6, 7
ROWS = ITEMS * GROUP
KL, EPSILON = 1e-3, 1e-6


class Compared(NamedTuple):
    """A random batch: B = 12 rollouts, C = 6 tokens of a completion, V = 7 words."""

    lengths: list[int]
    rewards: Tensor
    """[B]; the last item's are equal."""
    ids: Tensor
    """[B, 2 + C]"""
    now: Tensor
    """[B, 2 + C, V] logits of the policy."""
    old: Tensor
    """[B, 2 + C, V] logits at the start of the step."""
    ref: Tensor
    sampler: Tensor
    """[B, C] log-probabilities when the tokens were sampled; these, like all below, in fp32."""
    values: Tensor
    """[B, C] the critic's values now."""
    old_values: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, C] 1 for sampled tokens."""
        return (torch.arange(MOST) < torch.tensor(self.lengths)[:, None]).double()

    def logprobs(self, logits: Tensor) -> Tensor:
        """[B, C]"""
        found = logits.log_softmax(-1)[:, PROMPT - 1 : -1]
        return found.gather(-1, self.ids[:, PROMPT:, None])[..., 0]


class Result(NamedTuple):
    loss: float
    gradients: Tensor
    """By the logits, and for a critic by its values."""


def random_batch(seed: int) -> Compared:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    lengths = whole(1, MOST + 1, ROWS).tolist()
    rewards = whole(0, 3, ROWS).double() / 2
    rewards[-GROUP:] = 0.5
    ids = whole(0, VOCAB, ROWS, PROMPT + MOST)
    now = normal(ROWS, PROMPT + MOST, VOCAB)
    old, ref = now + 0.3 * normal(*now.shape), now + 0.3 * normal(*now.shape)
    batch = Compared(lengths, rewards, ids, now, old, ref, *[normal(ROWS, MOST)] * 3)
    sampler = batch.logprobs(old) + 0.3 * normal(ROWS, MOST)
    values = normal(ROWS, MOST)
    single = [sampler, values, values + 0.5 * normal(ROWS, MOST)]
    sampler, values, old_values = (each.float().double() for each in single)
    return batch._replace(sampler=sampler, values=values, old_values=old_values)


# --- ours -----------------------------------------------------------------------------------------


def ours(preset: str, batch: Compared, *overrides: str) -> Result:
    """Loss and gradients of the package, under a preset."""
    from ramify.train.override import override
    from ramify.train.presets import choices

    run = train.Run(policy=train.PolicySpec(path="tiny"), rl=train.RlSpec())
    run = override(train.with_preset(run, preset), overrides, choices(preset))
    assert run.rl is not None
    algorithm, loss = run.rl.algorithm, run.rl.loss.for_minibatches(2)
    assigned = algorithm.assign_advantages(_groups(batch), {}, every_token=loss.wants_every_token)
    rows = token_sequences(assigned.rollouts, 1.0)
    indices = [int(row.name.partition("/")[0]) for row in rows]
    for row, index in zip(rows, indices, strict=True):
        for name, values in (
            ("old_logprobs", batch.logprobs(batch.old)),
            ("ref_logprobs", batch.logprobs(batch.ref)),
            ("values", batch.old_values),
        ):
            column = np.zeros(len(row), np.float32)
            column[PROMPT:] = values[index, : len(row) - PROMPT]
            row.streams[name] = column
    finish(algorithm, rows)
    (packed,) = pack(rows, PackingSpec(share=False), assigned.denominators)
    logits, critic = batch.now.clone().requires_grad_(), batch.values.clone().requires_grad_()
    owners, places = torch.tensor(packed.owners).T
    owners = torch.tensor(indices)[owners]
    targets = HeadRequest(torch.tensor(packed.targets)[:, None])
    now, _ = entry_logprobs(logits[owners, places - 1], lambda h: h, targets, VOCAB, 1 << 20)
    streams = {name: torch.tensor(each).double() for name, each in packed.streams.items()}
    values = critic[owners, places - PROMPT] if preset == "verl" else None
    entries = LossEntries(
        now[:, 0], streams, packed.denominators, sequences=(owners, ROWS), values=values
    )
    return _result(compute(loss, entries)[0], logits, critic)


def _groups(batch: Compared) -> list[Group]:
    rollouts = [_rollout(batch, index) for index in range(ROWS)]
    return [Group(f"{n}", rollouts[n * GROUP : (n + 1) * GROUP]) for n in range(ITEMS)]


def _rollout(batch: Compared, index: int) -> Trajectory:
    ids, num = batch.ids[index].tolist(), batch.lengths[index]
    reply = Reply(
        Message("assistant", ""),
        prompt_ids=tuple(ids[:PROMPT]),
        token_ids=tuple(ids[PROMPT : PROMPT + num]),
        logprobs=tuple(batch.sampler[index, :num].tolist()),
        finish="stop",
    )
    turns = [Turn(0, (Message("user", ""),), reply, reused_ids=0)]
    call = Call("0", "rlm", "toy", 0, "0", turns=turns, stop=Stop.FINAL)
    reward = {"reward": batch.rewards[index].item()}
    return Trajectory(f"{index}", "", task="toy", calls=[call], rewards=reward)


def _result(loss: Tensor, *leaves: Tensor) -> Result:
    loss.backward()
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Result(loss.item(), torch.cat([part.flatten() for part in parts]))


# --- the others, as their code computes them ------------------------------------------------------


def _by_item(rewards: Tensor, epsilon: float | None) -> Tensor:
    """[B] rewards less the mean of their group; divided by its std + epsilon, unless None."""
    grouped = rewards.view(ITEMS, GROUP)
    centred = grouped - grouped.mean(1, keepdim=True)
    if epsilon is not None:
        centred = centred / (grouped.std(1, keepdim=True) + epsilon)
    return centred.flatten()


def _ppo(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def trl(b: Compared, now: Tensor, _: Tensor) -> Tensor:
    """``GRPOTrainer`` with ``loss_type="dapo"`` and the correction ``sequence_mask``."""
    old, mask = b.logprobs(b.old), b.mask
    correction = ((old - b.sampler) * mask).sum(1, keepdim=True).exp()
    correction = correction.masked_fill(correction > 3.0, 0.0)
    advantages = _by_item(b.rewards, 1e-4)[:, None]
    loss = _ppo((b.logprobs(now) - old).exp(), advantages) * correction
    return (loss * mask).sum() / mask.sum()


def skyrl(b: Compared, now: Tensor, _: Tensor) -> Tensor:
    """``ppo_policy_loss`` with ``token_mean``, plus the KL averaged by sequence."""
    logprobs, mask = b.logprobs(now), b.mask
    advantages = _by_item(b.rewards, EPSILON)[:, None] / mask.sum()
    policy = (_ppo((logprobs - b.logprobs(b.old)).exp(), advantages) * mask).sum()
    kl = b.logprobs(b.ref) - logprobs
    kl = ((kl.exp() - kl - 1) * mask).sum(1) / mask.sum(1)
    return policy + KL * kl.mean()


def prime(b: Compared, now: Tensor, _: Tensor) -> Tensor:
    """``default_loss_fn`` over the samples whose advantage is not 0."""
    logprobs, mask = b.logprobs(now), b.mask
    advantages = _by_item(b.rewards, None)[:, None]
    mask = mask * (advantages.abs() > 1e-9)
    gap, moved = logprobs - b.sampler, logprobs.exp() - b.sampler.exp()
    invalid = torch.where(advantages > 0, moved > 0.2, moved < -0.2)
    loss = -(~invalid * advantages * gap.exp()) + 1e-3 * gap**2
    return (loss * mask).sum() / mask.sum()


def verl(b: Compared, now: Tensor, values: Tensor) -> Tensor:
    """``compute_gae_advantage_return``, ``compute_policy_loss_vanilla``, ``compute_value_loss``."""
    mask, rewards = b.mask, torch.zeros_like(b.old_values)
    rewards[torch.arange(ROWS), torch.tensor(b.lengths) - 1] = b.rewards
    following = torch.cat([b.old_values * mask, torch.zeros(ROWS, 1)], 1)[:, 1:]
    deltas = (rewards + following - b.old_values) * mask
    advantages = deltas.flip(1).cumsum(1).flip(1)
    returns = advantages + b.old_values
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    advantages = (advantages - mean) * torch.rsqrt(variance + 1e-8)
    loss = _ppo((b.logprobs(now) - b.logprobs(b.old)).exp(), advantages)
    loss = torch.where(advantages < 0, torch.min(-advantages * 3.0, loss), loss)
    clipped = torch.clamp(values, b.old_values - 0.5, b.old_values + 0.5)
    value = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    return ((loss + value) * mask).sum() / mask.sum()


FORMULAS: dict[str, Callable[[Compared, Tensor, Tensor], Tensor]] = {
    "trl": trl,
    "skyrl": skyrl,
    "prime": prime,
    "verl": verl,
}


def theirs(preset: str, batch: Compared) -> Result:
    """Loss and gradients of the formula."""
    logits, critic = batch.now.clone().requires_grad_(), batch.values.clone().requires_grad_()
    return _result(FORMULAS[preset](batch, logits, critic), logits, critic)


# --- TRL's own code -------------------------------------------------------------------------------


class Table(torch.nn.Module):
    """A model whose logits are its parameters."""

    is_gradient_checkpointing = False

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        logprobs = self.logits.log_softmax(-1)
        here = logprobs[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
        pad = torch.nn.functional.pad
        return SimpleNamespace(log_probs=pad(here, (1, 0)), entropy=pad(here.detach(), (1, 0)))


def trl_installed(batch: Compared, **changes: Any) -> Result:
    """Loss and gradients of TRL's own trainer with its own defaults. It is made without its
    constructor, which wants a checkpoint and a data set."""
    from trl import GRPOConfig, GRPOTrainer

    given = {"num_generations": GROUP, "per_device_train_batch_size": ROWS, "use_vllm": True}
    args = GRPOConfig(
        output_dir="unused", use_cpu=True, bf16=False, report_to=[], **given, **changes
    )

    class Trainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            pass

        def _generate(self, prompts: Any) -> Any:
            ends = [PROMPT + num for num in batch.lengths]
            ids = [row[PROMPT:end].tolist() for row, end in zip(batch.ids, ends, strict=True)]
            sampled = zip(batch.sampler, batch.lengths, strict=True)
            logprobs = [row[:num].tolist() for row, num in sampled]
            texts = [""] * ROWS
            return batch.ids[:, :PROMPT].tolist(), ids, None, texts, logprobs, {}, None, None

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return batch.rewards[:, None]

    made = Trainer()
    fields = {
        **vars(args),
        "args": args,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "model": Table(batch.old).train(),
        "accelerator": _accelerator(),
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "ref_model": None,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    for name, value in fields.items():
        setattr(made, name, value)
    scored = made._generate_and_score_completions([{"prompt": ""}] * ROWS)
    model = Table(batch.now).train()
    loss = made._compute_loss(model, scored)
    loss.backward()
    gradient = model.logits.grad
    assert gradient is not None
    return Result(loss.item(), torch.cat([gradient.flatten(), torch.zeros(batch.values.numel())]))


def _accelerator() -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        autocast=nullcontext,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        is_main_process=False,
    )


# --- figures --------------------------------------------------------------------------------------


def apart(one: Result, other: Result) -> float:
    """The larger of the differences in the loss and in the gradients."""
    gradients = (one.gradients - other.gradients).abs().max().item()
    return max(abs(one.loss - other.loss), gradients)


def figures(num_batches: int = 20) -> Iterator[Figure]:
    """The largest difference for each preset; TRL's own code only if it is installed."""
    batches = [random_batch(seed) for seed in range(num_batches)]
    for name, preset in PRESETS.items():
        most = max(apart(ours(name, batch), theirs(name, batch)) for batch in batches)
        yield Figure(f"preset {name}: largest difference from {preset.trainer}", most, "", {}, 1e-6)
    if find_spec("trl"):
        most = max(apart(ours("trl", batch), trl_installed(batch)) for batch in batches)
        yield Figure("preset trl: largest difference from its installed code", most, "", {}, 1e-6)


if __name__ == "__main__":
    found = list(figures())
    show(found)
    sys.exit(any(figure.holds is False for figure in found))

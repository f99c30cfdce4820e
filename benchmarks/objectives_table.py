"""The cross table of objectives. It compares the loss and gradients that `rl.objective=NAME` gives,
with and without `--preset NAME`, with the formulas of the papers and of the other trainers' code,
in fp64 on random batches.

    python benchmarks/objectives_table.py         every cell: the largest difference in the loss and
                                                  in the gradients, over 8 batches
    python benchmarks/objectives.py --quick --json    the same within all figures about objectives

A batch has three items with four rollouts of one call each, of 1 to 6 tokens, and the model is a
table of logits. Ours goes through the package: rewards, advantages, packing, the head and the loss.
The formulas are written here, independently of the package, as each trainer's code computes them:

    TRL       1.16.0             trl/trainer/grpo_trainer.py, rloo_trainer.py, experimental/gmpo
    SkyRL     a956457 (2026-08)  skyrl/backends/skyrl_train/utils/ppo_utils.py, train/config/config.py
    verl      1dda039 (2026-08)  verl/trainer/ppo/core_algos.py, verl/workers/utils/losses.py
    prime-rl  559b447 (2026-08)  src/prime_rl/trainer/rl/loss.py, orchestrator/algo/*.py
    AReaL     4aef98d (2026-05)  areal/utils/functional/functional.py, trainer/ppo/actor.py, utils/
                                 data.py, examples/math/gsm8k_*.yaml

TRL's own code runs, too, if it is installed (``requirements-trl.txt``): its trainers score the
completions and compute the loss, with the defaults of their configurations. Decides the batch and
the formulas. The options of a cell are in ``named_objectives.py`` and ``other_trainer_presets.py``.
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
from figures import Figure, show
from torch import Tensor

from ramify import train
from ramify.models.training_forward import LmHeadRequest, compute_logprobs_and_entropies
from ramify.train.advantages.base import finish_advantages, needs_of, with_reduction
from ramify.train.config_overrides import override
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.losses.total_loss import BatchLossInputs, compute
from ramify.train.named_objectives import OBJECTIVES
from ramify.train.other_trainer_presets import PRESETS, choices_by_field, with_preset
from ramify.train.stages import required_loss_inputs
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn

ITEMS, GROUP, PROMPT, MOST, VOCAB = 3, 4, 2, 6, 7
ROWS = ITEMS * GROUP
EPSILON = 1e-6
LENGTH = 512
"""Number of tokens that TRL's constant reduction divides by. SkyRL and verl have no default."""
DEFAULTS = {"trl": "dapo", "skyrl": "grpo", "prime": "grpo", "verl": "ppo", "areal": "grpo"}
"""Map a preset to its objective if none is named."""


class ComparisonBatch(NamedTuple):
    """A random batch: B = 12 rollouts, C = 6 tokens of a completion, V = 7 words."""

    lengths: list[int]
    rewards: Tensor
    """[B]; the last item's are equal."""
    brevity: Tensor
    """[B] a second reward, for objectives that use several rewards."""
    greedy: Tensor
    """[items] rewards of greedy rollouts."""
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


def random_batch(seed: int) -> ComparisonBatch:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    lengths = whole(1, MOST + 1, ROWS).tolist()
    rewards = whole(0, 3, ROWS).double() / 2
    rewards[-GROUP:] = 0.5
    brevity = whole(0, 4, ROWS).double() / 10
    greedy = whole(0, 3, ITEMS).double() / 2
    ids = whole(0, VOCAB, ROWS, PROMPT + MOST)
    now = normal(ROWS, PROMPT + MOST, VOCAB)
    # Some rollouts and some tokens are far off, so that caps and masks matter.
    moved = (torch.rand(ROWS, 1, 1, generator=draw) < 0.3) * 0.5 + 0.3
    old, ref = now + moved * normal(*now.shape), now + 0.3 * normal(*now.shape)
    blank = torch.zeros(ROWS, MOST, dtype=torch.float64)
    batch = ComparisonBatch(
        lengths, rewards, brevity, greedy, ids, now, old, ref, blank, blank, blank
    )
    far = (torch.rand(ROWS, MOST, generator=draw) < 0.1) * 1.5 + 0.3
    sampler = (batch.logprobs(old) + far * normal(ROWS, MOST)).clamp(max=-1e-3)
    values = normal(ROWS, MOST)
    single = [sampler, values, values + 0.5 * normal(ROWS, MOST)]
    sampler, values, old_values = (each.float().double() for each in single)
    return batch._replace(sampler=sampler, values=values, old_values=old_values)


# --- ours -----------------------------------------------------------------------------------------


def spec(preset: str, *overrides: str) -> train.RlSpec:
    """Return the stage ``rl`` with the options of a preset. An empty preset changes nothing."""
    run = train.Run(policy=train.PolicySpec(path="tiny"), rl=train.RlSpec())
    run = with_preset(run, preset) if preset else run
    rl = override(run, overrides, choices_by_field(preset or None)).rl
    assert rl is not None
    return rl


def ours(preset: str, batch: ComparisonBatch, *overrides: str) -> Result:
    """Return the loss and the gradients that Ramify computes with the options of a preset. An empty
    preset changes nothing."""
    rl = spec(preset, *overrides)
    loss = rl.loss.for_minibatches(2)
    algorithm = with_reduction(rl.algorithm, loss.reduction)
    several = algorithm.__struct_config__.tag == "gdpo"
    groups = _groups(batch, several)
    assigned = algorithm.assign_advantages(groups, {}, every_token=loss.needs_zero_advantage)
    rows = token_sequences(assigned.rollouts, 1.0)
    indices = [int(row.name.partition("/")[0]) for row in rows]
    known = {
        "old_logprobs": batch.logprobs(batch.old),
        "ref_logprobs": batch.logprobs(batch.ref),
        "values": batch.old_values,
    }
    computed = needs_of(algorithm).streams | required_loss_inputs(loss)
    for row, index in zip(rows, indices, strict=True):
        for name in computed:
            values = known[name]
            column = np.zeros(len(row), np.float32)
            column[PROMPT:] = values[index, : len(row) - PROMPT]
            row.streams[name] = column
    finish_advantages(algorithm, rows)
    (packed,) = pack(rows, PackingSpec(share=False), assigned.denominators)
    logits, critic = batch.now.clone().requires_grad_(), batch.values.clone().requires_grad_()
    owners, places = torch.tensor(packed.owners).T
    owners = torch.tensor(indices)[owners]
    targets = LmHeadRequest(torch.tensor(packed.targets)[:, None])
    now, _ = compute_logprobs_and_entropies(
        logits[owners, places - 1], lambda h: h, targets, VOCAB, 1 << 20
    )
    streams = {name: torch.tensor(each).double() for name, each in packed.streams.items()}
    values = critic[owners, places - PROMPT] if needs_of(algorithm).values else None
    entries = BatchLossInputs(
        now[:, 0], streams, packed.denominators, sequences=(owners, ROWS), values=values
    )
    return _result(compute(loss, entries)[0], logits, critic)


def _groups(batch: ComparisonBatch, several: bool) -> list[Group]:
    rewards = [{"reward": value} for value in batch.rewards.tolist()]
    if several:
        rewards = [
            {**own, "brevity": value}
            for own, value in zip(rewards, batch.brevity.tolist(), strict=True)
        ]
    rollouts = [_rollout(batch, index, own) for index, own in enumerate(rewards)]
    greedy = [_rollout(batch, 0, {"reward": value}) for value in batch.greedy.tolist()]
    return [Group(f"{n}", rollouts[n * GROUP : (n + 1) * GROUP], greedy[n]) for n in range(ITEMS)]


def _rollout(batch: ComparisonBatch, index: int, rewards: dict[str, float]) -> Trajectory:
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
    return Trajectory(f"{index}", "", task=f"{index // GROUP}", calls=[call], rewards=rewards)


def _result(loss: Tensor, *leaves: Tensor) -> Result:
    loss.backward()
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Result(loss.item(), torch.cat([part.flatten() for part in parts]))


# --- the papers -----------------------------------------------------------------------------------


def _groups_of(rewards: Tensor) -> Tensor:
    """[items, group]"""
    return rewards.view(ITEMS, GROUP)


def _scaled(rewards: Tensor, epsilon: float | None) -> Tensor:
    """[B] rewards less the mean of their group; divided by its std + epsilon, unless None."""
    grouped = _groups_of(rewards)
    centred = grouped - grouped.mean(1, keepdim=True)
    if epsilon is not None:
        centred = centred / (grouped.std(1, keepdim=True) + epsilon)
    return centred.flatten()


def _others(rewards: Tensor) -> Tensor:
    """[B] each reward minus the mean reward of the other rollouts in its group."""
    grouped = _groups_of(rewards)
    return (grouped - (grouped.sum(1, keepdim=True) - grouped) / (GROUP - 1)).flatten()


def _over_mean(rewards: Tensor, epsilon: float) -> Tensor:
    """[B] each reward minus the mean of its group, divided by that mean; 0 for a mean of 0."""
    mean = _groups_of(rewards).mean(1, keepdim=True)
    found = (_groups_of(rewards) - mean) / (mean + epsilon)
    return torch.where(mean > 0, found, 0.0).flatten()


def _by_length(b: ComparisonBatch) -> Tensor:
    """[B] each reward minus the mean reward of its group, weighted by length."""
    sizes = _groups_of(torch.tensor(b.lengths).double())
    grouped = _groups_of(b.rewards)
    return (grouped - (sizes * grouped).sum(1, keepdim=True) / sizes.sum(1, keepdim=True)).flatten()


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Normalise to mean 0 and variance 1 over the masked tokens. 1e-8 is added to the variance."""
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def _last(b: ComparisonBatch, rewards: Tensor) -> Tensor:
    """[B, C] the reward on the last token."""
    found = torch.zeros(ROWS, MOST, dtype=torch.float64)
    found[torch.arange(ROWS), torch.tensor(b.lengths) - 1] = rewards
    return found


def _to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum(1).flip(1)


def _gae(b: ComparisonBatch, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns), with gamma 1."""
    values = b.old_values * b.mask
    following = torch.cat([values, torch.zeros(ROWS, 1, dtype=torch.float64)], 1)[:, 1:]
    deltas, found = _last(b, b.rewards) + following - values, torch.zeros_like(values)
    carried = torch.zeros(ROWS, dtype=torch.float64)
    for place in reversed(range(MOST)):
        carried = deltas[:, place] + lam * carried * b.mask[:, place]
        found[:, place] = carried
    return found * b.mask, (found + values) * b.mask


def _clip(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(r * advantages, r.clamp(1 - low, 1 + high) * advantages)


def _sigmoid_gate(r: Tensor, advantages: Tensor) -> Tensor:
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(tau * (r - 1)) * 4 / tau * advantages


def _geometric(gap: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] mean of the logarithms of a sequence's ratios."""
    return (gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def _gspo(gap: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """GSPO for each token: the value of the sequence's ratio, with the gradient of the token."""
    own = torch.exp(_geometric(gap, mask).detach() + gap - gap.detach())
    return _clip(own, advantages, low, high)


def _gmpo(gap: Tensor, advantages: Tensor, mask: Tensor, bound: float) -> Tensor:
    """[B, 1]; ``advantages``: [B, 1]"""
    signs = torch.sign(advantages)
    kept = signs * torch.minimum(signs * gap, signs * gap.clamp(-bound, bound))
    return -advantages * torch.exp(_geometric(kept, mask))


def _tokens(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum()


def _sequences(loss: Tensor, mask: Tensor) -> Tensor:
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def _constant(loss: Tensor, mask: Tensor, length: float | None = None) -> Tensor:
    """Sum over each sequence's tokens, divided by ``length`` or by the mean length of the step."""
    return (loss * mask).sum() / ROWS / (mask.sum() / ROWS if length is None else length)


def _critic(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    near = old + (values - old).clamp(-clip, clip)
    return torch.max((values - returns) ** 2, (near - returns) ** 2) / 2


def _running(rewards: Tensor, decay: float) -> Tensor:
    """[B] each reward minus a running mean that begins at 0 and is updated after each rollout."""
    mean, found = 0.0, []
    for value in rewards.tolist():
        found.append(value - mean)
        mean = decay * mean + (1 - decay) * value
    return torch.tensor(found, dtype=torch.float64)


def _separately(b: ComparisonBatch, epsilon: float) -> Tensor:
    return _scaled(b.rewards, epsilon) + _scaled(b.brevity, epsilon)


def paper(objective: str, b: ComparisonBatch, now: Tensor, values: Tensor) -> Tensor:
    """Compute an objective by the formula of its paper. Each rollout here is one response of the
    paper."""
    mask, gap = b.mask, b.logprobs(now) - b.logprobs(b.old)
    r, rho = gap.exp(), (b.logprobs(now) - b.sampler).exp()
    A = _scaled(b.rewards, EPSILON)[:, None]
    ahead = b.logprobs(b.ref) - b.logprobs(now)
    p, q = b.logprobs(now).exp().detach(), b.sampler.exp()
    match objective:
        case "grpo":
            return _sequences(_clip(r, A, 0.2, 0.2) + 0.04 * (ahead.exp() - ahead - 1), mask)
        case "dr_grpo":
            return _constant(_clip(r, _scaled(b.rewards, None)[:, None], 0.2, 0.2), mask)
        case "dapo":  # groups of equal rewards are sampled again: they do not count
            equal = _groups_of(b.rewards).std(1, keepdim=True) < 1e-9
            mask = mask * (~equal).repeat_interleave(GROUP, 0)
            return _tokens(_clip(r, A, 0.2, 0.28), mask)
        case "gspo":
            return _sequences(_gspo(gap, A, mask, 3e-4, 4e-4), mask)
        case "cispo":
            return _tokens(-r.detach().clamp(max=5.0) * A * b.logprobs(now), mask)
        case "ppo":
            advantages, returns = _gae(b, 0.95)
            policy = _clip(r, _whiten(advantages, mask), 0.2, 0.2)
            return _tokens(policy + 0.5 * _critic(values, b.old_values, returns, 0.2), mask)
        case "rloo":
            return _constant(-rho * _others(b.rewards)[:, None], mask)
        case "reinforce_pp":
            kl = (b.logprobs(b.old) - b.logprobs(b.ref)) * mask
            advantages = _to_go(_last(b, b.rewards) - 0.001 * kl)
            return _tokens(_clip(r, _whiten(advantages, mask), 0.2, 0.2), mask)
        case "reinforce_pp_baseline":
            advantages = _whiten(_scaled(b.rewards, None)[:, None] * mask, mask)
            return _tokens(_clip(r, advantages, 0.2, 0.2) + 0.001 * ahead**2 / 2, mask)
        case "maxrl":
            return _constant(-rho * _over_mean(b.rewards, EPSILON)[:, None], mask)
        case "remax":
            return _constant(-rho * (b.rewards - b.greedy.repeat_interleave(GROUP))[:, None], mask)
        case "opo":
            return _constant(-rho * _by_length(b)[:, None], mask)
        case "gdpo":
            sums = _separately(b, EPSILON)
            advantages = (sums - sums.mean()) / (sums.std() + EPSILON)
            return _tokens(_clip(r, advantages[:, None], 0.2, 0.2), mask)
        case "rae":  # all rollouts of a step are compared with the mean before it, which is 0 here
            return _constant(-rho * b.rewards[:, None], mask)
        case "sapo":
            return _sequences(_sigmoid_gate(r, A), mask)
        case "gmpo":
            return _gmpo(gap, A, mask, 0.4).mean()
        case "dppo":
            masked = torch.where(A > 0, p - q > 0.2, q - p > 0.2)
            return _tokens(-rho * A * ~masked, mask)
        case "dppo_kl":
            far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log() > 0.05
            masked = far & torch.where(A > 0, p > q, p < q)
            return _tokens(-rho * A * ~masked, mask)
        case "decoupled":
            weight = (b.logprobs(b.old) - b.sampler).exp()
            advantages = _whiten(b.rewards[:, None] * mask, mask)
            policy = weight.where(weight <= 5, 0.0) * _clip(r, advantages, 0.2, 0.2)
            return _tokens(policy, mask)
        case "rollout_is":
            kept = rho.detach() * ((rho > 0.8) & (rho < 1.28))
            return _tokens(-kept * A * b.logprobs(now), mask)
    raise KeyError(objective)


# --- the others, as their code computes them ------------------------------------------------------


def trl(objective: str, b: ComparisonBatch, now: Tensor, _: Tensor) -> Tensor:
    """Formulas of ``_compute_loss`` in TRL's trainers, with the correction ``sequence_mask`` of
    vLLM."""
    old, mask, logprobs = b.logprobs(b.old), b.mask, b.logprobs(now)
    gap = logprobs - old
    if objective == "rloo":  # RLOOTrainer: no correction; the KL is part of the reward
        kl = ((old - b.logprobs(b.ref)) * mask).sum(1)
        s = (gap * mask).sum(1).exp()
        return _clip(s, _others(b.rewards - 0.05 * kl), 0.2, 0.2).mean()
    advantages = _scaled(b.rewards, 1e-4)[:, None]
    if objective == "gmpo":  # GMPOTrainer: no correction
        clipped = gap.clamp(-0.4, 0.4)
        kept = torch.where(advantages > 0, gap.minimum(clipped), gap.maximum(clipped))
        return (-advantages * torch.exp(_geometric(kept, mask))).mean()
    correction = ((old - b.sampler) * mask).sum(1, keepdim=True).exp()
    correction = correction.masked_fill(correction > 3.0, 0.0)
    if objective == "dr_grpo":
        advantages = _scaled(b.rewards, None)[:, None]
    elif objective == "gdpo":
        sums = _separately(b, 1e-4)
        advantages = ((sums - sums.mean()) / (sums.std() + 1e-4))[:, None]
    r = (_geometric(gap, mask) if objective == "gspo" else gap).exp()
    loss = {
        "cispo": lambda: -r.clamp(max=0.2).detach() * advantages * logprobs,
        "sapo": lambda: _sigmoid_gate(r, advantages),
    }.get(objective, lambda: _clip(r, advantages, 0.2, 0.2))()
    loss = loss * correction
    if objective in ("grpo", "gspo", "sapo"):
        return _sequences(loss, mask)
    return _constant(loss, mask, LENGTH) if objective == "dr_grpo" else _tokens(loss, mask)


def skyrl(objective: str, b: ComparisonBatch, now: Tensor, values: Tensor) -> Tensor:
    """SkyRL's formulas. Its reductions scale the advantages, and its losses are sums. The KL and
    the value loss are averaged over each sequence."""
    old, mask, logprobs = b.logprobs(b.old), b.mask, b.logprobs(now)
    gap, returns = logprobs - old, mask
    advantages = _scaled(b.rewards, EPSILON)[:, None] * mask
    match objective:
        case "ppo":
            advantages, returns = _gae(b, 1.0)
            advantages = _whiten(advantages, mask)
        case "dr_grpo":
            advantages = _scaled(b.rewards, None)[:, None] * mask
        case "rloo":
            grouped = _groups_of(b.rewards)
            centred = (grouped - grouped.mean(1, keepdim=True)) * GROUP / (GROUP - 1)
            advantages = centred.flatten()[:, None] * mask
        case "reinforce_pp":
            advantages = _whiten(_to_go(_last(b, b.rewards)), mask)
        case "maxrl":
            advantages = _over_mean(b.rewards, EPSILON)[:, None] * mask
    if objective in ("gspo", "sapo"):
        scaled = advantages / (ROWS * mask.sum(1, keepdim=True))
    elif objective == "dr_grpo":
        scaled = advantages / (ROWS * LENGTH)
    else:
        scaled = advantages / mask.sum()
    r, rho = gap.exp(), (logprobs - b.sampler).exp()
    moved = (logprobs.exp() - b.sampler.exp()).detach()
    match objective:
        case "dapo":
            equal = (_groups_of(b.rewards).std(1, keepdim=True) < 1e-9).repeat_interleave(GROUP, 0)
            scaled = advantages / (mask * ~equal).sum()  # dynamic sampling filters equal groups
            loss = _clip(r, scaled, 0.2, 0.28)
            loss = torch.where(scaled < 0, torch.min(loss, -scaled * 10.0), loss)
        case "gspo":
            loss = _gspo(gap, scaled, mask, 0.2, 0.2)
        case "cispo":
            loss = -scaled * r.clamp(0.0, 5.0).detach() * logprobs
        case "sapo":
            loss = _sigmoid_gate(r, scaled)
        case "dppo":
            masked = ((scaled > 0) & (moved > 0.2)) | ((scaled < 0) & (-moved > 0.2))
            loss = -(rho * scaled * ~masked)
        case "dppo_kl":
            p, q = logprobs.exp().detach(), b.sampler.exp()
            kl = q * (b.sampler - logprobs.detach())
            kl = kl + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            masked = (kl > 0.2) & (((scaled > 0) & (moved > 0)) | ((scaled < 0) & (moved < 0)))
            loss = -(rho * scaled * ~masked)
        case "rollout_is":
            inside = (rho > 0.8) & (rho < 1.2)
            loss = -(torch.where(inside, rho, 0.0).detach() * scaled * logprobs)
        case _:
            loss = _clip(r, scaled, 0.2, 0.2)
    kl = b.logprobs(b.ref) - logprobs
    kl = ((kl.exp() - kl - 1) * mask).sum(1) / mask.sum(1)
    total = (loss * mask).sum() + (0.0 if objective == "dapo" else 1e-3) * kl.mean()
    if objective == "ppo":
        total = total + _sequences(_critic(values, b.old_values, returns, 0.2), mask)
    return total


def prime(objective: str, b: ComparisonBatch, now: Tensor, _: Tensor) -> Tensor:
    """``default_loss_fn`` over the samples whose advantage is not 0."""
    logprobs, mask = b.logprobs(now), b.mask
    advantages = {
        "maxrl": lambda: _over_mean(b.rewards, 0.0),
        "rae": lambda: _running(b.rewards, 0.95),
    }.get(objective, lambda: _scaled(b.rewards, None))()[:, None]
    mask = mask * (advantages.abs() > 1e-9)
    gap, moved = logprobs - b.sampler, logprobs.exp() - b.sampler.exp()
    invalid = torch.where(advantages > 0, moved > 0.2, moved < -0.2)
    loss = -(~invalid * advantages * gap.exp()) + 1e-3 * gap**2
    return (loss * mask).sum() / mask.sum()


def verl(objective: str, b: ComparisonBatch, now: Tensor, values: Tensor) -> Tensor:
    """verl's formulas: ``compute_policy_loss_*`` with ``compute_*_advantage``, and
    ``compute_value_loss``."""
    mask, logprobs = b.mask, b.logprobs(now)
    gap, returns = logprobs - b.logprobs(b.old), mask
    advantages = _scaled(b.rewards, EPSILON)[:, None] * mask
    match objective:
        case "ppo":
            advantages, returns = _gae(b, 1.0)
            advantages = _whiten(advantages, mask)
        case "dr_grpo":
            advantages = _scaled(b.rewards, None)[:, None] * mask
        case "rloo":
            factor = GROUP / (GROUP - 1)
            mean = _groups_of(b.rewards).mean(1).repeat_interleave(GROUP)
            advantages = (b.rewards * factor - mean * factor)[:, None] * mask
        case "reinforce_pp":
            advantages = _whiten(_to_go(_last(b, b.rewards)) * mask, mask)
        case "reinforce_pp_baseline":
            advantages = _whiten(_scaled(b.rewards, None)[:, None] * mask, mask)
        case "remax":
            returns = _to_go(_last(b, b.rewards) * mask)
            advantages = returns - b.greedy.repeat_interleave(GROUP)[:, None] * mask
        case "opo":
            advantages = _by_length(b)[:, None] * mask
        case "gdpo":
            advantages = _whiten(_separately(b, EPSILON)[:, None] * mask, mask)
    r = gap.clamp(-20, 20).exp()
    match objective:
        case "gspo":  # the mode is hard-coded, whatever loss_agg_mode says
            return _sequences(_gspo(gap, advantages, mask, 0.2, 0.2), mask)
        case "sapo":
            return _sequences(_sigmoid_gate(r, advantages), mask)
        case "gmpo":
            mean = (advantages * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            return _gmpo(gap, mean, mask, 0.2).mean()
        case "cispo":
            loss = -r.clamp(0.8, 1.2).detach() * advantages * logprobs
        case "dppo" | "dppo_kl":
            p, q = logprobs.exp(), b.logprobs(b.old).exp()
            if objective == "dppo":
                kept = torch.where(advantages > 0, p - q <= 0.2, p - q >= -0.2)
            else:
                kl = q * -gap + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
                up, down = (kl <= 0.2) | (p <= q), (kl <= 0.2) | (p >= q)
                kept = torch.where(advantages > 0, up, down)
            loss = -advantages * r.clamp(max=3.0).detach() * logprobs * kept
        case _:
            loss = _clip(r, advantages, 0.2, 0.28 if objective == "dapo" else 0.2)
            loss = torch.where(advantages < 0, torch.min(-advantages * 3.0, loss), loss)
    if objective == "dr_grpo":
        return _constant(loss, mask, LENGTH)
    if objective == "ppo":
        loss = loss + _critic(values, b.old_values, returns, 0.5)
    return _tokens(loss, mask)


def _norm(values: Tensor, mask: Tensor) -> Tensor:
    """AReaL's ``Normalization`` over the batch: 1e-5 is added to the standard deviation."""
    mean = (values * mask).sum() / mask.sum()
    std = (((values - mean) ** 2 * mask).sum() / (mask.sum() - 1)).sqrt()
    return (values - mean) * mask / (std + 1e-5)


def areal(objective: str, b: ComparisonBatch, now: Tensor, values: Tensor) -> Tensor:
    """AReaL's formulas: ``ppo_actor_loss_fn`` (``sapo_loss_fn``, ``ppo_critic_loss_fn``). The
    rewards are those of ``examples/math``: shifted and scaled, then normalised by group and over
    the batch."""
    mask, logprobs, old = b.mask, b.logprobs(now), b.logprobs(b.old)
    rewards, returns = (b.rewards - 0.5) * 10.0, mask
    match objective:
        case "ppo":  # its rewards are not scaled here: a critic would have to learn the scale
            raw, returns = _gae(b, 1.0)
        case "dr_grpo":
            raw = _scaled(rewards, None)[:, None] * mask
        case "rloo":
            raw = _others(rewards)[:, None] * mask
        case _:
            raw = _scaled(rewards, 1e-5)[:, None] * mask
    advantages = _norm(raw, mask)
    if objective == "sapo":
        r = (logprobs - b.sampler).exp()
        return _tokens(_sigmoid_gate(r, advantages), mask)
    weight = (old - b.sampler).exp()
    kept = mask * (weight <= 5.0)
    gap = logprobs - old
    if objective == "gspo":
        num = kept.sum(1, keepdim=True).clamp(min=1)
        gap = ((gap * kept).sum(1, keepdim=True) / num).expand_as(gap)
        advantages = ((advantages * kept).sum(1, keepdim=True) / num).expand_as(gap)
    low, high = (0.2, 0.28) if objective == "dapo" else (0.4, 0.4)
    loss = _clip(gap.exp(), advantages, low, high) * weight * kept
    total = loss.sum() / mask.sum()
    if objective == "ppo":
        total = total + _tokens(_critic(values, b.old_values, returns, 0.5), mask)
    return total


FORMULAS: dict[str, Callable[[str, ComparisonBatch, Tensor, Tensor], Tensor]] = {
    "": paper,
    "trl": trl,
    "skyrl": skyrl,
    "prime": prime,
    "verl": verl,
    "areal": areal,
}


def theirs(preset: str, batch: ComparisonBatch, objective: str | None = None) -> Result:
    """Return the loss and the gradients of a trainer's formula for an objective, or for its default
    one."""
    logits, critic = batch.now.clone().requires_grad_(), batch.values.clone().requires_grad_()
    name = objective or DEFAULTS[preset]
    return _result(FORMULAS[preset](name, batch, logits, critic), logits, critic)


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


TRL: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {"loss_type": "grpo"}),
    "dr_grpo": ("GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ("GRPO", {}),
    "gspo": ("GRPO", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": ("GRPO", {"loss_type": "cispo"}),
    "sapo": ("GRPO", {"loss_type": "sapo"}),
    "gdpo": ("GRPO", {"multi_objective_aggregation": "normalize_then_sum"}),
    "gmpo": ("GMPO", {}),
    "rloo": ("RLOO", {}),
}
"""Map an objective to TRL's trainer and the options that select it."""


def trl_cell(objective: str, batch: ComparisonBatch) -> Result:
    """Return the loss and the gradients of an objective, computed by TRL's own code."""
    trainer, options = TRL[objective]
    return trl_installed(batch, trainer, several=objective == "gdpo", **options)


def trl_installed(
    batch: ComparisonBatch, trainer: str = "GRPO", *, several: bool = False, **changes: Any
) -> Result:
    """Loss and gradients of TRL's own trainer with its own defaults. It is made without its
    constructor, which wants a checkpoint and a data set."""
    if trainer == "GMPO":
        from trl.experimental.gmpo import GMPOConfig as Config
        from trl.experimental.gmpo import GMPOTrainer as Base
    elif trainer == "RLOO":
        from trl import RLOOConfig as Config
        from trl import RLOOTrainer as Base
    else:
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Base

    given = {"num_generations": GROUP, "per_device_train_batch_size": ROWS, "use_vllm": True}
    args = Config(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **given, **changes)
    rewards = [batch.rewards, batch.brevity] if several else [batch.rewards]

    class Trainer(Base):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            pass

        def _generate(self, prompts: Any) -> Any:
            ends = [PROMPT + num for num in batch.lengths]
            ids = [row[PROMPT:end].tolist() for row, end in zip(batch.ids, ends, strict=True)]
            sampled = zip(batch.sampler, batch.lengths, strict=True)
            logprobs = [row[:num].tolist() for row, num in sampled]
            texts = [""] * ROWS
            prompts = batch.ids[:, :PROMPT].tolist()
            if trainer == "RLOO":
                return prompts, ids, texts
            return prompts, ids, None, texts, logprobs, {}, None, None

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return torch.stack(rewards, 1)

    made = Trainer()
    names = ["reward", "brevity"][: len(rewards)]
    fields = {
        **vars(args),
        "args": args,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "model": Table(batch.old).train(),
        "accelerator": _accelerator(),
        "reward_weights": torch.ones(len(rewards)),
        "reward_funcs": [None] * len(rewards),
        "reward_func_names": names,
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "ref_model": Table(batch.ref) if args.beta else None,
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


def cells() -> Iterator[tuple[str, str]]:
    """Return (preset, objective) of every cell that exists. The preset is empty for the paper."""
    yield from (("", objective) for objective in OBJECTIVES)
    yield from ((name, each) for name, preset in PRESETS.items() for each in preset.objectives)


def words(preset: str, objective: str) -> list[str]:
    """The overrides that choose a cell: the objective, and a length that a trainer does not set."""
    needs_length = objective == "dr_grpo" and preset in ("skyrl", "verl")
    length = [f"rl.algorithm.rollout_tokens={LENGTH}"] if needs_length else []
    return [f"rl.objective={objective}", *length]


def difference(preset: str, objective: str, batch: ComparisonBatch) -> float:
    """Return the largest difference between Ramify and the formula of a cell."""
    return apart(ours(preset, batch, *words(preset, objective)), theirs(preset, batch, objective))


def figures(num_batches: int = 8) -> Iterator[Figure]:
    """Report the largest difference of each cell. Cells that run TRL's own code are included only
    if it is installed. Objectives that a trainer does not have are counted and named."""
    batches = [random_batch(seed) for seed in range(num_batches)]
    for preset, objective in cells():
        most = max(difference(preset, objective, batch) for batch in batches)
        where = PRESETS[preset].trainer.partition(" (")[0] if preset else "paper"
        yield Figure(f"{objective}, {where}: largest difference", most, "", {}, 1e-6)
    for preset, defaults in DEFAULTS.items():
        most = max(apart(ours(preset, batch), theirs(preset, batch)) for batch in batches)
        named = f"preset {preset}, which is {defaults}: largest difference"
        yield Figure(named, most, "", {}, 1e-6)
    for name, preset_ in PRESETS.items():
        missing = [each for each in OBJECTIVES if each not in preset_.objectives]
        yield Figure(
            f"cells of {name} that do not exist: {', '.join(missing)}", len(missing), "", {}
        )
    if not find_spec("trl"):
        return
    for objective in TRL:
        most = max(
            apart(ours("trl", batch, f"rl.objective={objective}"), trl_cell(objective, batch))
            for batch in batches
        )
        yield Figure(f"{objective}, installed TRL: largest difference", most, "", {}, 1e-6)


if __name__ == "__main__":
    found = list(figures())
    show(found)
    sys.exit(any(figure.holds is False for figure in found))

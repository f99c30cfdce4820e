"""The loss of a step: three weighted sums over entries, each divided by its count over the whole
step.

    L = sum w_rl (policy + beta KL - c H + value) / N_rl  +  sum w_ce (-l) / N_ce  +  sum w_kd D / N_kd

Weights and counts come with the batch, so the loss, and with it the gradient, is the same however
the step was cut into batches, packed or ordered. What is to be known of the whole step first comes
with the batch, too (``whole_step.py``). Decides what each component is per entry and what is
measured on the way. Leaves out where log-probabilities come from (``head.py``) and where weights
and advantages do (``algorithms/``).

Legend: E entries, k teacher tokens per entry. l now, o old, m sampler's log-probability, as in
``policy_losses/base.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.corrections import CORRECTIONS
from ramify.train.distil_losses import KdKind, forward_kl, reverse_kl, surrogate
from ramify.train.policy_losses import POLICY_LOSSES, DppoTv, LossTokens, PolicyLoss, ratio
from ramify.train.policy_losses.base import SequenceSums, TokenSelectingLoss
from ramify.train.policy_losses.critic import CriticTokens, ValueLoss

if TYPE_CHECKING:
    from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "k3+"]
Old = Literal["auto", "pass", "now", "sampler"]


class LossSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is minimised."""

    policy: Any = DppoTv()
    """Implements ``PolicyLoss``; in a configuration a name of ``POLICY_LOSSES`` or a dotted path,
    or a map with ``name`` and options."""
    corrections: tuple[Any, ...] = ()
    """Factors on it for a sampler that is not the trainer, likewise by ``CORRECTIONS``."""
    old: Old = "auto"
    """Where ``o`` comes from, for a loss that reads it. ``pass``: the trainer computes it again at
    the start of each step. ``now``: l itself, which is the same where a step is one optimizer step.
    ``sampler``: m. ``auto``: a pass where a step has several minibatches, and else m, or l for
    corrections, which compare o with m."""
    value: ValueLoss = ValueLoss()
    """Of a critic, where there is one."""
    kl_beta: float = 0.0
    """Weight of the KL to a reference policy, whose log-probabilities are the stream
    ``ref_logprobs``; 0: none."""
    kl: KlKind = "k3+"
    """Its estimator, see ``kl_estimate``."""
    entropy: float = 0.0
    """c: weight of the policy's entropy at sampled tokens, which is made larger."""
    kd_pull: float = 1e-3
    """Of ``kd`` by sampled tokens: weight of (l - m)²."""
    kd: KdKind = "forward"
    """Of ``kd`` by several tokens per position: see ``distil_losses.py``."""
    kd_clip: float = 1.0
    """C of ``surrogate``: most that teacher and policy count as apart. 2 for maths with tools, 1
    for chat."""

    def __post_init__(self) -> None:
        if self.kl_beta < 0:
            raise ConfigError(f"loss.kl_beta={self.kl_beta} cannot be negative")
        msgspec.structs.force_setattr(self, "policy", POLICY_LOSSES.made(self.policy))
        msgspec.structs.force_setattr(
            self, "corrections", tuple(CORRECTIONS.made(each) for each in self.corrections)
        )
        if "fresh_old" in self.reads and self.old == "sampler":
            raise ConfigError(
                "loss.old=sampler: corrections and decoupled losses compare the trainer's "
                "log-probabilities with the "
                "sampler's; use auto or pass"
            )

    @property
    def reads(self) -> frozenset[str]:
        """What the policy's loss and its corrections need besides the streams of every batch:
        ``old_logprobs``, ``staleness``; ``fresh_old`` where the sampler's log-probabilities will
        not do as the old ones."""
        found = (frozenset(getattr(each, "reads", ())) for each in (self.policy, *self.corrections))
        return frozenset[str]().union(*found)

    @property
    def is_over_sequences(self) -> bool:
        """Whether a part of it looks at whole sequences, so that none may be split."""
        return any(getattr(each, "whole", False) for each in (self.policy, *self.corrections))

    @property
    def wants_every_token(self) -> bool:
        """Whether tokens whose advantage is 0 count: for a term that acts on each, or a mean over
        them."""
        return bool(
            self.kl_beta
            or self.entropy
            or self.is_over_sequences
            or isinstance(self.policy, TokenSelectingLoss)
        )

    def for_minibatches(self, num: int) -> LossSpec:
        """This loss with ``old`` settled, for steps of ``num`` optimizer steps."""
        if self.old != "auto":
            return self
        alone = "now" if "fresh_old" in self.reads else "sampler"
        return msgspec.structs.replace(
            self, old="pass" if num > 1 and "old_logprobs" in self.reads else alone
        )


class LossEntries(NamedTuple):
    """What a loss sees of a batch; each [E] unless said."""

    logprobs: Tensor
    """l, with gradient."""
    streams: Mapping[str, Tensor]
    """Those of the batch: weights, ``advantages``, ``sampler_logprobs``, ``old_logprobs``,
    ``ref_logprobs``, ``teacher_logprobs`` ([E, k] with ``teacher_ids``) …"""
    denominators: Mapping[str, float]
    entropy: Tensor | None = None
    """In nats; None where it was not asked for."""
    teacher_ids_logprobs: Tensor | None = None
    """[E, k] the policy's log-probabilities of ``teacher_ids``, with gradient."""
    sequences: tuple[Tensor, int] | None = None
    """([E] which sequence the entry is of, from 0; how many there are)."""
    values: Tensor | None = None
    """[E] a critic's, with gradient; None where there is none."""


def compute(loss: LossSpec, entries: LossEntries) -> tuple[Tensor, LossTally]:
    """The share of the step's loss that these entries have, a scalar with gradient; and what was
    measured."""
    tally = LossTally()
    shares = []
    for name, weighed in _components(loss, entries, tally):
        share = weighed.sum()
        tally.add(f"{name}_loss", share.detach(), 1)
        shares.append(share)
    return sum(shares[1:], shares[0]), tally


def per_entry(loss: LossSpec, entries: LossEntries) -> Tensor:
    """[E] what each entry adds to the loss; for looking at it."""
    parts = [weighed for _, weighed in _components(loss, entries, LossTally())]
    return sum(parts[1:], parts[0])


def _components(
    loss: LossSpec, entries: LossEntries, tally: LossTally
) -> Iterator[tuple[str, Tensor]]:
    """(name, what each entry adds to it); an entry without weight adds 0, whatever its
    log-probability."""
    for name, formula in (("rl", _reinforce), ("ce", _imitate), ("kd", _distil)):
        if name in entries.denominators:
            weight = entries.streams[name] / entries.denominators[name]
            yield name, (weight * formula(loss, entries, tally)).masked_fill(weight == 0, 0.0)


def kl_estimate(kind: KlKind, now: Tensor, ref: Tensor) -> Tensor:
    """Per token an estimate of KL(now, ref), with d = ref - now: k1 = -d, k2 = d²/2, k3 = exp(d) -
    d - 1 (d clamped to ±20, k3 to ±10), and ``k3+``: the value of k3 with the gradient of k2, which
    is that of the true KL when on-policy."""
    if kind == "k1":
        return now - ref
    k2 = (now - ref).square() / 2
    if kind == "k2":
        return k2
    d = (ref - now).clamp(-20.0, 20.0)
    k3 = (d.exp() - d - 1).clamp(-10.0, 10.0)
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def _reinforce(loss: LossSpec, entries: LossEntries, tally: LossTally) -> Tensor:
    policy: PolicyLoss = loss.policy
    streams, tokens = entries.streams, _tokens(loss, entries)
    now, weighs = tokens.now, streams["rl"] != 0
    value = policy.per_token(tokens)
    tally.policy(tokens, policy.clipped(tokens), weighs)
    for correction in loss.corrections:
        factor = correction.factor(tokens)
        tally.mean("corrected_away", (factor == 0).to(now.dtype), weighs)
        tally.mean("correction", factor, weighs)
        value = value * factor
    if loss.kl_beta:
        if "ref_logprobs" not in streams:
            raise ConfigError(
                "loss.kl_beta needs the reference's log-probabilities: the batch has no "
                "'ref_logprobs'"
            )
        kl = kl_estimate(loss.kl, now, streams["ref_logprobs"])
        tally.mean("ref_kl", kl.detach(), weighs)
        value = value + loss.kl_beta * kl
    if entries.entropy is not None:
        tally.mean("entropy", entries.entropy.detach(), weighs)
        if loss.entropy:
            value = value - loss.entropy * entries.entropy
    if entries.values is not None:
        if "returns" not in streams:
            raise ConfigError(
                "a critic learns from returns: the batch has no stream 'returns'; see the "
                "algorithm 'ppo'"
            )
        missed = loss.value.per_token(
            CriticTokens(entries.values, streams["values"], streams["returns"])
        )
        tally.mean("value_loss", missed.detach(), weighs)
        value = value + loss.value.weight * missed
    return value


def _tokens(loss: LossSpec, entries: LossEntries) -> LossTokens:
    streams, now = entries.streams, entries.logprobs
    sampler, old = streams["sampler_logprobs"], streams.get("old_logprobs")
    if old is None and (loss.old == "pass" or (loss.old == "auto" and "fresh_old" in loss.reads)):
        raise ConfigError(
            "the loss needs the trainer's log-probabilities at the start of the step: the batch "
            "has no stream "
            "'old_logprobs'; attach it, or set loss.old=now where a step is one optimizer step"
        )
    if old is None:
        old = now.detach() if loss.old == "now" else sampler
    whole = (
        None if entries.sequences is None else SequenceSums(*entries.sequences, streams["rl"] != 0)
    )
    chosen = streams.get("chosen")
    return LossTokens(
        now,
        old,
        sampler,
        streams["advantages"],
        whole,
        None if chosen is None else chosen != 0,
        streams.get("staleness"),
    )


def _imitate(loss: LossSpec, entries: LossEntries, tally: LossTally) -> Tensor:
    return -entries.logprobs


def _distil(loss: LossSpec, entries: LossEntries, tally: LossTally) -> Tensor:
    """By several tokens per position: one of ``distil_losses``. By the sampled token
    alone: -sg(l_T - l) rho + pull (l - m)², the reverse KL's policy gradient."""
    if "teacher_logprobs" not in entries.streams:
        raise ConfigError(
            "component 'kd' needs a teacher: the batch has no stream 'teacher_logprobs'"
        )
    teacher = entries.streams["teacher_logprobs"]
    if entries.teacher_ids_logprobs is not None:
        if loss.kd == "surrogate":
            return surrogate(
                teacher,
                entries.streams["student_logprobs"],
                entries.teacher_ids_logprobs,
                loss.kd_clip,
            )
        return (forward_kl if loss.kd == "forward" else reverse_kl)(
            teacher, entries.teacher_ids_logprobs
        )
    now, sampler = entries.logprobs, entries.streams["sampler_logprobs"]
    gap = (teacher - now).detach()
    tally.mean("teacher_gap", gap, entries.streams["kd"] != 0)
    return -gap * ratio(now, sampler) + loss.kd_pull * (now - sampler).square()


class LossTally:
    """Sums over entries, added up over the batches of a step, from which its metrics are made."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        """Name -> (sum, count)"""
        self._most: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + total, before[1] + count)

    def mean(self, name: str, values: Tensor, weighs: Tensor) -> None:
        self.add(name, values.masked_fill(~weighs, 0.0).sum(), weighs.sum())

    def policy(self, tokens: LossTokens, clipped: Tensor, weighs: Tensor) -> None:
        """What tells whether off-policy learning goes well, over the entries that weigh."""
        now = tokens.now.detach()
        mismatch = (
            tokens.old - tokens.sampler
            if tokens.old is not tokens.sampler
            else now - tokens.sampler
        ).abs()
        mismatch = mismatch.masked_fill(~weighs, 0.0)
        self.add("mismatch", mismatch.sum(), weighs.sum())
        self._raise("mismatch_max", mismatch.max())
        r = ratio(now, tokens.old)
        self.mean("clip_fraction", clipped.to(now.dtype), weighs)
        self.mean("approx_kl", r - 1 - (now - tokens.old), weighs)
        rho = ratio(now, tokens.sampler).masked_fill(~weighs, 0.0)
        self.add("rho", rho.sum(), weighs.sum())
        self.add("rho_squared", rho.square().sum(), weighs.sum())

    def merge(self, other: LossTally) -> None:
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, value in other._most.items():
            self._raise(name, value)

    def _raise(self, name: str, value: Tensor | float) -> None:
        """Keep the larger; a NaN stays one, and tensors stay where they are: no batch is waited
        for."""
        before = self._most.get(name)
        if before is None:
            self._most[name] = value
        elif isinstance(before, float) or isinstance(value, float):
            both = float(before), float(value)
            self._most[name] = math.nan if any(map(math.isnan, both)) else max(both)
        else:
            self._most[name] = before.maximum(value)

    def plain(self) -> LossTally:
        """The same in numbers, to be sent elsewhere."""
        found = LossTally()
        found._sums = {
            name: (float(total), float(count)) for name, (total, count) in self._sums.items()
        }
        found._most = {name: float(value) for name, value in self._most.items()}
        return found

    def metrics(self) -> dict[str, float]:
        """``loss`` and its components are sums over the step; ``ess`` is the effective sample size
        (sum rho)² / sum rho² as a share of the tokens; the others are means over the entries with
        policy-gradient weight:

        ``clip_fraction``, ``approx_kl`` (mean of r - 1 - log r), ``mismatch`` (mean of |o - m|, or
        of |l - m| where no old pass was made) and ``mismatch_max``, ``correction`` and
        ``corrected_away`` (the share it is 0 for), ``entropy``, ``ref_kl``, ``value_loss``."""
        sums = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        found: dict[str, float] = {
            name: sums.pop(name)[0] for name in ("rl_loss", "ce_loss", "kd_loss") if name in sums
        }
        found["loss"] = sum(found.values())
        if "rho" in sums:
            (rho, count), (squared, _) = sums.pop("rho"), sums.pop("rho_squared")
            found["ess"] = rho * rho / squared / count if squared and count else 0.0
        means = {name: total / count if count else 0.0 for name, (total, count) in sums.items()}
        return {**found, **means, **{name: float(value) for name, value in self._most.items()}}

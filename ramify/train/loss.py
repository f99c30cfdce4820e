"""The loss of a step: three weighted sums over entries, each divided by its count over the whole step.

    L = sum w_rl (policy + beta KL - c H) / N_rl  +  sum w_ce (-l) / N_ce  +  sum w_kd D / N_kd

Weights and counts come with the batch, so the loss, and with it the gradient, is the same however the step was cut into
batches, packed or ordered. Decides what each component is per entry and what is measured on the way. Leaves out where
log-probabilities come from (``head.py``) and where weights and advantages do (``algorithms/``).

Legend: E entries, k teacher tokens per entry. l now, o old, m sampler's log-probability, as in ``policy_losses.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.policy_losses import AnyPolicyLoss, DppoTv, Tokens, ratio

if TYPE_CHECKING:
    from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "k3+"]


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is minimised."""

    policy: AnyPolicyLoss = DppoTv()
    kl_beta: float = 0.0
    """Weight of the KL to a reference policy, whose log-probabilities are the stream ``ref_logprobs``; 0: none."""
    kl: KlKind = "k3+"
    """Its estimator, see ``kl_estimate``."""
    entropy: float = 0.0
    """c: weight of the policy's entropy at sampled tokens, which is made larger."""
    kd_pull: float = 1e-3
    """Of ``kd`` by sampled tokens: weight of (l - m)²."""

    def __post_init__(self) -> None:
        if self.kl_beta < 0:
            raise ConfigError(f"loss.kl_beta={self.kl_beta} cannot be negative")


class Entries(NamedTuple):
    """What a loss sees of a batch; each [E] unless said."""

    logprobs: Tensor
    """l, with gradient."""
    streams: Mapping[str, Tensor]
    """Those of the batch: weights, ``advantages``, ``sampler_logprobs``, ``old_logprobs``, ``ref_logprobs``,
    ``teacher_logprobs`` ([E, k] with ``teacher_ids``) …"""
    denominators: Mapping[str, float]
    entropy: Tensor | None = None
    """In nats; None where it was not asked for."""
    teacher_ids_logprobs: Tensor | None = None
    """[E, k] the policy's log-probabilities of ``teacher_ids``, with gradient."""


def compute(loss: Loss, entries: Entries) -> tuple[Tensor, Tally]:
    """The share of the step's loss that these entries have, a scalar with gradient; and what was measured."""
    tally = Tally()
    shares = []
    for name, weighed in _components(loss, entries, tally):
        share = weighed.sum()
        tally.add(f"{name}_loss", share.detach(), 1)
        shares.append(share)
    return sum(shares[1:], shares[0]), tally


def per_entry(loss: Loss, entries: Entries) -> Tensor:
    """[E] what each entry adds to the loss; for looking at it."""
    parts = [weighed for _, weighed in _components(loss, entries, Tally())]
    return sum(parts[1:], parts[0])


def _components(loss: Loss, entries: Entries, tally: Tally) -> Iterator[tuple[str, Tensor]]:
    """(name, what each entry adds to it); an entry without weight adds 0, whatever its log-probability."""
    for name, formula in (("rl", _reinforce), ("ce", _imitate), ("kd", _distil)):
        if name in entries.denominators:
            weight = entries.streams[name] / entries.denominators[name]
            yield name, (weight * formula(loss, entries, tally)).masked_fill(weight == 0, 0.0)


def kl_estimate(kind: KlKind, now: Tensor, ref: Tensor) -> Tensor:
    """Per token an estimate of KL(now, ref), with d = ref - now: k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1 (d clamped to ±20,
    k3 to ±10), and ``k3+``: the value of k3 with the gradient of k2, which is that of the true KL when on-policy."""
    if kind == "k1":
        return now - ref
    k2 = (now - ref).square() / 2
    if kind == "k2":
        return k2
    d = (ref - now).clamp(-20.0, 20.0)
    k3 = (d.exp() - d - 1).clamp(-10.0, 10.0)
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def _reinforce(loss: Loss, entries: Entries, tally: Tally) -> Tensor:
    streams, now = entries.streams, entries.logprobs
    sampler = streams["sampler_logprobs"]
    tokens = Tokens(now, streams.get("old_logprobs", sampler), sampler, streams["advantages"])
    value = loss.policy.per_token(tokens)
    weighs = streams["rl"] != 0
    tally.policy(tokens, loss.policy.clipped(tokens), weighs)
    if loss.kl_beta:
        if "ref_logprobs" not in streams:
            raise ConfigError("loss.kl_beta needs the reference's log-probabilities: the batch has no 'ref_logprobs'")
        kl = kl_estimate(loss.kl, now, streams["ref_logprobs"])
        tally.mean("ref_kl", kl.detach(), weighs)
        value = value + loss.kl_beta * kl
    if entries.entropy is not None:
        tally.mean("entropy", entries.entropy.detach(), weighs)
        if loss.entropy:
            value = value - loss.entropy * entries.entropy
    return value


def _imitate(loss: Loss, entries: Entries, tally: Tally) -> Tensor:
    return -entries.logprobs


def _distil(loss: Loss, entries: Entries, tally: Tally) -> Tensor:
    """By the teacher's likeliest tokens: sum over k of p_T (log p_T - log p), the forward KL on them. By the sampled token
    alone: -sg(l_T - l) rho + pull (l - m)², the reverse KL's policy gradient."""
    if "teacher_logprobs" not in entries.streams:
        raise ConfigError("component 'kd' needs a teacher: the batch has no stream 'teacher_logprobs'")
    teacher = entries.streams["teacher_logprobs"]
    if entries.teacher_ids_logprobs is not None:
        return (teacher.exp() * (teacher - entries.teacher_ids_logprobs)).sum(-1)
    now, sampler = entries.logprobs, entries.streams["sampler_logprobs"]
    gap = (teacher - now).detach()
    tally.mean("teacher_gap", gap, entries.streams["kd"] != 0)
    return -gap * ratio(now, sampler) + loss.kd_pull * (now - sampler).square()


class Tally:
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

    def policy(self, tokens: Tokens, clipped: Tensor, weighs: Tensor) -> None:
        """What tells whether off-policy learning goes well, over the entries that weigh."""
        now = tokens.now.detach()
        mismatch = (tokens.old - tokens.sampler if tokens.old is not tokens.sampler else now - tokens.sampler).abs()
        mismatch = mismatch.masked_fill(~weighs, 0.0)
        self.add("mismatch", mismatch.sum(), weighs.sum())
        self._most["mismatch_max"] = max(self._most.get("mismatch_max", 0.0), float(mismatch.max()))
        r = ratio(now, tokens.old)
        self.mean("clip_fraction", clipped.to(now.dtype), weighs)
        self.mean("approx_kl", r - 1 - (now - tokens.old), weighs)
        rho = ratio(now, tokens.sampler).masked_fill(~weighs, 0.0)
        self.add("rho", rho.sum(), weighs.sum())
        self.add("rho_squared", rho.square().sum(), weighs.sum())

    def merge(self, other: Tally) -> None:
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, value in other._most.items():
            self._most[name] = max(self._most.get(name, -math.inf), value)

    def plain(self) -> Tally:
        """The same in numbers, to be sent elsewhere."""
        found = Tally()
        found._sums = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        found._most = {name: float(value) for name, value in self._most.items()}
        return found

    def metrics(self) -> dict[str, float]:
        """``loss`` and its components are sums over the step; ``ess`` is the effective sample size (sum rho)² / sum rho²
        as a share of the tokens; the others are means over the entries with policy-gradient weight:

        ``clip_fraction``, ``approx_kl`` (mean of r - 1 - log r), ``mismatch`` (mean of |o - m|, or of |l - m| where no old
        pass was made) and ``mismatch_max``, ``entropy``, ``ref_kl``."""
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

"""Compute the loss of a training step as the sum of up to three components: reinforcement learning,
imitation and distillation.

Each component is a weighted sum over tokens, divided by a count over the whole step.

    L = sum w_rl (policy + beta KL - c H + value) / N_rl
      + sum w_ce (-l) / N_ce
      + sum w_kd D / N_kd

Weights and counts are part of the batch, so the loss and its gradient do not depend on how the step
was cut into batches, packed or ordered. This module defines the loss of each entry and the metrics
that are measured. Values that depend on the whole step are computed before training on any of its
batches, and added to the batch:

    choose        tokens that some losses treat differently (``covariance_losses.py``), selected
                  by means over the whole step and by random numbers keyed by sequence and
                  position, so that the cut and the order of the step do not matter
    sequence_index_of_entries
                  for a loss over sequences: which entries belong to one call, or to one rollout
                  (``LossSpec.sequence``). A call whose history was cut or rendered again has
                  several paths; its sequence is then all its sampled tokens, each counted once, on
                  whichever path it carries weight
    check_sequences_unsplit   for such a loss: each sequence is whole, in one batch

Log-probabilities are computed in ``models/training_forward.py``, and weights and advantages in
``advantages/``.

Legend: E entries of a batch, N tokens of the step, k teacher tokens per entry. l, o and m are the
current, old and sampler log-probabilities, as in ``base.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import ConfigError, TrainError
from ramify.plugins import check_methods, replace_names_with_import_locations
from ramify.train.losses import (
    POLICY_LOSSES,
    DppoTv,
    PolicyLoss,
    PolicyLossInputs,
    importance_ratio,
)
from ramify.train.losses.base import (
    SequenceSums,
    TokenSelectingLoss,
    TokenSelectionInputs,
    check_bounds,
    check_per_token,
)
from ramify.train.losses.corrections import CORRECTIONS
from ramify.train.losses.critic import CriticLossInputs, ValueLoss
from ramify.train.losses.distil_losses import KdKind, clipped_ppo_surrogate, forward_kl, reverse_kl
from ramify.types.training_sequences import Batch, Floats, Ints, SequenceUnit, call_or_rollout_key

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.models.moe_routing import ExpertLoad

KlKind = Literal["k1", "k2", "k3", "k3+"]
Old = Literal["auto", "pass", "now", "sampler"]


class LossSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training loss: policy loss with corrections, and KL, entropy, value and distillation
    terms."""

    policy: Any = DppoTv()
    """The policy loss; implements ``PolicyLoss``. In a configuration: a name in ``POLICY_LOSSES``,
    a dotted path, or a map with ``name`` and options."""
    corrections: tuple[Any, ...] = ()
    """Off-policy corrections: factors on the policy loss that compensate for differences between
    sampler and trainer. Configured like ``policy``, with names in ``CORRECTIONS``.
    """
    sequence: SequenceUnit = "call"
    """What counts as one sequence for losses and corrections over sequences (``gspo``, ``gmpo``,
    ``sequence_mask`` …): the tokens of a ``call``, or those of all calls of a ``rollout``.
    """
    old: Old = "auto"
    """Where a loss gets the old log-probabilities o from. ``pass``: the trainer recomputes them at
    the start of each step. ``now``: the current ones, which are the same if a step is a single
    optimizer step. ``sampler``: those recorded during sampling. ``auto``: ``pass`` if a step has
    several minibatches; otherwise ``now`` if a loss or correction compares trainer and sampler,
    and ``sampler`` if none does.
    """
    value: ValueLoss = ValueLoss()
    """Loss of the critic, if there is one."""
    kl_beta: float = 0.0
    """Weight of the KL to a reference policy, whose log-probabilities are the stream
    ``ref_logprobs``; 0: no KL."""
    kl: KlKind = "k3+"
    """Estimator of the KL divergence; see ``kl_estimate``."""
    entropy: float = 0.0
    """Weight of the entropy bonus, i.e. of the policy's entropy at sampled tokens."""
    router_aux_loss_coef: float | None = None
    """Weight of the load-balancing loss of a mixture-of-experts model; None: the value in the
    checkpoint's configuration (``router_aux_loss_coef``, if ``output_router_logits`` is set).
    """
    kd_pull: float = 1e-3
    """For distillation on sampled tokens: weight of the squared difference between policy and
    sampler log-probabilities, which keeps the policy close to the sampler."""
    kd: KdKind = "forward"
    """For distillation on several candidate tokens per position: the form of the loss; see
    ``docs/signals.md``."""
    kd_clip: float = 1.0
    """For ``kd=surrogate``: limit of the difference between a token's log-probabilities under
    teacher and policy. Use 2 for math with tools, 1 for chat.
    """

    def __post_init__(self) -> None:
        check_bounds(self, "loss.")
        msgspec.structs.force_setattr(self, "policy", POLICY_LOSSES.build(self.policy))
        msgspec.structs.force_setattr(
            self,
            "corrections",
            tuple(CORRECTIONS.build(correction) for correction in self.corrections),
        )
        check_methods("rl.loss.policy", self.policy, "per_token", "clipped")
        for correction in self.corrections:
            check_methods("rl.loss.corrections", correction, "factor")
        for formula in (self.policy, *self.corrections):
            config = getattr(formula, "__struct_config__", None)
            check_bounds(formula, f"{config.tag}: " if config is not None else "")
        if "fresh_old" in self.reads and self.old == "sampler":
            raise ConfigError(
                "loss.old=sampler: corrections and decoupled losses compare the trainer's "
                "log-probabilities with the sampler's: set loss.old to auto or pass"
            )

    @property
    def reads(self) -> frozenset[str]:
        """The names of the extra per-token inputs that the policy loss and its corrections read.

        These can be ``old_logprobs``, ``staleness``, and ``fresh_old`` if the sampler's
        log-probabilities cannot serve as the old ones.
        """
        reads = (frozenset(getattr(part, "reads", ())) for part in (self.policy, *self.corrections))
        return frozenset[str]().union(*reads)

    @property
    def is_over_sequences(self) -> bool:
        """True if a term of the loss needs whole sequences, so that no sequence may be split over
        batches."""
        return any(getattr(part, "whole", False) for part in (self.policy, *self.corrections))

    @property
    def reduction(self) -> SequenceUnit | None:
        """The unit, ``call`` or ``rollout``, within which the policy loss is averaged.

        None if ``rl.algorithm.reduction`` decides how tokens are averaged.
        """
        return self.sequence if getattr(self.policy, "sequence_mean", False) else None

    @property
    def needs_zero_advantage(self) -> bool:
        """True if some loss term needs the tokens with advantage 0.

        Such a term acts on every token or compares a token with others.
        """
        return bool(
            self.kl_beta
            or self.entropy
            or self.is_over_sequences
            or isinstance(self.policy, TokenSelectingLoss)
        )

    def stored(self) -> dict[str, Any]:
        """Return this loss as plain data that ``restored`` can rebuild in another process.

        A formula from a plug-in is stored by its import location. Raises ConfigError if a formula
        is not a msgspec struct.
        """
        try:
            data: dict[str, Any] = msgspec.to_builtins(self)
        except TypeError as error:
            raise ConfigError(
                f"rl.loss: {error}: make the formula a BaseLossFormula, which can be sent to "
                "other processes"
            ) from None
        replace_names_with_import_locations(self.policy, data["policy"])
        replace_names_with_import_locations(self.corrections, data["corrections"])
        return data

    @classmethod
    def restored(cls, data: Mapping[str, Any]) -> LossSpec:
        return msgspec.convert(data, cls)

    def for_minibatches(self, num: int) -> LossSpec:
        """Return a copy of this loss for training steps split into ``num`` minibatches.

        Each minibatch is one optimizer step. The copy replaces ``old="auto"`` with the source of
        old log-probabilities that is right for that number.
        """
        if self.old != "auto":
            return self
        single = "now" if "fresh_old" in self.reads else "sampler"
        return msgspec.structs.replace(
            self, old="pass" if num > 1 and "old_logprobs" in self.reads else single
        )


class BatchLossInputs(NamedTuple):
    """The inputs from which the training loss of one batch is computed.

    Each tensor has shape [E], with one number for each of the E tokens with loss, unless stated
    otherwise.
    """

    logprobs: Tensor
    """Log-probabilities under the trained policy, with gradient."""
    streams: Mapping[str, Tensor]
    """Streams of the batch: weights, ``advantages``, ``sampler_logprobs``, ``old_logprobs``,
    ``ref_logprobs``, ``teacher_logprobs`` ([E, k] with ``teacher_ids``) …"""
    denominators: Mapping[str, float]
    entropy: Tensor | None = None
    """Entropy of the policy at each token, in nats. None if it was not requested."""
    teacher_ids_logprobs: Tensor | None = None
    """[E, k] the policy's log-probabilities of ``teacher_ids``, with gradient."""
    sequences: tuple[Tensor, int] | None = None
    """The sequence index of each token, with shape [E], and the number of sequences."""
    values: Tensor | None = None
    """[E] the critic's values, with gradient; None without a critic."""


def compute(loss: LossSpec, entries: BatchLossInputs) -> tuple[Tensor, LossTally]:
    """Compute the contribution of one batch to the loss of the training step.

    Returns a scalar with gradient, and a tally from which the step's metrics are computed.
    """
    tally = LossTally()
    shares = []
    for name, weighed in _components(loss, entries, tally):
        share = weighed.sum()
        tally.add(f"{name}_loss", share.detach(), 1)
        shares.append(share)
    return sum(shares[1:], shares[0]), tally


def loss_per_entry(loss: LossSpec, entries: BatchLossInputs) -> Tensor:
    """Return the contribution of each of a batch's E loss tokens to the loss, as a tensor of shape
    [E].

    It is used only for diagnosis.
    """
    parts = [weighed for _, weighed in _components(loss, entries, LossTally())]
    return sum(parts[1:], parts[0])


def _components(
    loss: LossSpec, entries: BatchLossInputs, tally: LossTally
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each loss component, and the contribution of each token to the component.

    The names are ``rl``, ``ce`` and ``kd``. A token without weight contributes 0, whatever its
    log-probability.
    """
    for name, formula in (("rl", _reinforce), ("ce", _imitate), ("kd", _distil)):
        if name in entries.denominators:
            weight = entries.streams[name] / entries.denominators[name]
            yield name, (weight * formula(loss, entries, tally)).masked_fill(weight == 0, 0.0)


def kl_estimate(kind: KlKind, now: Tensor, ref: Tensor) -> Tensor:
    """Estimate the KL divergence KL(now, ref) per token from log-probabilities under two policies.

    With d = ref - now, the estimators are k1 = -d, k2 = d²/2 and k3 = exp(d) - d - 1, where d is
    clamped to ±20 and k3 to ±10. ``k3+`` has the value of k3 and the gradient of k2, which
    on-policy is the gradient of the true KL.
    """
    if kind == "k1":
        return now - ref
    k2 = (now - ref).square() / 2
    if kind == "k2":
        return k2
    # verl's limits, for numerical stability: the exponential of a rare token could overflow.
    d = (ref - now).clamp(-20.0, 20.0)
    k3 = (d.exp() - d - 1).clamp(-10.0, 10.0)
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def _reinforce(loss: LossSpec, entries: BatchLossInputs, tally: LossTally) -> Tensor:
    policy: PolicyLoss = loss.policy
    streams, tokens = entries.streams, _policy_loss_inputs(loss, entries)
    now, has_weight = tokens.now, streams["rl"] != 0
    value = policy.per_token(tokens)
    clipped = policy.clipped(tokens)
    check_per_token(policy, "per_token", value, tokens)
    check_per_token(policy, "clipped", clipped, tokens)
    if now.requires_grad and not value.requires_grad:
        raise ConfigError(
            f"{type(policy).__name__}.per_token() has no gradient: it must depend on tokens.now "
            "without detach()"
        )
    tally.add_policy_metrics(tokens, clipped, has_weight)
    for correction in loss.corrections:
        factor = correction.factor(tokens)
        check_per_token(correction, "factor", factor, tokens)
        tally.add_mean("corrected_away", (factor == 0).to(now.dtype), has_weight)
        tally.add_mean("correction", factor, has_weight)
        value = value * factor
    if loss.kl_beta:
        if "ref_logprobs" not in streams:
            raise ConfigError(
                "loss.kl_beta needs the reference's log-probabilities: the batch has no "
                "'ref_logprobs'"
            )
        kl = kl_estimate(loss.kl, now, streams["ref_logprobs"])
        tally.add_mean("ref_kl", kl.detach(), has_weight)
        # All is weighted as the policy loss; the share corrects that if KL is averaged otherwise.
        value = value + loss.kl_beta * kl * streams.get("kl_share", 1.0)
    if entries.entropy is not None:
        tally.add_mean("entropy", entries.entropy.detach(), has_weight)
        if loss.entropy:
            value = value - loss.entropy * entries.entropy
    if entries.values is not None:
        if "returns" not in streams:
            raise ConfigError(
                "a critic learns from returns, but the batch has no stream 'returns'; see the "
                "algorithm 'ppo'"
            )
        value_loss = loss.value.per_token_loss(
            CriticLossInputs(entries.values, streams["values"], streams["returns"])
        )
        tally.add_mean("value_loss", value_loss.detach(), has_weight)
        # The share, again, if the critic's loss is averaged in another way than the policy loss.
        value = value + loss.value.weight * value_loss * streams.get("value_share", 1.0)
    return value


def _policy_loss_inputs(loss: LossSpec, entries: BatchLossInputs) -> PolicyLossInputs:
    streams, now = entries.streams, entries.logprobs
    sampler, old = streams["sampler_logprobs"], streams.get("old_logprobs")
    if old is None and (loss.old == "pass" or (loss.old == "auto" and "fresh_old" in loss.reads)):
        raise ConfigError(
            "the loss needs the trainer's log-probabilities at the start of the step, but the "
            "batch has no stream 'old_logprobs'; attach it, or set loss.old=now if a step is one "
            "optimizer step"
        )
    if old is None:
        old = now.detach() if loss.old == "now" else sampler
    sums = (
        None if entries.sequences is None else SequenceSums(*entries.sequences, streams["rl"] != 0)
    )
    chosen = streams.get("chosen")
    return PolicyLossInputs(
        now,
        old,
        sampler,
        streams["advantages"],
        sums,
        None if chosen is None else chosen != 0,
        streams.get("staleness"),
    )


def _imitate(loss: LossSpec, entries: BatchLossInputs, tally: LossTally) -> Tensor:
    return -entries.logprobs


def _distil(loss: LossSpec, entries: BatchLossInputs, tally: LossTally) -> Tensor:
    """Return the distillation loss of each token, as a tensor of shape [E].

    With several candidate tokens per position, it is one of the losses in ``distil_losses``. With
    the sampled token alone, it is the policy gradient of the reverse KL, plus a pull of weight
    ``kd_pull`` towards the sampling policy: -sg(l_T - l) rho + kd_pull (l - m)², where l_T is the
    teacher's log-probability.
    """
    if "teacher_logprobs" not in entries.streams:
        raise ConfigError(
            "component 'kd' needs a teacher: the batch has no stream 'teacher_logprobs'"
        )
    teacher = entries.streams["teacher_logprobs"]
    if entries.teacher_ids_logprobs is not None:
        if loss.kd == "surrogate":
            return clipped_ppo_surrogate(
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
    tally.add_mean("teacher_gap", gap, entries.streams["kd"] != 0)
    return -gap * importance_ratio(now, sampler) + loss.kd_pull * (now - sampler).square()


class SerializableLossTally(msgspec.Struct, frozen=True):
    """A ``LossTally`` in the form of plain numbers, which can be sent to another process."""

    sums: dict[str, tuple[float, float]]
    """Map each name to a sum and a count."""
    maxima: dict[str, float]
    experts: tuple[tuple[Any, Any, Any], float] | None
    """Fields of an ``ExpertLoad``, on the CPU."""


class LossTally:
    """Sums over the tokens of a step's batches, from which the metrics of the step are computed."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        """Map each name to a sum and a count."""
        self.maxima: dict[str, Tensor | float] = {}
        self.experts: ExpertLoad | None = None

    def add_experts(self, load: ExpertLoad | None) -> None:
        """Add counts of how often each expert was chosen in a batch, for a mixture of experts.

        ``load`` is None for other models.
        """
        if load is not None:
            self.experts = load if self.experts is None else self.experts.merged(load)

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + total, before[1] + count)

    def add_mean(self, name: str, values: Tensor, has_weight: Tensor) -> None:
        self.add(name, values.masked_fill(~has_weight, 0.0).sum(), has_weight.sum())

    def add_policy_metrics(
        self, tokens: PolicyLossInputs, clipped: Tensor, has_weight: Tensor
    ) -> None:
        """Add metrics of how off-policy the weighted tokens are, such as the clip fraction."""
        now = tokens.now.detach()
        mismatch = (
            tokens.old - tokens.sampler
            if tokens.old is not tokens.sampler
            else now - tokens.sampler
        ).abs()
        mismatch = mismatch.masked_fill(~has_weight, 0.0)
        self.add("mismatch", mismatch.sum(), has_weight.sum())
        self._update_maximum("mismatch_max", mismatch.max())
        r = importance_ratio(now, tokens.old)
        self.add_mean("clip_fraction", clipped.to(now.dtype), has_weight)
        self.add_mean(
            "clip_low", (clipped.bool() & (tokens.advantages < 0)).to(now.dtype), has_weight
        )
        self.add_mean(
            "clip_high", (clipped.bool() & (tokens.advantages > 0)).to(now.dtype), has_weight
        )
        self.add_mean("approx_kl", r - 1 - (now - tokens.old), has_weight)
        rho = importance_ratio(now, tokens.sampler).masked_fill(~has_weight, 0.0)
        self.add("rho", rho.sum(), has_weight.sum())
        self.add("rho_squared", rho.square().sum(), has_weight.sum())

    def merge(self, other: LossTally | SerializableLossTally) -> None:
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.maxima.items():
            self._update_maximum(name, value)
        if other.experts is not None:
            from ramify.models.moe_routing import ExpertLoad, ExpertRoutingCounts

            counts, weight = other.experts
            self.add_experts(ExpertLoad(ExpertRoutingCounts(*counts), weight))

    def _update_maximum(self, name: str, value: Tensor | float) -> None:
        """Raise the recorded maximum of a metric to ``value`` if ``value`` is larger.

        Once a NaN occurs, the maximum stays NaN. Tensors stay on their device, since copying them
        would wait for the batch to finish.
        """
        before = self.maxima.get(name)
        if before is None:
            self.maxima[name] = value
        elif isinstance(before, float) or isinstance(value, float):
            both = float(before), float(value)
            self.maxima[name] = math.nan if any(map(math.isnan, both)) else max(both)
        else:
            self.maxima[name] = before.maximum(value)

    def to_serializable(self) -> SerializableLossTally:
        """Convert this tally to plain numbers, which can be sent to another process."""
        return SerializableLossTally(
            {name: (float(total), float(count)) for name, (total, count) in self.sums.items()},
            {name: float(value) for name, value in self.maxima.items()},
            None if self.experts is None else self.experts.to_cpu(),
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the training step, computed from the sums of this tally.

        ``loss`` and its components are sums over the step. ``ess`` is the effective sample size
        (sum rho)² / sum rho² as a fraction of the tokens. The others are means over entries with
        policy-gradient weight: ``clip_fraction`` (``clip_low`` of tokens with A < 0, ``clip_high``
        of those with A > 0), ``approx_kl`` (mean of r - 1 - log r),
        ``mismatch`` (mean of |o - m|, or of |l - m| if no old pass was made) and ``mismatch_max``,
        ``correction`` and ``corrected_away`` (share of tokens for which it is 0), ``entropy``,
        ``ref_kl``, ``value_loss``. For a mixture of experts also those of ``ExpertLoad``.
        """
        sums = {name: (float(total), float(count)) for name, (total, count) in self.sums.items()}
        metrics: dict[str, float] = {
            name: sums.pop(name)[0] for name in ("rl_loss", "ce_loss", "kd_loss") if name in sums
        }
        experts = {} if self.experts is None else self.experts.metrics()
        if "router_loss" in experts:
            metrics["router_loss"] = experts.pop("router_loss")
        metrics["loss"] = sum(metrics.values())
        if "rho" in sums:
            (rho, count), (squared, _) = sums.pop("rho"), sums.pop("rho_squared")
            metrics["ess"] = rho * rho / squared / count if squared and count else 0.0
        means = {name: total / count if count else 0.0 for name, (total, count) in sums.items()}
        maxima = {name: float(value) for name, value in self.maxima.items()}
        return {**metrics, **means, **maxima, **experts}


def selects_tokens(loss: LossSpec) -> bool:
    """Return True if the loss chooses some tokens of a step to treat them differently.

    If so, call ``mark_selected_tokens`` on the step's batches before training on them.
    """
    return isinstance(loss.policy, TokenSelectingLoss)


def mark_selected_tokens(
    batches: Many[Batch], loss: LossSpec, logprobs: Many[Floats]
) -> list[Batch]:
    """Select the tokens that the policy loss treats differently.

    Returns the batches with an additional per-token array ``chosen`` that marks these tokens.
    ``logprobs`` holds the log-probabilities of each batch under the current policy, with shape [E].
    """
    weighs = [batch.streams["rl"] != 0 for batch in batches]
    with_mask = list(zip(batches, weighs, strict=True))
    now = _concatenate_parts(column[mask] for column, mask in zip(logprobs, weighs, strict=True))
    old_name = (
        "old_logprobs"
        if all("old_logprobs" in batch.streams for batch in batches)
        else "sampler_logprobs"
    )
    old = (
        now
        if loss.old == "now"
        else _concatenate_parts(batch.streams[old_name][mask] for batch, mask in with_mask)
    )
    advantages = _concatenate_parts(batch.streams["advantages"][mask] for batch, mask in with_mask)
    keys = np.concatenate([_random_token_keys(batch)[mask] for batch, mask in with_mask])
    chosen = loss.policy.choose(TokenSelectionInputs(now, old, advantages, keys))
    chosen_batches, start = [], 0
    for batch, mask in with_mask:
        column = np.zeros(len(mask), np.float32)
        column[mask] = chosen[start : start + int(mask.sum())]
        start += int(mask.sum())
        chosen_batches.append(
            msgspec.structs.replace(batch, streams={**batch.streams, "chosen": column})
        )
    return chosen_batches


def sequence_index_of_entries(batch: Batch, unit: SequenceUnit = "call") -> tuple[Ints, int]:
    """Return the index of the sequence that each loss token belongs to, and the number of
    sequences.

    The indices start at 0. A sequence is a call, even if it has several paths, or a whole rollout
    if ``unit`` is ``rollout``.
    """
    owners, places = np.unique(batch.owners[:, 0], return_inverse=True)
    numbers: dict[str | int, int] = {}
    found = [
        numbers.setdefault(call_or_rollout_key(batch.sequences[owner], owner, unit), len(numbers))
        for owner in owners.tolist()
    ]
    return np.array(found, np.int64)[places], len(numbers)


def check_sequences_unsplit(batches: Many[Batch], unit: SequenceUnit = "call") -> None:
    """Raise TrainError if a call or rollout (``unit``) with policy-gradient weight is split over
    two batches."""
    places = Counter[str | int]()
    for batch in batches:
        learnt = np.unique(batch.owners[batch.streams["rl"] != 0, 0]).tolist()
        places.update(
            {call_or_rollout_key(batch.sequences[index], index, unit) for index in learnt}
        )
    for name, num in places.items():
        if num > 1:
            raise TrainError(
                f"the loss reads whole {unit}s, and {name} is in {num} batches: pack them with "
                f"whole='{unit}'"
            )


def _concatenate_parts(parts: Iterator[Floats]) -> npt.NDArray[np.float64]:
    return np.concatenate([part.astype(np.float64) for part in parts])


def _random_token_keys(batch: Batch) -> npt.NDArray[np.uint64]:
    """Return a reproducible pseudorandom number for each token that contributes to the loss.

    It depends only on the name of the token's sequence and on its position there.
    """
    seeds = {index: _hash(name) for index, name in batch.sequences.items()}
    mixed = np.array([seeds[index] for index in batch.owners[:, 0].tolist()], np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        mixed = mixed + (batch.owners[:, 1].astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

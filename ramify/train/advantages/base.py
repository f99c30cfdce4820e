"""The interface of RL algorithms.

They turn groups of scored rollouts into per-token advantages and loss weights.

    [Group] ── algorithm.assign_advantages(groups, task weights) ──> OptimizerStepAdvantages
                                                   [RolloutAdvantages], denominators, metrics

An algorithm is a small frozen struct in its own file; its fields are its options. It receives all
groups of a step at once, so every statistic is computed over the whole step. The trainer itself
does not know about advantages. An algorithm that needs more declares it in ``needs``: a greedy
rollout for each group, or per-token numbers that only the trainer can compute. It can also carry
state from step to step (``memory``):

    [TokenSequence] with those streams ── algorithm.finish(rows) ──> advantages for the whole step
    algorithm with memory=… ── assign_advantages ──> OptimizerStepAdvantages.memory
                                        saved in the checkpoint and passed to the next step
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

import msgspec

from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group, Trajectory

T = TypeVar("T")


class TokenCredit(msgspec.Struct, omit_defaults=True):
    """The advantages, loss weights and other values of the N tokens sampled in one turn."""

    advantages: list[float] = msgspec.field(default_factory=list)
    """[N] advantages; an empty list if there are none."""
    rl: list[float] = msgspec.field(default_factory=list)
    """[N] weights of the policy-gradient loss; an empty list if the turn has none."""
    ce: list[float] = msgspec.field(default_factory=list)
    """[N] weights of the cross-entropy loss; an empty list if the turn has none."""
    kd: list[float] = msgspec.field(default_factory=list)
    """[N] weights of the distillation loss; an empty list if the turn has none."""
    streams: dict[str, list[float] | list[list[float]]] = msgspec.field(default_factory=dict)
    """Further named streams of shape [N] or [N, k], such as reference log-probabilities."""
    given: float = 0.0
    """Cross-entropy weight of each token that the turn's prompt added. Such tokens were observed
    and not sampled.
    """

    def __post_init__(self) -> None:
        named: dict[str, Sized] = {
            "advantages": self.advantages,
            "rl": self.rl,
            "ce": self.ce,
            "kd": self.kd,
        }
        lengths = {
            name: len(values) for name, values in {**named, **self.streams}.items() if len(values)
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the streams of a turn differ in length: {lengths}")
        if self.rl and not self.advantages:
            raise ValueError("a turn has policy-gradient weights but no advantages")

    def __len__(self) -> int:
        """Return N, the number of tokens sampled in the turn, or 0 if the turn has no values."""
        streams: list[Sized] = [self.advantages, self.rl, self.ce, self.kd, *self.streams.values()]
        return max(len(values) for values in streams)


Stamps = dict[tuple[str, int], TokenCredit]
"""(call id, index of the turn in ``Call.turns``) -> the per-token numbers of that turn."""


class RolloutAdvantages(msgspec.Struct):
    """A rollout, and the advantages and loss weights of its turns."""

    trajectory: Trajectory
    credits: Stamps


class OptimizerStepAdvantages(msgspec.Struct):
    """The advantages and loss weights that an algorithm computes for all rollouts of one optimizer
    step.

    Example:
        assigned = train.GRPO().assign_advantages(groups, task.weights)
        assigned.metrics["reward"], assigned.no_signal
    """

    rollouts: list[RolloutAdvantages]
    """Rollouts with a training signal, in the order of the groups."""
    denominators: dict[str, float]
    """Loss component -> divisor of its sum over the whole step."""
    metrics: dict[str, float]
    no_signal: str = ""
    """Reason why there is nothing to learn from, as a sentence; empty if there is a signal."""
    notes: list[str] = msgspec.field(default_factory=list)
    """Other messages for the user, one sentence each, for example about a rollout with a non-finite
    reward.
    """
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """State that the algorithm carries into the next step."""


class AlgorithmNeeds(msgspec.Struct, frozen=True):
    """The requirements of an RL algorithm in addition to groups of scored rollouts."""

    greedy: bool = False
    """Whether each group needs a greedy rollout (temperature 0) in ``Group.greedy``."""
    values: bool = False
    """Whether the algorithm needs a critic's values."""
    branches: bool = False
    """Whether rollouts must fork (option ``rl.rollout.branch``)."""
    streams: frozenset[str] = frozenset()
    """Streams of token values that ``finish`` reads: ``values``, ``old_logprobs``,
    ``ref_logprobs``.
    """


class Algorithm(Protocol):
    """The interface of an RL algorithm, which turns groups of scored rollouts into advantages and
    loss weights.
    """

    @property
    def has_group_baseline(self) -> bool:
        """True if the algorithm compares a rollout with others of the same task item.

        A group with only one rollout then has no signal.
        """
        ...

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        """Assign advantages and loss weights to the sampled tokens of one optimizer step.

        ``weights`` are the task's weights of its named rewards. If ``every_token`` is set, tokens
        with advantage 0 are included too, because the loss has a term that acts on every token: a
        KL penalty or an entropy bonus."""
        ...


def needs_of(algorithm: Any) -> AlgorithmNeeds:
    """Return what an RL algorithm needs in addition to groups of scored rollouts.

    A wrapper such as ``outcome`` needs what its inner algorithm needs.
    """
    needs: AlgorithmNeeds = getattr(algorithm, "needs", None) or _of_inner(
        algorithm, needs_of, AlgorithmNeeds()
    )
    return needs


def finish_advantages(algorithm: Any, rows: Sequence[TokenSequence]) -> dict[str, float]:
    """Complete a step's advantages once the trainer has computed the values that the algorithm
    needs.

    These values, such as log-probabilities, are in the token sequences ``rows``. Returns metrics.

    The rows stay unchanged if the algorithm needs no such values.
    """
    if not needs_of(algorithm).streams:
        return {}
    own = getattr(algorithm, "finish", None)
    metrics: dict[str, float] = (
        own(rows)
        if own is not None
        else _of_inner(algorithm, lambda inner: finish_advantages(inner, rows), {})
    )
    return metrics


def with_saved_state(algorithm: T, memory: Mapping[str, float]) -> T:
    """Return a copy of ``algorithm`` with its saved state restored.

    An algorithm without state is returned unchanged.
    """
    fields = getattr(algorithm, "__struct_fields__", ())
    if "memory" in fields and memory:
        return _replace_unvalidated(algorithm, "memory", dict(memory))
    if "outcome" in fields and memory:
        inner = with_saved_state(algorithm.outcome, memory)  # type: ignore[attr-defined]
        return _replace_unvalidated(algorithm, "outcome", inner)
    return algorithm


def with_reduction(algorithm: T, reduction: str | None) -> T:
    """Return a copy of the algorithm with the token reduction that a policy loss requires.

    ``LossSpec.reduction`` gives this reduction. Nested algorithms are changed in the same way. The
    algorithm is returned unchanged if ``reduction`` is None, or if it imitates demonstrations
    instead of following a policy gradient.
    """
    if reduction is None or getattr(algorithm, "imitates", False):
        return algorithm
    fields = getattr(algorithm, "__struct_fields__", ())
    if "reduction" in fields:
        algorithm = _replace_unvalidated(algorithm, "reduction", reduction)
    for field in {"outcome", "other"} & set(fields):
        algorithm = _replace_unvalidated(
            algorithm, field, with_reduction(getattr(algorithm, field), reduction)
        )
    if "tasks" in fields:
        tasks: Mapping[str, Any] = algorithm.tasks  # type: ignore[attr-defined]
        own = {name: with_reduction(each, reduction) for name, each in tasks.items()}
        algorithm = _replace_unvalidated(algorithm, "tasks", own)
    return algorithm


_NEUTRAL = {"kl_share": 1.0, "value_share": 1.0}
"""Neutral values of those streams whose neutral value is not 0. With them, a token has its usual
weight in the KL penalty and in the critic's loss.
"""
_BY_TRAINER = ("ref_logprobs",)
"""Streams that the trainer computes for token sequences that lack them."""


def fill_missing_streams(rollouts: Sequence[RolloutAdvantages]) -> None:
    """Give all turns of a step the same set of named per-token arrays (streams).

    All sequences of a step must have the same streams. Missing streams are filled with values that
    have no effect.
    """
    widths: dict[str, int | None] = {}
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, rows in credit.streams.items():
                widths[name] = len(rows[0]) if rows and isinstance(rows[0], list) else None
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, width in widths.items():
                if name not in credit.streams and name not in _BY_TRAINER:
                    num, fill = len(credit), _NEUTRAL.get(name, 0.0)
                    credit.streams[name] = (
                        [fill] * num if width is None else [[fill] * width for _ in range(num)]
                    )


def _of_inner(algorithm: Any, function: Any, default: Any) -> Any:
    inner = getattr(algorithm, "outcome", None)
    return default if inner is None else function(inner)


def _replace_unvalidated(struct: T, field: str, value: object) -> T:
    """Return a copy of ``struct`` with a new value for ``field``.

    The copy is not validated again.
    """
    replaced = copy.copy(struct)
    msgspec.structs.force_setattr(replaced, field, value)  # type: ignore[arg-type]
    return replaced

"""What an algorithm is: it looks at scored groups and writes per-token streams on what was sampled;
the trainer is blind.

    [Group] ── algorithm.stamp(groups, task's weights) ──> Stamping: [Stamped], denominators, metrics

An algorithm is a small struct in a file of its own; its fields are its options. It reads a whole
step's groups at once, so that every statistic is global. One that needs more says so (``needs``): a
greedy rollout beside each group, numbers that only the trainer can compute of its rows, or what it
remembers of the steps before:

    [Sequence] with the streams it needs ── algorithm.finish(rows) ──> advantages on them, for the whole step at once
    algorithm with memory=… ── stamp ──> Stamping.memory, which goes into the checkpoint and to the next step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ramify.train.token_credit import AssignedRollout
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Group

T = TypeVar("T")


class AssignedStep(msgspec.Struct):
    """What one step learns from."""

    rollouts: list[AssignedRollout]
    """Those that teach something, in the order of the groups."""
    denominators: dict[str, float]
    """Loss component -> what its sum over the whole step is divided by."""
    metrics: dict[str, float]
    no_signal: str = ""
    """Why there is nothing to learn, in a sentence; empty where there is."""
    notes: list[str] = msgspec.field(default_factory=list)
    """What a person should know besides, in sentences: which rollout had a reward that is no
    number."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """What the algorithm remembers after this step."""


class AlgorithmNeeds(msgspec.Struct, frozen=True):
    """What an algorithm needs besides groups."""

    greedy: bool = False
    """A rollout without chance beside each group: ``Group.greedy``."""
    values: bool = False
    """A critic."""
    streams: frozenset[str] = frozenset()
    """Of rows, for ``finish``: ``values``, ``old_logprobs``, ``ref_logprobs``."""


class Algorithm(Protocol):
    """Implemented by every class in this room's registry."""

    @property
    def has_group_baseline(self) -> bool:
        """Whether rollouts are judged against others of the same task, so that a group of one
        teaches nothing."""
        ...

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        """The streams of one optimizer step. ``weights`` weigh the task's rewards by name. With
        ``every_token`` tokens whose advantage is 0 are stamped too, since the loss has a term that
        acts on each: a KL, an entropy."""
        ...


def needs_of(algorithm: Any) -> AlgorithmNeeds:
    """What ``algorithm`` needs, or the one within it that has the baseline (``outcome``)."""
    found: AlgorithmNeeds = getattr(algorithm, "needs", None) or _of_inner(
        algorithm, needs_of, AlgorithmNeeds()
    )
    return found


def finish(algorithm: Any, rows: Sequence[TokenSequence]) -> dict[str, float]:
    """Put onto ``rows``, those of a whole step, what only now can be computed; what was measured.
    Rows whose algorithm has nothing to add stay as they are."""
    if not needs_of(algorithm).streams:
        return {}
    own = getattr(algorithm, "finish", None)
    found: dict[str, float] = (
        own(rows) if own is not None else _of_inner(algorithm, lambda each: finish(each, rows), {})
    )
    return found


def remembering(algorithm: T, memory: Mapping[str, float]) -> T:
    """``algorithm`` with what it remembered; itself where it remembers nothing."""
    fields = getattr(algorithm, "__struct_fields__", ())
    if "memory" in fields and memory:
        return _replaced(algorithm, memory=dict(memory))
    if "outcome" in fields and memory:
        return _replaced(algorithm, outcome=remembering(algorithm.outcome, memory))  # type: ignore[attr-defined]
    return algorithm


def _of_inner(algorithm: Any, ask: Any, otherwise: Any) -> Any:
    inner = getattr(algorithm, "outcome", None)
    return otherwise if inner is None else ask(inner)


def _replaced(struct: T, **fields: Any) -> T:
    found: T = msgspec.structs.replace(struct, **fields)  # type: ignore[type-var]
    return found

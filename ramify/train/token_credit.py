"""What an algorithm writes on a rollout: per-token streams over what was sampled, call by call and
turn by turn.

    Group ── algorithm.stamp ──> [Stamped] ── compile ──> [Sequence]

Decides the form in which credit travels from the algorithms, which know rewards and trees, to
``compile``, which knows tokens and paths. A turn without a stamp carries no loss; its tokens are
still there as context. Tokens that several branches share are stamped once, in the call that
sampled them.
"""

from __future__ import annotations

from collections.abc import Sized

import msgspec

from ramify.types.trajectory import Trajectory


class TokenCredit(msgspec.Struct, omit_defaults=True):
    """The streams of one turn, over the N tokens that were sampled in it."""

    advantages: list[float] = msgspec.field(default_factory=list)
    """[N] or empty for none."""
    rl: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the policy-gradient component; empty for none."""
    ce: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the cross-entropy component; empty for none."""
    kd: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the distillation component; empty for none."""
    streams: dict[str, list[float] | list[list[float]]] = msgspec.field(default_factory=dict)
    """Further named streams, each [N] or [N, k]: reference logprobs and the like."""
    given: float = 0.0
    """Weight of the cross-entropy component of each token that the turn's prompt added (what was
    observed)."""

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
        """N; 0 for a stamp that says nothing."""
        streams: list[Sized] = [self.advantages, self.rl, self.ce, self.kd, *self.streams.values()]
        return max(len(values) for values in streams)


Stamps = dict[tuple[str, int], TokenCredit]
"""(call id, index of the turn in ``Call.turns``) -> its streams."""


class AssignedRollout(msgspec.Struct):
    """A rollout and what is to be learnt from it."""

    trajectory: Trajectory
    credits: Stamps

"""Token credit: what an algorithm assigns to a rollout, as per-token streams over the sampled
tokens, by call and turn.

    Group ── algorithm.assign_advantages ──> [AssignedRollout] ── compile ──> [TokenSequence]

Decides the format in which credit passes from the algorithms, which know rewards and trees, to
``compile``, which knows tokens and paths. A turn without credit carries no loss; its tokens are
still present as context. Tokens that several branches share have credit once, in the call that
sampled them.
"""

from __future__ import annotations

from collections.abc import Sized

import msgspec

from ramify.types.trajectory import Trajectory


class TokenCredit(msgspec.Struct, omit_defaults=True):
    """The streams of one turn, over the N tokens sampled in it."""

    advantages: list[float] = msgspec.field(default_factory=list)
    """[N], or empty for none."""
    rl: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the policy-gradient component; empty for none."""
    ce: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the cross-entropy component; empty for none."""
    kd: list[float] = msgspec.field(default_factory=list)
    """[N] weight of the distillation component; empty for none."""
    streams: dict[str, list[float] | list[list[float]]] = msgspec.field(default_factory=dict)
    """Further named streams, each [N] or [N, k], such as reference log-probabilities."""
    given: float = 0.0
    """Cross-entropy weight of each token that the turn's prompt added (observed, not sampled)."""

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
        """N; 0 if there are no streams."""
        streams: list[Sized] = [self.advantages, self.rl, self.ce, self.kd, *self.streams.values()]
        return max(len(values) for values in streams)


Stamps = dict[tuple[str, int], TokenCredit]
"""(call id, index of the turn in ``Call.turns``) -> its streams."""


class AssignedRollout(msgspec.Struct):
    """A rollout and the credit of its turns."""

    trajectory: Trajectory
    credits: Stamps

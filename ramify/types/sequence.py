"""What a trainer sees: token sequences with per-token streams, and the packed batch of them.

Legend: T tokens of a sequence, k teacher tokens per position, S segments of a batch.
Plain lists, so that this floor needs no tensor library; a backend makes tensors of them.
"""

from __future__ import annotations

from collections.abc import Sized

import msgspec

Stream = list[float]


class Sequence(msgspec.Struct, omit_defaults=True):
    """One path through a tree, from its first token to its last."""

    token_ids: list[int]
    """[T]"""
    mask: list[bool]
    """[T] whether the token was sampled by the policy, and so can carry loss."""
    sampler_logprobs: Stream
    """[T] log-probability at sampling time; 0 where ``mask`` is false."""
    advantages: Stream
    """[T]"""
    rl: Stream
    """[T] weight of the policy-gradient component."""
    ce: Stream = msgspec.field(default_factory=list)
    """[T] weight of the cross-entropy component; empty for none."""
    kd: Stream = msgspec.field(default_factory=list)
    """[T] weight of the distillation component; empty for none."""
    versions: list[int] = msgspec.field(default_factory=list)
    """[T] policy version that sampled the token, -1 where it was given; empty if unknown."""
    streams: dict[str, list[float] | list[list[float]]] = msgspec.field(default_factory=dict)
    """Further named streams, each [T] or [T, k]: old and reference logprobs, values, teacher top-k."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        streams: dict[str, Sized] = {"mask": self.mask, "sampler_logprobs": self.sampler_logprobs}
        streams |= {"advantages": self.advantages, "rl": self.rl}
        optional: dict[str, Sized] = {"ce": self.ce, "kd": self.kd, "versions": self.versions}
        streams |= {name: values for name, values in optional.items() if values}
        for name, values in {**streams, **self.streams}.items():
            if len(values) != num_tokens:
                raise ValueError(
                    f"sequence of {num_tokens} tokens has {len(values)} entries in '{name}', not one per token"
                )


class Segment(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a batch that attend to themselves, causally, and to their ancestors."""

    start: int
    end: int
    parent: int
    """Index of the segment that this one continues; -1 for a root."""


class Batch(msgspec.Struct):
    """A packed forest: shared prefixes stand once. The last stop before the device."""

    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T] depth of the token in its path, from 0."""
    segments: list[Segment]
    """[S] parents before children; together they cover [0, T) in order."""
    streams: dict[str, list[float] | list[list[float]]]
    """Each [T] or [T, k]."""
    denominators: dict[str, float]
    """Loss component -> global weight sum, over every batch of the step."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        streams: dict[str, Sized] = {"positions": self.positions, **self.streams}
        for name, values in streams.items():
            if len(values) != num_tokens:
                raise ValueError(f"batch of {num_tokens} tokens has {len(values)} entries in '{name}'")
        end = 0
        for index, segment in enumerate(self.segments):
            if segment.start != end or segment.end < segment.start or not -1 <= segment.parent < index:
                raise ValueError(f"segment {index} {segment} does not follow token {end} or names a later parent")
            end = segment.end
        if end != num_tokens:
            raise ValueError(f"segments cover {end} of {num_tokens} tokens")

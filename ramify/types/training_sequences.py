"""Define training data: token sequences, and batches that pack several sequences together.

A token sequence has arrays of per-token values, which are called streams.

    TokenSequence: one path             Batch: a forest; shared prefixes are stored once
    token_ids   1 2 3 7 8               token_ids  1 2 3 7 8 9
    mask        . . . x x               segments   [0,3) [3,5)<0 [5,6)<0
    rl          . . . w w               sources    2 3 2          index that predicts each entry
                                        targets    7 8 9          id that is predicted

A batch has one *entry* for each token that carries loss: the index of the token whose hidden state
predicts it, its id, and its streams. Two sequences that share tokens share their hidden states.
Each keeps its own entry with its own advantage and weight.

Arrays are numpy arrays that are created elsewhere. This module only checks their lengths, so it
needs no tensor library. Legend: T tokens of a sequence or batch, E entries, k teacher tokens per
position, S segments, M ids in all kept sets.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Bools = npt.NDArray[np.bool_]
else:  # numpy is installed only with the trainer
    Ints = Floats = Bools = Any


class SamplingMask(msgspec.Struct):
    """The token ids that the sampler could have drawn at each position.

    Recorded if top-p or top-k truncated the vocabulary.
    """

    offsets: Ints
    """Where the ids of each position begin, [T + 1]: token t was drawn from ``ids[offsets[t] :
    offsets[t + 1]]``. An empty slice means the whole vocabulary.
    """
    ids: Ints
    """Token ids of all positions, concatenated, [M]."""


class TokenSequence(msgspec.Struct, eq=False, kw_only=True):
    """The token ids of one path through a call's turns, and the per-token values that training
    needs.

    The path runs from its first to its last token.
    """

    token_ids: Ints
    """Ids of the T tokens, [T]."""
    mask: Bools
    """True if the policy sampled the token, [T]."""
    sampler_logprobs: Floats
    """Log-probability under the distribution that the token was drawn from, [T]. It is 0 for prompt
    tokens."""
    advantages: Floats
    """Advantage of each token, [T]."""
    rl: Floats
    """Weight of each token in the policy-gradient loss, [T]."""
    ce: Floats | None = None
    """Weight of each token in the cross-entropy loss, [T]. None: no such loss."""
    kd: Floats | None = None
    """Weight of each token in the distillation loss, [T]. None: no such loss."""
    versions: Ints | None = None
    """Policy version that sampled each token, or -1 for prompt tokens, [T]. None if unknown."""
    streams: dict[str, Floats] = msgspec.field(default_factory=dict)
    """Further per-token values by name, such as old and reference logprobs, values, or the
    teacher's top k. Each has shape [T] or [T, k]."""
    kept: SamplingMask | None = None
    """Token ids that the sampler could choose from. None if every token was drawn from the whole
    vocabulary."""
    routes: Ints | None = None
    """For mixture-of-experts models: the experts of the forward pass that produced each token,
    i.e. of the preceding token, [T, J], with J = layers times experts per token; -1 for unknown.
    None if no engine reported them.
    """
    temperature: float = 1.0
    """Sampling temperature. Logits are divided by it before log-probabilities are compared."""
    name: str = ""
    """Name for error messages, such as ``7c1f/call=0.3``."""
    item: str = ""
    """Id of the task item that was rolled out. Empty if there is none."""

    def __post_init__(self) -> None:
        streams: dict[str, Sized] = {"mask": self.mask, "sampler_logprobs": self.sampler_logprobs}
        streams |= {"advantages": self.advantages, "rl": self.rl}
        optional: dict[str, Sized | None] = {
            "ce": self.ce,
            "kd": self.kd,
            "versions": self.versions,
            "routes": self.routes,
            **self.streams,
        }
        streams |= {name: values for name, values in optional.items() if values is not None}
        _check_lengths(f"sequence {self.name}".strip(), "tokens", len(self.token_ids), streams)
        if self.kept is not None and len(self.kept.offsets) != len(self.token_ids) + 1:
            raise ValueError(
                f"sequence {self.name} of {len(self.token_ids)} tokens has "
                f"{len(self.kept.offsets)} offsets of kept sets: there must be one per token "
                "and one for the end"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


class PackedTokenSegment(msgspec.Struct, frozen=True):
    """A range of tokens ``[start, end)`` in a batch.

    Its tokens attend causally to each other and to the segments before it in the same sequence (its
    ancestors).
    """

    start: int
    end: int
    parent: int
    """Index of the segment that this one continues, or -1 for a root."""


class Batch(msgspec.Struct, eq=False, kw_only=True):
    """A batch of token sequences, ready for the device.

    The sequences are packed as a forest, in which shared prefixes are stored once.
    """

    token_ids: Ints
    """Ids of all T tokens of the forest, [T]."""
    positions: Ints
    """Depth of each token in its path, from 0, [T]."""
    segments: list[PackedTokenSegment]
    """The S segments in preorder: each comes directly before its descendants. Together they cover
    [0, T)."""
    sources: Ints
    """For each of the E entries, the index of the token whose hidden state predicts it, which is
    the token before it, [E].
    """
    targets: Ints
    """Token id of each entry, [E]."""
    streams: dict[str, Floats]
    """Values of each entry, [E] or [E, k]: ``sampler_logprobs``, ``advantages``, ``rl``, ``ce``,
    ``kd``, ``temperature`` and the named streams of the sequences."""
    denominators: dict[str, float]
    """For each loss component, the number by which its weighted sum is divided. The sum runs over
    all batches of the step.
    """
    sequences: dict[int, str]
    """Names of the sequences that have entries in this batch, keyed by their index in the list
    that was packed.
    """
    owners: Ints
    """For each entry, the index of its sequence and the position of its token in that sequence,
    [E, 2].
    """
    versions: Ints | None = None
    """Policy version that sampled each entry's token, [E]. None if unknown."""
    kept: SamplingMask | None = None
    """Token ids that the sampler could choose from for each entry. Its offsets are [E + 1]."""
    routes: Ints | None = None
    """Experts of each entry's token as in ``TokenSequence``, [E, J]."""
    token_weights: Floats | None = None
    """Weight of each token, [T]. A token that the batches of the step compute c times has weight 1
    / c, so that it counts once in total. None: 1 for all.
    """

    def __post_init__(self) -> None:
        num_tokens, num_entries = len(self.token_ids), len(self.sources)
        tokens: dict[str, Sized] = {"positions": self.positions}
        if self.token_weights is not None:
            tokens["token_weights"] = self.token_weights
        _check_lengths("batch", "tokens", num_tokens, tokens)
        entries: dict[str, Sized] = {"targets": self.targets, "owners": self.owners, **self.streams}
        if self.versions is not None:
            entries["versions"] = self.versions
        if self.routes is not None:
            entries["routes"] = self.routes
        _check_lengths("batch", "entries", num_entries, entries)
        check_segments(self.segments, num_tokens)

    def __len__(self) -> int:
        return len(self.token_ids)


def check_segments(segments: list[PackedTokenSegment], num_tokens: int) -> None:
    """Raise ValueError if ``segments`` do not cover all tokens in preorder, with each segment after
    its parent."""
    end = 0
    ancestors: list[int] = []
    for index, segment in enumerate(segments):
        # In preorder, a parent is the previous segment or one of its ancestors.
        while ancestors and ancestors[-1] != segment.parent:
            ancestors.pop()
        if (
            segment.start != end
            or segment.end < segment.start
            or (segment.parent != -1 and not ancestors)
        ):
            raise ValueError(
                f"segment {index} {segment} does not start at token {end}, or is not among the "
                "descendants of its parent"
            )
        ancestors.append(index)
        end = segment.end
    if end != num_tokens:
        raise ValueError(f"segments cover {end} of {num_tokens} tokens")


def _check_lengths(what: str, unit: str, length: int, streams: dict[str, Any]) -> None:
    for name, values in streams.items():
        if len(values) != length:
            raise ValueError(
                f"{what} of {length} {unit} has {len(values)} entries in '{name}': there must be "
                "one for each"
            )


def call_of(name: str) -> str:
    """Return the name of the call that a token sequence belongs to.

    For example, ``7c1f/call=0.3/path=1`` belongs to ``7c1f/call=0.3``.
    """
    return name.partition("/path=")[0]


def rollout_of(name: str) -> str:
    """Return the name of the rollout that a token sequence belongs to.

    For example, ``7c1f/call=0.3/path=1`` belongs to ``7c1f``.
    """
    return name.partition("/call=")[0]


SequenceUnit = Literal["call", "rollout"]
"""What a sequence-level loss treats as one sequence: the tokens sampled in one call, or in all
calls of a rollout."""


def call_or_rollout_key(name: str, index: int, unit: SequenceUnit = "call") -> str | int:
    """Return a key shared by all token sequences of one call, or of one rollout if ``unit`` is
    ``rollout``.

    The key is taken from the sequence's name. Without a name, it is ``index``.
    """
    return (call_of(name) if unit == "call" else rollout_of(name)) or index

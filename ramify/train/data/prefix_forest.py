"""Arrange token sequences as prefix trees, and write parts of the trees as batches.

A prefix tree stores a shared prefix once. A batch has tokens, segments, and one entry for each
token that carries loss.

    1 2 3 7 8 4          [1 2 3] ── [7 8] ── [4]     node: a stretch of tokens, its parent,
    1 2 3 7 8 5             │         └──── [5]      and one sequence that passes through it
    1 2 3 9                 └────── [9]

    piece  [1 2 3] -> [7 8], [9]    token_ids 1 2 3 7 8 9   segments [0,3) [3,5)<0 [5,6)<0
    sampled: 7 8 by one sequence,   sources   2 3 2         positions of the hidden states
             9 by the other         targets   7 8 9

A token's hidden state depends only on the tokens of its path, so a prefix that two sequences share
can be computed once: prompts, forked prefixes, and tokens that two siblings happened to sample
alike. What they learn stays separate, since a loss is counted by entry and not by token. The forest
does not depend on the order of the sequences. It is found by sorting the sequences as byte strings
and comparing neighbors: near-linear in the number of tokens.

The per-token streams of sequences become per-entry streams of batches. A token that was sampled at
a temperature or from a truncated distribution, and also carries cross-entropy, has two entries:
cross-entropy applies to the plain distribution, the policy gradient to the sampling distribution.

Legend: T tokens of a batch, E its entries, n entries of one sequence, k teacher tokens per
position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.types.training_sequences import (
    Batch,
    Floats,
    Ints,
    PackedTokenSegment,
    SamplingMask,
    TokenSequence,
)


class PrefixForestNode(NamedTuple):
    """A node of a prefix tree: a run of tokens that the same sequences share.

    It covers positions ``begin`` to ``end`` (exclusive), counted from the root.
    """

    begin: int
    end: int
    parent: int
    """Index of the parent node; -1 for a root."""
    sequence: int
    """Index of one sequence that passes through the node."""
    last: int = -1
    """For a node of a batch, which may join several nodes of the forest: the index of the last of
    them.
    """


class PrefixForest(NamedTuple):
    """The prefix trees of a set of token sequences.

    Each shared prefix is stored once.
    """

    nodes: list[PrefixForestNode]
    """All nodes in preorder."""
    leaves: list[int]
    """The node in which each sequence ends, by index of the sequence."""
    order: list[int]
    """Indices of the sequences, sorted by their token ids and then by name."""

    @property
    def num_tokens(self) -> int:
        return sum(node.end - node.begin for node in self.nodes)


def forest(sequences: Many[TokenSequence]) -> PrefixForest:
    """Build the prefix trees of the token sequences ``sequences``.

    No sequence may be empty.
    """
    keys = [sequence.token_ids.astype(">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (keys[index], sequences[index].name))
    growing = _GrowingForest()
    ends = [-1] * len(sequences)
    before: Ints | None = None
    for index in order:
        ids = sequences[index].token_ids
        shared = 0 if before is None else _common_prefix_length(before, ids)
        ends[index] = growing.add(index, shared, len(ids))
        before = ids
    return PrefixForest(*growing.grown(ends), order)


class PrefixNodeComputeCounts:
    """Counts how often each node of a step's prefix trees is computed.

    A shared prefix is computed again in each batch that needs it.
    """

    def __init__(self, radix_forest: PrefixForest, stretches: Many[PrefixForestNode]) -> None:
        """Count how often each node of the prefix trees is computed.

        Each of ``stretches`` covers a chain of whole nodes, and its ``last`` is the index of the
        chain's last node.
        """
        self._nodes = radix_forest.nodes
        self._num = [0] * len(self._nodes)
        for stretch in stretches:
            for node in self._nodes_in_stretch(stretch):
                self._num[node] += 1

    def inverse_computation_counts(self, stretch: PrefixForestNode) -> Floats:
        """Return token weights that make repeatedly computed tokens of ``stretch`` count only once.

        ``stretch`` is a run of tokens. A token that is computed c times in the step has weight 1 /
        c, so that copies do not count twice.
        """
        within = self._nodes_in_stretch(stretch)[::-1]
        sizes = [self._nodes[node].end - self._nodes[node].begin for node in within]
        weights = np.array([1 / self._num[node] for node in within], np.float32)
        return weights.repeat(sizes)

    def _nodes_in_stretch(self, stretch: PrefixForestNode) -> list[int]:
        """Return the indices of the nodes that ``stretch``, a run of tokens, covers, last node
        first."""
        found, node = [stretch.last], self._nodes[stretch.last]
        while node.begin > stretch.begin:
            found.append(node.parent)
            node = self._nodes[node.parent]
        return found


class _GrowingForest:
    """A set of prefix trees under construction.

    It holds the nodes added so far, and the path of the sequence that was added last.
    """

    def __init__(self) -> None:
        self.begin: list[int] = []
        self.end: list[int] = []
        self.parent: list[int] = []
        self.sequence: list[int] = []
        self.path: list[int] = []

    def add(self, sequence: int, shared: int, length: int) -> int:
        """Add a sequence whose first ``shared`` tokens equal those of the previous sequence.

        Returns the node in which the new sequence ends.
        """
        while self.path and self.begin[self.path[-1]] >= shared:
            self.path.pop()
        if self.path and self.end[self.path[-1]] > shared:
            self._split(self.path.pop(), shared)
        if length > shared:
            self.path.append(
                self._new_node(shared, length, self.path[-1] if self.path else -1, sequence)
            )
        return self.path[-1]

    def grown(self, ends: list[int]) -> tuple[list[PrefixForestNode], list[int]]:
        """Return the finished nodes in preorder, with children ordered by token ids.

        Also returns ``ends`` with each node replaced by its new index. The internal lists are not
        in preorder, since splitting a node appends its head at the end.
        """
        children: list[list[int]] = [[] for _ in self.begin]
        roots: list[int] = []
        for node, parent in enumerate(self.parent):
            (roots if parent < 0 else children[parent]).append(node)
        rank = [-1] * len(self.begin)
        nodes: list[PrefixForestNode] = []
        stack = roots[::-1]
        while stack:
            node = stack.pop()
            rank[node] = len(nodes)
            parent = self.parent[node]
            nodes.append(
                PrefixForestNode(
                    self.begin[node],
                    self.end[node],
                    rank[parent] if parent >= 0 else -1,
                    self.sequence[node],
                )
            )
            stack.extend(children[node][::-1])
        return nodes, [rank[end] for end in ends]

    def _new_node(self, begin: int, end: int, parent: int, sequence: int) -> int:
        self.begin.append(begin)
        self.end.append(end)
        self.parent.append(parent)
        self.sequence.append(sequence)
        return len(self.begin) - 1

    def _split(self, node: int, at: int) -> None:
        """Split a node of a prefix tree in two at the token position ``at``.

        The existing node keeps the tail, so that indices of its children and of sequences that end
        in it stay valid.
        """
        head = self._new_node(self.begin[node], at, self.parent[node], self.sequence[node])
        self.begin[node], self.parent[node] = at, head
        self.path.append(head)


def _common_prefix_length(a: Ints, b: Ints) -> int:
    """Return the length of the common prefix of two arrays of token ids."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


COMPONENTS = ("rl", "ce", "kd")
"""Names of the components of a loss. Each has an array of weights in a batch."""


class PackablePrefixTree(NamedTuple):
    """A prefix tree that fits into one batch as a whole.

    It may be a piece of a larger tree, together with the path from the root to that piece.
    """

    stretches: list[PrefixForestNode]
    """The stretches in preorder. The ``sequence`` of each is an index among the sequences that
    carry loss."""
    leaves: list[tuple[int, int]]
    """Pairs of a sequence and the stretch that holds its last token."""
    num_tokens: int
    cost: float


def loss_token_indices(sequence: TokenSequence) -> Ints:
    """Return the indices [n] of the n tokens of ``sequence`` that contribute to the loss.

    Raises ValueError if the first token has a weight, since nothing predicts that token.
    """
    weighs = sequence.rl != 0
    for other in (sequence.ce, sequence.kd):
        weighs = weighs if other is None else weighs | (other != 0)
    if len(weighs) and weighs[0]:
        raise ValueError(
            f"sequence {sequence.name} has a weight on its first token, which nothing predicts"
        )
    return np.flatnonzero(weighs)


class BatchBuilder:
    """Builds the batches of one optimizer step.

    All batches have the same per-token streams and the same denominators.
    """

    def __init__(
        self,
        sequences: Many[TokenSequence],
        learning: list[int],
        denominators: Mapping[str, float] | None,
    ) -> None:
        """Prepare to build batches from ``sequences``.

        ``learning`` holds the indices of sequences that have tokens with loss. Trees refer to a
        sequence by its position in ``learning``.
        """
        self._sequences = sequences
        self._learning = learning
        chosen = [sequences[index] for index in learning]
        self._named = _stream_names(chosen)
        self._denominators = _denominators(chosen, denominators)
        self._has_versions = all(sequence.versions is not None for sequence in chosen)
        self._has_kept = any(sequence.kept is not None for sequence in chosen)
        routes = [sequence.routes for sequence in chosen if sequence.routes is not None]
        self._route_size = max((each.shape[1] for each in routes), default=0)

    def batch(self, pieces: Iterable[PackablePrefixTree], copies: PrefixNodeComputeCounts) -> Batch:
        columns = _Columns()
        segments: list[PackedTokenSegment] = []
        present: dict[int, str] = {}
        end = 0
        for piece in pieces:
            first = len(segments)
            for stretch in piece.stretches:
                ids = self._sequences[self._learning[stretch.sequence]].token_ids[
                    stretch.begin : stretch.end
                ]
                columns.add(
                    token_ids=ids,
                    positions=np.arange(stretch.begin, stretch.end),
                    token_weights=copies.inverse_computation_counts(stretch),
                )
                segments.append(
                    PackedTokenSegment(
                        end, end + len(ids), stretch.parent + first if stretch.parent >= 0 else -1
                    )
                )
                end += len(ids)
            for place, leaf in piece.leaves:
                index = self._learning[place]
                present[index] = self._sequences[index].name
                self._add_entries(columns, index, _position_map(piece, leaf, segments[first:]))
        return self._batch(columns, segments, present)

    def _add_entries(self, columns: _Columns, index: int, places: tuple[Ints, Ints]) -> None:
        """Add one batch entry for each token of a sequence that contributes to the loss.

        ``places`` maps positions in the sequence to positions in the batch. It has two arrays with
        one element per stretch: the position where the stretch begins, and the offset to add to
        positions in it.
        """
        sequence = self._sequences[index]
        tokens = loss_token_indices(sequence)
        plain = np.zeros(len(tokens), np.bool_)
        if sequence.ce is not None and (sequence.temperature != 1 or sequence.kept is not None):
            imitated = tokens[sequence.ce[tokens] != 0]
            reinforced = tokens[_non_ce_mask(sequence)[tokens]]
            plain = np.repeat([False, True], [len(reinforced), len(imitated)])
            tokens = np.concatenate([reinforced, imitated])
        begins, shifts = places
        columns.add(
            sources=tokens - 1 + shifts[np.searchsorted(begins, tokens - 1, "right") - 1],
            targets=sequence.token_ids[tokens],
            owners=np.stack([np.full(len(tokens), index), tokens], 1),
            temperature=np.where(plain, 1, sequence.temperature).astype(np.float32),
            **_weights(sequence, tokens, plain),
            **{name: sequence.streams[name][tokens] for name in self._named},
        )
        if self._has_versions and sequence.versions is not None:
            columns.add(versions=sequence.versions[tokens])
        if self._route_size:
            unknown = np.full((len(tokens), self._route_size), -1)
            columns.add(routes=unknown if sequence.routes is None else sequence.routes[tokens])
        if self._has_kept:
            columns.add_kept(sequence.kept, tokens, plain)

    def _batch(
        self, columns: _Columns, segments: list[PackedTokenSegment], present: dict[int, str]
    ) -> Batch:
        names = ("advantages", "sampler_logprobs", "temperature", *self._denominators, *self._named)
        return Batch(
            token_ids=columns.whole("token_ids"),
            positions=columns.whole("positions"),
            segments=segments,
            sources=columns.whole("sources"),
            targets=columns.whole("targets"),
            streams={name: columns.whole(name) for name in names},
            denominators=self._denominators,
            sequences=present,
            owners=columns.whole("owners"),
            versions=columns.whole("versions") if self._has_versions else None,
            kept=columns.kept() if self._has_kept else None,
            routes=columns.whole("routes") if self._route_size else None,
            token_weights=columns.whole("token_weights"),
        )


class _Columns:
    """The arrays of a batch under construction, which are collected piece by piece."""

    def __init__(self) -> None:
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}

    def add(self, **values: npt.NDArray[Any]) -> None:
        for name, part in values.items():
            self._parts.setdefault(name, []).append(part)

    def add_kept(
        self, kept: SamplingMask | None, tokens: Ints, plain: npt.NDArray[np.bool_]
    ) -> None:
        """Add the token ids that top-p or top-k sampling could have chosen at each of the positions
        ``tokens``.

        The list is empty for tokens that ``plain`` marks, which carry cross-entropy. It is empty
        for all tokens if sampling was not truncated.
        """
        if kept is None:
            self.add(kept_sizes=np.zeros(len(tokens), np.int64), kept_ids=np.zeros(0, np.int64))
            return
        starts, sizes = (
            kept.offsets[tokens],
            np.where(plain, 0, kept.offsets[tokens + 1] - kept.offsets[tokens]),
        )
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.add(kept_sizes=sizes, kept_ids=kept.ids[np.repeat(starts, sizes) + within])

    def whole(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate(self._parts[name])

    def kept(self) -> SamplingMask:
        return SamplingMask(
            np.concatenate([[0], np.cumsum(self.whole("kept_sizes"))]), self.whole("kept_ids")
        )


def _position_map(
    piece: PackablePrefixTree, leaf: int, segments: list[PackedTokenSegment]
) -> tuple[Ints, Ints]:
    """Map positions in the sequence that ends at node ``leaf`` to positions in the batch.

    Returns two arrays with one element per node on the path: the position where the node begins,
    and the offset to add to positions in it. ``segments`` holds the batch segment of each node of
    ``piece``.
    """
    begins, shifts = [], []
    while leaf >= 0:
        begins.append(piece.stretches[leaf].begin)
        shifts.append(segments[leaf].start - begins[-1])
        leaf = piece.stretches[leaf].parent
    return np.array(begins[::-1]), np.array(shifts[::-1])


def _weights(
    sequence: TokenSequence, tokens: Ints, plain: npt.NDArray[np.bool_]
) -> dict[str, Floats]:
    """Return the advantages, sampler log-probabilities and loss weights for a sequence's batch
    entries.

    There is one entry per index in ``tokens``, and ``plain`` marks the entries for cross-entropy. A
    token with cross-entropy and another loss may have two entries, one for each.
    """
    has_two = bool(plain.any())
    columns = {
        "advantages": sequence.advantages[tokens],
        "sampler_logprobs": sequence.sampler_logprobs[tokens],
    }
    for name in COMPONENTS:
        column: Floats | None = getattr(sequence, name)
        values = np.zeros(len(tokens), np.float32) if column is None else column[tokens]
        tempered = has_two or sequence.temperature != 1 or sequence.kept is not None
        columns[name] = (
            np.where(plain == (name == "ce"), values, 0).astype(np.float32) if tempered else values
        )
    return columns


def _non_ce_mask(sequence: TokenSequence) -> npt.NDArray[np.bool_]:
    """Return a mask [T] of the tokens with a loss weight other than that of cross-entropy.

    These have a policy-gradient or distillation weight.
    """
    return np.not_equal(sequence.rl, 0) | (
        False if sequence.kd is None else np.not_equal(sequence.kd, 0)
    )


def _stream_names(sequences: list[TokenSequence]) -> list[str]:
    """Return the names of the extra per-token arrays of the sequences.

    Raises ValueError if the sequences do not all have the same ones.
    """
    names = sorted({name for sequence in sequences for name in sequence.streams})
    for sequence in sequences:
        if missing := [name for name in names if name not in sequence.streams]:
            raise ValueError(
                f"sequence {sequence.name} has no stream '{missing[0]}', which others of this step "
                "have"
            )
    return names


def _denominators(
    sequences: list[TokenSequence], given: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the divisor of each loss component, such as ``rl`` or ``ce``, that has a non-zero
    weight.

    The divisor is taken from ``given``, or else it is the sum of the weights. Raises ValueError if
    it is not positive.
    """
    denominators = {}
    for name in COMPONENTS:
        columns = [
            column
            for sequence in sequences
            if (column := getattr(sequence, name)) is not None and column.any()
        ]
        if columns:
            total = sum(float(column.sum(dtype=np.float64)) for column in columns)
            denominators[name] = total if given is None else given.get(name, 0.0)
            if not denominators[name] > 0:
                raise ValueError(
                    f"component '{name}' has weights, but its denominator "
                    f"{denominators[name]} is not positive"
                )
    return denominators

"""Arranges sequences as a forest, in which shared prefixes occur only once.

    1 2 3 7 8 4          [1 2 3] ── [7 8] ── [4]     node: a stretch of tokens, its parent,
    1 2 3 7 8 5             │         └──── [5]      and one sequence that passes through it
    1 2 3 9                 └────── [9]

A token's hidden state depends only on the tokens of its path, so a prefix that two sequences share
can be computed once: prompts, forked prefixes, and tokens that two siblings happened to sample
alike. What they learn stays separate, since a loss is counted by entry and not by token. The forest
does not depend on the order of the sequences. It is found by sorting the sequences as byte strings
and comparing neighbors: near-linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from ramify.types.sequence import Floats, Ints, TokenSequence


class ForestNode(NamedTuple):
    """Tokens ``[begin, end)``, counted along the path, that the same sequences pass through."""

    begin: int
    end: int
    parent: int
    """Index of the parent node; -1 for a root."""
    sequence: int
    """Index of one sequence that passes through it."""
    last: int = -1
    """For a stretch of a batch: index of the forest's node with which it ends."""


class Forest(NamedTuple):
    """Prefix trees over a set of sequences."""

    nodes: list[ForestNode]
    """In preorder."""
    leaves: list[int]
    """Sequence -> the node in which it ends."""
    order: list[int]
    """Indices of the sequences, sorted by their ids; equal ids are sorted by name."""

    @property
    def num_tokens(self) -> int:
        return sum(node.end - node.begin for node in self.nodes)


def forest(sequences: Many[TokenSequence]) -> Forest:
    """The radix trees of ``sequences``; none of them may be empty."""
    keys = [sequence.token_ids.astype(">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (keys[index], sequences[index].name))
    growing = _GrowingForest()
    ends = [-1] * len(sequences)
    before: Ints | None = None
    for index in order:
        ids = sequences[index].token_ids
        shared = 0 if before is None else _common(before, ids)
        ends[index] = growing.add(index, shared, len(ids))
        before = ids
    return Forest(*growing.grown(ends), order)


class NodeCopies:
    """How often the stretches of a step's batches compute each node of its forest."""

    def __init__(self, radix_forest: Forest, stretches: Many[ForestNode]) -> None:
        """``stretches``: whole nodes one below the other, of which ``last`` is the last."""
        self._nodes = radix_forest.nodes
        self._num = [0] * len(self._nodes)
        for stretch in stretches:
            for node in self._within(stretch):
                self._num[node] += 1

    def weights(self, stretch: ForestNode) -> Floats:
        """[n] of each token: 1 / how often it is computed."""
        within = self._within(stretch)[::-1]
        sizes = [self._nodes[node].end - self._nodes[node].begin for node in within]
        weights = np.array([1 / self._num[node] for node in within], np.float32)
        return weights.repeat(sizes)

    def _within(self, stretch: ForestNode) -> list[int]:
        """The nodes of a stretch, from the last to the first."""
        found, node = [stretch.last], self._nodes[stretch.last]
        while node.begin > stretch.begin:
            found.append(node.parent)
            node = self._nodes[node.parent]
        return found


class _GrowingForest:
    """The nodes so far, and the path of the last sequence through them."""

    def __init__(self) -> None:
        self.begin: list[int] = []
        self.end: list[int] = []
        self.parent: list[int] = []
        self.sequence: list[int] = []
        self.path: list[int] = []

    def add(self, sequence: int, shared: int, length: int) -> int:
        """Add a sequence that has ``shared`` tokens in common with the last one. Returns the node
        in which it ends."""
        while self.path and self.begin[self.path[-1]] >= shared:
            self.path.pop()
        if self.path and self.end[self.path[-1]] > shared:
            self._split(self.path.pop(), shared)
        if length > shared:
            self.path.append(
                self._new(shared, length, self.path[-1] if self.path else -1, sequence)
            )
        return self.path[-1]

    def grown(self, ends: list[int]) -> tuple[list[ForestNode], list[int]]:
        """The nodes in preorder, with children in the order of their ids. (In the internal lists,
        the head of a node that was split comes after it.)"""
        children: list[list[int]] = [[] for _ in self.begin]
        roots: list[int] = []
        for node, parent in enumerate(self.parent):
            (roots if parent < 0 else children[parent]).append(node)
        rank = [-1] * len(self.begin)
        nodes: list[ForestNode] = []
        stack = roots[::-1]
        while stack:
            node = stack.pop()
            rank[node] = len(nodes)
            parent = self.parent[node]
            nodes.append(
                ForestNode(
                    self.begin[node],
                    self.end[node],
                    rank[parent] if parent >= 0 else -1,
                    self.sequence[node],
                )
            )
            stack.extend(children[node][::-1])
        return nodes, [rank[end] for end in ends]

    def _new(self, begin: int, end: int, parent: int, sequence: int) -> int:
        self.begin.append(begin)
        self.end.append(end)
        self.parent.append(parent)
        self.sequence.append(sequence)
        return len(self.begin) - 1

    def _split(self, node: int, at: int) -> None:
        """Split a node: ``node`` keeps the tokens after ``at``, so that its children, and the
        sequences that end in it, keep their index."""
        head = self._new(self.begin[node], at, self.parent[node], self.sequence[node])
        self.begin[node], self.parent[node] = at, head
        self.path.append(head)


def _common(a: Ints, b: Ints) -> int:
    """Length of the common prefix of ``a`` and ``b``."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length

"""Pack token sequences into batches for training.

Common prefixes are computed once, sequences that are too long are cut, and the batches have about
equal cost.

    sequences ── forest ──> trees ── share prefixes if it pays ── cut at max_tokens ──> pieces
    pieces ── balance ──> [Batch]

A tree that is larger than a batch is cut between its leaves, and each piece repeats the path that
leads to it: the same hidden states are computed twice, but each entry counts once. So the loss and
the gradient are those of the uncut tree. A single path longer than ``max_tokens`` is its own piece.
For a loss over sequences, all paths of one call are in one batch, even beyond ``max_tokens``.
All decisions depend only on lengths and ids: the same sequences, in any order, give the same
batches.

The content of a batch is written by ``prefix_forest.py``, its entries are used by the losses in
``losses/``, and a device computes it with ``models/forest_attention.py``. Legend: E entries of a
batch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.train.data.prefix_forest import (
    BatchBuilder,
    PackablePrefixTree,
    PrefixForest,
    PrefixForestNode,
    PrefixNodeComputeCounts,
    forest,
    loss_token_indices,
)
from ramify.types.training_sequences import (
    Batch,
    Floats,
    SequenceUnit,
    TokenSequence,
    call_or_rollout_key,
)

Unit = str | int
"""Key that sequences share if they must stay together in one batch."""


class PackingCostModel(msgspec.Struct, frozen=True):
    """Estimated compute costs, used to balance batches.

    The unit is the work for one token without attention.
    """

    pair: float = 2e-3
    """Cost of one token attending to one other token, summed over all layers, forward and
    backward."""
    share: float = 25.0
    """Fixed cost of sharing one prefix, because it is computed separately from what follows it."""
    join: float = 0.08
    """Additional cost of each token after a shared prefix: its attention to the prefix is computed
    apart from the rest and merged.
    """

    def span_cost(self, begin: int, end: int) -> float:
        """Return the cost of computing the tokens from ``begin`` to ``end`` (exclusive) of a
        sequence.

        Their attention to earlier tokens is included.
        """
        num = end - begin
        return num + self.pair * (num * begin + num * (num + 1) / 2)


class PackingSpec(msgspec.Struct, frozen=True):
    """Settings for packing batches, for one model on one device."""

    max_tokens: int = 8192
    """Maximum number of tokens in a batch, which limits the memory of activations. Larger prefix
    trees are cut."""
    share: bool = True
    """Whether to compute each shared prefix only once. False: every path is a separate row."""
    cost: PackingCostModel = PackingCostModel()
    fill_tokens: int | None = None
    """Small prefix trees are packed into one batch up to this number of tokens; a larger tree gets
    its own batch, uncut. CPUs are fastest with a few thousand tokens at once. None:
    ``max_tokens``.
    """
    multiple: int = 1
    """Make the number of batches a multiple of this number if there are enough trees. It is the
    number of ranks that compute at the same time."""


def pack(
    sequences: Many[TokenSequence],
    packing: PackingSpec | None = None,
    denominators: Mapping[str, float] | None = None,
    *,
    whole: SequenceUnit | None = None,
) -> list[Batch]:
    """Pack the token sequences of one optimizer step into batches of about equal cost.

    Sequences without any loss weight are dropped. ``whole`` keeps all sequences of a call, or of a
    rollout, in one batch, which sequence-level losses require (``LossSpec.sequence``).

    ``denominators``: the divisor of each component's sum; by default the sum of its weights over
    all sequences. Raises ValueError if a component has weights but no positive denominator, if a
    first token has a weight, or if some but not all sequences have a named stream.

    Example:
        batches = train.pack(sequences, backend.packing, assigned.denominators)
    """
    packing = packing or PackingSpec()
    learning = [
        index for index, sequence in enumerate(sequences) if len(loss_token_indices(sequence))
    ]
    if not learning:
        return []
    writer = BatchBuilder(sequences, learning, denominators)
    found = forest([sequences[index] for index in learning])
    trees = _build_shared_trees(found, packing)
    units = [
        index if whole is None else call_or_rollout_key(sequences[index].name, index, whole)
        for index in learning
    ]
    pieces = _pieces(trees, units, packing)
    fill_tokens = min(packing.fill_tokens or packing.max_tokens, packing.max_tokens)
    copies = PrefixNodeComputeCounts(
        found, [stretch for piece in pieces for stretch in piece.stretches]
    )
    return [
        writer.batch(bin, copies) for bin in _balance_batches(pieces, fill_tokens, packing.multiple)
    ]


def copy_to_sequences(
    sequences: Many[TokenSequence], batches: Many[Batch], name: str, values: Many[Floats]
) -> None:
    """Copy values that were computed for packed batches back to their sequences, as a per-token
    array ``name``.

    ``values`` has one array per batch. Tokens without a loss get 0.

    Each array of ``values`` has shape [E], with one number for each entry of its batch. A token
    that is both reinforced and imitated has two entries, and the value of the reinforced one
    counts. Ratios, KL and distillation use it, while cross-entropy reads no stream.
    """
    for sequence in sequences:
        sequence.streams[name] = np.zeros(len(sequence), np.float32)
    for batch, column in zip(batches, values, strict=True):
        is_drawn = _is_drawn(batch)
        for index in batch.sequences:
            stream, is_mine = sequences[index].streams[name], batch.owners[:, 0] == index
            # A token's second entry overwrites the first.
            for mine in (is_mine & ~is_drawn, is_mine & is_drawn):
                stream[batch.owners[mine, 1]] = column[mine]


def _is_drawn(batch: Batch) -> npt.NDArray[np.bool_]:
    """Return a mask [E] of the loss tokens that have a policy-gradient or distillation weight.

    Only for such entries do log-probabilities follow the sampling temperature and truncation.
    """
    is_drawn = np.zeros(len(batch.owners), np.bool_)
    for name in {"rl", "kd"} & batch.streams.keys():
        is_drawn |= batch.streams[name] != 0
    return is_drawn


def packing_statistics(batches: Many[Batch], sequences: Many[TokenSequence]) -> dict[str, float]:
    """Return packing statistics: the number of batches, of tokens to compute, and of tokens in the
    sequences.

    The ratio of the two token counts shows how much prefix sharing saves.
    """
    computed = sum(len(batch) for batch in batches)
    present = {index for batch in batches for index in batch.sequences}
    whole = sum(len(sequences[index]) for index in present)
    return {
        "batches": len(batches),
        "packed_tokens": computed,
        "row_tokens": whole,
        "shared": whole / computed if computed else 1.0,
    }


# --- sharing computation


class _Tree(NamedTuple):
    """A prefix tree of token sequences, before it is cut into pieces that fit into a batch."""

    stretches: list[PrefixForestNode]
    """The tree's nodes, each a stretch of tokens, in preorder. A node's ``sequence`` is an index
    into the list of sequences that carry loss.
    """
    leaves: list[tuple[int, int]]
    """Pairs of a sequence and the stretch in which it ends, in preorder."""


def _build_shared_trees(radix_forest: PrefixForest, packing: PackingSpec) -> list[_Tree]:
    """Return the trees of the prefix forest, sharing a prefix only where that saves computation.

    If sharing a node does not pay, its tokens are repeated in each of its children.
    """
    nodes = radix_forest.nodes
    begin = [node.begin for node in nodes]
    keeps = [True] * len(nodes)
    children = [0] * len(nodes)
    below = [0] * len(nodes)
    """Number of tokens below each node in the final layout."""
    for index in range(len(nodes) - 1, -1, -1):
        node, num = nodes[index], children[index]
        tokens = node.end - node.begin
        if num:
            saved = (
                (num - 1) * packing.cost.span_cost(node.begin, node.end) if packing.share else 0.0
            )
            keeps[index] = saved > packing.cost.share + packing.cost.join * below[index]
        if node.parent >= 0:
            children[node.parent] += 1 if keeps[index] else num
            below[node.parent] += below[index] + (tokens if keeps[index] else tokens * num)
    # A kept node begins where its nearest kept ancestor ends; nodes in between are repeated in it.
    owner = [-1] * len(nodes)
    for index, node in enumerate(nodes):
        parent = node.parent
        owner[index] = parent if parent < 0 or keeps[parent] else owner[parent]
        begin[index] = nodes[owner[index]].end if owner[index] >= 0 else 0
    return _split_trees(radix_forest, keeps, owner, begin)


def _split_trees(
    radix_forest: PrefixForest, keeps: list[bool], owner: list[int], begin: list[int]
) -> list[_Tree]:
    """Split the prefix forest into trees at the nodes that are not shared.

    Nodes that stay shared are marked in ``keeps``, and each one without such an ancestor becomes
    the root of a tree. The tokens of any other node are repeated in the nodes below it. A sequence
    that ends in such a node is assigned to its first copy.
    """
    trees: list[_Tree] = []
    place: list[tuple[int, int]] = [(-1, -1)] * len(radix_forest.nodes)
    """Map each node to its tree and to its stretch in that tree."""
    for index, node in enumerate(radix_forest.nodes):
        if not keeps[index]:
            continue
        if owner[index] < 0:
            trees.append(_Tree([], []))
            tree, parent = len(trees) - 1, -1
        else:
            tree, parent = place[owner[index]]
        place[index] = (tree, len(trees[tree].stretches))
        trees[tree].stretches.append(
            PrefixForestNode(begin[index], node.end, parent, node.sequence, index)
        )
    first = _first_kept(radix_forest, keeps)
    for sequence in sorted(
        radix_forest.order, key=lambda sequence: first[radix_forest.leaves[sequence]]
    ):
        tree, stretch = place[first[radix_forest.leaves[sequence]]]
        trees[tree].leaves.append((sequence, stretch))
    return trees


def _first_kept(radix_forest: PrefixForest, keeps: list[bool]) -> list[int]:
    """Return each node's first descendant that is marked in ``keeps``, or the node itself if it is
    marked.

    The tokens of a node without a mark are repeated in the nodes below it. A node without children
    is always marked.
    """
    first = list(range(len(radix_forest.nodes)))
    for index in range(len(radix_forest.nodes) - 1, -1, -1):
        parent = radix_forest.nodes[index].parent
        if parent >= 0 and not keeps[parent]:
            first[parent] = first[index]
    return first


# --- cutting and balancing


def _pieces(
    trees: list[_Tree], units: list[Unit], packing: PackingSpec
) -> list[PackablePrefixTree]:
    """Cut all prefix trees of token sequences into pieces that fit into a batch.

    ``units`` holds a key for each sequence. Sequences with the same key stay in one piece, even if
    they are in different trees.
    """
    num_trees = Counter(
        unit for tree in trees for unit in {units[sequence] for sequence, _ in tree.leaves}
    )
    spread = {unit for unit, num in num_trees.items() if num > 1}
    pieces: list[PackablePrefixTree] = []
    parts: dict[Unit, list[PackablePrefixTree]] = {unit: [] for unit in units if unit in spread}
    for tree in trees:
        leaves: dict[Unit, list[tuple[int, int]]] = {}
        for sequence, leaf in tree.leaves:
            leaves.setdefault(units[sequence], []).append((sequence, leaf))
        # The set's order does not matter, since each unit has its own list.
        for unit in spread & leaves.keys():
            parts[unit] += _cut(tree, [leaves.pop(unit)], packing)
        pieces += _cut(tree, list(leaves.values()), packing)
    return [*pieces, *(_side_by_side(each) for each in parts.values())]


def _cut(
    tree: _Tree, units: list[list[tuple[int, int]]], packing: PackingSpec
) -> list[PackablePrefixTree]:
    """Cut a prefix tree into pieces of at most ``max_tokens`` tokens.

    Each of ``units`` is a group of sequences that must stay together. A piece takes whole groups
    while they fit. A group that exceeds the limit becomes a separate piece.
    """
    pieces: list[PackablePrefixTree] = []
    present: set[int] = set()
    leaves: list[tuple[int, int]] = []
    size = 0
    for unit in units:
        new, num_new = _missing_nodes(tree, unit, present)
        if leaves and size + num_new > packing.max_tokens:
            pieces.append(_extract_piece(tree, present, leaves, packing.cost))
            present, leaves, size = set(), [], 0
            new, num_new = _missing_nodes(tree, unit, present)
        present |= new
        leaves += unit
        size += num_new
    return [*pieces, _extract_piece(tree, present, leaves, packing.cost)] if leaves else pieces


def _missing_nodes(
    tree: _Tree, leaves: list[tuple[int, int]], present: set[int]
) -> tuple[set[int], int]:
    """Return the nodes from ``leaves`` up to the root that are missing in ``present``, and their
    token count.

    ``present`` holds the nodes of the current piece.
    """
    missing: set[int] = set()
    for _, stretch in leaves:
        while stretch >= 0 and stretch not in present and stretch not in missing:
            missing.add(stretch)
            stretch = tree.stretches[stretch].parent
    return missing, sum(tree.stretches[each].end - tree.stretches[each].begin for each in missing)


def _side_by_side(pieces: list[PackablePrefixTree]) -> PackablePrefixTree:
    """Combine pieces of different prefix trees into one piece in which they share no tokens."""
    stretches: list[PrefixForestNode] = []
    leaves: list[tuple[int, int]] = []
    for piece in pieces:
        first = len(stretches)
        stretches += [
            node._replace(parent=node.parent + first if node.parent >= 0 else -1)
            for node in piece.stretches
        ]
        leaves += [(sequence, leaf + first) for sequence, leaf in piece.leaves]
    num_tokens, cost = sum(each.num_tokens for each in pieces), sum(each.cost for each in pieces)
    return PackablePrefixTree(stretches, leaves, num_tokens, cost)


def _extract_piece(
    tree: _Tree, present: set[int], leaves: list[tuple[int, int]], cost: PackingCostModel
) -> PackablePrefixTree:
    """Return the part of ``tree`` whose node indices are in ``present`` as a separate tree.

    A node with only one child left is merged with that child. ``leaves`` holds the sequences of the
    part, each with the node in which it ends.
    """
    order = sorted(present)
    children = dict.fromkeys(order, 0)
    for index in order:
        if tree.stretches[index].parent >= 0:
            children[tree.stretches[index].parent] += 1
    begin, parent, absorbed = {}, {}, {}
    for index in order:
        stretch = tree.stretches[index]
        begin[index], parent[index] = stretch.begin, stretch.parent
        # For a single child, the fixed cost of sharing a prefix saves nothing.
        if stretch.parent >= 0 and children[stretch.parent] == 1:
            begin[index], parent[index] = begin[stretch.parent], parent[stretch.parent]
            absorbed[stretch.parent] = index
    rank: dict[int, int] = {-1: -1}
    stretches: list[PrefixForestNode] = []
    for index in order:
        if index not in absorbed:
            rank[index] = len(stretches)
            stretch = tree.stretches[index]
            stretches.append(stretch._replace(begin=begin[index], parent=rank[parent[index]]))
    # From the last node on, because the child of a merged node may have been merged as well.
    for index in reversed(order):
        if index in absorbed:
            rank[index] = rank[absorbed[index]]
    num_tokens = sum(stretch.end - stretch.begin for stretch in stretches)
    total = sum(cost.span_cost(stretch.begin, stretch.end) for stretch in stretches)
    return PackablePrefixTree(
        stretches, [(sequence, rank[leaf]) for sequence, leaf in leaves], num_tokens, total
    )


def _balance_batches(
    pieces: list[PackablePrefixTree], fill_tokens: int, multiple: int
) -> list[list[PackablePrefixTree]]:
    """Distribute pieces of prefix trees over batches of about equal cost.

    A batch has at most ``fill_tokens`` tokens, unless a single piece is larger. The most expensive
    piece goes first, and each piece goes into the cheapest batch with room for it.
    """
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].cost, index))
    num_bins = -(-sum(piece.num_tokens for piece in pieces) // fill_tokens)
    num_bins += -num_bins % multiple
    bins: list[list[PackablePrefixTree]] = [[] for _ in range(num_bins)]
    sizes = [0] * num_bins
    heap = [(0.0, bin) for bin in range(num_bins)]
    for index in order:
        piece, full = pieces[index], []
        while heap and sizes[heap[0][1]] and sizes[heap[0][1]] + piece.num_tokens > fill_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            bins.append([])
            sizes.append(0)
            heap.append((0.0, len(bins) - 1))
        cost, bin = heapq.heappop(heap)
        bins[bin].append(piece)
        sizes[bin] += piece.num_tokens
        for entry in (*full, (cost + piece.cost, bin)):
            heapq.heappush(heap, entry)
    return [bin for bin in bins if bin]

"""The matrix products of a training step and nothing else: what a step would cost if attention, norms,
losses, gathers and Python were free.

    run = products(model, batches, dtype)      forward and backward, three products per matrix
    step_seconds / seconds(run)                how far the step is from its products
    multiplications(model, batches)            forward, with those of attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ramify.models.dense import DenseModel
from ramify.models.forest_attention import ForestAttentionPlan
from ramify.types.training_sequences import Batch


def products(model: nn.Module, batches: Iterable[Batch], dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that multiplies what a step over ``batches`` multiplies.

    A matrix inside the model meets every token of a batch; the output matrix meets the entries
    that have a loss. Attention's own products are left out: their size depends on the kernel.
    """
    inside, output = [], []
    matrices = {name: each for name, each in model.named_parameters() if each.dim() == 2}
    last = "lm_head.weight" if "lm_head.weight" in matrices else "model.embed_tokens.weight"
    for name, matrix in matrices.items():
        if name == last:
            output.append(matrix.detach().to(dtype))
        elif not name.endswith("embed_tokens.weight"):
            inside.append(matrix.detach().to(dtype))
    sizes = [(len(batch), len(batch.owners)) for batch in batches]

    def run() -> None:
        for tokens, entries in sizes:
            for num, found in ((tokens, inside), (entries, output)):
                rows: dict[int, Tensor] = {}
                for matrix in found:
                    _multiply(matrix, num, rows)

    return run


def multiplications(model: DenseModel, batches: Iterable[Batch]) -> float:
    """Return the multiplications of a forward pass: of each matrix with its rows, of the output
    matrix with the entries, and of queries with keys and weights with values."""
    shape = model.shape
    heads = shape.num_heads * shape.head_size
    before = sum(
        matrix.numel()
        for name, matrix in model.model.layers[0].named_parameters()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    )
    layer = sum(each.numel() for each in model.model.layers[0].parameters() if each.dim() == 2)
    total = 0.0
    for batch in batches:
        rows = sorted(set(batch.sources.tolist()))
        total += (shape.num_layers - 1) * len(batch) * layer + len(batch) * before
        total += len(rows) * (layer - before) + len(batch.owners) * shape.vocab_size * shape.width
        pairs = (shape.num_layers - 1) * _pairs(ForestAttentionPlan.for_segments(batch.segments))
        total += (
            2 * heads * (pairs + _pairs(ForestAttentionPlan.for_segments(batch.segments, rows)))
        )
    return total


def _pairs(plan: ForestAttentionPlan) -> float:
    """The number of queries and keys that meet."""
    below = sum(
        (each.keys[1] - each.keys[0]) * (each.queries[1] - each.queries[0]) for each in plan.below
    )
    return sum(num * (num + 1) / 2 for num in plan.own) + below


def _multiply(matrix_OI: Tensor, num: int, rows: dict[int, Tensor]) -> None:
    """The output, the gradient of the input and the gradient of the matrix."""
    for width in matrix_OI.shape:
        if width not in rows:
            rows[width] = torch.randn(num, width, device=matrix_OI.device, dtype=matrix_OI.dtype)
    dy_NO, x_NI = rows[matrix_OI.shape[0]], rows[matrix_OI.shape[1]]
    torch.mm(x_NI, matrix_OI.t())
    torch.mm(dy_NO, matrix_OI)
    torch.mm(dy_NO.t(), x_NI)

"""Speed up a small ``DenseModel`` on a CPU with preprocessed copies of its weights.

The copies compute the same function in half the operations. In small models, starting an operation
costs more than its arithmetic. So the products for queries, keys and values are joined into one, as
are those for gate and up; weights are stored in the order in which products read them; and what can
be multiplied into a weight beforehand is:

    norms           their weight is part of the next matrix; a step only multiplies by 1 / rms
    scale           d ** -0.5 is part of the queries' norm or matrix
    rotation        the halves of a head are interleaved, so it is one complex product

``DenseModel`` gives the same numbers except for rounding. The copies are made again when a weight
was changed in place or replaced, and after ``drop_weight_copies``. The model itself is defined in
``models/dense.py``, and attention in ``kv_cache.py``.

Legend: T tokens, N rows of them, D width, M width of the MLP, H query heads, K key-value heads, d
head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ramify.inference.local.kv_cache import PrefillDecodeAttention
from ramify.models import onednn_products
from ramify.models.dense import (
    CausalAttentionKernel,
    DenseModel,
    DenseModelConfig,
    rotary_frequencies,
)

_MOST_BYTES = 32 << 20
"""Maximum total size in bytes of a model's weights for which prepared copies are worth their
memory. In larger models, arithmetic dominates."""
_LEAST_ROWS = 48
"""Minimum number of tokens at which matrix products may be faster with oneDNN than with PyTorch."""
_FEW_ROWS = 256
"""Number of tokens below which row counts are rounded up to multiples of 16. Others are rounded up
to multiples of 64."""
_LEAST_MULTIPLICATIONS = 1 << 20
"""Minimum number of multiplications in a matrix product at which oneDNN is faster than PyTorch."""
_USES_BEFORE_PACKING = 8
"""Number of oneDNN products with a weight before it is stored in oneDNN's own layout. The
conversion costs as much time as 30 products then save, and leaves results bitwise identical."""
_FIRST_POSITIONS = 256
"""Number of positions for which rotary embeddings are computed initially."""
_KEPT_SIZES = 16
"""Maximum number of different token counts for which workspaces are kept."""


class CpuOptimizedDecoder:
    """A small model whose weights are copied into layouts that make decoding on a CPU fast.

    Implements ``model_runner.DecoderModel``.
    """

    @staticmethod
    def is_worthwhile_for(model: DenseModel) -> bool:
        """Return True if a model decodes faster with prepared copies of its weights.

        It must be small, in fp32, and on a CPU.
        """
        parameters = list(model.parameters())
        return sum(each.nbytes for each in parameters) <= _MOST_BYTES and all(
            each.device.type == "cpu" and each.dtype == torch.float32 for each in parameters
        )

    def __init__(self, model: DenseModel) -> None:
        self._model = model
        # The dicts themselves, since each step looks at all weights, and attributes are slower.
        self._weighted = [each._parameters for each in model.modules() if hasattr(each, "weight")]
        self._seen: list[tuple[int, int]] = []
        """Address and version of each weight at the time it was copied."""
        self._layers: list[_PreparedLayer] = []
        self._output: _Matrix | None = None
        self._turns_P1d = _turns(rotary_frequencies(model.shape), _FIRST_POSITIONS)
        self._storage = torch.empty(0)
        self._rooms: dict[int, _Workspace] = {}

    def drop_weight_copies(self) -> None:
        """Drop the prepared copies of the weights, which may have changed unnoticed."""
        self._seen, self._layers, self._output = [], [], None

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttentionKernel,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states from which ``logits`` computes the logits.

        They have the shape [T, D] for all tokens, or [N, D] for the tokens with the indices
        ``rows_N``. They are normalized, but the weight of the final norm is multiplied into the
        output matrix. The next call overwrites them. If weights cannot be copied, the original
        model computes all of it.
        """
        if not self._is_prepared():
            return self._model.hidden(ids_T, positions_T, attend, rows_N)
        num = len(ids_T)
        room = self._workspace(num)
        missing = room.num_rows - num
        if missing:
            ids_T, positions_T = F.pad(ids_T, (0, missing)), F.pad(positions_T, (0, missing))
        h_TD = F.embedding(ids_T, self._model.model.embed_tokens.weight)
        turns_T1d = self._turns_at(positions_T)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if layer.qkv.bias is None:
                # The product is scaled instead of its input, since it is copied anyway.
                torch.mul(layer.qkv.product(h_TD), room.inverse_rms(h_TD), out=room.qkv)
            else:
                room.qkv.copy_(layer.qkv.product(room.norm(h_TD)))
            if layer.head_scale is not None:
                room.norm_heads().mul_(layer.head_scale)
            room.pairs.mul_(turns_T1d)
            q, k, v = room.q[:num], room.k[:num], room.v[:num]
            if rows_N is not None and index == last:
                all_q, q = q, q.index_select(0, rows_N)
                h_TD = h_TD.index_select(0, rows_N)
                if isinstance(attend, PrefillDecodeAttention):
                    o_TD = attend.attend_for_logits(index, q, k, v, 1.0).flatten(-2)
                else:
                    o_TD = attend(index, all_q, k, v, 1.0).index_select(0, rows_N).flatten(-2)
                num = len(rows_N)
                room = self._workspace(num)
                missing = room.num_rows - num
                h_TD = F.pad(h_TD, (0, 0, 0, missing)) if missing else h_TD
            else:
                o_TD = attend(index, q, k, v, 1.0).flatten(-2)
            if missing:
                o_TD = F.pad(o_TD, (0, 0, 0, missing))
            h_TD = layer.o.add_product(h_TD, o_TD)
            gate_TM, up_TM = layer.gate_up.product(room.norm(h_TD)).chunk(2, -1)
            inner_TM = torch.mul(F.silu(gate_TM, inplace=True), up_TM, out=room.inner)
            h_TD = layer.down.add_product(h_TD, inner_TM)
        final_norm = self._model.model.norm
        if final_norm._forward_hooks:  # an observer of the model sees each step
            final_norm(h_TD[:num])
        return room.norm(h_TD)[:num]

    def logits(self, h_ND: Tensor) -> Tensor:
        """Return the fp32 logits [N, V] for N hidden states."""
        if self._output is None:
            return self._model.logits(h_ND)
        num = len(h_ND)
        if missing := _rounded_rows(num) - num:
            h_ND = F.pad(h_ND, (0, 0, 0, missing))
        return self._output.product(h_ND)[:num]

    def _is_prepared(self) -> bool:
        """Update the prepared weights if necessary, and return True if they can be used.

        Returns False if the weights cannot be copied, because they are computed (adapters), or
        because their data type or device has changed.
        """
        # A weight that is computed is not a parameter of its module.
        weights: list[Any] = [each.get("weight") for each in self._weighted]
        weights += [bias for each in self._weighted if (bias := each.get("bias")) is not None]
        # A tensor made in inference mode has no version, so changes to it would go unseen.
        if any(type(each) is not nn.Parameter or each.is_inference() for each in weights):
            self.drop_weight_copies()
            return False
        seen = [(each.data_ptr(), each._version) for each in weights]
        if seen != self._seen:
            self.drop_weight_copies()
            self._seen = seen
            if self.is_worthwhile_for(self._model):
                self._prepare()
        return bool(self._layers)

    def _prepare(self) -> None:
        shape = self._model.shape
        self._layers = [_prepare_layer(layer, shape) for layer in self._model.model.layers]
        self._output = _Matrix(self._model.lm_head.weight * self._model.model.norm.weight)

    def _turns_at(self, positions_T: Tensor) -> Tensor:
        """Return the rotary embedding's rotations [T, 1, d / 2] at the given positions."""
        # Looking for the largest position first would cost every step an operation.
        try:
            return self._turns_P1d.index_select(0, positions_T)
        except IndexError:  # a position is beyond the table
            num = 2 * int(positions_T.max())
            self._turns_P1d = _turns(rotary_frequencies(self._model.shape), num)
            return self._turns_P1d.index_select(0, positions_T)

    def _workspace(self, num: int) -> _Workspace:
        """Return the buffers in which to process ``num`` tokens.

        They have room for a few more tokens if that makes products faster. They hold the
        intermediate results of the tokens. All buffers share one block of memory.
        """
        num = _rounded_rows(num)
        room = self._rooms.get(num)
        if room is None:
            size = num * _Workspace.width(self._model.shape)
            if size > len(self._storage):
                self._rooms.clear()
                self._storage = torch.empty(size)
            elif len(self._rooms) >= _KEPT_SIZES:
                self._rooms.clear()
            room = self._rooms[num] = _Workspace(self._storage, num, self._model.shape)
        return room


class _Matrix:
    """A linear layer's weight matrix, stored in layouts that make matrix products fast.

    Several orders of its values are stored.
    """

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._least_rows = _least_rows(weight_OI.numel())
        # Products with [in, out] are 1.2 to 1.4 times as fast as with [out, in].
        self._weight_IO = weight_OI.t().contiguous()
        # No copy is needed: oneDNN can read the transpose of a contiguous matrix.
        self._for_onednn = self._weight_IO.t()
        self._uses_left = _USES_BEFORE_PACKING

    def product(self, x: Tensor) -> Tensor:
        """Return ``x @ weight + bias``."""
        if x.shape[0] >= self._least_rows:
            return onednn_products.product(x, self._onednn_weight(), self.bias)
        if self.bias is None:
            return torch.mm(x, self._weight_IO)
        return torch.addmm(self.bias, x, self._weight_IO)

    def add_product(self, h: Tensor, x: Tensor) -> Tensor:
        """Return ``h + x @ weight + bias``. ``h`` may be overwritten."""
        if x.shape[0] >= self._least_rows:
            # oneDNN is very slow with inputs that are not contiguous.
            return onednn_products.product_and_sum(
                x.contiguous(), self._onednn_weight(), self.bias, h
            )
        h.addmm_(x, self._weight_IO)
        return h if self.bias is None else h.add_(self.bias)

    def _onednn_weight(self) -> Tensor:
        if self._uses_left:
            self._uses_left -= 1
            if not self._uses_left:
                self._for_onednn = onednn_products.packed(self._for_onednn)
        return self._for_onednn


def _least_rows(size: int) -> float:
    """Return the number of rows from which oneDNN's matrix product is faster than PyTorch's.

    The weight has ``size`` numbers. The time to allocate the result counts.
    """
    if not onednn_products.is_faster_on_cpu():
        return math.inf
    return max(_LEAST_ROWS, _LEAST_MULTIPLICATIONS / size)


class _PreparedLayer(NamedTuple):
    qkv: _Matrix
    """Joined query, key and value matrix [D, (H + 2 K) d], with the first norm's weight multiplied
    in."""
    head_scale: Tensor | None
    """Norm weights of queries and keys [H + K, d]. None if the model has none."""
    o: _Matrix
    """Attention output matrix [H d, D]."""
    gate_up: _Matrix
    """Joined gate and up matrix [D, 2 M], with the second norm's weight multiplied in."""
    down: _Matrix
    """Down matrix of the MLP [M, D]."""


def _prepare_layer(layer: Any, shape: DenseModelConfig) -> _PreparedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    scale = size**-0.5
    # A query that has no norm is scaled by its matrix.
    q_scale = 1.0 if shape.qk_norm else scale
    qkv = [
        _interleave_halves(attention.q_proj.weight, size) * q_scale,
        _interleave_halves(attention.k_proj.weight, size),
        attention.v_proj.weight,
    ]
    qkv_bias = head_scale = None
    if attention.q_proj.bias is not None:
        qkv_bias = torch.cat(
            [
                _interleave_halves(attention.q_proj.bias, size) * q_scale,
                _interleave_halves(attention.k_proj.bias, size),
                attention.v_proj.bias,
            ]
        )
    if shape.qk_norm:
        q_scale_d = _interleave_halves(attention.q_norm.weight, size) * scale
        k_scale_d = _interleave_halves(attention.k_norm.weight, size)
        head_scale = torch.cat([q_scale_d.expand(heads, -1), k_scale_d.expand(kv_heads, -1)])
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    gate_up_bias = (
        None if mlp.gate_proj.bias is None else torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
    )
    return _PreparedLayer(
        _Matrix(torch.cat(qkv) * layer.input_layernorm.weight, qkv_bias),
        head_scale,
        _Matrix(attention.o_proj.weight, attention.o_proj.bias),
        _Matrix(gate_up * layer.post_attention_layernorm.weight, gate_up_bias),
        _Matrix(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _turns(frequencies_d: Tensor, num: int) -> Tensor:
    """Return the rotary embedding's rotations at the first ``num`` positions as complex numbers.

    The shape is [P, 1, d / 2].
    """
    angles = torch.arange(num)[:, None, None].float() * frequencies_d
    return torch.polar(torch.ones(()).expand_as(angles), angles)


def _interleave_halves(rows: Tensor, size: int) -> Tensor:
    """Reorder each head's rows so that the pairs of the rotary embedding become adjacent.

    The order becomes 0, d/2, 1, d/2 + 1, … Two numbers that the rotary embedding rotates together
    then form one complex number.
    """
    halves = rows.view(-1, 2, size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _rounded_rows(num: int) -> int:
    """Round a token count up to one of a few sizes, so that oneDNN can reuse its kernels."""
    if num < _LEAST_ROWS or not onednn_products.is_faster_on_cpu():
        return num
    step = 16 if num < _FEW_ROWS else 64
    return -(-num // step) * step


class _Workspace:
    """Buffers for the intermediate results of a fixed number of tokens.

    They are views of one block of memory. Allocating memory for each operation would often cost
    more than the operation.
    """

    @staticmethod
    def width(shape: DenseModelConfig) -> int:
        """Return the number of floating-point values of buffer space that one token needs."""
        heads = shape.num_heads + 2 * shape.num_kv_heads
        return shape.width + heads * (shape.head_size + 1) + shape.mlp_width + 1

    def __init__(self, storage: Tensor, num: int, shape: DenseModelConfig) -> None:
        self.num_rows = num
        heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
        rotated = heads + kv_heads
        # Queries and keys come first: complex numbers begin at an even place.
        widths = ((rotated + kv_heads) * size, shape.width, shape.mlp_width, 1, rotated)
        parts = torch.split(storage[: num * sum(widths)], [num * each for each in widths])
        qkv, normed, inner, rms, head_rms = (
            part.view(num, width) for part, width in zip(parts, widths, strict=True)
        )
        by_head = qkv.view(num, rotated + kv_heads, size)
        self.qkv = qkv
        self.q, self.k = by_head[:, :heads], by_head[:, heads:rotated]
        self.v = by_head[:, rotated:]
        self.pairs = torch.view_as_complex(by_head[:, :rotated].view(num, rotated, size // 2, 2))
        """Queries and keys as complex numbers, [T, H + K, d / 2]."""
        self.inner = inner
        self._normed, self._rms = normed, rms
        self._rotated, self._head_rms = by_head[:, :rotated], head_rms[..., None]
        self._eps = torch.full((), shape.norm_eps)

    def norm(self, h_TD: Tensor) -> Tensor:
        """Divide each row of ``h_TD`` by its root mean square.

        The next call overwrites the result.
        """
        return torch.mul(h_TD, self.inverse_rms(h_TD), out=self._normed)

    def norm_heads(self) -> Tensor:
        """Normalize queries and keys in place by the root mean square of each head.

        They are also returned.
        """
        return self._rotated.mul_(_inverse_rms(self._rotated, self._eps, self._head_rms))

    def inverse_rms(self, h_TD: Tensor) -> Tensor:
        """Return 1 / the root mean square of each row, [T, 1].

        The next call overwrites it.
        """
        return _inverse_rms(h_TD, self._eps, self._rms)


def _inverse_rms(x: Tensor, eps: Tensor, out: Tensor) -> Tensor:
    torch.linalg.vector_norm(x, 2, -1, True, out=out)
    return torch.addcmul(eps, out, out, value=1 / x.shape[-1], out=out).rsqrt_()

"""Decoding steps as CUDA graphs.

A step that only decodes launches some hundred kernels from Python, which takes longer than their
work until about a hundred sequences decode together. A graph replays them with one call. It has a
fixed shape and fixed addresses:

    n rows, one per slot    ids, positions and the cache rows to write, in one buffer on the device
    length                  how many positions of each slot attention reads

Both are rounded up to a few sizes. A row whose slot does not decode writes to a spare position of
that slot and reads its first one; its output is not used. A shape is captured when it has been
needed ``_WORTH`` times. Steps that also read prompts are computed call by call.

The output matrix is outside the graph: its fp32 logits would take n x V floats per graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ramify.inference.local.kv_cache import DecodeAttention, KeyValueCache
from ramify.inference.local.slots import EngineStep
from ramify.logging import RoomLogger
from ramify.models.dense import DenseModel

_WORTH = 4
"""Steps of a shape before it is captured; capturing it computes the step three times."""
_MIN_LENGTH = 128
_log = RoomLogger("inference")

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], tuple[Callable[[], object], Tensor]]
"""Takes a computation over fixed addresses; returns how to repeat it, and its output."""


class _StepShape(NamedTuple):
    """Size of a captured step."""

    rows: int
    """n"""
    length: int


class CapturedDecoding:
    """Captured decoding steps of a ``DenseModel`` over one cache at a time."""

    def __init__(self, model: DenseModel, capture: Callable[[], Capture] | None = None) -> None:
        """``capture``: makes what captures the computations of one cache; by default as CUDA
        graphs."""
        self._model = model
        self._new_capture = capture or CudaCapture
        self._works = True
        self.clear()

    def clear(self) -> None:
        """Forget all captured steps: the cache is another one. Frees their memory."""
        self._steps: dict[_StepShape, _CapturedStep] = {}
        self._num_seen: Counter[_StepShape] = Counter()
        self._capture = self._new_capture()
        self._addresses = self._addresses_now()

    def weights_changed(self) -> None:
        """Keep the captured steps if the new weights are where the old ones were."""
        if self._addresses_now() != self._addresses:
            self.clear()

    def hidden(self, cache: KeyValueCache, step: EngineStep) -> Tensor | None:
        """Hidden states [len(step.slots), D] of a step without spans; None if it is not captured,
        and has to be computed call by call. ``cache`` is the same from one ``clear`` to the
        next."""
        if step.spans or not self._works:
            return None
        shape = _StepShape(
            min(_rounded(step.slots[-1] + 1), cache.num_slots),
            min(_rounded(max(step.positions) + 1, _MIN_LENGTH), cache.capacity),
        )
        captured = self._steps.get(shape) or self._captured(cache, shape)
        return None if captured is None else captured(step)

    def _captured(self, cache: KeyValueCache, shape: _StepShape) -> _CapturedStep | None:
        self._num_seen[shape] += 1
        if self._num_seen[shape] < _WORTH:
            return None
        try:
            self._steps[shape] = _CapturedStep(self._model, cache, shape, self._capture)
        except RuntimeError as error:
            self._works = False
            _log.warning(
                "decoding_not_captured",
                f"decoding stays without CUDA graphs, which is slower: {error}",
                shown=True,
            )
            return None
        return self._steps[shape]

    def _addresses_now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]


class _CapturedStep:
    """A decoding step of one shape."""

    def __init__(
        self, model: DenseModel, cache: KeyValueCache, shape: _StepShape, capture: Capture
    ) -> None:
        device = cache.kv.device
        self._cache = cache
        # The step before has ended when its tokens are read, so this buffer is free again.
        self._staged_3n = torch.zeros(3, shape.rows, dtype=torch.long)
        if device.type == "cuda":
            self._staged_3n = self._staged_3n.pin_memory()
        self._staged = self._staged_3n.numpy()
        self._inputs_3n = self._staged_3n.to(device)
        self._spare_n = cache.row_of(range(shape.rows), [cache.capacity] * shape.rows)
        self._staged[2] = self._spare_n
        self._inputs_3n.copy_(self._staged_3n)
        ids_n, positions_n, rows_n = self._inputs_3n

        def compute() -> Tensor:
            attend = _FixedAttention(cache, positions_n, rows_n, shape.length)
            return model.hidden(ids_n, positions_n, attend)

        self._replay, self._h_nD = capture(compute)

    def __call__(self, step: EngineStep) -> Tensor:
        """[len(step.slots), D]"""
        slots = step.slots
        self._staged[:2] = 0
        self._staged[2] = self._spare_n
        self._staged[0, slots] = step.ids
        self._staged[1, slots] = step.positions
        self._staged[2, slots] = self._cache.row_of(slots, step.positions)
        self._inputs_3n.copy_(self._staged_3n, non_blocking=True)
        self._replay()
        if slots[-1] + 1 == len(slots):
            return self._h_nD[: len(slots)]
        return self._h_nD.index_select(0, torch.tensor(slots, device=self._h_nD.device))


class _FixedAttention:
    """Attention of one token of each slot, from tensors on the device alone. Implements
    ``dense.CausalAttention``."""

    def __init__(
        self, cache: KeyValueCache, positions_n: Tensor, rows_n: Tensor, length: int
    ) -> None:
        self._cache = cache
        self._write_at = cache.write_rows(rows_n)
        self._decode = DecodeAttention(cache, positions_n, length)

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        self._cache.write(layer, self._write_at, k_TKd, v_TKd)
        return self._decode(layer, q_THd, scale)


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Compute) -> tuple[Callable[[], object], Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Twice beforehand on another stream, as PyTorch asks: libraries allocate at first use.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a trainer's, may allocate at the same time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return graph.replay, output


def _rounded(number: int, least: int = 1) -> int:
    """The next power of two, or one and a half times one: at most half as much again."""
    power = max(1 << max(number - 1, 0).bit_length(), least)
    return 3 * power // 4 if 3 * power // 4 >= max(number, least) else power

"""CUDA graphs for decoding steps of the inference engine.

In such a step, every sequence gets one token.

One step of a small model consists of some 800 kernels. On a GPU it takes ten times as long to
launch them one by one as to run them. A CUDA graph records the launches once and repeats them with
a single call, always with the same shapes and the same memory:

    step ── round up to a ``CudaGraphShape`` ── copy inputs ── replay the shape's graph ── logits

Rounding up adds rows. Each of them repeats the first token of the step, so it writes the same keys
and values to the same place of the cache, and its logits are dropped. A shape that occurs for the
first time runs kernel by kernel, and is recorded when it occurs again.

Steps that also compute prompts have no graph; ``model_runner.py`` runs them kernel by kernel.

Legend: T tokens of the padded step, n slots, K key-value heads, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.inference.local.kv_cache import DecodeAttention, KeyValueCache
from ramify.inference.local.kv_cache_slots import EngineStep
from ramify.models.dense import DenseModel

MAX_GRAPHS = 128
"""Maximum number of recorded CUDA graphs per KV cache. Once it is reached, all are dropped and
recorded again."""
_LEAST_LENGTH = 64

Replay = Callable[[], Tensor]
"""A function that replays a recorded computation and returns the tensor that holds its result."""
Record = Callable[[Callable[[], Tensor]], Replay]
"""A function that records a computation without running it."""


class CudaGraphShape(NamedTuple):
    """The sizes of a decoding step that are fixed in its CUDA graph."""

    tokens: int
    slots: int
    """Number of cache slots up to and including the last one with a decoding sequence."""
    length: int
    """Number of cache positions that are read per slot."""

    @classmethod
    def for_step(cls, step: EngineStep, cache: KeyValueCache) -> CudaGraphShape:
        """Return the CUDA graph shape that fits a decoding step.

        Its sizes are rounded up, so that only a few different graphs are recorded.
        """
        slots = min(_round_up(step.slots[-1] + 1), cache.num_slots)
        longest = max(step.positions) + 1
        length = min(_LEAST_LENGTH * _round_up(-(-longest // _LEAST_LENGTH)), cache.capacity)
        return cls(min(_round_up(len(step.slots)), slots), slots, length)


class DecodeGraphs:
    """The CUDA graphs of decoding steps, one per shape and recorded on demand.

    All of them use the same KV cache.
    """

    def __init__(self, model: DenseModel, cache: KeyValueCache, record: Record) -> None:
        """Create a collection that has recorded no CUDA graphs yet.

        ``record`` records a computation and returns a function that repeats it. On a GPU it is a
        ``CudaGraphRecorder``. On a CPU, pass a function that returns the computation itself.
        """
        self._model = model
        self._cache = cache
        self._record = record
        self._inputs: dict[CudaGraphShape, Tensor] = {}
        self._replays: dict[CudaGraphShape, Replay] = {}
        self._weights: tuple[int, ...] = ()

    def run_step(self, step: EngineStep) -> Tensor:
        """Return the logits of a step in which each sequence decodes one token.

        The step has no prompt tokens. Returns the fp32 logits [n, V] after each of its tokens. The
        next call overwrites them.
        """
        self._check_weights()
        shape = CudaGraphShape.for_step(step, self._cache)
        given = _pack_step(step, shape)
        if shape in self._replays:
            self._inputs[shape].copy_(given)
            logits_TV = self._replays[shape]()
        elif shape in self._inputs:
            logits_TV = self._record_graph(shape, given)
        else:
            if len(self._inputs) >= MAX_GRAPHS:
                self._drop()
            self._inputs[shape] = given.to(self._cache.kv.device)
            logits_TV = self._compute(shape)
        return logits_TV[: len(step.slots)]

    def _record_graph(self, shape: CudaGraphShape, given: Tensor) -> Tensor:
        self._inputs[shape].copy_(given)

        def compute() -> Tensor:
            return self._compute(shape)

        try:
            self._replays[shape] = self._record(compute)
        except RuntimeError as error:
            warnings.warn(
                f"CUDA graphs cannot be recorded on this device ({error}): each step launches its "
                "kernels one by one, which is slower",
                stacklevel=2,
            )
            self._record = lambda work: work
            self._replays[shape] = compute
        return self._replays[shape]()

    def _compute(self, shape: CudaGraphShape) -> Tensor:
        """Return the fp32 logits [T, V] for the current inputs of one CUDA graph shape."""
        packed = self._inputs[shape]
        ids_T, positions_T, slots_T, last_n = torch.split(
            packed, [shape.tokens] * 3 + [shape.slots]
        )
        attend = _PaddedStep(self._cache, positions_T, slots_T, last_n, shape.length)
        return self._model.logits(self._model.hidden(ids_T, positions_T, attend))

    def _check_weights(self) -> None:
        """Drop all graphs if a weight has moved in memory, because graphs read weights at fixed
        addresses."""
        weights = tuple(each.data_ptr() for each in self._model.parameters())
        if weights != self._weights:
            self._drop()
            self._weights = weights

    def _drop(self) -> None:
        self._inputs.clear()
        self._replays.clear()


class CudaGraphRecorder:
    """Records computations as CUDA graphs that can be replayed.

    They share one memory pool, because only one graph runs at a time.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads, such as the trainer's, may use the device meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class _PaddedStep:
    """The attention of a decoding step that is padded to the fixed shape of its CUDA graph.

    Extra rows fill the step up to this shape. Implements ``dense.CausalAttentionKernel``.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        positions_T: Tensor,
        slots_T: Tensor,
        last_n: Tensor,
        length: int,
    ) -> None:
        self._write = cache.writer(slots_T * (cache.heads * cache.capacity) + positions_T)
        self._attend = DecodeAttention(cache, slots_T, last_n, length)

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        self._write(layer, k_TKd, v_TKd)
        return self._attend(layer, q_THd, scale)


def _pack_step(step: EngineStep, shape: CudaGraphShape) -> Tensor:
    """Pack the inputs of a decoding step into one tensor, so that one copy moves them to the
    device.

    It contains the ids [T], positions [T] and slots [T] of the tokens, and the last position of
    each slot [n].
    """
    num_more = shape.tokens - len(step.slots)
    ids, positions, slots = (
        [*each, *[each[0]] * num_more] for each in (step.ids, step.positions, step.slots)
    )
    # A slot that does not decode attends to its first position, so that its unused row is finite.
    last = [0] * shape.slots
    for slot, position in zip(step.slots, step.positions, strict=True):
        last[slot] = position
    return torch.tensor([*ids, *positions, *slots, *last])


def _round_up(number: int) -> int:
    """Round a number up to one of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, …."""
    power = 1 << max(number - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power

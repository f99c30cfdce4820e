"""Model runners, through which the inference engine runs a model.

A runner takes the tokens of one step, returns their logits, and holds the KV cache.

A model gets the fastest runner that gives the same results as the model itself:

    DenseModel             ``BatchedStepModelRunner``: all spans of a step in one pass over one
                           token axis; on a CPU, small models run as a ``CpuOptimizedDecoder``, and
                           keys may be stored transposed (``transposed_key_cache.py``); on a GPU,
                           steps that only decode are CUDA graphs (``decode_graphs.py``)
    transformers module    ``BatchedStepModelRunner`` through its attention interface, if a probe
                           gives the logits of the module alone (``models.training_forward``);
                           otherwise ``TransformersModelRunner``: one sequence at a time, with
                           transformers' own cache
    in fixed shapes        ``BatchInvariantModelRunner``: a token's logits have the same bits
                           whatever else is in the step, in the cache, or in the slot's past
                           (``models/batch_invariant_forward.py``)

``TransformersModelRunner`` is correct for all kinds of models, and slow. What a model's cache
supports is tested once when the model is loaded, since some caches silently give wrong results for
unsupported operations:

    cut       crop the cache to its first tokens, for a sequence that shares only those
    extend    extend it by several tokens at once; state-space models continue one by one

``BatchInvariantModelRunner`` computes tokens in blocks of 64, one pass each, so a step of one
sequence costs as much as a step of 64. With products in bf16, weights stay in fp32 as in the
trainer, and are cast once per step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.inference.local import transposed_key_cache
from ramify.inference.local.cpu_optimized_decoder import CpuOptimizedDecoder
from ramify.inference.local.decode_graphs import CudaGraphRecorder, DecodeGraphs, Record
from ramify.inference.local.kv_cache import KeyValueCache, KvCacheLayout, PrefillDecodeAttention
from ramify.inference.local.kv_cache_slots import CacheSlotMove, EngineStep, SlotTokenSpan
from ramify.inference.local.transposed_key_cache import TransposedKeyCache
from ramify.models.batch_invariant_forward import (
    BLOCK,
    apply_in_blocks,
    cast_for_products,
    causal_attention,
    consecutive_token_spans,
    round_up_to_block,
)
from ramify.models.dense import CausalAttentionKernel, DenseModel
from ramify.models.moe_routing import MoeRouters
from ramify.models.training_forward import TransformersTrunk


class BatchInvariantModelRunner:
    """A batch-invariant model runner: its operations have fixed shapes.

    The logits of a token therefore do not depend on the rest of the batch. Implements
    ``ModelRunner``.
    """

    is_fixed = True
    routers: MoeRouters | None = None
    routes: Sequence[tuple[int, ...]] = ()

    def __init__(self, model: DenseModel, products: torch.dtype) -> None:
        """Create a runner that computes the model in fixed shapes.

        ``products`` is the precision of matrix products, which must equal the trainer's.
        """
        shape, parameter = model.shape, next(model.parameters())
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
        self._model = model
        self._products = products
        self._device = parameter.device
        self._layout = KvCacheLayout(*sizes, products, parameter.device)
        self.bytes_per_token = self._layout.bytes_per_token
        self._cache = KeyValueCache(self._layout, 1, BLOCK)

    @property
    def cache_bytes(self) -> int:
        return self._cache.kv.untyped_storage().nbytes()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        tokens = list(zip(step.slots, step.positions, step.ids, strict=True))
        rows = list(range(len(tokens)))
        for span, is_wanted in zip(step.spans, wanted, strict=True):
            tokens += [(span.slot, span.start + at, id) for at, id in enumerate(span.ids)]
            rows += [len(tokens) - 1] if is_wanted else []
        return self._logits(self._cache, tokens, rows)

    def copy_or_swap_slots(self, change: CacheSlotMove) -> None:
        self._cache.copy_or_swap_slots(change)

    def resize_cache(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        self._cache = self._cache.resized(stay, num_slots, round_up_to_block(capacity))

    def invalidate_cache(self) -> None:
        """Do nothing, because every cache position is written before it is read."""

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        cache = KeyValueCache(self._layout, 1, round_up_to_block(len(ids)))
        tokens = [(0, position, id) for position, id in enumerate(SlotTokenSpan(0, 0, ids).ids)]
        return self._logits(cache, tokens, range(len(ids)))

    def _logits(
        self, cache: KeyValueCache, tokens: Sequence[tuple[int, int, int]], rows: Sequence[int]
    ) -> Tensor:
        """Return the logits of some tokens, computed in blocks of fixed size.

        Each token is a tuple of cache slot, position and id. Returns the fp32 logits [n, V] after
        the tokens with the indices ``rows``.
        """
        with self._precision():
            h_TD = torch.cat(
                [
                    self._compute_block(cache, tokens[start : start + BLOCK])
                    for start in range(0, len(tokens), BLOCK)
                ]
            )
            index = torch.tensor(rows, dtype=torch.long, device=self._device)
            return apply_in_blocks(self._model.logits, h_TD.index_select(0, index))

    def _compute_block(
        self, cache: KeyValueCache, tokens: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        """Return the hidden states [n, D] of at most ``BLOCK`` tokens.

        They are computed as one padded block.
        """
        slots, positions, ids = (list(each) for each in zip(*tokens, strict=True))
        padding = [0] * (BLOCK - len(tokens))
        ids_T, positions_T = torch.tensor(
            [[*ids, *padding], [*positions, *padding]], device=self._device
        )
        attend = _CachedBlock(cache, slots, positions)
        return self._model.hidden(ids_T, positions_T, attend)[: len(tokens)]

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._products == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._products)


class _CachedBlock:
    """The attention of one block of tokens over the KV cache.

    Implements ``dense.CausalAttentionKernel``.
    """

    def __init__(self, cache: KeyValueCache, slots: list[int], positions: list[int]) -> None:
        self._cache = cache
        self._runs = consecutive_token_spans(slots, positions)
        self._num = len(slots)
        self._write = cache.writer(torch.tensor(cache.token_rows(slots, positions)))

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        q_THd, k_TKd, v_TKd = cast_for_products(q_THd, k_TKd, v_TKd)
        self._write(layer, k_TKd[: self._num], v_TKd[: self._num])
        o_THd = torch.zeros_like(q_THd)
        for run in self._runs:
            at, length = (
                slice(run.row, run.row + run.num),
                round_up_to_block(run.position + run.num),
            )
            k, v = (self._cache.kv[which, layer, run.source, :, :length] for which in (0, 1))
            o_THd[at] = causal_attention(q_THd[at], k, v, run.position, scale)
        return o_THd


class TransformersModelRunner:
    """A model runner for any transformers module.

    It computes one sequence at a time with transformers' own cache.
    """

    bytes_per_token = cache_bytes = 0
    is_fixed = False
    routers: MoeRouters | None = None
    routes: Sequence[tuple[int, ...]] = ()

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._device = next(module.parameters()).device
        takes = inspect.signature(module.forward).parameters
        # State-space models have their own name for the cache.
        self._field = "cache_params" if "cache_params" in takes else "past_key_values"
        self._memories: list[_Memory] = []
        self._can_extend = self._can_cut = True
        self._try_out()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        single = [
            SlotTokenSpan(*each)
            for each in zip(step.slots, step.positions, ([id] for id in step.ids), strict=True)
        ]
        logits, routes = [], []
        for span in [*single, *step.spans]:
            logits.append(self._logits_after_span(self._memories[span.slot], span))
            routes += [] if self.routers is None else self.routers.recorded_experts(None)[-1:]
        is_wanted = [*itertools.repeat(True, len(single)), *wanted]
        self.routes = list(itertools.compress(routes, is_wanted))
        chosen = list(itertools.compress(logits, is_wanted))
        return torch.stack(chosen) if chosen else torch.empty(0)

    def copy_or_swap_slots(self, change: CacheSlotMove) -> None:
        memories = self._memories
        if change.kind == "swap":
            memories[change.source], memories[change.target] = (
                memories[change.target],
                memories[change.source],
            )
        else:
            memories[change.target] = memories[change.source].copy()

    def resize_cache(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        memories = [self._memories[slot] for slot in stay if slot < len(self._memories)]
        self._memories = memories + [_Memory() for _ in range(num_slots - len(memories))]

    def invalidate_cache(self) -> None:
        self._memories = [_Memory() for _ in self._memories]

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        outputs = self._module(
            input_ids=torch.tensor([list(ids)], device=self._device), use_cache=False
        )
        logits_TV: Tensor = outputs.logits[0].float()
        return logits_TV

    def _logits_after_span(self, memory: _Memory, span: SlotTokenSpan) -> Tensor:
        """Return the fp32 logits [V] after the last token of a span in a KV-cache slot.

        ``memory`` is the model's cache of the tokens before the span. If it cannot be cut at the
        beginning of the span, the tokens before are recomputed.
        """
        new = list(span.ids)
        if not memory.cut(span.start, self._can_cut):
            new, memory.ids, memory.cache = [*memory.ids[: span.start], *new], [], None
        # Some caches accept only one new token at a time.
        whole = self._can_extend or memory.cache is None
        for part in [new] if whole else [[token] for token in new]:
            logits_V = self._forward_pass(memory, part)
        return logits_V

    def _forward_pass(self, memory: _Memory, ids: list[int]) -> Tensor:
        known = {} if memory.cache is None else {self._field: memory.cache}
        outputs = self._module(
            input_ids=torch.tensor([ids], device=self._device), use_cache=True, **known
        )
        memory.cache = getattr(outputs, self._field)
        memory.ids += ids
        logits_V: Tensor = outputs.logits[0, -1].float()
        return logits_V

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Test whether the model's cache can be extended and truncated without changing the logits.

        The logits are compared with logits without a cache.
        """
        vocabulary = self._module.config.get_text_config().vocab_size
        ids = [(1 + 13 * index) % vocabulary for index in range(8)]
        other = [*ids[:4], *((5 + 7 * index) % vocabulary for index in range(4))]
        memory = _Memory()
        self._logits_after_span(memory, SlotTokenSpan(0, 0, ids[:3]))
        self._can_extend = self._is_cache_correct(memory, SlotTokenSpan(0, 3, ids[3:]), ids)
        memory = _Memory()
        self._logits_after_span(memory, SlotTokenSpan(0, 0, ids))
        self._can_cut = self._can_extend and self._is_cache_correct(
            memory, SlotTokenSpan(0, 4, other[4:]), other
        )

    def _is_cache_correct(self, memory: _Memory, span: SlotTokenSpan, ids: Sequence[int]) -> bool:
        try:
            cached = self._logits_after_span(memory, span)
        except (NotImplementedError, ValueError, RuntimeError, AttributeError, IndexError):
            return False
        expected = self.all_logits(ids)[-1]
        tolerance = 1e-3 if self._module.dtype == torch.float32 else 5e-2
        return bool(torch.allclose(cached, expected, rtol=tolerance, atol=tolerance))


class _Memory:
    """The cached state of one KV-cache slot for a ``transformers`` model.

    It consists of the token ids computed so far and the model's cache of them.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Any = None

    def copy(self) -> _Memory:
        other = _Memory()
        other.ids, other.cache = list(self.ids), copy.deepcopy(self.cache)
        return other

    def cut(self, length: int, can_cut: bool) -> bool:
        """Truncate the cache to its first ``length`` tokens.

        Returns False if that is not possible.
        """
        if length == len(self.ids):
            return True
        if not can_cut or self.cache is None:
            return False
        try:
            self.cache.crop(length)
        except (NotImplementedError, ValueError, RuntimeError):
            return False  # such as a sliding window that has moved past these tokens
        del self.ids[length:]
        return bool(self.cache.get_seq_length() == length)


class ModelRunner(Protocol):
    """The interface through which the inference engine runs a model.

    A runner computes steps, and holds a cache with one slot per sequence.
    """

    bytes_per_token: int
    """Cache bytes per token. 0 if the cache is not allocated in advance."""

    is_fixed: bool
    """True if the runner computes in fixed shapes (``BatchInvariantModelRunner``)."""

    routers: MoeRouters | None
    """Routers of the mixture-of-experts model, if experts are recorded."""

    routes: Sequence[tuple[int, ...]]
    """Per row of the latest logits, the experts that its token was routed to, k per layer. Empty
    unless recorded."""

    @property
    def cache_bytes(self) -> int:
        """The number of bytes used by the cache, or 0 if unknown."""
        ...

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        """Return the logits of an engine step, and cache the keys and values of its tokens.

        Returns fp32 logits [n, V]: after each decoding token, then after each span whose ``wanted``
        is True.
        """
        ...

    def copy_or_swap_slots(self, change: CacheSlotMove) -> None:
        """Copy the first tokens of one KV-cache slot to another, or swap two slots."""
        ...

    def resize_cache(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        """Change the number and length of cache slots.

        The first new slots get the contents of the old slots that are listed in ``stay``.
        """
        ...

    def invalidate_cache(self) -> None:
        """Invalidate the entire cache, so that none of it is read again."""
        ...

    def all_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the fp32 logits [T, V] at every position of the given ids.

        The engine's cache is not used.
        """
        ...


class DecoderModel(Protocol):
    """A language model that processes all tokens of a step as one flat batch.

    An example is ``models.dense.DenseModel``.
    """

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttentionKernel,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of tokens after the final norm.

        They are [T, D] for all tokens, or [N, D] for the tokens with the indices ``rows_N``.
        """
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """Return the fp32 logits [N, V] for N hidden states."""
        ...


class BatchedStepModelRunner:
    """A model runner that computes all tokens of a step in one pass over the model."""

    is_fixed = False
    routers: MoeRouters | None = None
    routes: Sequence[tuple[int, ...]] = ()

    def __init__(
        self, decoder: DecoderModel, layout: KvCacheLayout, record: Record | None = None
    ) -> None:
        """Create a runner with an empty cache.

        ``record`` records and repeats decode-only steps (``decode_graphs.py``). If it is None, such
        steps run like all others.
        """
        self._decoder = decoder
        self._layout = layout
        self._record = record
        self.bytes_per_token = layout.bytes_per_token
        is_transposed = record is None and transposed_key_cache.is_faster(layout)
        self._set_cache((TransposedKeyCache if is_transposed else KeyValueCache)(layout, 1, 1))

    @property
    def cache_bytes(self) -> int:
        return self._cache.kv.untyped_storage().nbytes()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        if self._graphs is not None and not step.spans:
            return self._graphs.run_step(step)
        rows_N = None
        if step.spans:
            rows = list(range(len(step.slots)))
            end = len(rows) - 1
            for span, is_wanted in zip(step.spans, wanted, strict=True):
                end += len(span.ids)
                if is_wanted:
                    rows.append(end)
            rows_N = torch.tensor(rows, dtype=torch.long, device=self._layout.device)
        h_ND = self._hidden_states(step, self._cache, rows_N, wanted)
        if self.routers is not None:
            self.routes = self.routers.recorded_experts(rows_N)
        return self._decoder.logits(h_ND)

    def copy_or_swap_slots(self, change: CacheSlotMove) -> None:
        self._cache.copy_or_swap_slots(change)

    def resize_cache(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        self._set_cache(self._cache.resized(stay, num_slots, capacity))

    def invalidate_cache(self) -> None:
        """Do nothing, because every cache position is written before it is read."""

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        cache = KeyValueCache(self._layout, 1, len(ids))
        step = EngineStep(spans=[SlotTokenSpan(0, 0, ids)])
        return self._decoder.logits(self._hidden_states(step, cache, None, [True]))

    def _set_cache(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._graphs: DecodeGraphs | None = None
        if self._record is not None and isinstance(self._decoder, DenseModel):
            self._graphs = DecodeGraphs(self._decoder, cache, self._record)

    def _hidden_states(
        self,
        step: EngineStep,
        cache: KeyValueCache,
        rows_N: Tensor | None,
        wanted: Sequence[bool],
    ) -> Tensor:
        ids, positions = list(step.ids), list(step.positions)
        for span in step.spans:
            ids += span.ids
            positions += range(span.start, span.end)
        ids_T, positions_T = torch.tensor([ids, positions], device=self._layout.device)
        attend = PrefillDecodeAttention(cache, step, wanted)
        return self._decoder.hidden(ids_T, positions_T, attend, rows_N)


class _PreparedRunner(BatchedStepModelRunner):
    def __init__(self, decoder: CpuOptimizedDecoder, layout: KvCacheLayout) -> None:
        super().__init__(decoder, layout)
        self._prepared = decoder

    def invalidate_cache(self) -> None:
        # PyTorch's fused AdamW changes weights without a new version number, so copies may be old.
        self._prepared.drop_weight_copies()


def create_runner(model: nn.Module, fixed_shapes: torch.dtype | None = None) -> ModelRunner:
    """Return the fastest model runner that does not change the results of ``model``.

    If ``fixed_shapes`` is a data type, return a runner that computes in fixed shapes, with matrix
    products in that type. Raises ConfigError if the model does not support that.
    """
    if fixed_shapes is not None:
        if not isinstance(model, DenseModel):
            raise ConfigError(f"a {type(model).__name__} cannot compute in fixed shapes")
        return BatchInvariantModelRunner(model, fixed_shapes)
    if isinstance(model, DenseModel):
        shape, parameter = model.shape, next(model.parameters())
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
        layout = KvCacheLayout(*sizes, parameter.dtype, parameter.device)
        if CpuOptimizedDecoder.is_worthwhile_for(model):
            return _PreparedRunner(CpuOptimizedDecoder(model), layout)
        is_cuda = parameter.device.type == "cuda"
        return BatchedStepModelRunner(model, layout, CudaGraphRecorder() if is_cuda else None)
    return _try_single_pass(model) or TransformersModelRunner(model)


class _ModuleDecoder:
    """An adapter that gives a transformers module the interface ``DecoderModel``."""

    def __init__(self, trunk: TransformersTrunk) -> None:
        self._trunk = trunk

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttentionKernel,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        with self._trunk.forward_context():
            h_TD = self._trunk.hidden_with_attention(ids_T, positions_T, attend)
        return h_TD if rows_N is None else h_TD.index_select(0, rows_N)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self._trunk.logits(h_ND)


@torch.inference_mode()
def _try_single_pass(module: Any) -> BatchedStepModelRunner | None:
    """Return a single-pass runner for a transformers module, or None if it does not support one."""
    try:
        trunk = TransformersTrunk(module)
    except ConfigError:
        return None
    # A step needs the same: attention that can be replaced, and no other mixing of tokens.
    if not trunk.can_share_prefixes:
        return None
    try:
        runner = BatchedStepModelRunner(_ModuleDecoder(trunk), _layout(module))
        agrees = _is_consistent(runner, module)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None
    return runner if agrees else None


def _is_consistent(runner: BatchedStepModelRunner, module: Any) -> bool:
    """Return True if chunking and batching sequences leaves their logits unchanged.

    Two test sequences are compared with each one alone.
    """
    vocabulary = module.config.get_text_config().vocab_size
    first, second = ([(start + 13 * index) % vocabulary for index in range(8)] for start in (1, 5))
    runner.resize_cache([], 2, 8)
    # Each kind of step: a prompt, one beside decoding, decoding alone, and a continued prompt.
    steps = [
        EngineStep(spans=[SlotTokenSpan(0, 0, first[:5])]),
        EngineStep([0], [5], first[5:6], [SlotTokenSpan(1, 0, second[:6])]),
        EngineStep([0, 1], [6, 6], [first[6], second[6]]),
        EngineStep(spans=[SlotTokenSpan(0, 7, first[7:])]),
    ]
    logits = torch.cat([runner.forward(step, [True] * len(step.spans)) for step in steps])
    inputs = torch.tensor([first, second], device=logits.device)
    all_logits = module(input_ids=inputs, use_cache=False).logits.float()
    expected = all_logits[[0, 0, 1, 0, 1, 0], [4, 5, 5, 6, 6, 7]]
    tolerance = 1e-3 if module.dtype == torch.float32 else 5e-2
    return bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance))


def _layout(module: Any) -> KvCacheLayout:
    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvCacheLayout(config.num_hidden_layers, heads, size, module.dtype, module.device)

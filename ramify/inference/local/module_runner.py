"""Runner for any causal language model of transformers, with transformers' own cache per slot.

Correct for every kind of model, and slow: each sequence runs through the model by itself. What a
model's cache supports is tested once when the model is loaded, since some caches silently give
wrong results for unsupported operations:

    cut       crop the cache to its first tokens, for a sequence that shares only those
    extend    extend it by several tokens at once; state-space models continue one by one
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ramify.inference.local.slots import SlotMove
from ramify.inference.local.step import EngineStep, SlotSpan


class ModuleRunner:
    """Runs a transformers module."""

    bytes_per_token = cache_bytes = 0
    is_fixed = False

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._device = next(module.parameters()).device
        takes = inspect.signature(module.forward).parameters
        self._field = "cache_params" if "cache_params" in takes else "past_key_values"
        self._memories: list[_Memory] = []
        self._can_extend = self._can_cut = True
        self._try_out()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        single = [
            SlotSpan(*each)
            for each in zip(step.slots, step.positions, ([id] for id in step.ids), strict=True)
        ]
        logits = [self._after(self._memories[span.slot], span) for span in [*single, *step.spans]]
        chosen = [*logits[: len(single)], *itertools.compress(logits[len(single) :], wanted)]
        return torch.stack(chosen) if chosen else torch.empty(0)

    def change(self, change: SlotMove) -> None:
        memories = self._memories
        if change.kind == "swap":
            memories[change.source], memories[change.target] = (
                memories[change.target],
                memories[change.source],
            )
        else:
            memories[change.target] = memories[change.source].copy()

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        memories = [self._memories[slot] for slot in stay if slot < len(self._memories)]
        self._memories = memories + [_Memory() for _ in range(num_slots - len(memories))]

    def forget(self) -> None:
        self._memories = [_Memory() for _ in self._memories]

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        outputs = self._module(
            input_ids=torch.tensor([list(ids)], device=self._device), use_cache=False
        )
        logits_TV: Tensor = outputs.logits[0].float()
        return logits_TV

    def _after(self, memory: _Memory, span: SlotSpan) -> Tensor:
        """fp32 logits [V] after a span, whose beginning is in ``memory``."""
        new = list(span.ids)
        if not memory.cut(span.start, self._can_cut):
            new, memory.ids, memory.cache = [*memory.ids[: span.start], *new], [], None
        whole = self._can_extend or memory.cache is None
        for part in [new] if whole else [[token] for token in new]:
            logits_V = self._pass(memory, part)
        return logits_V

    def _pass(self, memory: _Memory, ids: list[int]) -> Tensor:
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
        """Find out what the cache supports, by comparing logits."""
        vocabulary = self._module.config.get_text_config().vocab_size
        ids = [(1 + 13 * index) % vocabulary for index in range(8)]
        other = [*ids[:4], *((5 + 7 * index) % vocabulary for index in range(4))]
        memory = _Memory()
        self._after(memory, SlotSpan(0, 0, ids[:3]))
        self._can_extend = self._gives(memory, SlotSpan(0, 3, ids[3:]), ids)
        memory = _Memory()
        self._after(memory, SlotSpan(0, 0, ids))
        self._can_cut = self._can_extend and self._gives(memory, SlotSpan(0, 4, other[4:]), other)

    def _gives(self, memory: _Memory, span: SlotSpan, ids: Sequence[int]) -> bool:
        try:
            cached = self._after(memory, span)
        except (NotImplementedError, ValueError, RuntimeError, AttributeError, IndexError):
            return False
        expected = self.all_logits(ids)[-1]
        tolerance = 1e-3 if self._module.dtype == torch.float32 else 5e-2
        return bool(torch.allclose(cached, expected, rtol=tolerance, atol=tolerance))


class _Memory:
    """Contents of a slot: the ids that went into it, and transformers' cache of them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Any = None

    def copy(self) -> _Memory:
        other = _Memory()
        other.ids, other.cache = list(self.ids), copy.deepcopy(self.cache)
        return other

    def cut(self, length: int, can_cut: bool) -> bool:
        """Keep only the first ``length`` tokens; False if that is not possible."""
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

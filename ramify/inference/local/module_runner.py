"""Any causal language model of transformers under the engine, with its own cache of one sequence per slot.

Correct for every kind of model, and slow: each sequence goes through the model by itself. ``Dense`` computes the usual
ones together (``runner.py``). Where a kind of cache cannot be cut back to its first tokens (state-space models), what
was computed is only used by a sequence that goes on exactly where it ended.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ramify.inference.local.slots import Change, Span


class ModuleRunner:
    """Runs a transformers module."""

    bytes_per_token = 0

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._device = next(module.parameters()).device
        self._caches: list[_Remembered] = []

    def forward(self, spans: Sequence[Span], wanted: Sequence[bool]) -> Tensor:
        done = [self._one(span) for span in spans]
        chosen = [logits_V for logits_V, is_wanted in zip(done, wanted, strict=True) if is_wanted]
        return torch.stack(chosen) if chosen else torch.empty(0)

    def change(self, change: Change) -> None:
        caches = self._caches
        if change.kind == "swap":
            caches[change.source], caches[change.target] = caches[change.target], caches[change.source]
            return
        source = caches[change.source]
        caches[change.target] = _Remembered(copy.deepcopy(source.cache), list(source.ids))

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        kept = [self._caches[slot] for slot in stay if slot < len(self._caches)]
        self._caches = kept + [_Remembered(None, []) for _ in range(num_slots - len(kept))]

    def forget(self) -> None:
        self._caches = [_Remembered(None, []) for _ in self._caches]

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        outputs = self._module(input_ids=torch.tensor([list(ids)], device=self._device), use_cache=False)
        logits_TV: Tensor = outputs.logits[0].float()
        return logits_TV

    def _one(self, span: Span) -> Tensor:
        """fp32 logits [V] after one span."""
        remembered = self._caches[span.slot]
        remembered.ids = remembered.ids[: span.start]
        ids = list(span.ids)
        if remembered.cache is not None and not _cut(remembered.cache, span.start):
            remembered.cache = None
        if remembered.cache is None:  # begun anew, from the tokens that were computed before
            ids = [*remembered.ids, *ids]
        outputs = self._module(
            input_ids=torch.tensor([ids], device=self._device), past_key_values=remembered.cache, use_cache=True
        )
        remembered.cache = outputs.past_key_values
        remembered.ids += span.ids
        logits_V: Tensor = outputs.logits[0, -1].float()
        return logits_V


class _Remembered:
    """What a slot holds: a cache of transformers, and the ids that went into it."""

    def __init__(self, cache: Any, ids: list[int]) -> None:
        self.cache, self.ids = cache, ids


def _cut(cache: Any, length: int) -> bool:
    """Leave the first ``length`` tokens of a cache; False where it cannot be cut."""
    have = cache.get_seq_length()
    if have == length:
        return True
    if have < length or not hasattr(cache, "crop") or any(not hasattr(layer, "crop") for layer in cache.layers):
        return False
    try:
        cache.crop(length)
    except (NotImplementedError, ValueError, RuntimeError):
        return False
    return bool(cache.get_seq_length() == length)

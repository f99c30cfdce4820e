"""Decoding over transposed keys gives the tokens and log-probabilities of a plain forward pass, and
the attention of the cache that stores keys as they come."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ramify.inference.local import transposed_key_cache
from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.kv_cache import KeyValueCache, KvCacheLayout, PrefillDecodeAttention
from ramify.inference.local.kv_cache_slots import CacheSlotMove, EngineStep, SlotTokenSpan
from ramify.inference.local.transposed_key_cache import TransposedKeyCache, is_faster
from tests.inference.helpers import drained, engine
from tests.inference.test_engine import POLICY, assert_as_expected, requests

HEADS, SIZE = 2, 8
LAYOUT = KvCacheLayout(2, HEADS, SIZE, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("least_heads", [0, 1000])
@pytest.mark.parametrize(
    "room", [{"slots": 24}, {"slots": 5}, {"slots": 7, "cache_bytes": 200_000}]
)
def test_samples_are_those_of_a_plain_forward_pass(
    room: dict[str, int], least_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transposed_key_cache, "is_faster", lambda layout: True)
    monkeypatch.setattr(transposed_key_cache, "_LEAST_HEADS", least_heads)
    asked = [*requests(30, seed=5), *requests(12, shared=70, seed=6)]
    running = engine(POLICY, **room)
    for request in asked:
        running.add(GenerationState(**request))
    assert_as_expected(drained(running), asked)


class BothCaches:
    """Makes the same steps with both kinds of cache, and compares the attention of each."""

    def __init__(self, num_slots: int, capacity: int, group: int) -> None:
        self.caches = [
            kind(LAYOUT, num_slots, capacity) for kind in (KeyValueCache, TransposedKeyCache)
        ]
        self._heads = HEADS * group
        torch.manual_seed(0)

    def step(self, step: EngineStep) -> None:
        inputs = [
            torch.randn(step.num_tokens, heads, SIZE) for heads in (self._heads, HEADS, HEADS)
        ]
        for scale in (1.0, SIZE**-0.5):
            plain, transposed = (self._outputs(cache, step, inputs, scale) for cache in self.caches)
            torch.testing.assert_close(transposed, plain, rtol=0, atol=1e-5)

    def _outputs(
        self, cache: KeyValueCache, step: EngineStep, inputs: list[Tensor], scale: float
    ) -> Tensor:
        q, k, v = inputs
        wanted = [index % 3 > 0 for index in range(len(step.spans))]
        attend = PrefillDecodeAttention(cache, step, wanted)
        outputs = [attend(layer, q + layer, k - layer, v, scale) for layer in (0, 1)]
        # The last tokens of spans have the same outputs when only these are computed.
        rows, end = list(range(len(step.slots))), len(step.slots)
        for span, is_wanted in zip(step.spans, wanted, strict=True):
            end += len(span.ids)
            rows += [end - 1] if is_wanted else []
        attend = PrefillDecodeAttention(cache, step, wanted)
        at_wanted = attend.attend_for_logits(1, q[rows] + 1, k - 1, v, scale)
        torch.testing.assert_close(at_wanted, outputs[1][rows], rtol=0, atol=1e-5)
        return torch.stack(outputs)

    def move(self, *changes: CacheSlotMove) -> None:
        for cache in self.caches:
            for change in changes:
                cache.copy_or_swap_slots(change)

    def resize(self, stay: list[int], num_slots: int, capacity: int) -> None:
        self.caches = [cache.resized(stay, num_slots, capacity) for cache in self.caches]


def decoding(slots: list[int], lengths: list[int]) -> EngineStep:
    """Return a step that decodes the next token of sequences of some lengths."""
    return EngineStep(slots, [lengths[slot] for slot in slots], [5] * len(slots))


@torch.inference_mode()
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("equal", [True, False])
def test_attention_is_that_of_the_plain_cache(group: int, *, equal: bool) -> None:
    pick = random.Random(group)
    num = 20
    both = BothCaches(num, 100, group)  # the transposed cache rounds it up to 128
    lengths = [70] * num if equal else [pick.randint(1, 80) for _ in range(num)]
    spans = [SlotTokenSpan(slot, 0, [5] * length) for slot, length in enumerate(lengths)]
    both.step(EngineStep(spans=spans))
    for _ in range(20):  # more than the steps that are prepared together
        both.step(decoding(list(range(num)), lengths))
        lengths = [length + 1 for length in lengths]
    both.move(
        CacheSlotMove("copy", 3, 5, 33), CacheSlotMove("swap", 2, 9, max(lengths[2], lengths[9]))
    )
    lengths[5] = min(33, lengths[3])
    lengths[2], lengths[9] = lengths[9], lengths[2]
    # Only some slots decode, and another gets a span of several tokens.
    some = [slot for slot in range(num) if slot not in (4, 6)]
    step = decoding(some, lengths)
    step.spans = [SlotTokenSpan(4, lengths[4], [5] * 7)]
    both.step(step)
    lengths = [length + (7 if slot == 4 else slot in some) for slot, length in enumerate(lengths)]
    stay = [slot for slot in range(num) if slot % 5]
    both.resize(stay, 18, 300)
    lengths = [lengths[slot] for slot in stay]
    for slots in ([*range(16)], [*range(1, 16)], [*range(1, 16)]):
        both.step(decoding(slots, lengths))
        lengths = [length + (slot in slots) for slot, length in enumerate(lengths)]


@torch.inference_mode()
@pytest.mark.parametrize("capacity", [64, 192, 256, 1000])
def test_sequences_fill_their_slots_to_the_last_position(capacity: int) -> None:
    both = BothCaches(14, capacity, 2)
    lengths = [capacity - 3 - slot % 2 for slot in range(14)]
    both.step(EngineStep(spans=[SlotTokenSpan(slot, 0, [5] * n) for slot, n in enumerate(lengths)]))
    for _ in range(3):
        both.step(decoding(list(range(14)), lengths))
        lengths = [length + 1 for length in lengths]


def test_keys_are_transposed_only_in_fp32_on_a_cpu() -> None:
    assert not is_faster(LAYOUT._replace(dtype=torch.bfloat16))
    assert not is_faster(LAYOUT._replace(device=torch.device("meta")))

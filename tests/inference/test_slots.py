"""Assignment of slots, copies of common prefixes, and eviction. Tokens are written as letters."""

from __future__ import annotations

from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.kv_cache_slots import (
    CacheSlotMove,
    CacheSlotTable,
    EngineStep,
    SlotTokenSpan,
)


def generation(text: str, affinity: str = "") -> GenerationState:
    return GenerationState([ord(letter) for letter in text], max_tokens=9, affinity=affinity)


def admitted(
    slots: CacheSlotTable, text: str, affinity: str = ""
) -> tuple[int, list[CacheSlotMove], int]:
    """Admit a prompt and mark it as computed; return (slot, changes, number of reused tokens)."""
    found = slots.admit(generation(text, affinity))
    assert found is not None
    slot, changes = found
    ready = int(slots.length_S[slot])
    slots.mark_computed(EngineStep(spans=[SlotTokenSpan(slot, ready, text[ready:])]))  # type: ignore[arg-type]
    return slot, changes, ready


def test_next_turn_reuses_its_own_slot() -> None:
    slots = CacheSlotTable(3, 16)
    assert admitted(slots, "abcd") == (0, [], 0)
    slots.release(0)
    assert admitted(slots, "abcdefg") == (0, [], 4)


def test_sibling_copies_the_common_prefix() -> None:
    slots = CacheSlotTable(3, 16)
    admitted(slots, "abcdX")
    assert admitted(slots, "abcdYY") == (1, [CacheSlotMove("copy", 0, 1, 4)], 4)
    slots.release(0)
    slots.release(1)
    assert admitted(slots, "abZ") == (2, [CacheSlotMove("copy", 0, 2, 2)], 2)


def test_the_last_token_is_always_computed() -> None:
    slots = CacheSlotTable(2, 16)
    admitted(slots, "abcd")
    slots.release(0)
    assert admitted(slots, "abcd") == (1, [CacheSlotMove("copy", 0, 1, 3)], 3)


def test_least_recently_used_slot_is_taken() -> None:
    slots = CacheSlotTable(3, 16)
    for slot, text in enumerate(["aa", "bb", "cc"]):
        admitted(slots, text)
        slots.release(slot)
    admitted(slots, "aaa")  # slot 0 is used again
    slots.release(0)
    assert admitted(slots, "xyz")[0] == 1
    assert admitted(slots, "ccc")[::2] == (2, 2)


def test_waiting_parents_keep_their_slots_while_children_run() -> None:
    slots = CacheSlotTable(3, 16)
    for slot, (text, affinity) in enumerate([("root", "0"), ("kid1", "0.0"), ("other", "7")]):
        admitted(slots, text, affinity)
        slots.release(slot)
    assert (
        admitted(slots, "next", "0.1")[0] == 1
    )  # least recently used except its parent: the finished sibling
    slots.release(1)
    assert admitted(slots, "last", "0.1.0")[0] == 2
    assert admitted(slots, "root2", "0")[::2] == (0, 4)


def test_admission_fails_without_a_free_slot() -> None:
    slots = CacheSlotTable(1, 16)
    admitted(slots, "ab")
    assert slots.admit(generation("cd")) is None


def test_admission_waits_for_a_long_common_prefix() -> None:
    prompt = "p" * 40
    slots = CacheSlotTable(3, 64)
    first = slots.admit(generation(prompt + "x"))
    assert first == (0, [])
    assert (
        slots.admit(generation(prompt + "y")) is None
    )  # being computed: it will be there in a step or two
    assert slots.admit(generation("short")) == (1, [])
    slots.mark_computed(EngineStep(spans=[SlotTokenSpan(0, 0, range(41))]))
    assert admitted(slots, prompt + "y") == (2, [CacheSlotMove("copy", 0, 2, 40)], 40)


def test_no_prefix_is_shared_without_reuse() -> None:
    slots = CacheSlotTable(2, 64, reuse=False)
    admitted(slots, "a" * 50)
    assert admitted(slots, "a" * 51) == (1, [], 0)
    slots.release(0)
    assert admitted(slots, "a" * 50) == (0, [], 0)


def test_compaction_moves_running_slots_together() -> None:
    slots = CacheSlotTable(6, 16)
    for text in ["aa", "bb", "cc", "dd", "ee"]:
        admitted(slots, text)
    slots.release(1)
    assert slots.compact() == []  # one hole among four is left
    slots.release(0)
    slots.release(2)
    assert slots.compact() == [CacheSlotMove("swap", 4, 0, 2), CacheSlotMove("swap", 3, 1, 2)]
    assert slots.running() == [0, 1]
    assert admitted(slots, "aab")[::2] == (4, 2)  # idle slots are still known after the move


def test_resize_keeps_the_slots_that_fit() -> None:
    slots = CacheSlotTable(4, 8)
    for text in ["aaaa", "bbbb", "cccccccc"]:
        admitted(slots, text)
    slots.release(0)
    slots.release(1)
    stay, lost = slots.resize(2, 16)
    assert (stay, lost) == ([2, 1], [])
    assert admitted(slots, "bbbbb")[::2] == (1, 4)
    slots.release(1)
    stay, lost = slots.resize(1, 16)
    assert (stay, lost) == ([0], [])
    more = slots.resize(3, 4)
    assert more == ([0], [])
    running = slots.owner[0]
    assert slots.resize(0, 4) == ([], [running])


def test_forget_clears_all_slots() -> None:
    slots = CacheSlotTable(2, 16)
    admitted(slots, "abcd")
    admitted(slots, "wxyz")
    slots.release(0)
    slots.invalidate_cache()
    assert slots.length_S.tolist() == [0, 0]
    assert admitted(slots, "abcde") == (0, [], 0)

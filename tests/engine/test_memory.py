"""A run that has ended keeps nothing large, even before garbage is collected."""

from __future__ import annotations

import asyncio
import gc

from tests.engine.helpers import code, rlm

BIG = 5_000_000


def large_texts() -> list[str]:
    """Kinds of the objects that hold a text of at least ``BIG`` characters."""
    return [
        type(holder).__name__
        for holder in gc.get_objects()
        for held in gc.get_referents(holder)
        # Not isinstance: some objects of torch warn when their __class__ is read.
        if issubclass(type(held), str | bytes | bytearray) and len(held) >= BIG
    ]


def test_context_of_a_run_is_freed_when_it_ends() -> None:
    async def ask() -> None:
        async with rlm([code("FINAL(len(context))")] * 2) as r:
            assert (await r.acompletion("warm up", "How long?")).answer == 7
            gc.collect()
            before = large_texts()
            gc.disable()
            try:
                result = await r.acompletion("x" * BIG, "How long?")
                assert result.answer == BIG
                # The index of `search` may be half built; its thread stops at the next block.
                async with asyncio.timeout(30):
                    while large_texts() != before:
                        await asyncio.sleep(0.01)
            finally:
                gc.enable()

    asyncio.run(ask())

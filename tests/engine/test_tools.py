"""The user's functions: one that never returns blocks only its caller."""

from __future__ import annotations

import asyncio
import threading

from ramify.engine.tool_set import ToolSet


def test_hanging_tools_do_not_block_other_threads() -> None:
    never = threading.Event()
    tools = ToolSet({"hang": never.wait, "double": lambda x: 2 * x})

    async def main() -> tuple[int, int]:
        hung = [
            asyncio.create_task(tools.call("hang", (), {})) for _ in range(40)
        ]  # more than the loop's own threads
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            found = await tools.call("double", (21,), {}), await asyncio.to_thread(lambda: 1)
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)
        return found

    try:
        ended: list[tuple[int, int]] = []
        thread = threading.Thread(target=lambda: ended.append(asyncio.run(main())), daemon=True)
        thread.start()
        thread.join(90)
        assert ended == [(42, 1)]  # and asyncio.run did not wait for those that hang
    finally:
        never.set()

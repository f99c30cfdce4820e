"""Replies of the scripted model in each benchmark, and the server process that sends them.

A request has the marker ``<<scene:NAME>>`` in its question. The reply is the next line of that
scene, according to the number of replies in the conversation. One server can therefore serve any
engine, repeatedly and concurrently, and all engines run the same code in the same order. All three
engines accept an answer by ``answer``; they differ in their code fence, which the suffix of a
scene's name selects (``three.python``). A request without a marker comes from a child.

    python benchmarks/scenes.py --latency 0.05        prints the base URL; GET /served has the
                                                      counts
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from collections.abc import Callable

from ramify.testing.reply_script import ScriptedFailure, dropped
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message

MARKER = re.compile(r"<<scene:([\w.]+)>>")
FINISH = "answer['content'] = {}\nanswer['ready'] = True"
WORDS = "[f'<<scene:word>> {{i}}' for i in range({})]"

LONG_WORDS = "[f'<<scene:word>> {i} ' + 'x' * 4000 for i in range(200)]"
"""Two hundred prompts of a thousand tokens."""


def calls(count: int) -> tuple[str, ...]:
    """Return a scene with ``count`` plain calls in one batch. Its answer is the seconds of the
    batch, or -1 if a reply is wrong."""
    batch = (
        "import time\nstarted = time.perf_counter()\n"
        f"replies = llm_query_batched({WORDS.format(count)})\n"
        "seconds = time.perf_counter() - started if replies == ['ok'] * len(replies) else "
        "-1\nprint(seconds)"
    )
    return batch, FINISH.format("str(seconds)")


def children(count: int) -> tuple[str, ...]:
    return (
        f"replies = rlm_query_batched([f'Say done. {{i}}' for i in "
        f"range({count})])\nprint(len(replies))",
        FINISH.format("str(replies.count('done'))"),
    )


SCENES: dict[str, tuple[str, ...]] = {
    "three": ("print(len(context))", "x = 1\nprint(x)", FINISH.format("str(len(context))")),
    "wait": ("print(len(context))", FINISH.format("'done'")),
    "child": (FINISH.format("'done'"),),
    "children": children(20),
    "one_child": (FINISH.format("rlm_query('Say done.')"),),
    "calls": calls(500),
    "budget": (f"replies = llm_query_batched({LONG_WORDS})", FINISH.format("'done'")),
    "loop": ("kept = 41\nwhile True:\n    pass", FINISH.format("str(kept + 1)")),
    "lost": ("reply = llm_query('<<scene:dropped>>')\nprint(reply)", FINISH.format("reply")),
}
"""Name -> cells of its turns; the last one is repeated."""


def teller() -> Callable[[tuple[Message, ...]], str | ScriptedFailure]:
    drops = 0

    def tell(messages: tuple[Message, ...]) -> str | ScriptedFailure:
        nonlocal drops
        asked = (MARKER.search(message.content) for message in messages if message.role == "user")
        name = next((found[1] for found in asked if found), "child")
        if name == "word":
            return "ok"
        if name == "dropped":
            drops += 1
            return dropped("never arrives") if drops % 2 else "ok"
        scene, _, fence = name.partition(".")
        turn = sum(message.role == "assistant" for message in messages)
        cells = SCENES[scene]
        return f"```{fence or 'repl'}\n{cells[min(turn, len(cells) - 1)]}\n```"

    return tell


async def serve(latency_s: float) -> None:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    async with ScriptedServer(teller(), latency_s=latency_s, window=10**9, keep=False) as server:
        print(server.url, flush=True)
        await done.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the scripted model of the benchmarks.")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each reply")
    asyncio.run(serve(parser.parse_args().latency))

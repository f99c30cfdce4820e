"""Measure a reward model over HTTP: the seconds for 1,000 rewards from a server that takes 50 ms
for a request of at most 32 texts and serves 8 requests at once.

The server is another process. Rewards are asked for as a run does: each answer is scored in its own
thread, with the time limit of a score, and ``RewardModel`` makes batches of those that wait. Not
here: the forms of servers, retries and errors (``tests/evaluate/test_reward_model.py``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from figures import Figure

NUM = 1000
SERVER = """\
import asyncio, json
from aiohttp import web

places = asyncio.Semaphore(8)
sizes = []

async def classify(request):
    texts = (await request.json())["input"]
    if len(texts) > 32:
        return web.Response(status=413, text="more than 32 texts")
    async with places:
        await asyncio.sleep(0.05)
    sizes.append(len(texts))
    return web.json_response(
        {"data": [{"index": i, "probs": [float(len(t))]} for i, t in enumerate(texts)]}
    )

async def main():
    app = web.Application()
    app.router.add_post("/classify", classify)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def measure(quick: bool) -> list[Figure]:
    from ramify.evaluate.reward_model_client import RewardModel
    from ramify.tasks.base import DatasetTask, Item
    from ramify.tasks.score_with_timeout import score_with_timeout
    from ramify.tasks.validation import answer_only_trajectory

    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/classify"
        reward = RewardModel(url, text=lambda question, answer: answer)
        items = [Item("How long?", id=f"t/test/{number}") for number in range(NUM)]
        task = DatasetTask("t", {"test": items}, reward)

        def score(number: int) -> float:
            run = answer_only_trajectory(items[number], "x" * number)
            return score_with_timeout(task, items[number], run, 30).rewards["correct"]

        with ThreadPoolExecutor(NUM) as pool:
            list(pool.map(score, range(64)))  # connections
            started = time.monotonic()
            rewards = list(pool.map(score, range(NUM)))
            seconds = time.monotonic() - started
    finally:
        server.kill()
        server.wait()
    is_right = rewards == [float(number) for number in range(NUM)]
    return [Figure("1,000 rewards of a reward model over HTTP", seconds, "s", {}, 2, is_right)]


if __name__ == "__main__":
    from figures import show

    show(measure(True))

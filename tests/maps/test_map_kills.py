"""A map that is killed at any moment: each row once in the output, and no recorded reply paid
twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

from ramify import testing
from ramify.maps.map_journal import TableMapStore, read_lines
from ramify.maps.map_journal_state import MapJournalState

NUM = 300
COMMAND = [sys.executable, "-m", "ramify", "map", "Which word?"]


def test_a_killed_map_continues_without_paying_twice(tmp_path: Path) -> None:
    asyncio.run(_killed(tmp_path))


async def _killed(folder: Path) -> None:
    rows, out, seed = folder / "rows.jsonl", folder / "out.jsonl", random.Random(7)
    rows.write_text("".join(f'{{"id": {n}, "text": "word w{n}."}}\n' for n in range(NUM)))
    asked: Counter[str] = Counter()
    limit = asyncio.Event()
    kill_at = 0

    def reply(messages: object) -> str:
        word = messages[-1].content.split(".")[0].split()[-1]
        asked[word] += 1
        if kill_at and asked.total() >= kill_at:
            limit.set()
        return word

    async with testing.ScriptedServer(reply, keep=False, latency_s=0.002) as server:
        environ = {
            **os.environ,
            "RAMIFY_HOME": str(folder / "home"),
            "OPENAI_API_KEY": "sk-0123456789",
            "OPENAI_BASE_URL": server.url,
        }
        command = [*COMMAND, str(rows), "--out", str(out), "--column", "text", "--quiet"]
        command += ["--model", "openai:m", "--max-concurrency", "8"]
        num_kills = 4
        for number in range(num_kills + 1):
            limit.clear()
            is_last = number == num_kills
            kill_at = 0 if is_last else asked.total() + seed.randrange(1, NUM // 6)
            process = await asyncio.create_subprocess_exec(*command, env=environ)
            if not is_last:
                await asyncio.wait_for(limit.wait(), 120)
                process.send_signal(signal.SIGKILL)
            code = await process.wait()
            assert code == (0 if is_last else -signal.SIGKILL)
            assert out.exists() == is_last
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in answers] == list(range(NUM))
    assert [row["answer"] for row in answers] == [f"w{number}" for number in range(NUM)]
    # Only what was in flight at a kill, at most eight requests, is asked again.
    assert max(asked.values()) <= 1 + num_kills
    assert asked.total() - NUM <= 8 * num_kills
    ((path, _),) = TableMapStore(folder / "home").headers()
    replies = Counter(line.r.number for _, line in read_lines(path) if line.r is not None)
    assert set(replies.values()) == {1}
    assert MapJournalState.read(path).usage.calls >= asked.total()

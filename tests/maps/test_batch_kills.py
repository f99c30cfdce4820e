"""A map with batches that is killed at every moment: nothing is uploaded or paid twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from ramify import testing
from ramify.maps.map_journal import TableMapStore
from ramify.maps.map_journal_state import MapJournalState

NUM = 40
FORMS = {
    "openai": ("OPENAI", "/v1/batches", "/content"),
    "anthropic": ("ANTHROPIC", "/v1/messages/batches", "/results"),
}


class Killed:
    """Commands against a batch server."""

    def __init__(self, server: testing.FakeBatchApiServer, provider: str, folder: Path) -> None:
        name, self.create, self.results = FORMS[provider]
        self.server, self.folder = server, folder
        rows, self.out = folder / "rows.jsonl", folder / "out.jsonl"
        rows.write_text("".join(f'{{"id": {n}, "text": "word w{n}"}}\n' for n in range(NUM)))
        self.environ = {
            **os.environ,
            "RAMIFY_HOME": str(folder / "home"),
            f"{name}_API_KEY": "sk-0123456789",
            f"{name}_BASE_URL": server.url if provider == "openai" else server.root,
        }
        self.command = [sys.executable, "-m", "ramify", "map", "Which word?", str(rows)]
        self.command += ["--out", str(self.out), "--column", "text", "--batch", "--batch-rows"]
        self.command += ["20", "--model", f"{provider}:m", "--quiet"]

    async def start(self) -> Process:
        return await asyncio.create_subprocess_exec(*self.command, env=self.environ, stderr=PIPE)

    async def stopped_at(self, line: str, *, is_done: bool, number: int = signal.SIGKILL) -> str:
        """Run the command, and send it a signal at a request, whose answer it does not get if it
        is killed. Return what it says."""
        reached = asyncio.Event()

        def on_request(received: str, was_served: bool) -> bool:
            if received.endswith(line) and was_served == is_done:
                reached.set()
                return number != signal.SIGKILL
            return True

        self.server.on_request = on_request
        process = await self.start()
        await asyncio.wait_for(reached.wait(), 120)
        process.send_signal(number)
        said = (await process.communicate())[1].decode()
        self.server.on_request = lambda received, was_served: True
        assert process.returncode == (3 if number == signal.SIGINT else -signal.SIGKILL)
        assert not self.out.exists()
        return said


@pytest.mark.parametrize("provider", FORMS)
def test_a_killed_map_finds_its_batches_again(provider: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with testing.FakeBatchApiServer(lambda found: found[-1].content.split()[1]) as server:
            map = Killed(server, provider, tmp_path)
            # The first upload is not accepted; the second is, and its answer is lost.
            await map.stopped_at(f"POST {map.create}", is_done=False)
            assert len(server.batches) == 0
            await map.stopped_at(f"POST {map.create}", is_done=True)
            assert len(server.batches) == 1
            await map.stopped_at(map.results, is_done=True)
            process = await map.start()
            assert (await process.wait(), await process.stderr.read()) == (0, b"")
            assert [len(batch.requests) for batch in server.batches.values()] == [20, 20]
            answers = [json.loads(line) for line in map.out.read_text().splitlines()]
            assert [row["answer"] for row in answers] == [f"w{number}" for number in range(NUM)]
            assert server.num_direct == 0
            ((path, _),) = TableMapStore(tmp_path / "home").headers()
            assert MapJournalState.read(path).usage.calls == NUM

    asyncio.run(work())


def test_ctrl_c_leaves_the_batch_at_the_provider(tmp_path: Path) -> None:
    async def work() -> None:
        async with testing.FakeBatchApiServer(lambda found: "yes", holds=True) as server:
            map = Killed(server, "openai", tmp_path)
            said = await map.stopped_at("/v1/batches/batch_1", is_done=True, number=signal.SIGINT)
            assert "40 rows remain in batches at openai (batch_0, batch_1)" in said
            assert "the same command collects them and continues the map" in said
            await server.finish()
            process = await map.start()
            assert (await process.wait(), await process.stderr.read()) == (0, b"")
            assert len(server.batches) == 2
            assert len(map.out.read_text().splitlines()) == NUM

    asyncio.run(work())

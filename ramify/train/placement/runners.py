"""Rollouts in processes of their own: each attempt goes to the runner with least to do, and comes back as a trajectory.

    Rollouts ── attempt(item, name, sampling) ──> Runners ── runner 0  runner 1 …      (``runner.py``)

Seeds, groups and their order stay with who asks (``train/rollout.py``), so that a group is the same wherever it is rolled out.
A runner that ends is named, and what it was at is begun again by others: with the same seeds that is the same rollout. When
none is left, whoever asks is told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import Item
from ramify.train.placement.hosts import Hosts, Started
from ramify.train.placement.runner import AT, KEY, NUMBER, Ask, RunnerSpec, Told
from ramify.train.placement.seats import Member
from ramify.types.trajectory import Trajectory

_END_S = 10.0


class Runner(Protocol):
    """What rolls out, in this process or elsewhere."""

    async def attempt(self, item: Item, name: str, sampling: Sampling) -> Trajectory:
        """As ``evaluate.attempt``."""
        ...


class _One:
    """One runner, as the run has it."""

    def __init__(self, number: int, process: Started, connection: Connection) -> None:
        self.number, self.process, self.connection = number, process, connection
        self.asks: dict[int, Ask] = {}
        """What it is at."""


class Runners:
    """Implements ``Runner``. Belongs to one event loop; ``start`` comes first."""

    def __init__(
        self, hosts: Hosts, num: int, spec: RunnerSpec, out: Path, *, version: Callable[[], int],
        seen: Callable[[Sequence[int]], None], say: Callable[[str], None], start_s: float = 120.0,
    ) -> None:  # fmt: skip
        """``version``: of the weights that engines have now. ``seen`` is given the hashes of what went through them."""
        self._hosts, self._num, self._spec, self._out = hosts, num, spec, out
        self._version, self._seen, self._say, self._start_s = version, seen, say, start_s
        self._alive: list[_One] = []
        self._processes: list[Started] = []
        self._wanted: dict[int, asyncio.Future[Trajectory]] = {}
        self._ids = itertools.count(1)
        self._why: list[str] = []
        self._is_closing = False

    async def start(self) -> None:
        """Bring the runners up. Raises ConfigError for one that cannot begin."""
        self._loop = asyncio.get_running_loop()
        key = secrets.token_bytes(32)
        try:
            with socket.create_server((self._hosts.address, 0), backlog=self._num) as server:
                host, port = server.getsockname()
                self._processes = [self._started(number, f"{host}:{port}", key) for number in range(self._num)]
                self._alive = await asyncio.to_thread(self._joined, server, key)
            ready = [self._loop.create_future() for _ in self._alive]
            for one, future in zip(self._alive, ready, strict=True):
                one.connection.send(self._spec)
                threading.Thread(target=self._read, args=(one, future), daemon=True, name="ramify runners").start()
            await asyncio.gather(*ready)
        except BaseException:
            await self.close()
            raise

    async def attempt(self, item: Item, name: str, sampling: Sampling) -> Trajectory:
        """One rollout, by the runner with least to do. Raises TrainError where none is left, and what is a bug."""
        ask = Ask(next(self._ids), item, name, sampling, self._version())
        future: asyncio.Future[Trajectory] = self._loop.create_future()
        self._wanted[ask.id] = future
        try:
            self._give(ask)
            return await future
        finally:
            del self._wanted[ask.id]
            if future.cancelled():
                for one in self._alive:
                    if one.asks.pop(ask.id, None) is not None:
                        self._send(one, ask.id)

    async def close(self) -> None:
        """End them all. Idempotent."""
        self._is_closing = True
        runners, self._alive = self._alive, []
        for one in runners:
            self._send(one, None)
        processes, self._processes = self._processes, []
        await asyncio.gather(*(asyncio.to_thread(_ended, process) for process in processes))
        for one in runners:
            one.connection.close()

    # --- bringing them up --------------------------------------------------------------------------------------------

    def _started(self, number: int, at: str, key: bytes) -> Started:
        package = str(Path(__file__).parents[3])
        named = self._spec.inference.key_variable
        told = {
            AT: at, KEY: key.hex(), NUMBER: str(number), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")])),
            **({named: os.environ[named]} if named in os.environ else {}),
        }  # fmt: skip
        command = [sys.executable, "-m", "ramify.train.placement.runner"]
        log = self._out.resolve() / "runners" / f"runner-{number}.log"
        return self._hosts.start(Member("rollouts", number), command, told, log)

    def _joined(self, server: socket.socket, key: bytes) -> list[_One]:
        """All runners, once they have come back with the key."""
        server.settimeout(0.2)
        found: dict[int, _One] = {}
        until = time.monotonic() + self._start_s
        while len(found) < self._num:
            try:
                peer, _ = server.accept()
            except TimeoutError:
                self._check_starting(found, until)
                continue
            peer.setblocking(True)
            connection = Connection(peer.detach())
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            number = int(connection.recv())
            found[number] = _One(number, self._processes[number], connection)
        return [found[number] for number in range(self._num)]

    def _check_starting(self, found: dict[int, _One], until: float) -> None:
        for number, process in enumerate(self._processes):
            if number not in found and (status := process.poll()) is not None:
                raise ConfigError(f"runner {number} ended with status {status} before it began: {process.said()}")
        if time.monotonic() > until:
            raise ConfigError(f"a runner did not come back to the run within {self._start_s:g} s")

    # --- what they say -----------------------------------------------------------------------------------------------

    def _read(self, one: _One, ready: asyncio.Future[None]) -> None:
        """In a thread of its own, as long as it speaks."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while True:
                told: Told = one.connection.recv()
                self._loop.call_soon_threadsafe(self._told, one, told, ready)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lost, one, ready)

    def _told(self, one: _One, told: Told, ready: asyncio.Future[None]) -> None:
        text = told.data.decode("utf-8", "replace") if told.kind != "done" else ""
        self._seen(told.paths)
        ask, wanted = one.asks.pop(told.id, None), self._wanted.get(told.id)
        match told.kind:
            case "ready" if not ready.done():
                ready.set_result(None)
            case "failed" if not ready.done():
                ready.set_exception(ConfigError(f"runner {one.number} cannot begin: {text}"))
            case "said":
                self._say(f"runner {one.number}: {text}")
            case "done" if ask is not None and wanted is not None and not wanted.done():
                wanted.set_result(msgspec.json.decode(told.data, type=Trajectory))
            case "broke" if wanted is not None and not wanted.done():
                wanted.set_exception(RuntimeError(f"in runner {one.number}: {text}"))

    def _lost(self, one: _One, ready: asyncio.Future[None]) -> None:
        if self._is_closing or one not in self._alive:
            return
        self._alive.remove(one)
        why = (
            f"runner {one.number} ({one.process.where}) is lost: its process ended; its log ends: {one.process.said()}"
        )
        self._why.append(why)
        if not ready.done():
            ready.set_exception(ConfigError(why))
            return
        self._say(f"{why}; {len(one.asks)} rollouts are begun again by {len(self._alive)} others")
        asks, one.asks = list(one.asks.values()), {}
        for ask in asks:
            self._give(ask)

    def _give(self, ask: Ask) -> None:
        if not self._alive:
            wanted = self._wanted.get(ask.id)
            if wanted is not None and not wanted.done():
                wanted.set_exception(TrainError(f"no runner of rollouts is left: {'; '.join(self._why)}"))
            return
        one = min(self._alive, key=lambda each: (len(each.asks), each.number))
        one.asks[ask.id] = ask
        self._send(one, ask)

    def _send(self, one: _One, word: Ask | int | None) -> None:
        with contextlib.suppress(OSError):  # its reader finds out
            one.connection.send(word)


def _ended(process: Started) -> None:
    until = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.terminate(0.0)

"""Rollouts in processes of their own: each attempt goes to the runner with least to do, and comes
back as a trajectory.

    Rollouts ── attempt(item, name, sampling) ──> Runners ── runner 0  runner 1 …      (``rollout_worker.py``)

Seeds, groups and their order stay with who asks (``train/rollout.py``), so that a group is the same
wherever it is rolled out. A runner that ends is named and started again, a few times in a row; what
it was at is begun again by others, or by it: with the same seeds that is the same rollout. When
none is left and none is expected, whoever asks is told why.

Engines are looked after by the run, which gives them their weights: a runner that gets no answer
from one says so, and is told whenever it changes which of them may be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, RamifyError, TrainError
from ramify.tasks.base import Item
from ramify.train.handshake import authenticate
from ramify.train.placement.launcher import LaunchedProcess, Launcher
from ramify.train.placement.placement_slots import SlotMember
from ramify.train.placement.rollout_worker import (
    AT,
    KEY,
    NUMBER,
    AvailableEngines,
    RolloutRequest,
    RolloutWorkerSpec,
    WorkerMessage,
    heard,
)
from ramify.types.trajectory import Trajectory

_END_S = 10.0
_LOOK_S = 0.5
_POLL_S = 0.1
_PAUSE_S = 1.0
"""Before another try."""
_TOLD = 3
"""Of the runners that went last an error says why."""


class RolloutSource(Protocol):
    """What rolls out, in this process or elsewhere."""

    async def attempt(self, item: Item, name: str, sampling: Sampling) -> Trajectory:
        """As ``evaluate.attempt``."""
        ...


class EngineHealth(Protocol):
    """What runners need of the run's engines: the part of ``HttpEngines`` that looks after them."""

    @property
    def version(self) -> int:
        """Of the weights that they have now."""
        ...

    @property
    def answering(self) -> tuple[str, ...]:
        """Addresses of those that may be asked."""
        ...

    async def look_after(self, url: str, who: str) -> None:
        """``who`` got no answer from one."""
        ...


class _Worker:
    """One runner, as the run has it."""

    def __init__(self, number: int, process: LaunchedProcess, connection: Connection) -> None:
        self.number, self.process, self.connection = number, process, connection
        self.asks: dict[int, RolloutRequest] = {}
        """What it is at."""
        self.told: tuple[str, ...] = ()
        """Which engines it asks."""
        self._words: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True, name="ramify to a runner").start()

    def send(
        self, word: RolloutWorkerSpec | RolloutRequest | AvailableEngines | int | None
    ) -> None:
        """Say it, in order, without waiting: a runner that stands still takes nothing. None is the
        last."""
        self._words.put(word)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # its reader finds out
            while True:
                word = self._words.get()
                self.connection.send(word)
                if word is None:
                    return


class RolloutWorkers:
    """Implements ``RolloutSource``. Belongs to one event loop; ``start`` comes first."""

    def __init__(
        self,
        hosts: Launcher,
        num: int,
        spec: RolloutWorkerSpec,
        out: Path,
        engines: EngineHealth,
        *,
        seen: Callable[[Sequence[int]], None],
        say: Callable[[str], None],
        start_s: float = 120.0,
        restarts: int = 3,
    ) -> None:
        """``seen`` is given the hashes of what went through engines; ``restarts``: how often a
        runner may end without having brought a rollout in between."""
        self._hosts, self._num, self._spec, self._out, self._engines = (
            hosts,
            num,
            spec,
            out,
            engines,
        )
        self._seen, self._say, self._start_s, self._restarts = seen, say, start_s, restarts
        self._key = secrets.token_bytes(32)
        self._alive: list[_Worker] = []
        self._processes: dict[int, LaunchedProcess] = {}
        self._tries = dict.fromkeys(range(num), 0)
        self._coming: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[RolloutRequest] = []
        """Asked while no runner was there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: dict[int, asyncio.Future[Trajectory]] = {}
        self._ids = itertools.count(1)
        self._why: list[str] = []
        self._is_closing = False

    async def start(self) -> None:
        """Bring the runners up. Raises ConfigError for one that cannot begin."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._num):
                    group.create_task(self._bring(number))
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        self._keep(self._watch())

    async def attempt(self, item: Item, name: str, sampling: Sampling) -> Trajectory:
        """One rollout, by the runner with least to do. Raises TrainError where none is left, and
        what is a bug."""
        ask = RolloutRequest(next(self._ids), item, name, sampling, self._engines.version)
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
                        one.send(ask.id)

    async def close(self) -> None:
        """End them all. Idempotent."""
        self._is_closing = True
        tasks, self._coming = [*self._tasks, *self._coming.values()], {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        rollout_workers, self._alive = self._alive, []
        for one in rollout_workers:
            one.send(None)
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(asyncio.to_thread(_ended, process) for process in processes))
        for one in rollout_workers:
            one.connection.close()

    # --- bringing one up
    # ---------------------------------------------------------------------------------------------

    async def _bring(self, number: int) -> None:
        """Start runner ``number``, and return once it can roll out. Raises ConfigError where it
        cannot."""
        until = time.monotonic() + self._start_s
        while not self._engines.answering:
            if time.monotonic() > until:
                raise ConfigError(
                    f"runner {number} has no engine to ask within {self._start_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        with socket.create_server((self._hosts.address, 0), backlog=1) as server:
            server.setblocking(False)
            process = await asyncio.to_thread(
                self._started, number, "{}:{}".format(*server.getsockname())
            )
            self._processes[number] = process
            one = _Worker(number, process, await self._joined(server, number, process))
        urls = one.told = self._engines.answering
        inference = msgspec.structs.replace(self._spec.inference, urls=urls)
        one.send(msgspec.structs.replace(self._spec, inference=inference))
        ready = self._loop.create_future()
        threading.Thread(
            target=self._read, args=(one, ready), daemon=True, name="ramify runners"
        ).start()
        try:
            async with asyncio.timeout(self._start_s):
                await ready
        except TimeoutError:
            one.send(None)
            raise ConfigError(
                f"runner {number} ({process.where}) did not begin within {self._start_s:g} s"
            ) from None
        one.told = ()  # the next look tells it which engines there are now
        self._alive.append(one)
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            self._give(ask)

    def _started(self, number: int, at: str) -> LaunchedProcess:
        package = str(Path(__file__).parents[3])
        names = {self._spec.inference.key_variable, *self._spec.variables}
        told = {
            AT: at,
            KEY: self._key.hex(),
            NUMBER: str(number),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [package, os.environ.get("PYTHONPATH", "")])
            ),
            **{name: os.environ[name] for name in names if name in os.environ},
        }
        command = [sys.executable, "-m", "ramify.train.placement.rollout_worker"]
        log = self._out.resolve() / "runners" / f"runner-{number}.log"
        member = SlotMember("rollouts", number)
        if before := self._processes.get(number):
            before.terminate(0.0)
            self._hosts.renew(member)
        return self._hosts.start(member, command, told, log)

    async def _joined(
        self, server: socket.socket, number: int, process: LaunchedProcess
    ) -> Connection:
        """The runner's connection, once it has come back with the key. Raises ConfigError."""
        until = time.monotonic() + self._start_s
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    peer, _ = await self._loop.sock_accept(server)
            except TimeoutError:
                status = await asyncio.to_thread(process.poll)
                if status is not None:
                    said = await asyncio.to_thread(process.said)
                    raise ConfigError(
                        f"runner {number} ended with status {status} before it began: {said}"
                    ) from None
                if time.monotonic() > until:
                    raise ConfigError(
                        f"runner {number} did not come back to the run within {self._start_s:g} s"
                    ) from None
                continue
            if joined := await asyncio.to_thread(authenticate, peer, self._key):
                return joined[0]

    async def _replace(self, number: int) -> None:
        """Bring runner ``number`` up again, or give it up, aloud."""
        try:
            while True:
                try:
                    await self._bring(number)
                    return self._say(f"runner {number} is back ({self._processes[number].where})")
                except (RamifyError, OSError, EOFError) as error:
                    self._why.append(f"runner {number} did not come back: {error}")
                    is_last = not self._may_try(number)
                    self._say(f"{self._why[-1]}; it is {'given up' if is_last else 'tried again'}")
                    if is_last:
                        return None
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._coming.pop(number, None)
            if not self._is_closing and not self._alive and not self._coming:
                self._give_up()

    def _may_try(self, number: int) -> bool:
        self._tries[number] += 1
        return self._tries[number] <= self._restarts

    # --- looking after them
    # ------------------------------------------------------------------------------------------

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Tell them which engines may be asked, and find those that ended without a word, as with
        their machine."""
        while True:
            urls = self._engines.answering
            for one in list(self._alive):
                if urls and one.told != urls:
                    one.told = urls
                    one.send(AvailableEngines(urls))
                if await asyncio.to_thread(one.process.poll) is not None:
                    self._lost(one, await asyncio.to_thread(_why, one))
            await asyncio.sleep(_LOOK_S)

    async def _look_after(self, one: _Worker, url: str) -> None:
        await self._engines.look_after(url, f"runner {one.number}")
        one.told = ()

    # --- what they say
    # -----------------------------------------------------------------------------------------------

    def _read(self, one: _Worker, ready: asyncio.Future[None]) -> None:
        """In a thread of its own, as long as it speaks."""
        with contextlib.suppress(EOFError, OSError, RuntimeError, msgspec.MsgspecError):
            while True:
                told = heard(one.connection)
                self._loop.call_soon_threadsafe(self._told, one, told, ready)
        why = _why(one)  # another machine may take its time to say so
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended, one, ready, why)

    def _told(self, one: _Worker, told: WorkerMessage, ready: asyncio.Future[None]) -> None:
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
            case "gone" if not self._is_closing:
                self._keep(self._look_after(one, text))
            case "done" if ask is not None and wanted is not None and not wanted.done():
                self._tries[one.number] = 0
                wanted.set_result(msgspec.json.decode(told.data, type=Trajectory))
            case "broke" if wanted is not None and not wanted.done():
                wanted.set_exception(RuntimeError(f"in runner {one.number}: {text}"))

    def _ended(self, one: _Worker, ready: asyncio.Future[None], why: str) -> None:
        if not ready.done():
            ready.set_exception(ConfigError(why))
        self._lost(one, why)

    def _lost(self, one: _Worker, why: str) -> None:
        if self._is_closing or one not in self._alive:
            return
        self._alive.remove(one)
        one.send(None)
        one.connection.close()
        self._why.append(why)
        back = "it is started again" if self._may_try(one.number) else "it is given up"
        self._say(
            f"{self._why[-1]}; {len(one.asks)} rollouts are begun again, {len(self._alive)} others "
            f"are there; {back}"
        )
        if self._tries[one.number] <= self._restarts:
            self._coming[one.number] = asyncio.ensure_future(self._replace(one.number))
        asks, one.asks = list(one.asks.values()), {}
        for ask in asks:
            self._give(ask)

    def _give(self, ask: RolloutRequest) -> None:
        if ask.id not in self._wanted:
            return
        if not self._alive:
            self._waiting.append(ask)
            if not self._coming:
                self._give_up()
            return
        one = min(self._alive, key=lambda each: (len(each.asks), each.number))
        one.asks[ask.id] = ask
        one.send(ask)

    def _give_up(self) -> None:
        """There is nobody for what waits."""
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            wanted = self._wanted.get(ask.id)
            if wanted is not None and not wanted.done():
                wanted.set_exception(
                    TrainError(f"no runner of rollouts is left: {'; '.join(self._why[-_TOLD:])}")
                )


def _why(one: _Worker) -> str:
    return f"runner {one.number} ({one.process.where}) is lost: its process ended; its log ends: {one.process.said()}"


def _ended(process: LaunchedProcess) -> None:
    until = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.terminate(0.0)

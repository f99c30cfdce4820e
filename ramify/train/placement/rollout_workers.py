"""Sample rollouts in separate worker processes.

Each rollout goes to the least busy worker and comes back as a trajectory.

    rollouts ── attempt(item, name, sampling) ──> RolloutWorkers ──> worker 0, worker 1, …
                                                                     (``rollout_worker.py``)

The caller (``rollouts/rollouter.py``) decides seeds, groups and their order, so a group is the same
wherever it is sampled. A worker that ends is reported and restarted, up to a few times in a row.
Its unfinished rollouts are sampled again by any worker, with the same result, since their seeds are
the same. If no worker is left and none is being restarted, rollouts fail with the reason.

The run manages the engines and gives them their weights. A worker that gets no answer from an
engine reports it, and is notified whenever the list of available engines changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.actors.child_process import ProcessHandle, pythonpath_environment, wait_then_kill
from ramify.actors.connect_back import ConnectBackListener, MissedHeartbeatDetector
from ramify.actors.launcher import Launcher, RoleInstanceId
from ramify.actors.restarts import ProcessRestartLimiter, cancel_all, retry_until_started
from ramify.actors.run_channel import AuthenticatedChannel
from ramify.clients.base import Sampling
from ramify.errors import ConfigError, TrainError
from ramify.log_handlers import ForwardedLogRecord
from ramify.logging import ComponentLogger
from ramify.tasks.base import Item
from ramify.train.branch_sampler import BranchOptions
from ramify.train.placement.rollout_worker import (
    AvailableEnginesMessage,
    CancelRolloutMessage,
    EndWorkerMessage,
    RolloutRequest,
    RolloutWorkerMessage,
    RolloutWorkerSpec,
    RunMessage,
    SerializedTaskItem,
)
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.inference.http.http_engines import HttpEngineClient  # it imports PyTorch

_log = ComponentLogger("train")
_END_S = 10.0
_LOOK_S = 0.5
_POLL_S = 0.1
_PAUSE_S = 1.0
"""Seconds between two attempts to restart a worker."""
_MAX_REASONS = 3
"""Number of most recent failures whose reasons an error quotes."""


class _Worker:
    """The run's record of one worker process: its connection, and the rollouts that it is
    sampling."""

    def __init__(
        self, number: int, process: ProcessHandle, channel: AuthenticatedChannel, heartbeat_s: float
    ) -> None:
        self.heartbeats = MissedHeartbeatDetector(heartbeat_s, _LOOK_S)
        self.number = number
        self.process = process
        self.channel = channel
        self.requests: dict[int, RolloutRequest] = {}
        """The rollouts that the worker is sampling, by request id."""
        self.urls: tuple[str, ...] = ()
        """Addresses of the engines that the worker was last told to call."""
        self._outbox: queue.SimpleQueue[RunMessage] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True, name="ramify to a rollout worker").start()

    def send(self, message: RunMessage) -> None:
        """Queue a message for the worker without waiting, since a stalled worker does not read.

        Messages are sent in order.
        """
        self._outbox.put(message)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reading thread notices a broken connection
            while True:
                message = self._outbox.get()
                self.channel.send(message)
                if isinstance(message, EndWorkerMessage):
                    return


class RolloutWorkers:
    """A pool of worker processes that sample the rollouts of a run.

    It belongs to one event loop. Call ``start`` before any other method.
    """

    def __init__(
        self,
        hosts: Launcher,
        num: int,
        spec: RolloutWorkerSpec,
        out: Path,
        engines: HttpEngineClient,
        *,
        seen: Callable[[Sequence[int]], None],
        start_s: float = 120.0,
        restarts: int = 3,
        heartbeat_s: float = 60.0,
    ) -> None:
        """Prepare ``num`` workers without starting them.

        ``seen`` is called with hashes of the token sequences that passed through engines. A worker
        that ends is restarted unless it has ended more than ``restarts`` times in a row without
        completing a rollout. A worker that is silent for more than ``heartbeat_s`` seconds is
        ended, and counts as lost.
        """
        self._hosts = hosts
        self._num = num
        self._spec = spec
        self._out = out
        self._engines = engines
        self._seen = seen
        self._start_s = start_s
        self._heartbeat_s = heartbeat_s
        self._restarts = ProcessRestartLimiter(restarts, _log, "worker")
        self._alive: list[_Worker] = []
        self._processes: dict[int, ProcessHandle] = {}
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[RolloutRequest] = []
        """Requests that arrived while no worker was available."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._futures: dict[int, asyncio.Future[Trajectory]] = {}
        self._ids = itertools.count(1)
        self._reasons: list[str] = []
        self._is_closing = False

    async def start(self) -> None:
        """Start all workers, and wait until they are ready.

        Raises ConfigError if one cannot start.
        """
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._num):
                    group.create_task(self._start_worker(number))
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        self._run_task(self._watch())

    async def sample_rollout(
        self, item: Item, name: str, sampling: Sampling, branch: BranchOptions | None = None
    ) -> Trajectory:
        """Sample one rollout on the least busy worker.

        ``branch`` sets where the rollout forks into several continuations; None: it does not fork.
        Raises TrainError if no worker is left, and RuntimeError for a bug in the worker.
        """
        stored, version = SerializedTaskItem.from_item(item), self._engines.version
        request = RolloutRequest(next(self._ids), stored, name, sampling, version, branch)
        future: asyncio.Future[Trajectory] = self._loop.create_future()
        self._futures[request.id] = future
        try:
            self._assign(request)
            return await future
        finally:
            del self._futures[request.id]
            if future.cancelled():
                for worker in self._alive:
                    if worker.requests.pop(request.id, None) is not None:
                        worker.send(CancelRolloutMessage(request.id))

    async def close(self) -> None:
        """End all rollout workers of the training run.

        Calling it again does nothing.
        """
        self._is_closing = True
        tasks, self._restarting = [*self._tasks, *self._restarting.values()], {}
        await cancel_all(tasks)
        workers, self._alive = self._alive, []
        for worker in workers:
            worker.send(EndWorkerMessage())
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.to_thread(wait_then_kill, processes, _END_S)
        for worker in workers:
            worker.channel.close()

    # --- starting a worker

    async def _start_worker(self, number: int) -> _Worker:
        """Start a worker, and return it once it can sample rollouts.

        Raises ConfigError if the worker cannot start or if no engine answers.
        """
        until = time.monotonic() + self._start_s
        while not self._engines.up_to_date_urls:
            if time.monotonic() > until:
                raise ConfigError(
                    f"rollout worker {number} found no engine to call within {self._start_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        worker = await asyncio.to_thread(self._start_process, number)
        urls = worker.urls = self._engines.up_to_date_urls
        inference = msgspec.structs.replace(self._spec.inference, urls=urls)
        worker.send(msgspec.structs.replace(self._spec, inference=inference))
        ready = self._loop.create_future()
        threading.Thread(
            target=self._read, args=(worker, ready), daemon=True, name="ramify rollout workers"
        ).start()
        try:
            async with asyncio.timeout(self._start_s):
                await ready
        except TimeoutError:
            worker.send(EndWorkerMessage())
            raise ConfigError(
                f"rollout worker {number} ({worker.process.where}) did not start within "
                f"{self._start_s:g} s"
            ) from None
        worker.urls = ()  # ``_watch`` sends the current list of engines next
        self._alive.append(worker)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._assign(request)
        return worker

    def _start_process(self, number: int) -> _Worker:
        """Start the process of a worker, and wait until it has connected.

        Raises ConfigError if it does not connect.
        """
        names = {self._spec.inference.key_variable, *self._spec.variables}
        command = [sys.executable, "-m", "ramify.train.placement.rollout_worker"]
        log = self._out.resolve() / "runners" / f"runner-{number}.log"
        member = RoleInstanceId("rollouts", number)
        if before := self._processes.get(number):
            before.end(0.0)
            self._hosts.ensure_slot(member)
        with ConnectBackListener(self._hosts.address) as listener:
            environment = {
                "OMP_NUM_THREADS": "1",
                **pythonpath_environment(),
                **{name: os.environ[name] for name in names if name in os.environ},
            }
            process = self._processes[number] = self._hosts.start(
                member, command, environment, log, listener.create_ticket(str(number))
            )

            def look() -> None:
                if self._is_closing:
                    raise ConfigError("the run is ending")
                if process.poll() is not None:
                    raise ConfigError(
                        f"rollout worker {number} did not connect: it {process.exit_reason()}"
                    )

            try:
                channel, _ = listener.accept(str, self._start_s, look)
            except ConfigError:
                process.end(0.0)
                raise
            except TimeoutError:
                raise ConfigError(
                    f"rollout worker {number} did not connect to the run within {self._start_s:g} s"
                ) from None
        return _Worker(number, process, channel, self._heartbeat_s)

    async def _restart(self, number: int) -> None:
        """Restart a rollout worker that has ended.

        After several failed attempts the run continues without it. Either outcome is logged.
        """
        try:
            worker = await retry_until_started(
                partial(self._start_worker, number),
                partial(self._note_failed_restart, number),
                _PAUSE_S,
            )
            if worker is not None:
                text = f"rollout worker {number} is back ({worker.process.where})"
                self._restarts.record_recovery(number, text)
        finally:
            self._restarting.pop(number, None)
            if not self._is_closing and not self._alive and not self._restarting:
                self._fail_waiting()

    def _note_failed_restart(self, number: int, error: Exception) -> bool:
        self._reasons.append(f"rollout worker {number} did not restart: {error}")
        return self._restarts.decide_restart(number, self._reasons[-1])

    # --- supervision

    def _run_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Keep workers informed of the available engines, and detect workers that ended without a
        message.

        A worker ends without a message if, for example, its machine fails.
        """
        while True:
            urls = self._engines.up_to_date_urls
            for worker in list(self._alive):
                if urls and worker.urls != urls:
                    worker.urls = urls
                    worker.send(AvailableEnginesMessage(urls))
                if await asyncio.to_thread(worker.process.poll) is not None:
                    self._handle_lost_worker(worker, await asyncio.to_thread(_why_lost, worker))
                elif worker.heartbeats.count_silent_interval():
                    self._handle_lost_worker(
                        worker,
                        f"rollout worker {worker.number} ({worker.process.where}) is lost: no "
                        f"heartbeat for {worker.heartbeats.limit_s:g} s",
                    )
                    await asyncio.to_thread(worker.process.end, 0.0)
            await asyncio.sleep(_LOOK_S)

    async def _check_engine(self, worker: _Worker, url: str) -> None:
        await self._engines.handle_reported_loss(url, f"rollout worker {worker.number}")
        worker.urls = ()

    # --- messages from workers

    def _read(self, worker: _Worker, ready: asyncio.Future[None]) -> None:
        """Read a rollout worker's messages until the worker ends.

        This method runs in a separate thread.
        """
        with contextlib.suppress(EOFError, OSError, RuntimeError, msgspec.MsgspecError):
            while True:
                message: RolloutWorkerMessage = worker.channel.receive(RolloutWorkerMessage)
                worker.heartbeats.record_message()
                self._loop.call_soon_threadsafe(self._on_message, worker, message, ready)
        why = _why_lost(worker)  # takes a while if it asks another machine
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_end, worker, ready, why)

    def _on_message(
        self, worker: _Worker, message: RolloutWorkerMessage, ready: asyncio.Future[None]
    ) -> None:
        text = message.data.decode("utf-8", "replace") if message.kind != "done" else ""
        self._seen(message.paths)
        request = worker.requests.pop(message.id, None)
        future = self._futures.get(message.id)
        match message.kind:
            case "ready" if not ready.done():
                ready.set_result(None)
            case "failed" if not ready.done():
                ready.set_exception(
                    ConfigError(f"rollout worker {worker.number} cannot start: {text}")
                )
            case "said":
                sent = msgspec.json.decode(message.data, type=ForwardedLogRecord)
                _log.log_forwarded_record(sent, f"rollout worker {worker.number}")
            case "gone" if not self._is_closing:
                self._run_task(self._check_engine(worker, text))
            case "done" if request is not None and future is not None and not future.done():
                self._restarts.record_success(worker.number)
                future.set_result(msgspec.json.decode(message.data, type=Trajectory))
            case "broke" if future is not None and not future.done():
                future.set_exception(RuntimeError(f"in rollout worker {worker.number}: {text}"))

    def _on_end(self, worker: _Worker, ready: asyncio.Future[None], why: str) -> None:
        if not ready.done():
            ready.set_exception(ConfigError(why))
        self._handle_lost_worker(worker, why)

    def _handle_lost_worker(self, worker: _Worker, why: str) -> None:
        if self._is_closing or worker not in self._alive:
            return
        self._alive.remove(worker)
        worker.send(EndWorkerMessage())
        worker.channel.close()
        self._reasons.append(why)
        is_restarted = self._restarts.decide_restart(
            worker.number,
            f"{self._reasons[-1]}; {len(worker.requests)} rollouts are sampled again, "
            f"{len(self._alive)} other workers remain",
            rollouts=len(worker.requests),
            left=len(self._alive),
        )
        if is_restarted:
            self._restarting[worker.number] = asyncio.ensure_future(self._restart(worker.number))
        requests, worker.requests = list(worker.requests.values()), {}
        for request in requests:
            self._assign(request)

    def _assign(self, request: RolloutRequest) -> None:
        if request.id not in self._futures:
            return
        if not self._alive:
            self._waiting.append(request)
            if not self._restarting:
                self._fail_waiting()
            return
        worker = min(self._alive, key=lambda worker: (len(worker.requests), worker.number))
        worker.requests[request.id] = request
        worker.send(request)

    def _fail_waiting(self) -> None:
        """Fail all queued rollouts, because no worker is left."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            future = self._futures.get(request.id)
            if future is not None and not future.done():
                reasons = "; ".join(self._reasons[-_MAX_REASONS:])
                future.set_exception(TrainError(f"no rollout worker is left: {reasons}"))


def _why_lost(worker: _Worker) -> str:
    return (
        f"rollout worker {worker.number} ({worker.process.where}) is lost: it "
        f"{worker.process.exit_reason()}"
    )

"""Run the attempts of evaluations on the machines of a Ray cluster.

    evaluate_all ── RayAttemptRunner ──> RayEvaluationWorker (actors) ──> a run's id, its outcome
    this process: the order, the records, and what is asked next  a task and an RLM each

Each worker makes the items of a task itself, so that no long context is sent over the network, and
attempts at one item go to the same worker as long as it has room. The outcomes are recorded by this
process. Each worker writes the journals of its runs to its own store, at the same path as here. If
the machines share that folder, an attempt whose worker was lost, or whose command was killed,
continues from its journal, and nothing is paid for twice; otherwise the attempt is made again. Each
worker has its own rate limit. The cluster is joined by ``actors/ray_cluster.py``.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify import __version__
from ramify.actors.ray_cluster import (
    RayClusterConnection,
    check_node_versions,
    check_ramify_version,
    error_cause_line,
    import_ray,
)
from ramify.engine import event_loop_thread
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.evaluation_matrix import EvalMatrixTaskCache
from ramify.evaluate.run_evaluation import (
    AttemptOutcome,
    AttemptStartRecord,
    EvaluationPlan,
    EvaluationSetup,
    PlannedAttempt,
    RlmAttemptRunner,
)
from ramify.store.folder_store import Store
from ramify.tasks.base import Item, items_of
from ramify.types.trajectory import Trajectory

_STORE_BYTES = 160 << 20
"""Size of Ray's object store, in bytes, for a cluster that is started here."""
_WORKER_CPUS = 0.5
"""CPUs that Ray reserves for each worker. It is a fraction, since workers mostly wait for
models."""
_KEPT_ITEMS = 4
"""Number of items that a worker caches for further attempts at them."""
_TRIES = 6
"""Maximum number of workers that may be lost during one attempt."""
_AGAIN_S = 0.5
"""Seconds before the second try, doubled for each later one. Meanwhile, Ray restarts a lost
worker."""

MakeAttempts = Callable[[EvaluationPlan, Store | None], RlmAttemptRunner]
"""Creates the ``RlmAttemptRunner`` of a plan in a worker, with the worker's store. It contains no
API keys: each worker reads them from its environment."""


class _RemoteRecord:
    """The part of an evaluation's record that a worker needs to run one attempt.

    It names the stored run to continue and reports that a run has begun.
    """

    def __init__(self, run: str, place: tuple[str, int], tell: Callable[[object], None]) -> None:
        self.unfinished = {place: run} if run else {}
        self._tell = tell

    def record_attempt_start(self, item: str, attempt: int, run: str) -> None:
        self._tell(AttemptStartRecord(item, attempt, run))


class RayEvaluationWorker:
    """A Ray actor that runs evaluation attempts in threads.

    The actor is one process of the cluster.
    """

    def __init__(self, make: MakeAttempts, store: str, folder: str, version: str) -> None:
        """Create a worker, and change its working directory to ``folder`` if that exists on its
        machine.

        The files of tasks then have the same relative paths as for the command that started the
        evaluation.
        """
        check_ramify_version(version)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path[:0] = [""] * ("" not in sys.path)
        self._make = make
        self._store = Store(Path(store)) if store else None
        self._tasks = EvalMatrixTaskCache()
        self._made: dict[bytes, RlmAttemptRunner] = {}
        self._items: dict[tuple[int, str, int], Item] = {}
        self._lock = threading.Lock()

    def attempt(self, sent: bytes) -> Iterator[bytes]:
        """Run one attempt at a task item, as the encoded request ``sent`` describes it.

        Yield the id of the run as soon as it has begun, and finally the outcome of the attempt.
        Both are encoded as JSON.
        """
        order = msgspec.json.decode(sent, type=RayEvalAttemptRequest)
        told: queue.SimpleQueue[object] = queue.SimpleQueue()

        def work() -> None:
            try:
                told.put(self._run_attempt(order, told.put))
            except BaseException as error:  # noqa: BLE001 (it is raised by the generator)
                told.put(error)

        threading.Thread(target=work, daemon=True).start()
        while True:
            found = told.get()
            if isinstance(found, BaseException):
                raise found
            yield msgspec.json.encode(found)
            if isinstance(found, AttemptOutcome):
                return

    def _run_attempt(
        self, order: RayEvalAttemptRequest, tell: Callable[[object], None]
    ) -> AttemptOutcome:
        plan = order.plan
        with self._lock:
            task = self._tasks.get_or_create(plan)
            item = self._item(id(task), items_of(task, plan.split), plan.split, order.index)
            makes = self._open_maker(plan)
        record: Any = _RemoteRecord(order.run, (item.id, order.number), tell)
        job = EvaluationSetup(plan, task, record, makes)
        which = PlannedAttempt(order.index, item.id, item, order.number)
        outcome, _ = event_loop_thread.run(makes.run_attempt(job, which, order.max_cost))
        return outcome

    def _item(self, task: int, items: Sequence[Item], split: str, index: int) -> Item:
        place = task, split, index
        if place not in self._items:
            while len(self._items) >= _KEPT_ITEMS:
                del self._items[next(iter(self._items))]
            self._items[place] = items[index]
        return self._items[place]

    def _open_maker(self, plan: EvaluationPlan) -> RlmAttemptRunner:
        key = msgspec.json.encode((plan.model, plan.settings), order="deterministic")
        if key not in self._made:
            made = self._make(plan, self._store)
            event_loop_thread.run(made.__aenter__())
            self._made[key] = made
        return self._made[key]


class RayEvalAttemptRequest(msgspec.Struct, frozen=True):
    """A message that asks a Ray worker to run one attempt of an evaluation."""

    plan: EvaluationPlan
    index: int
    """Index of the item."""
    number: int
    run: str
    """Id of the stored run that began this attempt; empty if none did."""
    max_cost: float | None


class RayAttemptRunner:
    """Runs the attempts of evaluations on the machines of a Ray cluster.

    Implements ``AttemptRunner``.
    """

    makes_items = True

    def __init__(
        self,
        make: MakeAttempts,
        store: Path | None,
        *,
        concurrency: int,
        workers: int | None = None,
        address: str = "",
    ) -> None:
        """Prepare to run up to ``concurrency`` attempts at once on the workers of a cluster.

        By default, there is one worker per CPU. Raises ConfigError if ``workers`` is less than 1.
        """
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers}: give 1 or more")
        self.num_again = 0
        """Number of attempts that were repeated because their worker was lost."""
        self._make = make
        self._store = "" if store is None else str(store)
        self._concurrency = concurrency
        self._workers = workers
        self._cluster = RayClusterConnection(address, store_bytes=_STORE_BYTES, is_quiet=True)
        self._actors: list[Any] = []
        self._load: list[int] = []
        """Number of attempts in progress, per worker."""
        self._home: dict[tuple[int, str, int], int] = {}
        """(task, split, index of an item) -> worker that has cached the item."""
        self._is_joined = False

    async def __aenter__(self) -> RayAttemptRunner:
        ray = import_ray()
        if not ray.is_initialized():
            await asyncio.to_thread(self._cluster.join_or_start)
            self._is_joined = True
        try:
            await asyncio.to_thread(check_node_versions, __version__)
            cpus = int(ray.cluster_resources().get("CPU", 1))
            num = min(self._concurrency, self._workers or max(1, cpus))
            each = math.ceil(self._concurrency / num)
            worker = ray.remote(RayEvaluationWorker).options(
                num_cpus=_WORKER_CPUS, max_concurrency=each + 1, max_restarts=-1
            )
            given = self._make, self._store, os.getcwd(), __version__
            self._actors = [worker.remote(*given) for _ in range(num)]
            self._load = [0] * num
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        ray = import_ray()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._is_joined:
            self._is_joined = False
            await asyncio.to_thread(self._cluster.leave)

    async def run_attempt(
        self, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> tuple[AttemptOutcome, Trajectory | None]:
        """Run one attempt on a worker, and try again if the worker is lost.

        Return the outcome of the attempt without its trajectory, which stays on the worker.
        """
        ray = import_ray()
        lost = ""
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(_AGAIN_S * 2 ** (number - 1))
            worker = self._worker_for(job, which)
            self._load[worker] += 1
            try:
                return await self._made_by(self._actors[worker], job, which, max_cost), None
            except ray.exceptions.RayActorError as error:
                self.num_again += 1
                lost = error_cause_line(error)
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, RamifyError):
                    raise type(cause)(str(cause)) from None
                raise
            finally:
                self._load[worker] -= 1
        return self._lost_outcome(which, lost), None

    async def _made_by(
        self, actor: Any, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> AttemptOutcome:
        record = job.record
        run = record.unfinished.get((which.id, which.number), "") if record is not None else ""
        order = RayEvalAttemptRequest(job.plan, which.item_index, which.number, run, max_cost)
        told = actor.attempt.options(num_returns="streaming").remote(msgspec.json.encode(order))
        async for reference in told:
            found = msgspec.json.decode(await reference, type=AttemptStartRecord | AttemptOutcome)
            if isinstance(found, AttemptOutcome):
                return found
            if record is not None:
                record.record_attempt_start(which.id, which.number, found.run)
        raise RamifyError("a worker ended an attempt without reporting its outcome")

    def _worker_for(self, job: EvaluationSetup, which: PlannedAttempt) -> int:
        """Choose the Ray worker that runs an attempt.

        Prefer the worker that has already cached the item, if it has room, and otherwise take the
        one with the fewest attempts in progress.
        """
        place = id(job.task), job.plan.split, which.item_index
        home = self._home.get(place)
        each = math.ceil(self._concurrency / len(self._actors))
        if home is None or self._load[home] >= each:
            home = min(range(len(self._load)), key=self._load.__getitem__)
            self._home[place] = home
        return home

    def _lost_outcome(self, which: PlannedAttempt, why: str) -> AttemptOutcome:
        return AttemptOutcome(
            item=which.id,
            attempt=which.number,
            error=f"its worker was lost {_TRIES} times: {why}",
        )

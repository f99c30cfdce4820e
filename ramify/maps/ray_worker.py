"""The worker process of a map on a Ray cluster.

Each worker has an engine with its own sandbox, and answers one part of the rows after another.

    part ── rows that have no answer yet ──> TableMapRun with the shared budget ──> file of the part

Each part is run as a separate ``TableMapRun``, so a row is asked, checked, repaired and retried
exactly as it is without Ray. Equal rows within a part are asked once. If an earlier invocation of
the map left a part incomplete, the part is read from the output and only the missing rows are
asked. ``ray_row_partition.py`` divides the rows into parts, ``part_output.py`` manages their files,
and ``shared_budget.py`` lets the workers share a budget.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from ramify.actors.ray_cluster import check_ramify_version
from ramify.engine import event_loop_thread
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.rlm import RLM
from ramify.engine.typed_answers import to_answer_schema
from ramify.maps.map_output import AddedAnswerColumns
from ramify.maps.map_run import MapResult, TableMapRun, TableMapSpec
from ramify.maps.part_output import NOT_ASKED, PartedOutputFolder
from ramify.maps.ray_row_partition import EncodedRowChunk, RowFiles
from ramify.maps.row_source import RowSource
from ramify.maps.shared_budget import UNLIMITED, MapRowCounts, RemoteBudget

_NO_LIMITS = Limits(max_calls=UNLIMITED, max_tokens=UNLIMITED, max_cost=float(UNLIMITED))


class MapWorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all workers of a map on a Ray cluster share.

    They contain no keys, because each worker reads the keys from its own environment.
    """

    make_rlm: Callable[[], RLM]
    """Function that creates a worker's RLM."""
    question: str
    answer_type: Any = None
    columns: tuple[str, ...] = ()
    prefix: str = ""
    strict: bool = False
    is_priced: bool = False
    """True if any model has a price."""
    version: str = ""
    """Version of Ramify in the process that began the map."""


class RowAnsweringEngine:
    """The engine of a worker process, which answers all parts of a map's rows with one RLM."""

    def __init__(self, task: MapWorkerConfig, budget: Any) -> None:
        """Start the RLM with which this worker answers rows.

        ``budget`` is the Ray actor handle of the ``MapBudgetActor``. Raises ConfigError if the
        worker has a different version of Ramify.
        """
        check_ramify_version(task.version)
        self.task = task
        self._budget = budget
        self._rlm = task.make_rlm()
        event_loop_thread.run(self._rlm.__aenter__())

    def answer(
        self, part: str, source: RowSource, known: MapRowCounts
    ) -> tuple[MapResult | None, str]:
        """Answer the unanswered rows of one part, read from ``source``.

        ``known`` counts those rows of the part that already have an answer. Returns (result, empty
        string), or (None, reason) if the map is stopping.
        """
        return event_loop_thread.run(self._answer(part, source, known))

    def report_answered_part(self, part: str, known: MapRowCounts) -> None:
        """Report a part whose rows are all answered, so that it counts in the map's totals."""
        event_loop_thread.run(self._skip(part, known))

    async def _answer(
        self, part: str, source: RowSource, known: MapRowCounts
    ) -> tuple[MapResult | None, str]:
        task = self.task
        request = TableMapSpec(
            question=task.question,
            answer_type=task.answer_type,
            columns=task.columns,
            prefix=task.prefix,
            budget=_NO_LIMITS,
            strict=task.strict,
            is_part=True,
        )
        remote = RemoteBudget(
            self._call,
            uuid.uuid4().hex,
            lambda: run.pause_remaining_s,
            lambda reason: run.stop_gracefully(reason),
        )
        ledger = BudgetLedger(_NO_LIMITS, priced=task.is_priced, shared=remote, owner="map")
        run = TableMapRun(self._rlm, source, request, ledger)
        if reason := await remote.begin_part_attempt(part):
            return None, reason
        try:
            result = await run.run()
        # The attempt is not ended, so what it reserved will count as spent when it falls silent.
        except BaseException:
            await remote.close()
            raise
        # A problem that stops one worker, such as a missing key, stops all of them.
        if result.stop not in ("done", "stopped"):
            await self._call("stop", result.stop, result.reason)
        new = MapRowCounts(
            result.num_answered,
            result.num_failed,
            result.num_missing,
            result.num_questions,
            result.num_known,
        )
        await remote.end_part_attempt(new + known)
        return result, ""

    async def _skip(self, part: str, known: MapRowCounts) -> None:
        attempt = uuid.uuid4().hex
        if not await self._call("begin_part_attempt", attempt, part):
            await self._call("end_part_attempt", attempt, known)
            await self._call("mark_written", part)

    def _call(self, method: str, *given: Any) -> Awaitable[Any]:
        return asyncio.wrap_future(getattr(self._budget, method).remote(*given).future())


class MapPartWorker:
    """A Ray actor that answers the rows of a map, one part at a time.

    Ray Data runs it on the nodes of the cluster.
    """

    def __init__(
        self,
        task: MapWorkerConfig,
        budget: Any,
        files: RowFiles,
        output: PartedOutputFolder,
        *,
        retries: bool,
    ) -> None:
        """Start the engine with which this worker answers rows.

        If ``retries`` is set, rows with an earlier error are asked again.
        """
        self._engine = RowAnsweringEngine(task, budget)
        self._files = files
        self._output = output
        self._retries = retries
        kind = None if task.answer_type is None else to_answer_schema(task.answer_type)
        self._added = AddedAnswerColumns(kind, task.prefix, files.empty_row_source.kept_columns)

    def __call__(self, batch: Any) -> Iterator[Any]:
        for part in batch.to_pylist():
            yield self._answer_part(EncodedRowChunk(**part))

    def _answer_part(self, part: EncodedRowChunk) -> Any:
        """Answer the unanswered rows of a part, and return a Ray block that describes its new file.

        The block is empty if no new file is needed.
        """
        source = part.row_source(self._files)
        rows = list(source.values())
        done = self._output.rows_already_written(part.name)
        error = self._added.error
        asked = [
            index
            for index in range(len(rows))
            if index >= len(done) or self._is_asked(done[index].get(error))
        ]
        left = set(asked)
        old = [row for index, row in enumerate(done) if index not in left]
        num_failed = sum(bool(row.get(error)) for row in old)
        known = MapRowCounts(len(old) - num_failed, num_failed, 0, 0, len(old))
        if not asked:
            self._engine.report_answered_part(part.name, known)
            return _file_block()
        table = msgspec.structs.replace(
            source, total=len(asked), values=lambda: (rows[index] for index in asked)
        )
        result, _ = self._engine.answer(part.name, table, known)
        if result is None or (result.num_missing == len(rows)):
            return _file_block()
        answered = dict(zip(asked, result.table, strict=True))
        merged = [
            answered[index] if index in answered else done[index] for index in range(len(rows))
        ]
        data = self._output.encode(merged, source, self._added)
        return _file_block((part.name, result.num_missing == 0, data))

    def _is_asked(self, error: str | None) -> bool:
        return bool(error) and (self._retries or str(error).startswith(NOT_ASKED))


def _file_block(*files: tuple[str, bool, bytes]) -> Any:
    import pyarrow

    names, finished, data = zip(*files, strict=True) if files else ((), (), ())
    return pyarrow.table(
        {
            "name": pyarrow.array(names, pyarrow.string()),
            "is_finished": pyarrow.array(finished, pyarrow.bool_()),
            "data": pyarrow.array(data, pyarrow.large_binary()),
        }
    )

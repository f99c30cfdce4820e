"""Runs a map on a Ray cluster, as one Ray Data pipeline.

The pipeline reads files of rows, asks a question about each row, and writes the answers to a
folder.

    RowPartitionDatasource ──> MapPartWorker (actors) ──> PartFileDatasink   OUT/part-00000-….jsonl
    files                      an engine each              │
                                    └── MapBudgetActor ──────┘              an actor on this node
    this process: starts it, asks it for its state, and passes Ctrl-C on

Ray Data moves the blocks of rows, slows down reading if the workers are slower, and repeats what a
lost worker had not finished. A part of the rows is named after its file and its position in that
file, so a repeated part overwrites its own file, and running the same command again processes the
parts that are missing. ``OUT/_map.json`` identifies the map whose answers are in the folder.
Spending is recorded in the store of this machine. ``ramify/actors/ray_cluster.py`` connects to
clusters.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from ramify import __version__
from ramify.actors.ray_cluster import (
    RayClusterConnection,
    check_node_versions,
    error_cause_line,
    import_ray,
)
from ramify.engine.question import Question
from ramify.engine.rlm import RLM
from ramify.engine.typed_answers import to_answer_schema
from ramify.errors import ConfigError, RamifyError, RunInUse, StoreError
from ramify.maps.map_journal import (
    RAY_MAPS,
    MapJournalHeader,
    RayMapHeaderFields,
    TableMapStore,
    new_map_id,
)
from ramify.maps.map_output import AddedAnswerColumns
from ramify.maps.map_run import MapResult, TableMapSpec
from ramify.maps.part_output import UNFINISHED, PartedOutputFolder, is_part, open_output_folder
from ramify.maps.ray_row_partition import row_files_of_urls, split_text_files
from ramify.maps.ray_worker import MapPartWorker, MapWorkerConfig
from ramify.maps.row_question import RowQuestionMaker
from ramify.maps.shared_budget import MapBudgetActor, RayMapStatus
from ramify.progress import track_progress
from ramify.store.durable_files import make_folder
from ramify.store.folder_store import Store

_POLL_S = 0.25
_STORE_BYTES = 160 << 20
"""Size in bytes of the object store of a local cluster that is started here."""
_WORKER_CPUS = 0.5
"""Number of CPUs that Ray reserves for one worker. The remaining CPUs are for reading and
writing."""
_MANIFEST = "_map.json"
_SETTINGS = (
    *("model", "sub_model", "models", "scaffold", "sampling", "instructions", "examples"),
    "mode",
)


class MapOutputIdentity(msgspec.Struct, frozen=True):
    """The contents of the file ``_map.json`` in a map's output folder.

    They identify the map that wrote the answers.
    """

    key: str
    """Digest of the question, its settings and the model."""
    question: str
    model: str
    files: tuple[tuple[str, int], ...]
    """(path, size in bytes) of each input file. They determine which rows belong to which part."""


class RayMapRun:
    """A run of a map on a Ray cluster.

    It also continues a map that was interrupted.
    """

    def __init__(
        self,
        make_rlm: Callable[[], RLM],
        urls: Sequence[str],
        request: TableMapSpec,
        out: str,
        store: Store,
        workers: int | None = None,
        address: str = "",
    ) -> None:
        """Prepare to run a map on a Ray cluster over the files at ``urls``.

        Workers create their RLM with ``make_rlm``, which must not contain keys. ``out`` is the path
        or URL of the output folder, and its extension determines the file format. Raises
        ConfigError or SourceError.
        """
        if request.sample is not None:
            raise ConfigError("a sample (--try) runs only on this machine: remove --placement ray")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers}: give 1 or more")
        self.request = request
        self._make_rlm = make_rlm
        self._files = row_files_of_urls(urls)
        self._output = open_output_folder(out)
        self._out = out if "://" in out else self._output.folder
        self._store = store
        self._workers = workers
        self._cluster = RayClusterConnection(address, store_bytes=_STORE_BYTES, is_quiet=True)
        self._stops: list[tuple[str, str]] = []
        self._num_earlier_requests = 0
        kind = None if request.answer_type is None else to_answer_schema(request.answer_type)
        base = Question(request.question, None, kind=kind)
        if not request.question.strip():
            raise ConfigError("the question is empty: say what you want to know of each row")
        table = self._files.empty_row_source
        self._asking = RowQuestionMaker(
            request.question, table.columns, request.columns or table.shown, base, b""
        )
        self._added = AddedAnswerColumns(kind, request.prefix, table.kept_columns)
        self._schema = kind.schema if kind else None

    def stop_gracefully(self, reason: str = "it was stopped", stop: str = "stopped") -> None:
        """Stop the map before it starts any new rows.

        Requests in flight are finished first.
        """
        self._stops.append((stop, reason))

    async def run(self) -> MapResult:
        """Answer all rows on the cluster, and write the map's output folder.

        Raises ConfigError before any row is asked if the settings are invalid.
        """
        began_s, request = time.perf_counter(), self.request
        rlm = self._make_rlm()
        async with rlm, rlm.direct_calls(request.budget) as calls:
            config = calls.setup.config
            settings = {name: config[name] for name in _SETTINGS if name in config}
            asked = (request.question, self._schema, settings, request.columns, request.prefix)
            key = hashlib.sha256(msgspec.json.encode((*asked, self._out))).hexdigest()
            manifest = MapOutputIdentity(
                key,
                request.question,
                calls.client.name,
                tuple((file.path, file.size) for file in self._files.files),
            )
            is_priced = calls.is_priced
        task = MapWorkerConfig(
            make_rlm=self._make_rlm,
            question=request.question,
            answer_type=request.answer_type,
            columns=request.columns,
            prefix=request.prefix,
            strict=request.strict,
            is_priced=is_priced,
            version=__version__,
        )
        record = make_folder(self._store.root / RAY_MAPS) / f"{key[:32]}.json"
        maps = TableMapStore(self._store.root)
        found = next((path for path, header in maps.headers() if header.key == key), None)
        # Two processes with one output would ask everything twice.
        journal = None if found is None else maps.reopen(found)
        try:
            skipped, old = self._prepare(manifest)
            output = msgspec.structs.replace(self._output, old=old)
            async with self._join_cluster() as ray:
                self._claim(manifest)
                journal = journal or maps.create(self._header(manifest, config, record.name))
                state = await self._on_cluster(
                    ray, task, output, skipped, str(record), rlm.limits.max_concurrency
                )
        finally:
            if journal is not None:
                journal.close()
        counts, done = state.counts, state.stop == "done"
        return MapResult(
            id=journal.path.stem,
            stop=state.stop,  # type: ignore[arg-type]
            reason=state.reason,
            num_rows=counts.answered + counts.failed + counts.missing,
            num_answered=counts.answered,
            num_failed=counts.failed,
            num_missing=counts.missing,
            num_questions=counts.asked,
            num_known=counts.known,
            usage=state.usage,
            cost=state.cost,
            seconds=time.perf_counter() - began_s,
            out=self._out if done else "",
            num_earlier_requests=self._num_earlier_requests,
            num_paid_again=state.num_paid_again,
        )

    def _header(
        self, manifest: MapOutputIdentity, config: dict[str, Any], record: str
    ) -> MapJournalHeader:
        added, kept = self._added, self._files.empty_row_source.kept_columns
        shown = tuple(name for name in self._asking.shown if name in kept)
        return MapJournalHeader(
            id=new_map_id(manifest.key),
            key=manifest.key,
            question=manifest.question,
            started_at=time.time(),
            model=manifest.model,
            out=self._out,
            rows=self._files.name,
            answer_schema=self._schema,
            config=config,
            parts=RayMapHeaderFields(record, shown or kept, added.answers, added.error),
        )

    # --- the folder of the output

    def _prepare(self, manifest: MapOutputIdentity) -> tuple[frozenset[str], frozenset[str]]:
        """Prepare the map's output folder, and return what earlier invocations left in it.

        Returns the names of the finished parts, and the files of parts that may lack answers.
        Raises ConfigError if the folder contains anything other than this map's output. Writes no
        files.
        """
        import pyarrow.fs as arrow_fs

        output = self._output
        files, folder = output.filesystem, output.folder
        path = f"{folder}/{_MANIFEST}"
        try:
            files.create_dir(folder, recursive=True)
            names = [
                info.base_name
                for info in files.get_file_info(arrow_fs.FileSelector(folder, allow_not_found=True))
            ]
            if _MANIFEST in names:
                with files.open_input_file(path) as file:
                    self._check(msgspec.json.decode(file.read(), type=MapOutputIdentity), manifest)
            elif any(not name.startswith("_part-") for name in names):
                raise ConfigError(
                    f"{self._out} is not empty, and no map wrote it: give another folder"
                )
        except (OSError, msgspec.DecodeError) as error:
            raise self._not_written(error) from None
        parts = [name for name in names if is_part(name) and name.endswith(output.ending)]
        whole = {name for name in parts if UNFINISHED not in name}
        unfinished = {name for name in parts if UNFINISHED in name}
        if self.request.retry_failed:
            return frozenset(), frozenset(whole | unfinished)
        done = frozenset(name.removesuffix(output.ending) for name in whole)
        return done, frozenset(unfinished)

    def _claim(self, manifest: MapOutputIdentity) -> None:
        """Mark the output folder as belonging to this map by writing ``_map.json``.

        Unfinished files of lost workers are deleted. Raises ConfigError if the folder cannot be
        written.
        """
        import pyarrow.fs as arrow_fs

        files, folder = self._output.filesystem, self._output.folder
        try:
            with files.open_output_stream(f"{folder}/{_MANIFEST}") as file:
                file.write(msgspec.json.encode(manifest))
            for info in files.get_file_info(arrow_fs.FileSelector(folder)):
                if info.base_name.startswith("_part-"):
                    files.delete_file(info.path)
        except OSError as error:
            raise self._not_written(error) from None

    def _not_written(self, error: Exception) -> ConfigError:
        return ConfigError(f"cannot write {self._out}: {error}")

    def _check(self, found: MapOutputIdentity, ours: MapOutputIdentity) -> None:
        if found.key != ours.key:
            what = (
                f"the question {found.question[:60]!r}"
                if found.question != ours.question
                else f"the same question with other settings (model {found.model})"
            )
            raise ConfigError(
                f"{self._out} has the answers to {what}: give another out, or remove it"
            )
        if found.files != ours.files[: len(found.files)]:
            raise ConfigError(
                f"the input files are not those with which {self._out} was started: give another "
                "out (files may only be added at the end)"
            )

    # --- the cluster

    @contextlib.asynccontextmanager
    async def _join_cluster(self) -> AsyncIterator[Any]:
        """Context manager that connects to the Ray cluster and yields the ``ray`` module.

        An existing connection is used if there is one. Raises ConfigError if a node has a different
        version of Ramify.
        """
        ray = import_ray()
        if not (was_joined := ray.is_initialized()):
            await asyncio.to_thread(self._cluster.join_or_start)
        try:
            await asyncio.to_thread(check_node_versions, __version__)
            yield ray
        finally:
            if not was_joined:
                self._cluster.leave()

    async def _on_cluster(
        self,
        ray: Any,
        task: MapWorkerConfig,
        output: PartedOutputFolder,
        skipped: frozenset[str],
        record: str,
        max_in_flight: int,
    ) -> RayMapStatus:
        """Run the map as a Ray Data pipeline, and return its final status."""
        # On this node, where the record is.
        budget = (
            ray.remote(MapBudgetActor)
            .options(num_cpus=0, max_concurrency=1000, scheduling_strategy=_this_node_strategy(ray))
            .remote(
                self.request.budget,
                max_in_flight,
                is_priced=task.is_priced,
                record=record,
                counts_again=self.request.retry_failed,
            )
        )
        try:
            before: RayMapStatus = await budget.state.remote()
            self._num_earlier_requests = before.usage.calls
        except ray.exceptions.RayError as error:
            raise RunInUse(
                f"the map's budget cannot be opened: {error_cause_line(error)}"
            ) from None
        try:
            return await self._run_watched(
                budget, partial(self._run_pipeline, task, output, budget, skipped)
            )
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(budget)  # the caller's process may live, and start another map

    def _run_pipeline(
        self,
        task: MapWorkerConfig,
        output: PartedOutputFolder,
        budget: Any,
        skipped: frozenset[str],
    ) -> None:
        import ray

        from ramify.maps.ray_source import (
            PartFileDatasink,
            RowPartitionDatasource,
            row_partition_block,
        )

        files = self._files
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        most = self._workers or max(1, int(resources.get("CPU", 1)))
        # Each writing process takes seconds to start, and a part milliseconds to write.
        writers = max(2, most // 4)
        with _quiet_context():
            if files.is_texts:
                parts = [part for part in split_text_files(files) if part.name not in skipped]
                if not parts:
                    return
                writers = min(writers, len(parts))
                rows = ray.data.from_arrow([row_partition_block([part]) for part in parts])
            else:
                rows = ray.data.read_datasource(
                    RowPartitionDatasource(files, skipped),
                    override_num_blocks=len(files.files),
                    num_cpus=0.1,
                )
            answered = rows.map_batches(
                MapPartWorker,
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(
                    min_size=self._workers or 1, max_size=most, max_tasks_in_flight_per_actor=1
                ),
                fn_constructor_args=(task, budget, files, output),
                fn_constructor_kwargs={"retries": self.request.retry_failed},
                num_cpus=_WORKER_CPUS,
            )
            answered.write_datasink(
                PartFileDatasink(output, budget),
                ray_remote_args={"num_cpus": 0.1},
                concurrency=writers,
            )

    async def _run_watched(self, budget: Any, run: Callable[[], None]) -> RayMapStatus:
        """Run the Ray Data pipeline in a thread until it ends, and return the map's status.

        Meanwhile, show the progress, and forward stop requests to the shared budget.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def end(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                run()
            except BaseException as caught:  # noqa: BLE001 (it is raised by the waiting task)
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed after a second Ctrl-C
                loop.call_soon_threadsafe(end, error)

        threading.Thread(target=work, daemon=True, name="ramify-ray-data").start()
        with track_progress("map", unit="rows") as progress:
            while not ended.done():
                await asyncio.wait([ended], timeout=_POLL_S)
                while self._stops:
                    await budget.stop.remote(*self._stops.pop(0))
                state: RayMapStatus = await budget.state.remote()
                cost = "" if state.cost is None else f"${state.cost:.4g}"
                progress.set_progress(state.counts.answered + state.counts.failed, cost or None)
        if (error := ended.result()) is not None:
            raise _failure(error)
        final: RayMapStatus = await budget.state.remote()
        return final


def _this_node_strategy(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


@contextlib.contextmanager
def _quiet_context() -> Iterator[None]:
    """Context manager that sets up Ray Data for a map and silences its messages.

    Each block holds one part of the rows, and Ray prints neither progress bars nor advice. The
    earlier settings are restored at the end of the ``with`` block.
    """
    from ray.data import DataContext

    warnings.filterwarnings("ignore", "The maximum number of concurrent tasks", UserWarning)

    context = DataContext.get_current()
    names = ("target_max_block_size", "enable_progress_bars", "max_errored_blocks")
    before = {name: getattr(context, name) for name in names}
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)


def _failure(error: BaseException) -> BaseException:
    """Return the error to report for a failed Ray Data pipeline.

    It is the RamifyError that made the pipeline fail, or a new one that describes the failure.
    """
    cause: BaseException | None = error
    while cause is not None:
        inner = getattr(cause, "cause", None) or cause.__cause__
        if isinstance(cause, RamifyError):
            return type(cause)(str(cause)) if isinstance(cause, ConfigError | StoreError) else cause
        cause = inner
    return RamifyError(
        f"the pipeline of Ray Data failed: {error_cause_line(error)}; the same command "
        "continues the map"
    )

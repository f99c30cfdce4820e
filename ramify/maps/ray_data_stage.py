"""A stage for Ray Data pipelines that asks a question about each row.

    dataset.map_batches(ramify.ray.RayDataAsker("Is this a complaint?", model="openai:gpt-5-mini"))
        batch (columns by name, Arrow or pandas) ──> the batch, with the columns of the answers

All copies of an ``RayDataAsker`` share one budget and one rate limit. Each process that Ray Data
uses has one engine. ``ray_map.py`` runs a whole map, including reading and writing files.
"""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ramify import __version__
from ramify.engine.limits import Limits
from ramify.engine.rlm import RLM
from ramify.engine.typed_answers import to_answer_schema as as_answer_type
from ramify.errors import RamifyError
from ramify.maps.api import make_worker_rlm_factory, total_map_limits
from ramify.maps.map_output import AddedAnswerColumns
from ramify.maps.open_row_source import open_rows
from ramify.maps.part_output import NOT_ASKED
from ramify.maps.ray_worker import MapWorkerConfig, RowAnsweringEngine
from ramify.maps.shared_budget import MapBudgetActor, MapRowCounts

_engines: dict[str, RowAnsweringEngine] = {}
"""Id of an ``RayDataAsker`` -> its engine in this process."""
_engines_lock = threading.Lock()


class RayDataAsker:
    """A Ray Data stage that asks a question about each row of a batch.

    Example:
        asker = ramify.ray.RayDataAsker(
            "Is {subject} urgent?", model="openai:gpt-5-mini", max_cost=20
        )
        dataset.map_batches(asker, batch_size=500).write_parquet("urgent")
    """

    def __init__(
        self,
        question: str,
        *,
        model: str | Sequence[str],
        answer_type: Any = None,
        columns: Sequence[str] = (),
        prefix: str = "",
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        **options: Any,
    ) -> None:
        """Create a Ray Data stage that asks the given question.

        The arguments are those of ``ramify.map``, and the limits apply to all workers together.
        Starts or joins Ray if this process is not connected yet. Raises ConfigError if an argument
        is invalid.
        """
        import ray

        make_rlm = make_worker_rlm_factory(model, options)
        limits = options.get("limits") or Limits()
        is_priced = _is_priced(make_rlm())
        self._id = uuid.uuid4().hex
        self._task = MapWorkerConfig(
            make_rlm=make_rlm,
            question=question,
            answer_type=answer_type,
            columns=tuple(columns),
            prefix=prefix,
            is_priced=is_priced,
            version=__version__,
        )
        # Kept alive by this object and its copies.
        self._budget = (
            ray.remote(MapBudgetActor)
            .options(num_cpus=0, max_concurrency=1000)
            .remote(
                total_map_limits(max_calls, max_tokens, max_cost),
                limits.max_concurrency,
                is_priced=is_priced,
            )
        )

    def __call__(self, batch: Any) -> Any:
        """Ask the question about each row of a batch.

        Returns the batch with columns for the answer and the column ``error``. A NumPy batch
        becomes an Arrow table. Raises RamifyError if a problem must be fixed first, such as a
        missing key.
        """
        table = batch if hasattr(batch, "to_pylist") or hasattr(batch, "iloc") else _rows(batch)
        source = open_rows(table)
        task = self._task
        kind = None if task.answer_type is None else as_answer_type(task.answer_type)
        added = AddedAnswerColumns(kind, task.prefix, source.columns)
        with _engines_lock:
            engine = _engines.get(self._id) or RowAnsweringEngine(task, self._budget)
            _engines[self._id] = engine
        result, why = engine.answer(uuid.uuid4().hex, _as_list(source), MapRowCounts())
        if result is not None and result.stop not in ("done", "limit", "stopped"):
            raise RamifyError(result.reason)
        if result is None:
            rows = [added.added_values(None, f"{NOT_ASKED} {why}")] * len(list(source.iter_rows()))
        else:
            rows = result.table
        return _with_columns(batch, added, rows)


def _is_priced(rlm: RLM) -> bool:
    from ramify.engine import event_loop_thread

    async def look() -> bool:
        async with rlm.direct_calls(total_map_limits(None, None, None)) as calls:
            return calls.is_priced

    return event_loop_thread.run(look())


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a Ray Data batch, which is stored by columns, to a list of rows as dicts."""
    columns = {
        name: values.tolist() if hasattr(values, "tolist") else list(values)
        for name, values in batch.items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_list(source: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(source, extend=None)


def _with_columns(batch: Any, added: AddedAnswerColumns, rows: list[dict[str, Any]]) -> Any:
    """Return a Ray Data batch with the answer and error columns added.

    A column has the same type in every batch, even if it has no values, because Ray Data writes
    batches separately.
    """
    columns = {
        name: added.arrow_array(name, [row.get(name) for row in rows]) for name in added.names
    }
    if hasattr(batch, "assign"):
        pandas = importlib.import_module("pandas")
        return batch.assign(
            **{
                name: pandas.Series(
                    pandas.arrays.ArrowExtensionArray(column), index=batch.index, name=name
                )
                for name, column in columns.items()
            }
        )
    if not hasattr(batch, "append_column"):
        from ray.data.block import BlockAccessor

        batch = BlockAccessor.batch_to_arrow_block(batch)
    for name, column in columns.items():
        batch = batch.append_column(name, column)
    return batch

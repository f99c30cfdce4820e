"""The functions ``ramify.map`` and ``ramify.amap``, which ask one question about every row of a
table.

    result = ramify.map("Is this a complaint?", "tickets.jsonl", "openai:gpt-5-mini", out="a.jsonl")
    table = ramify.map("Is {subject} urgent?", frame, "openai:gpt-5-mini", answer_type=bool).table

The command is in ``ramify/cli/map_command.py``, and the work is done by ``map_run.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ramify.engine import event_loop_thread
from ramify.engine.limits import Limits
from ramify.engine.question import ModelSpec, RlmKeywordOptions
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, check_keywords
from ramify.maps.map_run import MapResult, TableMapRun, TableMapSpec
from ramify.maps.open_row_source import open_paths, open_rows
from ramify.store.base import RunStore
from ramify.store.folder_store import Store

UNLIMITED = 10**15
"""Number of calls or tokens that means no limit."""


def total_map_limits(
    max_calls: int | None, max_tokens: int | None, max_cost: float | None
) -> Limits:
    """Return the budget limits of a map, which apply to all of its rows together.

    If ``max_cost`` is None and the model has a price, the cost limit is 5 dollars.
    """
    return Limits(
        max_calls=UNLIMITED if max_calls is None else max_calls,
        max_tokens=UNLIMITED if max_tokens is None else max_tokens,
        max_cost=max_cost,
    )


def _path_of(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out).expanduser()


def make_worker_rlm_factory(model: Any, options: dict[str, Any]) -> Callable[[], RLM]:
    """Return a function that creates the RLM of a map's worker on another machine.

    Raises ConfigError unless the model is given by name: a model object may hold a key, so it
    cannot be sent to another process.
    """
    names = [model] if isinstance(model, str) else model
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"a worker on a Ray cluster needs the name of a model, and {type(model).__name__} was "
            "given: give 'provider:model'; keys are read from each worker's environment"
        )
    return partial(RLM, model, **options)


def _are_paths(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and all(isinstance(row, str | Path) for row in rows)


async def amap(
    question: str,
    rows: Any,
    model: ModelSpec | Sequence[ModelSpec] | RLM,
    *,
    out: str | Path | None = None,
    answer_type: Any = None,
    columns: Sequence[str] = (),
    table: str | None = None,
    prefix: str = "",
    max_calls: int | None = None,
    max_tokens: int | None = None,
    max_cost: float | None = None,
    retry_failed: bool = False,
    strict: bool = False,
    sample: int | None = None,
    placement: Literal["local", "ray"] = "local",
    workers: int | None = None,
    batch: bool = False,
    batch_rows: int | None = None,
    store: RunStore | None = None,
    **options: Any,
) -> MapResult:
    """Ask a question about each row of a table, and return the answers.

    This is the asynchronous version of ``map``.

    question      a question, for which each row is the context, or a template over columns:
                  ``"Is {subject} a complaint?"``
    rows          a JSONL, CSV, Parquet or SQLite file, a folder, several of them, or a list, a
                  DataFrame, an Arrow table, a ``datasets.Dataset``
    model         as for ``RLM``, or an ``RLM``, whose limits then hold for each row
    out           .jsonl, .csv or .parquet file; without it, the result has a ``table``
    answer_type   type or JSON schema of an answer; the properties of an object become columns
    columns       columns that the model reads; all by default
    table         table of a SQLite file
    prefix        text before the names of the new columns
    max_calls, max_tokens, max_cost
                  limits of all rows together; 5 dollars unless ``max_cost`` is given
    retry_failed  ask rows that have an error once more
    strict        stop at the first row with an error
    sample        number of rows to ask, drawn at random; ``MapResult.estimate`` extrapolates
    placement     ``ray``: on a Ray cluster (``RAY_ADDRESS``, else one on this machine); ``rows``
                  are then files or URLs, ``out`` is a folder of parts, and ``model`` is a name
    workers       workers on the cluster; up to one for each CPU by default
    batch         send the rows that one request answers through the batch API of OpenAI or
                  Anthropic: half the price, within a day; needs a store
    batch_rows    most rows of one batch; as many as the provider accepts by default
    store         where the map is kept, so that the same call continues it; nowhere by default
    options       options of ``RLM``, unless ``model`` is one: ``sub_model``, ``limits`` per row, …

    Order is kept, and equal rows are asked once. A row that fails has its error in a column. Raises
    ConfigError before anything is asked. ``MapResult.stop`` says why a map ended early.

    Example:
        result = await ramify.amap("Is this a complaint?", "tickets.csv", "openai:gpt-5-mini")
        result.table
    """
    if not isinstance(question, str):
        raise ConfigError(f"the question is a {type(question).__name__}: give a text")
    if not isinstance(model, RLM):
        known = (
            amap.__kwdefaults__,
            RLM.__init__.__kwdefaults__,
            RlmKeywordOptions.__annotations__,
        )
        check_keywords("map", options, sorted({name for names in known for name in names or ()}))
    elif options or store is not None:
        given = next(iter(options), "store")
        raise ConfigError(f"'{given}' belongs to the RLM that was given: set it there")
    request = TableMapSpec(
        question=question,
        answer_type=answer_type,
        columns=(columns,) if isinstance(columns, str) else tuple(columns),
        prefix=prefix,
        out=_path_of(out),
        budget=total_map_limits(max_calls, max_tokens, max_cost),
        retry_failed=retry_failed,
        strict=strict,
        sample=sample,
        batch=batch,
        batch_rows=batch_rows,
    )
    if placement == "ray":
        if batch:
            raise ConfigError("batch=True cannot be combined with placement='ray': remove one")
        if table is not None:
            raise ConfigError(
                f"table={table!r}: SQLite cannot be read on a cluster: remove placement='ray', or "
                "export the table to JSONL"
            )
        return await _map_on_ray(rows, model, request, out, workers, store, options)
    rlm = model if isinstance(model, RLM) else RLM(model, store=store, **options)
    is_paths = isinstance(rows, list) and rows and all(isinstance(each, Path) for each in rows)
    source = open_paths(rows, table) if is_paths else open_rows(rows, table)
    return await TableMapRun(rlm, source, request).run()


async def _map_on_ray(
    rows: Any,
    model: Any,
    request: TableMapSpec,
    out: str | Path | None,
    workers: int | None,
    store: RunStore | None,
    options: dict[str, Any],
) -> MapResult:
    """Ask a question about each row of a table, using workers on a Ray cluster."""
    from ramify.maps.ray_map import RayMapRun

    paths = [rows] if isinstance(rows, str | Path) else rows
    if out is None or not _are_paths(paths):
        raise ConfigError("placement='ray' needs rows as files or URLs, and a folder as out=")
    return await RayMapRun(
        make_worker_rlm_factory(model, options),
        [str(path) for path in paths],
        request,
        str(out),
        store if isinstance(store, Store) else Store(),
        workers,
    ).run()


def map(question: str, rows: Any, model: Any, **options: Any) -> MapResult:
    """Ask a question about each row of a table, wait for all answers, and return them.

    The options are those of ``amap``, the asynchronous version.

    >>> model = testing.ScriptedClient(lambda messages: "yes")
    >>> ramify.map("Is this a question?", ["Why?"], model).table
    [{'text': 'Why?', 'answer': 'yes', 'error': None}]
    """
    return event_loop_thread.run(amap(question, rows, model, **options))

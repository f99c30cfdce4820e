"""``sql`` over a Parquet file beside DuckDB alone: a grouped sum of 10 million rows.

    python benchmarks/inputs.py --part tables

The query process has been started before the timed part. Each side runs in turn; the figure is the
quotient of the fastest runs. A query that DuckDB answers in less than 0.2 s would measure the pipe
to the process, so the sum is over an expression that takes longer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure

NUM_ROWS = 10_000_000
_RUNS = 5
_FLOOR = 1.5
_LEAST_S = 0.2
_QUERY = (
    "SELECT k, sum(sqrt(v) * ln(v + 1)), count(DISTINCT v % 1000) FROM {} GROUP BY k ORDER BY k"
)


def figures(quick: bool) -> Iterator[Figure]:
    import duckdb

    from ramify.sources.load_sources import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        alone = duckdb.connect()
        alone.execute(
            f"COPY (SELECT range % 100 AS k, (range * 7919 % 1000003)::DOUBLE AS v FROM "
            f"range({NUM_ROWS})) TO '{path}'"
        )
        sql = load([path]).tools["sql"]
        ours_rows = sql(_QUERY.format("rows"))
        place = f"read_parquet('{path}')"
        assert [row[0] for row in ours_rows] == [
            row[0] for row in alone.execute(_QUERY.format(place)).fetchall()
        ]
        ours_s, alone_s = _fastest(
            lambda: sql(_QUERY.format("rows")),
            lambda: alone.execute(_QUERY.format(place)).fetchall(),
            3 if quick else _RUNS,
        )
    yield Figure(
        "sql over Parquet, grouped sum of 10 million rows",
        round(ours_s / alone_s, 3),
        "× DuckDB alone",
        {"seconds of DuckDB alone": round(alone_s, 3)},
        floor=_FLOOR,
        valid=alone_s >= _LEAST_S,
    )


def _fastest(
    first: Callable[[], object], second: Callable[[], object], runs: int
) -> tuple[float, float]:
    best = [float("inf"), float("inf")]
    for _ in range(runs):
        for side, call in enumerate((first, second)):
            started = time.perf_counter()
            call()
            best[side] = min(best[side], time.perf_counter() - started)
    return best[0], best[1]

"""CPU time of a run's steps, read from its metrics.

    batch16.decode/steps: 311, batch16.decode/cpu_s: 1.42, cpu/loop_s: 1.31, …
        ->  RecordedCpu(step=12, cores=2, loop_s=1.31, sessions_s=2.74, engine=[StepTiming(…)])

Runs of earlier versions have it in ``processors.jsonl``, with the fields of ``RecordedCpu``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ramify.inference.local.slots import StepTiming
from ramify.train.metrics import StepMetrics

_EARLIER = "processors.jsonl"
_BATCH = re.compile(r"batch(\d+)\.(decode|prefill)/steps")


class RecordedCpu(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of the rollouts of one step."""

    step: int = 0
    cores: int
    """Cores that the run could use."""
    loop_s: float
    """CPU time of the event loop's thread: requests, replies, session frames."""
    sessions_s: float
    """CPU time of all child processes, where sessions run."""
    engine: list[StepTiming]


def recorded_cpu(run: Path, lines: Sequence[StepMetrics]) -> Iterator[RecordedCpu]:
    """The CPU time of the steps in ``lines``, the metrics of the run in folder ``run``."""
    for line in lines:
        if "cpu/loop_s" in line.values:
            yield _recorded(line)
    path = run / _EARLIER
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield msgspec.json.decode(text, type=RecordedCpu)


def _recorded(line: StepMetrics) -> RecordedCpu:
    values = line.values
    engine = []
    for name in values:
        if found := _BATCH.fullmatch(name):
            prefix = name.removesuffix("steps")
            engine.append(
                StepTiming(
                    sequences=int(found[1]),
                    reads=found[2] == "prefill",
                    steps=int(values[name]),
                    tokens=int(values[prefix + "tokens"]),
                    read=int(values.get(prefix + "read", 0)),
                    cpu_s=values[prefix + "cpu_s"],
                )
            )
    return RecordedCpu(
        step=line.step,
        cores=int(values["cpu/cores"]),
        loop_s=values["cpu/loop_s"],
        sessions_s=values["cpu/sessions_s"],
        engine=engine,
    )

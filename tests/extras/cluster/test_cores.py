"""Shared CPU cores, computed by hand; simulated slots that cache like the real ones; and the CPU
measurements that a run records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from simpy import Environment, Event

from ramify.extras.cluster.measured_engine_rate import (
    InferenceEngineSpeed,
    StepRolloutCpuTime,
    read_step_cpu_times,
)
from ramify.extras.cluster.simulated_engine import SimulatedEngine, SimulatedKvCache
from ramify.extras.cluster.simulated_rollout import SimulatedCores
from ramify.inference.local.step_timings import EngineStepTimingRecorder, EngineStepTotals
from ramify.train.metrics import MetricsFile, RolloutCpuMeter, read_metrics


def ends(env: Environment, **events: Event) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, event in events.items():
        event.callbacks.append(lambda _, name=name: found.setdefault(name, env.now))
    env.run()
    return found


def test_sessions_share_the_cores() -> None:
    """Sessions of 2, 2 and 5 s on two cores: each gets two thirds of a core until 3 s; then the
    last has 3 s left and a core to itself."""
    env = Environment()
    cores = SimulatedCores(env, 2, None)
    found = ends(
        env,
        a=cores.run_session_work(2.0),
        b=cores.run_session_work(2.0),
        c=cores.run_session_work(5.0),
    )
    assert found == pytest.approx({"a": 3, "b": 3, "c": 6})
    cores.settle()
    assert cores.used_s == pytest.approx(9)


def test_engine_and_event_loop_share_one_core() -> None:
    """Ten tokens of 1 s; the 2 s of the loop take 4 s, because the engine gets half of the core; a
    session uses the other core."""
    env = Environment()
    engine = SimulatedEngine(env, InferenceEngineSpeed(((1.0, 1.0),)), 1)
    cores = SimulatedCores(env, 2, engine)
    found = ends(
        env,
        reply=engine.request_reply(0, 0, 10),
        loop=cores.queue_loop_work(2.0),
        session=cores.run_session_work(3.0),
    )
    assert found == pytest.approx({"session": 3, "loop": 4, "reply": 12})
    assert not engine.wants
    assert cores.used_s == pytest.approx(15)


def test_engine_and_session_share_a_single_core() -> None:
    """Engine and session get half a core each until the session has had its 2 s."""
    env = Environment()
    engine = SimulatedEngine(env, InferenceEngineSpeed(((1.0, 1.0),)), 1)
    cores = SimulatedCores(env, 1, engine)
    assert ends(
        env, reply=engine.request_reply(0, 0, 5), session=cores.run_session_work(2.0)
    ) == pytest.approx({"session": 4, "reply": 7})


def test_simulated_slots_reuse_prefixes_like_real_ones() -> None:
    """Two slots: a call returns to its own, a sibling copies the shared prefix, a third takes the
    least recently used slot."""
    kept, first = SimulatedKvCache(2, 64), np.arange(20, dtype=np.int32)

    def tokens_to_prefill(ids: Any, affinity: str) -> int:
        admitted = kept.admit(ids, affinity)
        assert admitted is not None
        kept.release(admitted[0], np.append(ids, np.int32(99)))
        return admitted[1]

    assert tokens_to_prefill(first, "0") == 20
    assert tokens_to_prefill(np.append(first, np.array([99, 5, 6], np.int32)), "0") == 3
    assert tokens_to_prefill(np.append(first[:15], np.array([70, 71], np.int32)), "0") == 2
    assert tokens_to_prefill(np.arange(100, 110, dtype=np.int32), "0") == 10
    assert tokens_to_prefill(np.append(first, np.array([99, 5, 6, 7], np.int32)), "0") == 24 - 15
    kept.clear()
    assert tokens_to_prefill(first, "0") == 20


def test_sequences_wait_for_cache_space() -> None:
    """64 tokens: two sequences of up to 32 at a time, one of up to 64."""
    env = Environment()
    engine = SimulatedEngine(env, InferenceEngineSpeed(((1.0, 1.0),)), 8, cache_tokens=64)
    found = ends(env, a=engine.request_reply(0, 10, 10), b=engine.request_reply(0, 20, 10), c=engine.request_reply(0, 40, 10),
                 d=engine.request_reply(0, 10, 5))  # fmt: skip
    assert found == {"a": 10, "b": 10, "c": 20, "d": 25}


def test_step_timings_are_grouped_by_kind() -> None:
    paces = EngineStepTimingRecorder()
    for sequences, read, cpu_s in ((5, 0, 0.5), (8, 0, 1.0), (3, 40, 2.0), (0, 7, 0.25)):
        paces.record_step(sequences, read, cpu_s)
    assert [(each.sequences, each.reads, each.steps, each.tokens, each.read, each.cpu_s) for each in paces.take_totals()] == [
        (0, True, 1, 0, 7, 0.25), (4, True, 1, 3, 40, 2.0), (8, False, 2, 13, 0, 1.5)
    ]  # fmt: skip
    assert paces.take_totals() == []


def test_cpu_time_is_measured_and_read_from_the_metrics(tmp_path: Path) -> None:
    paces = EngineStepTimingRecorder()
    meter = RolloutCpuMeter(paces.take_totals)
    paces.record_step(9, 9, 9.0)
    meter.restart()
    for sequences, read, cpu_s in ((1, 0, 0.5), (12, 0, 0.25), (3, 40, 2.0), (3, 2, 1.0)):
        paces.record_step(sequences, read, cpu_s)
    sum(range(200_000))
    spent = meter.measure_and_restart()
    assert (spent["cpu/engine_s"], spent["cpu/loop_s"] > 0, spent["cpu/cores"] >= 1) == (
        3.75,
        True,
        True,
    )
    metrics = MetricsFile(tmp_path)
    metrics.write(7, "rl", 1.0, {**spent, "cpu/cores": 2, "cpu/loop_s": 0.5, "cpu/sessions_s": 1.5})
    metrics.write(8, "sft", 1.0, {"loss": 1.0})
    engine = [
        EngineStepTotals(sequences=1, reads=False, steps=1, tokens=1, cpu_s=0.5),
        EngineStepTotals(sequences=4, reads=True, steps=2, tokens=6, read=42, cpu_s=3.0),
        EngineStepTotals(sequences=16, reads=False, steps=1, tokens=12, cpu_s=0.25),
    ]
    expected = StepRolloutCpuTime(step=7, cores=2, loop_s=0.5, sessions_s=1.5, engine=engine)
    assert list(read_step_cpu_times(tmp_path, list(read_metrics(tmp_path)))) == [expected]
    # The format of an earlier version, with a last line that was cut off by a kill.
    earlier = msgspec.structs.replace(expected, step=6)
    (tmp_path / "processors.jsonl").write_bytes(msgspec.json.encode(earlier) + b'\n{"step": 7,')
    assert list(read_step_cpu_times(tmp_path, [])) == [earlier]

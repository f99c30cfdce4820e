"""A trainer built from the parts of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ramify.train.config import STALL_S, Schedule
from ramify.train.learner import Learner, PolicyWeightTransfer, WeightPublisher
from ramify.train.metrics import StepMetrics
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.stages import TrainingStage
from ramify.train.stall_watchdog import StallWatchdog, WatchedTrainingThread
from ramify.train.trainer import PolicyEvaluationPlan, Trainer


def trainer_over(
    out: Path,
    stages: Sequence[TrainingStage],
    backend_of: Callable[[TrainingStage], Any],
    policy: PolicyWeightTransfer,
    evaluate: Any,
    *,
    schedule: Schedule | None = None,
    config: dict[str, Any] | None = None,
    listener: Callable[[StepMetrics], None] | None = None,
    watch: StallWatchdog | None = None,
) -> Trainer:
    """Return a trainer for ``stages`` in the folder ``out``, without engine checks."""
    record = TrainingRunRecorder(out, schedule, config=config, listener=listener)
    thread = WatchedTrainingThread(watch or StallWatchdog(out, STALL_S))
    publisher = WeightPublisher(policy, record, thread)
    return Trainer(record, [Learner(publisher, backend_of)], stages, PolicyEvaluationPlan(evaluate))

"""Record the metrics of each training step and the outcome of each rollout group.

There is one file for each in the run's folder.

    metrics.jsonl   {"step": 12, "stage": "rl", "at_s": 41.2,
                     "values": {"reward": 0.46, "sampled_tokens": 8123, …},
                     "diagnoses": [{"name": "too_easy", "text": "in 100% of groups …"}]}
    groups.jsonl    {"step": 7, "number": 57, "item": "ledger/train/57", "version": 6,
                     "outcome": "learnt", "rollouts": ["…"], "failed": []}

Live views use a listener; the web page and the terminal view read the same lines from the file. A
group is the set of attempts at one item, and is identified by the item's number. Its line is
written in the step that learned from the group or gave it up.

Metrics of a step's rollouts, in addition to those of their algorithm:

    pass@4                     probability that at least one of four attempts at an item is right
    depth1.rlm/reward          mean reward of the calls of one depth and kind, if they have any
    task.PART/reward …         of each part of a mixture: groups, reward, zero_variance, pass@k
    depth1.rlm/calls …         calls per rollout, turns and sampled tokens per call, surprise
                               (mean -logprob), share of calls that a limit truncated
    staleness, staleness_max   steps by which the sampling weights of a token are out of date

All files of a run's folder that hold one JSON line per record are ``JsonlRecordFile``:

    LINES = JsonlRecordFile("groups.jsonl", RolloutGroupRecord)
    LINES.append(folder, records)     one write: a kill leaves whole lines, except perhaps the last
    LINES.read(folder)                   the records in order; skips a line that a kill tore
    LINES.drop_after_step(folder, step)  drops the records of later steps; atomic

Each record has the number of its ``step``.

Where the time of each step went, since the line before it, as metrics of the step:

    time/sampling_s, time/packing_s, …         wall seconds of each part, and
    time/step_s                                their sum (``step_time_accounting.py``)
    time_cpu/sampling_s, …, time_cpu/step_s    CPU seconds
    time/overhead, time_cpu/overhead           share of all parts but sampling and passes

CPU time of each step's rollouts, as metrics of the step:

    cpu/loop_s, cpu/sessions_s, cpu/engine_s   seconds of CPU; cpu/cores: cores that they share
    batch16.decode/steps                       steps of the engine with 9 to 16 sequences
    batch16.prefill/cpu_s, …/tokens, …/read    the same for steps that also read prompt tokens

The CPU metrics exist only if the engine is in the trainer's process, where all parts share the same
cores. Unlike wall time, CPU time is the same on a busy machine. Learning and the work between
rollouts, such as evaluations and checkpoints, are not included. The rollouts themselves are stored
in ``OUT/rollouts``.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from ramify.evaluate.evaluation_report import RIGHT
from ramify.evaluate.statistics import pass_at_k
from ramify.inference.local.step_timings import EngineStepTotals
from ramify.step_time_accounting import StepPartTimes
from ramify.tasks.base import total
from ramify.tasks.mixture import item_part_name
from ramify.types.agent_outcome import AGENT_RECORD, AgentExitReason
from ramify.types.trajectory import Call, Group, RolloutGroupOutcome, Trajectory


class StepNumberedRecord(Protocol):
    """A record that belongs to an optimizer step.

    It is one line of a JSONL file of the run.
    """

    @property
    def step(self) -> int:
        """The number of optimizer steps in the whole run, up to and including this record's
        step."""
        ...


R = TypeVar("R", bound=StepNumberedRecord)


class JsonlRecordFile(Generic[R]):
    """A JSONL file of records in a run's folder, such as ``groups.jsonl``.

    All records of a file have the same type.
    """

    def __init__(self, name: str, kind: type[R]) -> None:
        self.name = name
        self._kind = kind

    def append(self, folder: Path, records: Sequence[R]) -> None:
        """Append ``records`` to the file with a single write.

        Writes nothing if there are none.
        """
        lines = self._encode_lines(records)
        if not lines:
            return
        with (folder / self.name).open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line must not swallow the next one
                    lines = b"\n" + lines
            file.write(lines)

    def read(self, folder: Path) -> Iterator[R]:
        """Yield the records of the file in a run's folder, in order.

        Damaged lines are skipped, and a missing file yields nothing.
        """
        path = folder / self.name
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield msgspec.json.decode(line, type=self._kind)

    def drop_after_step(self, folder: Path, step: int) -> None:
        """Remove the records of all steps after ``step``.

        The file is replaced atomically.
        """
        path = folder / self.name
        if path.exists():
            fresh = path.with_suffix(".tmp")
            fresh.write_bytes(
                self._encode_lines([record for record in self.read(folder) if record.step <= step])
            )
            fresh.replace(path)

    @staticmethod
    def _encode_lines(records: Sequence[R]) -> bytes:
        return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


FILE = "metrics.jsonl"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A fault found by a run's automatic checks, and how the run reacts to it.

    See ``training_guard.py``.
    """

    name: str
    """Name of the finding: ``divergence``, ``too_hard``, …"""
    text: str
    """One sentence with the cause, and with the option to change."""
    action: Literal["warn", "stop", "rollback"] = "warn"
    """The run's reaction: ``warn`` only reports the fault, ``stop`` ends the stage, and
    ``rollback`` returns to the best checkpoint."""


class StepMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metrics of one training step or evaluation.

    They are one line of ``metrics.jsonl``.
    """

    step: int
    """Optimizer steps of the whole run, including this one: the first is 1."""
    stage: str
    """Stage of the run: ``sft``, ``rl``, …; an evaluation has the stage that it followed."""
    at_s: float
    """Seconds of training since the run began, over all resumptions."""
    values: dict[str, float]
    """Name -> finite number (JSON allows no others); ``validation/reward`` and ``test/reward`` are
    evaluations on those splits."""
    diagnoses: list[Diagnosis] = []
    """Faults that the training guard found in this step or evaluation; usually none."""


METRICS = JsonlRecordFile(FILE, StepMetrics)


class MetricsFile:
    """The metrics file of a run in progress.

    New metrics are written to it and passed to a listener.
    """

    def __init__(self, folder: Path, listener: Callable[[StepMetrics], None] | None = None) -> None:
        self._folder = folder
        self._listener = listener
        (folder / FILE).touch()

    def write(
        self,
        step: int,
        stage: str,
        at_s: float,
        values: Mapping[str, float],
        diagnoses: Sequence[Diagnosis] = (),
    ) -> StepMetrics:
        finite = {
            name: _round_to_float32(value) for name, value in values.items() if math.isfinite(value)
        }
        measured = StepMetrics(step, stage, round(at_s, 3), finite, list(diagnoses))
        METRICS.append(self._folder, [measured])
        if self._listener is not None:
            self._listener(measured)
        return measured


def read_metrics(folder: Path) -> Iterator[StepMetrics]:
    """Yield the metrics stored in a run's folder, in order.

    Damaged lines are skipped, and a missing file yields nothing.

    Example:
        [row.values["reward"] for row in train.read_metrics(Path("runs/tiny")) if row.stage == "rl"]
    """
    return METRICS.read(folder)


def last_step_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the last training step in a run's folder.

    Returns an empty dict if there is none.
    """
    rows = [row.values for row in read_metrics(folder) if "learn_s" in row.values]
    return rows[-1] if rows else {}


def _round_to_float32(value: float) -> float:
    """Round ``value`` to seven digits, the precision of a 32-bit float."""
    return float(f"{value:.7g}")


# --- outcomes of groups


class RolloutGroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one rollout group.

    It is one line of ``groups.jsonl``.
    """

    step: int = 0
    """Optimizer steps of the run, including the one that decided the outcome, as in
    ``metrics.jsonl``."""
    number: int
    """Index of the item."""
    item: str
    """Id of the item."""
    version: int | None
    """Oldest policy version that sampled any of its tokens; None if it is not known."""
    outcome: RolloutGroupOutcome
    rollouts: list[str]
    """Ids of the rollouts that have a reward."""
    failed: list[str] = []
    """Ids of the other rollouts, including those that were given up."""


GROUPS = JsonlRecordFile("groups.jsonl", RolloutGroupRecord)


def group_record(
    number: int, group: Group, learnt: Collection[str] | None, given_up: Sequence[str] = ()
) -> RolloutGroupRecord:
    """Return the record of a rollout group's outcome.

    ``learnt`` holds the ids of the step's rollouts that have an advantage, or is None if the step
    did not need the group. ``given_up`` holds the ids of rollouts that were abandoned while the
    group continued.
    """
    scored = [trajectory.id for trajectory in group.trajectories if trajectory.rewards]
    outcome = RolloutGroupOutcome.SPARE if learnt is None else RolloutGroupOutcome.NO_SIGNAL
    if not scored:
        outcome = RolloutGroupOutcome.LOST
    elif learnt and not set(learnt).isdisjoint(scored):
        outcome = RolloutGroupOutcome.LEARNT
    return RolloutGroupRecord(
        number=number,
        item=group.task,
        version=_oldest_version(group),
        outcome=outcome,
        rollouts=scored,
        failed=[
            *(trajectory.id for trajectory in group.trajectories if not trajectory.rewards),
            *given_up,
        ],
    )


def _oldest_version(group: Group) -> int | None:
    replies = (
        turn.reply for tree in group.trajectories for call in tree.calls for turn in call.turns
    )
    return min((span.version for reply in replies for span in reply.versions or ()), default=None)


# --- metrics of rollouts


class CallDepthMetrics(msgspec.Struct, frozen=True):
    """Metrics of all calls with the same depth and kind in a set of rollouts."""

    depth: int
    kind: str
    calls: int
    reward: float | None
    """Mean reward of the calls. None if no call has a reward."""
    turns: float
    """Turns per call."""
    sampled: float
    """Sampled tokens per call."""
    surprise: float | None
    """Mean of -logprob over sampled tokens, in nats; None if log-probabilities are not known."""
    truncated: float
    """Share of calls that a limit truncated."""


def metrics_by_depth(
    trajectories: Sequence[Trajectory], weights: Mapping[str, float]
) -> list[CallDepthMetrics]:
    """Return the metrics of the calls at each depth, separately for each kind of call.

    ``weights`` are the task's reward weights. The reward of a root call is that of its rollout.
    """
    members: dict[tuple[int, str], list[tuple[Call, float | None]]] = defaultdict(list)
    for tree in trajectories:
        for call in tree.calls:
            rewards = tree.call_rewards.get(call.id) or (
                tree.rewards if call.parent is None else {}
            )
            members[call.depth, call.kind].append(
                (call, total(rewards, weights) if rewards else None)
            )
    return [_depth_metrics(depth, kind, members[depth, kind]) for depth, kind in sorted(members)]


def _depth_metrics(
    depth: int, kind: str, members: Sequence[tuple[Call, float | None]]
) -> CallDepthMetrics:
    calls = [call for call, _ in members]
    rewards = [reward for _, reward in members if reward is not None]
    replies = [turn.reply for call in calls for turn in call.turns]
    logprobs = [value for reply in replies for value in reply.logprobs or ()]
    cut_short = sum(call.stop is not None and call.stop.is_truncated() for call in calls)
    return CallDepthMetrics(
        depth,
        kind,
        len(calls),
        math.fsum(rewards) / len(rewards) if rewards else None,
        len(replies) / len(calls),
        sum(len(reply.token_ids or ()) for reply in replies) / len(calls),
        -math.fsum(logprobs) / len(logprobs) if logprobs else None,
        cut_short / len(calls),
    )


def passes(groups: Sequence[Group], weights: Mapping[str, float]) -> dict[int, float]:
    """Return pass@k of the rollout groups for k = 2, 4, 8, … and for the size of the largest group.

    Each value is the mean over the groups with at least k attempts. Failed rollouts do not count as
    attempts, since they say nothing about the policy.
    """
    right = [
        [total(tree.rewards, weights) >= RIGHT for tree in group.trajectories if tree.rewards]
        for group in groups
    ]
    most = max((len(attempts) for attempts in right), default=0)
    powers = {2**power for power in range(1, most.bit_length()) if 2**power <= most}
    by_k = {}
    for k in sorted(powers | ({most} if most > 1 else set())):
        enough = [
            pass_at_k(len(attempts), sum(attempts), k) for attempts in right if len(attempts) >= k
        ]
        by_k[k] = math.fsum(enough) / len(enough)
    return by_k


def rollout_metrics(
    groups: Sequence[Group], weights: Mapping[str, float], prefix: str = ""
) -> dict[str, float]:
    """Return metrics of scored rollouts, such as pass@k and metrics by depth and kind of call.

    If there are several rewards, the metrics include the mean of each. Rollouts that agents ran add
    the numbers of failed agents.
    """
    metrics = {f"{prefix}pass@{k}": value for k, value in passes(groups, weights).items()}
    trajectories = [tree for group in groups for tree in group.trajectories]
    rewards: dict[str, list[float]] = defaultdict(list)
    for tree in trajectories:
        for reward, value in tree.rewards.items():
            rewards[reward].append(value)
    if len(rewards) > 1:
        means = {name: math.fsum(values) / len(values) for name, values in rewards.items()}
        metrics |= {f"{prefix}reward/{name}": means[name] for name in sorted(means)}
    for layer in metrics_by_depth(trajectories, weights):
        name = f"{prefix}depth{layer.depth}.{layer.kind}"
        values = {
            "reward": layer.reward,
            "calls": layer.calls / len(trajectories),
            "turns": layer.turns,
            "sampled": layer.sampled,
            "surprise": layer.surprise,
            "truncated": layer.truncated,
        }
        metrics |= {f"{name}/{what}": value for what, value in values.items() if value is not None}
    return metrics | _of_agents(trajectories, prefix)


def _of_agents(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Count the rollouts in which an external agent failed, by kind of failure.

    Returns an empty dict if no agent ran a rollout.
    """
    ends = Counter(
        AgentExitReason(record["outcome"])
        for tree in trajectories
        if (record := tree.metadata.get(AGENT_RECORD)) is not None
    )
    return {
        f"{prefix}agent/{end}": float(ends[end])
        for end in AgentExitReason
        if ends and end.is_failure
    }


def mixture_metrics(groups: Sequence[Group], weights: Mapping[str, float]) -> dict[str, float]:
    """Return metrics for each task of a mixture, such as its mean weighted reward and pass@k.

    They also include the number of groups and the share of groups with equal rewards.
    """
    by_part: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_part[item_part_name(group.task)].append(group)
    metrics = {}
    for part, own in sorted(by_part.items()):
        prefix = f"task.{part}/"
        metrics[f"{prefix}groups"] = float(len(own))
        scored = [
            [total(tree.rewards, weights) for tree in group.trajectories if tree.rewards]
            for group in own
        ]
        every = [reward for rewards in scored for reward in rewards]
        if every:
            metrics[f"{prefix}reward"] = math.fsum(every) / len(every)
            having = [rewards for rewards in scored if rewards]
            same = sum(min(rewards) == max(rewards) for rewards in having)
            metrics[f"{prefix}zero_variance"] = same / len(having)
        metrics |= {f"{prefix}pass@{k}": value for k, value in passes(own, weights).items()}
    return metrics


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean and maximum staleness of the sampled tokens.

    A token's staleness is the number of versions between the weights that sampled it and
    ``version``, which learns from it. Returns an empty dict if the versions are unknown.
    """
    spans = [
        (span.end - span.start, version - span.version)
        for group in groups
        for tree in group.trajectories
        for call in tree.calls
        for turn in call.turns
        for span in turn.reply.versions or ()
    ]
    num = sum(length for length, _ in spans)
    if not num:
        return {}
    return {
        "staleness": sum(length * age for length, age in spans) / num,
        "staleness_max": float(max(age for _, age in spans)),
    }


class RolloutCpuMeter:
    """Measures the CPU time that rollouts use, between ``restart`` and ``measure_and_restart``.

    Call both methods in the event loop's thread.
    """

    def __init__(self, paces: Callable[[], list[EngineStepTotals]]) -> None:
        """Create a meter of the CPU time that rollouts use.

        ``paces`` is a function that returns the cost of the engine's steps since that function was
        last called.
        """
        self._paces = paces
        self._loop_s = 0.0
        self._sessions_s = 0.0

    def restart(self) -> None:
        """Start measuring CPU time now, and discard what was measured before."""
        self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), descendant_cpu_s()

    def measure_and_restart(self) -> dict[str, float]:
        """Return metrics of the CPU time used since the last restart, and restart the meter."""
        loop_s, sessions_s = self._loop_s, self._sessions_s
        engine = self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), descendant_cpu_s()
        return {
            "cpu/cores": float(num_cores()),
            "cpu/loop_s": self._loop_s - loop_s,
            "cpu/sessions_s": max(0.0, self._sessions_s - sessions_s),
            "cpu/engine_s": sum(each.cpu_s for each in engine),
            **{name: value for each in engine for name, value in engine_timing_metrics(each)},
        }


def engine_timing_metrics(timing: EngineStepTotals) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric about one kind of engine step, such as prefill
    steps."""
    prefix = f"batch{timing.sequences}.{'prefill' if timing.reads else 'decode'}"
    yield f"{prefix}/steps", float(timing.steps)
    yield f"{prefix}/tokens", float(timing.tokens)
    yield f"{prefix}/cpu_s", timing.cpu_s
    if timing.reads:
        yield f"{prefix}/read", float(timing.read)


def step_time_metrics(times: StepPartTimes) -> dict[str, float]:
    """Return metrics of the time spent in each part of a training step.

    ``overhead`` is the share of all parts except sampling and the forward and backward passes.
    """
    metrics: dict[str, float] = {}
    for kind, parts in (("time", times.wall_s), ("time_cpu", times.cpu_s)):
        metrics |= {f"{kind}/{part}_s": seconds for part, seconds in parts.items()}
        step_s = metrics[f"{kind}/step_s"] = math.fsum(parts.values())
        useful_s = parts["sampling"] + parts["forward_backward"]
        metrics[f"{kind}/overhead"] = 1 - useful_s / step_s if step_s else 0.0
    return metrics


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def descendant_cpu_s() -> float:
    """Return the CPU time in seconds used by all descendants of this process.

    Children that have ended and were waited for are included. Returns 0 if the system does not
    report CPU times.
    """
    ticks, children = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            ticks[number] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(number)
    total, remaining = 0, [os.getpid()]
    while remaining:
        for number in children[remaining.pop()]:
            total += ticks[number]
            remaining.append(number)
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0

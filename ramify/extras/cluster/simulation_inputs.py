"""Read the inputs of a simulation from the folder of a finished run: its rollouts, times and
settings.

    OUT/rollouts/step-*.jsonl     whole call trees by group: the workload of a rollout; requests
                                  with their seconds: the engine's rate
    OUT/metrics.jsonl             work_s, learn_s and the end of each step: time of learning,
                                  publishing and what lies between; CPU time of engine, event loop
                                  and sessions, if they share cores
    OUT/checkpoints/*/state.json  sizes of the run: items, group, concurrency, slots, ranks

Measurements are drawn at random rather than averaged. Groups are drawn whole, so that long items
are long in all of their rollouts and the calls of a rollout stay together. The time of learning is
the value on the fitted line, times one of the measured deviations from it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.extras.cluster.measured_engine_rate import (
    InferenceEngineSpeed,
    MeasuredRequest,
    StepRolloutCpuTime,
    fit,
    non_negative_least_squares,
    read_step_cpu_times,
)
from ramify.extras.cluster.rollout_workloads import (
    CallWorkload,
    RolloutWorkload,
    workload_of_trajectory,
)
from ramify.extras.cluster.simulated_rollout import RolloutHostCpuUse
from ramify.train import metrics as metric_file
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.types.trajectory import RolloutGroupOutcome, Trajectory

HOW = "train with schedule.save_rollouts_every=1, which saves every step's rollouts in OUT/rollouts"
DEFAULT_SLOTS = 128
"""Default number of slots (concurrent sequences) of the embedded engine on a CPU."""
CPU_CACHE_BYTES = 2 << 30
"""Default cache size of the embedded engine on a CPU."""


class MeasuredRunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the run in which the inputs of a simulation were measured.

    They include sizes such as the number of engines. A simulation uses them unless it is given
    others.
    """

    items: int
    group: int
    concurrency: int
    on_wire: int
    engines: int
    slots: int
    ranks: int
    staleness: int
    max_items: int = 0
    straggler_factor: float = 0.0
    grace_steps: int = 4
    keeps: bool = False
    embedded: bool = False
    evaluate: int = 0
    """Steps between evaluations. 0 means only at the end."""
    cache_tokens: int = 0
    """Capacity of one engine's cache in tokens; 0 if unknown."""


class SimulationInputs(msgspec.Struct, kw_only=True):
    """The inputs of a simulation, measured in a finished run.

    They include its rollouts, the engine speed, and the trainer's times.
    """

    groups: list[list[RolloutWorkload]]
    rate: InferenceEngineSpeed
    sizes: MeasuredRunSettings
    learn_base_s: float
    """Seconds of learning per step, independent of the number of tokens."""
    learn_token_s: float
    """Seconds per trained token, when ``sizes.ranks`` ranks share the work."""
    learn_off: list[float] = msgspec.field(default_factory=lambda: [1.0])
    """Measured learning time of each step, as a multiple of the fitted time. The simulation draws
    from these ratios."""
    publish_s: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """Seconds from the end of learning to the beginning of the next step's rollouts."""
    prepare_s: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """Seconds from the end of the last rollout to the beginning of learning."""
    zero_variance: float = 0.0
    """Fraction of groups that dynamic sampling discarded because all rewards were equal."""
    evaluate_s: float = 0.0
    """Mean seconds of an evaluation."""
    scaling: float = 1.0
    """Parallel efficiency: the speed-up from doubling the ranks, divided by two."""
    host: RolloutHostCpuUse | None = None
    """CPU use of rollouts on the trainer's host. If None, it is unknown, and no work waits for a
    core."""
    computed_s: list[float] = msgspec.field(default_factory=list)
    """CPU seconds of each step's rollouts. Empty if they were not measured."""
    step_s: list[float] = msgspec.field(default_factory=list)
    """Measured seconds of each step, without evaluations."""

    def sample_group(
        self, draw: random.Random, num: int, of: int | None = None
    ) -> list[RolloutWorkload]:
        """Draw ``num`` measured rollouts from a single group of rollouts.

        The group is the one with index ``of``, or a random one if None. If the group has too few
        rollouts, some are repeated.
        """
        rollouts = draw.choice(self.groups) if of is None else self.groups[of]
        if num <= len(rollouts):
            return draw.sample(rollouts, num)
        return [*rollouts, *draw.choices(rollouts, k=num - len(rollouts))]

    def draw_learning_times(
        self, draw: random.Random, tokens: int, ranks: int
    ) -> tuple[float, float]:
        """Draw the seconds that a training step spends on learning and on publishing weights.

        The step learns from ``tokens`` tokens with ``ranks`` trainer ranks.
        """
        times = ranks / self.sizes.ranks
        # Each doubling of the ranks costs a factor ``scaling``. Fewer ranks are assumed to scale
        # linearly.
        faster = times * self.scaling ** math.log2(times) if times > 1 else times
        learn_s = (self.learn_base_s + self.learn_token_s * tokens / faster) * draw.choice(
            self.learn_off
        )
        return learn_s, draw.choice(self.publish_s)

    @property
    def max_sequence_tokens(self) -> int:
        """The length of the longest sequence in tokens, prompt and reply together."""
        rollouts = (rollout for group in self.groups for rollout in group)
        turns = (turn for rollout in rollouts for call in rollout.calls() for turn in call.turns)
        return max((turn.context + turn.sampled for turn in turns), default=1)

    def draw_learning_delay(self, draw: random.Random) -> float:
        """Draw a random delay in seconds between the end of a step's rollouts and the start of
        learning.

        It is drawn from the delays in the measured run.
        """
        return draw.choice(self.prepare_s)


def read_measured_run(
    run: Path,
    *,
    last: int | None = None,
    rate: InferenceEngineSpeed | None = None,
    scaling: float = 1.0,
) -> SimulationInputs:
    """Read the inputs of a simulation from the folder of a finished run.

    Args:
        run: The ``--out`` of ``ramify train``.
        last: Use only this many of the last saved steps; None for all.
        rate: Rate of the engine, if it was measured in another way.
        scaling: See ``SimulationInputs.scaling``.

    If the folder does not contain enough, raises ConfigError that says what to do.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run's folder: give the --out of ramify train")
    if not 0 < scaling <= 1:
        raise ConfigError(
            f"scaling={scaling} is the share of linear speed-up that is achieved: give a value "
            "above 0 and at most 1"
        )
    lines = [each for each in metric_file.read_metrics(run) if each.stage == "rl"]
    done = _measured_steps(run, lines)
    saved = dict(_read_saved_rollouts(run))
    if last is not None:
        saved = dict(list(saved.items())[-last:])
    steps = [step for step in saved if step in done]
    if not steps:
        raise ConfigError(f"{run} has no saved rollouts of its {len(done)} steps: {HOW}")
    groups = {step: _groups(saved[step]) for step in steps}
    shaped = {
        step: [[workload_of_trajectory(tree) for tree in group] for group in groups[step]]
        for step in steps
    }
    sizes = _read_run_settings(run, list(groups.values()))
    tried = fmean(each.values.get("items", sizes.items) for each in done.values())
    base_s, token_s, off = _fit_learning_time(
        [
            sum(rollout.trainer_tokens for group in shaped[step] for rollout in group)
            for step in steps
        ],
        [done[step].values["learn_s"] for step in steps],
    )
    step_seconds = _step_seconds(lines)
    trees = [tree for step in steps for group in groups[step] for tree in group]
    # Groups that dynamic sampling discarded also used the engine, but were not recorded.
    hidden = max(1.0, tried / sizes.items)
    spent = (
        [each for each in read_step_cpu_times(run, list(done.values())) if each.step in steps]
        if sizes.embedded
        else []
    )
    host = _measure_host_cpu(
        spent,
        [rollout for step in steps for group in shaped[step] for rollout in group],
        hidden,
        len(steps),
    )
    if rate is None:
        rate = _fit_rate_to_cpu(spent, sizes.slots) if host is not None else None
    return SimulationInputs(
        groups=[group for step in steps for group in shaped[step]],
        rate=rate or _fit_engine_rate(trees, sizes, hidden),
        host=host,
        sizes=sizes,
        learn_base_s=base_s,
        learn_token_s=token_s,
        learn_off=off,
        scaling=scaling,
        publish_s=_publishing_seconds(done, step_seconds),
        prepare_s=_preparation_seconds(done, saved, steps, sizes),
        zero_variance=_zero_variance(run, max(0.0, 1 - sizes.items / tried)),
        evaluate_s=_evaluation_seconds(lines),
        computed_s=[
            each.loop_s + each.sessions_s + sum(pace.cpu_s for pace in each.engine)
            for each in spent
        ],
        step_s=[step_seconds[step] for step in sorted(step_seconds)],
    )


def _measured_steps(
    run: Path, lines: list[metric_file.StepMetrics]
) -> dict[int, metric_file.StepMetrics]:
    """Return the metrics of each completed reinforcement-learning step, by step number.

    Raises ConfigError if there are fewer than two.
    """
    done = {
        each.step: each for each in lines if "learn_s" in each.values and "work_s" in each.values
    }
    if not done:
        raise ConfigError(
            f"{run} has no {metric_file.FILE} with steps of reinforcement learning: give a run "
            f"that got through one; {HOW}"
        )
    if len(done) < 2:
        raise ConfigError(
            f"{run} has one step of reinforcement learning, which does not show the time between "
            f"two steps: give a run of at least two; {HOW}"
        )
    return done


# --- trees ----------------------------------------------------------------------------------------


def _read_saved_rollouts(run: Path) -> Iterator[tuple[int, list[Trajectory]]]:
    """Yield the number and the trajectories of each training step whose rollouts were saved."""
    decoder = msgspec.json.Decoder(Trajectory)
    for path in sorted((run / "rollouts").glob("step-*.jsonl")):
        try:
            trees = [decoder.decode(line) for line in path.read_bytes().splitlines()]
            yield int(path.stem.removeprefix("step-")), [tree for tree in trees if tree.calls]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} does not contain trajectories: {error}") from error


def _groups(trees: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Divide trajectories into groups of rollouts, by their run name or their task item.

    The suffix ``/rollout=N`` of a name is ignored. Trajectories without such a name are grouped by
    item.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for tree in trees:
        name, is_named, _ = tree.id.rpartition("/rollout=")
        groups[name if is_named else tree.task].append(tree)
    return list(groups.values())


def _read_run_settings(
    run: Path, steps: Sequence[Sequence[Sequence[Trajectory]]]
) -> MeasuredRunSettings:
    """Read the sizes and settings of the measured run from its configuration.

    Missing sizes are counted in the saved rollouts.
    """
    checkpoint = CheckpointStore(run).latest()
    config: dict[str, Any] = read_state(checkpoint).config if checkpoint is not None else {}
    rl, policy = config.get("rl") or {}, config.get("policy") or {}
    sample, rollout = rl.get("sample") or {}, rl.get("rollout") or {}
    inference = config.get("inference") or {}
    shard = (config.get("compute") or {}).get("shard") or {}
    limits = config.get("limits") or {}
    group = max(len(group) for groups in steps for group in groups)
    items = max(len(groups) for groups in steps)
    return MeasuredRunSettings(
        items=sample.get("items", items),
        group=rollout.get("group", group),
        concurrency=rollout.get("concurrency", items * group),
        on_wire=limits.get("max_concurrency", 1_000_000),
        engines=len(inference.get("urls") or ()) or inference.get("num", 1),
        slots=policy.get("slots") or DEFAULT_SLOTS,
        ranks=shard.get("ranks") or 1,
        staleness=sample.get("max_staleness", 0),
        max_items=sample.get("max_items") or 0,
        straggler_factor=sample.get("straggler_factor") or 0.0,
        grace_steps=sample.get("grace_steps", 4),
        keeps=not inference or inference.get("engine") == "ramify",
        embedded=bool(config) and not inference,
        evaluate=(config.get("schedule") or {}).get("evaluate_every") or 0,
        cache_tokens=0
        if checkpoint is None or inference
        else _cache_tokens(checkpoint / "policy", policy),
    )


def _cache_tokens(folder: Path, policy: dict[str, Any]) -> int:
    """Return how many tokens fit into the KV cache of an engine in the trainer's process.

    Returns 0 if the size of the cache or of the model is unknown.
    """
    num_bytes = policy.get("cache_bytes") or (
        CPU_CACHE_BYTES if policy.get("device") == "cpu" else 0
    )
    try:
        model = msgspec.json.decode((folder / "config.json").read_bytes())
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        itemsize = 4 if "32" in str(model.get("dtype") or model.get("torch_dtype") or "32") else 2
        return int(num_bytes // (2 * model["num_hidden_layers"] * heads * size * itemsize))
    except (OSError, KeyError, TypeError, msgspec.DecodeError):
        return 0


# --- times ----------------------------------------------------------------------------------------


def _fit_engine_rate(
    trees: Sequence[Trajectory], sizes: MeasuredRunSettings, hidden: float
) -> InferenceEngineSpeed:
    """Fit the speed of the run's inference engines to the requests in recorded trajectories.

    Discarded rollouts ran at the same time but were not recorded. ``hidden`` corrects for them: it
    is the ratio of all rollouts to the recorded ones.
    """
    requests = [each for tree in trees for root in _roots(tree) for each in _replay_call(*root)[0]]
    return fit(requests, sizes.engines, sizes.slots, hidden=hidden)


def _fit_rate_to_cpu(
    spent: Sequence[StepRolloutCpuTime], slots: int
) -> InferenceEngineSpeed | None:
    """Estimate the speed of an engine in the trainer's process from the CPU time of its steps.

    Returns None if no steps were recorded.
    """
    paces = [pace for each in spent for pace in each.engine]
    # Weighted least squares: the variance of a total is assumed to grow with its number of steps.
    weights = [1 / math.sqrt(pace.steps) for pace in paces]
    rows = [
        (pace.steps * weight, pace.tokens * weight, pace.read * weight)
        for pace, weight in zip(paces, weights, strict=True)
    ]
    if not rows:
        return None
    base_s, each_s, read_s = non_negative_least_squares(
        rows, [pace.cpu_s * weight for pace, weight in zip(paces, weights, strict=True)]
    )
    step_s = max(base_s + each_s, 1e-9)
    return InferenceEngineSpeed(
        ((1.0, step_s), (max(slots, 2), step_s + each_s * (max(slots, 2) - 1))), read_s
    )


def _measure_host_cpu(
    spent: Sequence[StepRolloutCpuTime],
    rollouts: Sequence[RolloutWorkload],
    hidden: float,
    num_steps: int,
) -> RolloutHostCpuUse | None:
    """Estimate the CPU use of rollouts on the trainer's machine.

    The result includes the event loop's time per request and the fraction of session time spent
    computing. Returns None if the engine recorded no CPU time.
    """
    if not spent or not any(each.engine for each in spent):
        return None
    calls = [call for rollout in rollouts for call in rollout.calls()]
    turns = [turn for call in calls for turn in call.turns]
    worked_s = sum(call.host_s for call in calls) + sum(
        cell.seconds for turn in turns for cell in turn.cells
    )
    share = hidden * len(spent) / num_steps
    return RolloutHostCpuUse(
        max(each.cores for each in spent),
        sum(each.loop_s for each in spent) / max(share * len(turns), 1),
        min(1.0, sum(each.sessions_s for each in spent) / max(share * worked_s, 1e-9)),
    )


def _roots(tree: Trajectory) -> Iterator[tuple[CallWorkload, float]]:
    """Yield the root calls of a recorded rollout with their start times."""
    begins = [call.started_s for call in tree.calls if call.parent is None and call.kind != "judge"]
    for root, started_s in zip(workload_of_trajectory(tree).roots, begins, strict=True):
        yield root, tree.started_at + started_s


def _replay_call(call: CallWorkload, at_s: float) -> tuple[list[MeasuredRequest], float]:
    """Replay a model call and its descendants, starting at ``at_s``, and return their engine
    requests.

    The time at which the last one ends is returned, too. Turns and waves of calls follow one
    another without gaps, and the calls of one wave begin together.
    """
    requests: list[MeasuredRequest] = []
    for index, turn in enumerate(call.turns):
        requests.append(MeasuredRequest(at_s, at_s + turn.seconds, turn.new, turn.sampled))
        at_s += turn.seconds + (0.0 if index else call.host_s)
        for cell in turn.cells:
            at_s += cell.seconds
            for wave in cell.waves:
                replays = [_replay_call(child, at_s) for child in wave]
                requests += [each for part, _ in replays for each in part]
                at_s = max(end for _, end in replays)
    return requests, at_s


def _zero_variance(run: Path, otherwise: float) -> float:
    """Return the fraction of groups whose rollouts all got the same reward.

    Nothing can be learned from such groups. Lost and skipped groups do not count. ``otherwise`` is
    a rough estimate, returned if the run has no record of its groups. If the estimate is 0, the
    result is 0 without a look at the record.
    """
    if not otherwise:
        return 0.0
    outcomes = [each.outcome for each in metric_file.GROUPS.read(run)]
    untried = (RolloutGroupOutcome.LOST, RolloutGroupOutcome.SKIPPED)
    tried = sum(outcome not in untried for outcome in outcomes)
    return outcomes.count(RolloutGroupOutcome.NO_SIGNAL) / tried if tried else otherwise


def _fit_learning_time(
    tokens: Sequence[int], seconds: Sequence[float]
) -> tuple[float, float, list[float]]:
    """Fit a linear model of learning time: seconds per step plus seconds per token.

    Returns seconds per step, seconds per token, and the ratio of measured to fitted time for each
    step.
    """
    if len(set(tokens)) > 2:
        base_s, token_s = non_negative_least_squares(
            [(1.0, float(each)) for each in tokens], seconds
        )
    else:
        base_s, token_s = 0.0, sum(seconds) / max(sum(tokens), 1)
    fitted = [base_s + token_s * each for each in tokens]
    off = [took / each for took, each in zip(seconds, fitted, strict=True) if each > 0]
    return base_s, token_s, off or [1.0]


def _step_seconds(lines: Sequence[metric_file.StepMetrics]) -> dict[int, float]:
    """Return the duration of each training step in seconds, excluding evaluations.

    Steps whose predecessor was not logged are left out.
    """
    seconds: dict[int, float] = {}
    before: metric_file.StepMetrics | None = None
    between_s = 0.0
    for each in lines:
        if "learn_s" not in each.values:
            between_s += each.values.get("evaluate_s", 0.0)
            continue
        if before is not None and each.step == before.step + 1 and each.at_s > before.at_s:
            seconds[each.step] = each.at_s - before.at_s - between_s
        before, between_s = each, 0.0
    return seconds


def _evaluation_seconds(lines: Sequence[metric_file.StepMetrics]) -> float:
    """Return the mean duration in seconds of the evaluations between training steps."""
    first = min(each.step for each in lines if "learn_s" in each.values)
    last = max(each.step for each in lines if "learn_s" in each.values)
    between = [each for each in lines if first <= each.step < last] or lines
    seconds = [each.values["evaluate_s"] for each in between if "evaluate_s" in each.values]
    return fmean(seconds) if seconds else 0.0


def _publishing_seconds(
    done: dict[int, metric_file.StepMetrics], step_seconds: dict[int, float]
) -> list[float]:
    """Return the seconds that publishing the weights took in each training step.

    This is the step's duration without waiting and learning.
    """
    remaining = [
        step_seconds[step] - done[step].values["work_s"] - done[step].values["learn_s"]
        for step in step_seconds
    ]
    return [max(0.0, each) for each in remaining] or [0.0]


def _preparation_seconds(
    done: dict[int, metric_file.StepMetrics],
    saved: dict[int, list[Trajectory]],
    steps: Sequence[int],
    sizes: MeasuredRunSettings,
) -> list[float]:
    """Return the seconds for preparing each step's data after its rollouts have ended.

    For an asynchronous run, return ``[0.0]``.
    """
    if sizes.staleness:
        return [0.0]
    seconds = []
    for step in steps:
        begun = min(tree.started_at for tree in saved[step])
        ended = max(tree.started_at + tree.seconds for tree in saved[step])
        seconds.append(max(0.0, done[step].values["work_s"] - (ended - begun)))
    return seconds

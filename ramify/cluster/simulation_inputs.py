"""What a finished run's folder says of how long things take: the material of a simulation.

    OUT/rollouts/step-*.jsonl    whole trees, by groups: what a rollout asks for; requests with their seconds: the engine's rate
    OUT/metrics.jsonl            work_s, learn_s and when each step ended: learning, publishing, what comes between
    OUT/processors.jsonl         where engine, loop and sessions share processors: what each of them computed
    OUT/checkpoints/*/state.json the run's own sizes: items, group, concurrency, slots, ranks

Nothing is averaged that can be drawn again: groups are drawn whole, so that items that are long
stay long in all their rollouts and a tree's calls stay together; learning takes what the fitted
line says times one of the measured deviations.
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

from ramify.cluster.rate import EngineRate, MeasuredRequest, fit, non_negative
from ramify.cluster.rollout_shapes import CallShape, RolloutShape, shape_of
from ramify.cluster.simulated_rollout import TrainerHost
from ramify.errors import ConfigError
from ramify.train import cpu_seconds as processor_file
from ramify.train import group_records as group_file
from ramify.train import metrics as metric_file
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.cpu_seconds import CpuSeconds
from ramify.types.trajectory import Trajectory

HOW = "train with schedule.save_rollouts_every=1, which keeps every step's rollouts in OUT/rollouts"
DEFAULT_SLOTS = 128
"""Of the embedded engine on a CPU, where the run does not say."""
CPU_CACHE_BYTES = 2 << 30
"""Likewise."""


class RunSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the run itself was: the setting that a simulation begins with."""

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
    """Steps between evaluations; 0: none but at the end."""
    cache_tokens: int = 0
    """Of one engine; 0 where that is not known."""


class SimulationInputs(msgspec.Struct, kw_only=True):
    """All that a simulation draws from."""

    groups: list[list[RolloutShape]]
    rate: EngineRate
    sizes: RunSizes
    learn_base_s: float
    """Of a step's learning, however much there is."""
    learn_token_s: float
    """Per token that is learnt from, on ``sizes.ranks`` ranks."""
    learn_off: list[float] = msgspec.field(default_factory=lambda: [1.0])
    """Measured over fitted, of each step."""
    publish_s: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """From the end of learning to the beginning of the next step's rollouts."""
    prepare_s: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """From the last rollout's end to the beginning of learning."""
    zero_variance: float = 0.0
    """Share of groups that dynamic sampling gave up."""
    evaluate_s: float = 0.0
    """That an evaluation takes, on average."""
    scaling: float = 1.0
    """How much of twice the speed twice the ranks give."""
    host: TrainerHost | None = None
    """What the trainer's machine computes besides; None where that is not known, and nothing waits
    for a processor."""
    computed_s: list[float] = msgspec.field(default_factory=list)
    """Processor seconds of each step's rollouts, where they were measured."""
    step_s: list[float] = msgspec.field(default_factory=list)
    """Of each step as it was measured, evaluations left out."""

    def group(self, draw: random.Random, num: int, of: int | None = None) -> list[RolloutShape]:
        """``num`` rollouts of one measured group, the one with index ``of`` where that is given:
        those that it had, and further ones drawn from them."""
        found = draw.choice(self.groups) if of is None else self.groups[of]
        if num <= len(found):
            return draw.sample(found, num)
        return [*found, *draw.choices(found, k=num - len(found))]

    def learn(self, draw: random.Random, tokens: int, ranks: int) -> tuple[float, float]:
        """Seconds that a step on ``ranks`` ranks learns, and that it publishes."""
        times = ranks / self.sizes.ranks
        faster = times * self.scaling ** math.log2(times) if times > 1 else times
        learn_s = (self.learn_base_s + self.learn_token_s * tokens / faster) * draw.choice(
            self.learn_off
        )
        return learn_s, draw.choice(self.publish_s)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        rollouts = (rollout for group in self.groups for rollout in group)
        turns = (turn for rollout in rollouts for call in rollout.calls() for turn in call.turns)
        return max((turn.context + turn.sampled for turn in turns), default=1)

    def prepare(self, draw: random.Random) -> float:
        return draw.choice(self.prepare_s)


def measured(
    run: Path, *, last: int = 0, rate: EngineRate | None = None, scaling: float = 1.0
) -> SimulationInputs:
    """What the run in folder ``run`` says. ``last``: by its last kept steps alone (0: all).
    ``rate`` of an engine that was measured otherwise. Raises ConfigError, with what to do, where
    the folder does not hold enough."""
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run's folder: give the --out of ramify train")
    if not 0 < scaling <= 1:
        raise ConfigError(
            f"scaling={scaling} is the share of linear speed-up that is kept: above 0 and at most 1"
        )
    lines = [each for each in metric_file.read(run) if each.stage == "rl"]
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
            f"{run} has one step of reinforcement learning, which does not say what passes between "
            "two: give a run of at "
            f"least two; {HOW}"
        )
    kept = dict(list(_kept(run))[-last:])
    steps = [step for step in kept if step in done]
    if not steps:
        raise ConfigError(f"{run} has no kept rollouts of its {len(done)} steps: {HOW}")
    groups = {step: _groups(kept[step]) for step in steps}
    shaped = {
        step: [[shape_of(tree) for tree in group] for group in groups[step]] for step in steps
    }
    sizes = _sizes(run, list(groups.values()))
    tried = fmean(each.values.get("items", sizes.items) for each in done.values())
    base_s, token_s, off = _learning(
        [sum(rollout.learnt for group in shaped[step] for rollout in group) for step in steps],
        [done[step].values["learn_s"] for step in steps],
    )
    took = _took(lines)
    trees = [tree for step in steps for group in groups[step] for tree in group]
    hidden = max(1.0, tried / sizes.items)
    spent = (
        [each for each in processor_file.read(run) if each.step in steps] if sizes.embedded else []
    )
    host = _host(
        spent,
        [rollout for step in steps for group in shaped[step] for rollout in group],
        hidden,
        len(steps),
    )
    if rate is None:
        rate = _computed(spent, sizes.slots) if host is not None else None
    return SimulationInputs(
        groups=[group for step in steps for group in shaped[step]],
        rate=rate or _rate(trees, sizes, hidden),
        host=host,
        sizes=sizes,
        learn_base_s=base_s,
        learn_token_s=token_s,
        learn_off=off,
        scaling=scaling,
        publish_s=_publishing(done, took),
        prepare_s=_preparing(done, kept, steps, sizes),
        zero_variance=_zero_variance(run, max(0.0, 1 - sizes.items / tried)),
        evaluate_s=_evaluating(lines),
        computed_s=[
            each.loop_s + each.sessions_s + sum(pace.cpu_s for pace in each.engine)
            for each in spent
        ],
        step_s=[took[step] for step in sorted(took)],
    )


# --- trees
# ---------------------------------------------------------------------------------------------------------------


def _kept(run: Path) -> Iterator[tuple[int, list[Trajectory]]]:
    """(step, its trajectories) of each step whose rollouts were kept."""
    decoder = msgspec.json.Decoder(Trajectory)
    for path in sorted((run / "rollouts").glob("step-*.jsonl")):
        try:
            trees = [decoder.decode(line) for line in path.read_bytes().splitlines()]
            yield int(path.stem.removeprefix("step-")), [tree for tree in trees if tree.calls]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} holds something else than trajectories: {error}") from error


def _groups(trees: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """By the name that a rollout has, ``…/rollout=3``; where it has none, by item."""
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for tree in trees:
        name, is_named, _ = tree.id.rpartition("/rollout=")
        found[name if is_named else tree.task].append(tree)
    return list(found.values())


def _sizes(run: Path, steps: Sequence[Sequence[Sequence[Trajectory]]]) -> RunSizes:
    """As the run was configured; what its checkpoint does not say is counted."""
    checkpoint = CheckpointStore(run).latest()
    config: dict[str, Any] = read_state(checkpoint).config if checkpoint is not None else {}
    rl, policy = config.get("rl") or {}, config.get("policy") or {}
    sample, rollout = rl.get("sample") or {}, rl.get("rollout") or {}
    inference = config.get("inference") or {}
    shard = (config.get("compute") or {}).get("shard") or {}
    limits = config.get("limits") or {}
    group = max(len(group) for groups in steps for group in groups)
    items = max(len(groups) for groups in steps)
    return RunSizes(
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
    """That the cache of an embedded engine has room for; 0 where its size or the model's is not
    known."""
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


# --- times
# ---------------------------------------------------------------------------------------------------------------


def _rate(trees: Sequence[Trajectory], sizes: RunSizes, hidden: float) -> EngineRate:
    """What their requests say. Rollouts that were given up ran beside them and are not there: they
    count by their share."""
    asked = [each for tree in trees for root in _roots(tree) for each in _asked(*root)]
    return fit(asked, sizes.engines, sizes.slots, hidden=hidden)


def _computed(spent: Sequence[CpuSeconds], slots: int) -> EngineRate | None:
    """Of an engine by what its steps computed, seconds of a core; None where it made none."""
    paces = [pace for each in spent for pace in each.engine]
    weights = [1 / math.sqrt(pace.steps) for pace in paces]
    rows = [
        (pace.steps * weight, pace.tokens * weight, pace.read * weight)
        for pace, weight in zip(paces, weights, strict=True)
    ]
    if not rows:
        return None
    base_s, each_s, read_s = non_negative(
        rows, [pace.cpu_s * weight for pace, weight in zip(paces, weights, strict=True)]
    )
    step_s = max(base_s + each_s, 1e-9)
    return EngineRate(
        ((1.0, step_s), (max(slots, 2), step_s + each_s * (max(slots, 2) - 1))), read_s
    )


def _host(
    spent: Sequence[CpuSeconds], rollouts: Sequence[RolloutShape], hidden: float, num_steps: int
) -> TrainerHost | None:
    """What loop and sessions computed, spread over the requests that were made and the seconds that
    sessions worked."""
    if not spent or not any(each.engine for each in spent):
        return None
    calls = [call for rollout in rollouts for call in rollout.calls()]
    turns = [turn for call in calls for turn in call.turns]
    worked_s = sum(call.host_s for call in calls) + sum(
        cell.seconds for turn in turns for cell in turn.cells
    )
    share = hidden * len(spent) / num_steps
    return TrainerHost(
        max(each.cores for each in spent),
        sum(each.loop_s for each in spent) / max(share * len(turns), 1),
        min(1.0, sum(each.sessions_s for each in spent) / max(share * worked_s, 1e-9)),
    )


def _roots(tree: Trajectory) -> Iterator[tuple[CallShape, float]]:
    """Each root call with the time at which it began."""
    begins = [call.started_s for call in tree.calls if call.parent is None and call.kind != "judge"]
    for root, started_s in zip(shape_of(tree).roots, begins, strict=True):
        yield root, tree.started_at + started_s


def _asked(call: CallShape, at_s: float) -> Iterator[MeasuredRequest]:
    """The requests of ``call`` and below, with their times as its order has them."""
    yield from _played(call, at_s)[0]


def _played(call: CallShape, at_s: float) -> tuple[list[MeasuredRequest], float]:
    """(requests of ``call``, which began at ``at_s``, and of all below it; when it ended)."""
    found: list[MeasuredRequest] = []
    for index, turn in enumerate(call.turns):
        found.append(MeasuredRequest(at_s, at_s + turn.seconds, turn.new, turn.sampled))
        at_s += turn.seconds + (0.0 if index else call.host_s)
        for cell in turn.cells:
            at_s += cell.seconds
            for wave in cell.waves:
                played = [_played(child, at_s) for child in wave]
                found += [each for requests, _ in played for each in requests]
                at_s = max(end for _, end in played)
    return found, at_s


def _zero_variance(run: Path, otherwise: float) -> float:
    """Share of groups that nothing could be learnt from, of those that were tried until a step had
    enough."""
    if not otherwise:
        return 0.0
    outcomes = [each.outcome for each in group_file.read(run)]
    tried = sum(each in ("learnt", "silent", "spare") for each in outcomes)
    return outcomes.count("silent") / tried if tried else otherwise


def _learning(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, list[float]]:
    """(seconds however many tokens, seconds per token, measured over fitted)."""
    if len(set(tokens)) > 2:
        base_s, token_s = non_negative([(1.0, float(each)) for each in tokens], seconds)
    else:
        base_s, token_s = 0.0, sum(seconds) / max(sum(tokens), 1)
    fitted = [base_s + token_s * each for each in tokens]
    off = [took / each for took, each in zip(seconds, fitted, strict=True) if each > 0]
    return base_s, token_s, off or [1.0]


def _took(lines: Sequence[metric_file.StepMetrics]) -> dict[int, float]:
    """Step -> seconds from the end of the one before to its own, for those that directly follow
    one; what was evaluated between them left out."""
    found: dict[int, float] = {}
    before: metric_file.StepMetrics | None = None
    between_s = 0.0
    for each in lines:
        if "learn_s" not in each.values:
            between_s += each.values.get("evaluate_s", 0.0)
            continue
        if before is not None and each.step == before.step + 1 and each.at_s > before.at_s:
            found[each.step] = each.at_s - before.at_s - between_s
        before, between_s = each, 0.0
    return found


def _evaluating(lines: Sequence[metric_file.StepMetrics]) -> float:
    """Of those between steps."""
    first = min(each.step for each in lines if "learn_s" in each.values)
    last = max(each.step for each in lines if "learn_s" in each.values)
    between = [each for each in lines if first <= each.step < last] or lines
    found = [each.values["evaluate_s"] for each in between if "evaluate_s" in each.values]
    return fmean(found) if found else 0.0


def _publishing(done: dict[int, metric_file.StepMetrics], took: dict[int, float]) -> list[float]:
    """What a step took besides waiting for its work and learning."""
    rest = [
        took[step] - done[step].values["work_s"] - done[step].values["learn_s"] for step in took
    ]
    return [max(0.0, each) for each in rest] or [0.0]


def _preparing(
    done: dict[int, metric_file.StepMetrics],
    kept: dict[int, list[Trajectory]],
    steps: Sequence[int],
    sizes: RunSizes,
) -> list[float]:
    """What a synchronous step's work took besides its rollouts."""
    if sizes.staleness:
        return [0.0]
    found = []
    for step in steps:
        begun = min(tree.started_at for tree in kept[step])
        ended = max(tree.started_at + tree.seconds for tree in kept[step])
        found.append(max(0.0, done[step].values["work_s"] - (ended - begun)))
    return found

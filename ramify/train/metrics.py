"""What a training run measures, step by step, in one file of its folder: ``metrics.jsonl``.

    {"step": 12, "stage": "rl", "at_s": 41.2, "values": {"reward": 0.46, "sampled_tokens": 8123, …}}

One line is written with one ``write``, so a killed run leaves whole lines but perhaps the last,
which a reader skips. Whoever wants to watch listens; the page and the terminal's view read the same
lines. On resume what a step wrote after the checkpoint is dropped, since it will be measured again.

Of a step's rollouts is measured, besides what their algorithm says:

    pass@4                     the chance that at least one of four attempts at an item is right
    depth1.rlm/reward          of the calls of one depth and kind: mean reward, where they have one; calls for each rollout,
    depth1.rlm/calls …         turns and sampled tokens for each call, surprise (mean -logprob), share that a limit cut short
    staleness, staleness_max   steps that the weights had gone on since a token was sampled
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ramify.evaluate.report import RIGHT
from ramify.evaluate.statistics import pass_at_k
from ramify.tasks.base import total
from ramify.types.trajectory import Call, Group, Trajectory

FILE = "metrics.jsonl"


class StepMetrics(msgspec.Struct, frozen=True):
    """What was measured at one step."""

    step: int
    """Optimizer steps of the whole run before this one was over: 1 is the first."""
    stage: str
    """``sft``, ``rl``, … of the run; evaluations carry the stage that they followed."""
    at_s: float
    """Seconds of training since the run began, over all its resumptions."""
    values: dict[str, float]
    """Name -> finite number (JSON has no other); ``validation/reward`` and ``test/reward`` are of
    those streams."""


class MetricsFile:
    """The run's file, open for appending."""

    def __init__(self, folder: Path, listener: Callable[[StepMetrics], None] | None = None) -> None:
        self.path = folder / FILE
        self._listener = listener
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.lseek(self._file, 0, os.SEEK_END)
        if not _ends_a_line(self.path):
            os.write(self._file, b"\n")  # what was cut off by a kill must not swallow the next line

    def write(self, step: int, stage: str, at_s: float, values: Mapping[str, float]) -> StepMetrics:
        finite = {name: _rounded(value) for name, value in values.items() if math.isfinite(value)}
        measured = StepMetrics(step, stage, round(at_s, 3), finite)
        os.write(self._file, msgspec.json.encode(measured) + b"\n")
        if self._listener is not None:
            self._listener(measured)
        return measured

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(folder: Path) -> Iterator[StepMetrics]:
    """The lines of a run's folder, in order; a torn one is skipped, and there may be none."""
    path = folder / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield msgspec.json.decode(line, type=StepMetrics)


def cut(folder: Path, step: int) -> None:
    """Drop what was measured after ``step``; atomic."""
    kept = b"".join(msgspec.json.encode(each) + b"\n" for each in read(folder) if each.step <= step)
    path = folder / FILE
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(kept)
    fresh.replace(path)


def _rounded(value: float) -> float:
    """Seven digits are what a 32-bit float has."""
    return float(f"{value:.7g}")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# --- what rollouts came to
# -----------------------------------------------------------------------------------------------


class DepthMetrics(msgspec.Struct, frozen=True):
    """The calls of one depth and kind, of some rollouts."""

    depth: int
    kind: str
    calls: int
    reward: float | None
    """Mean; None where none of them has one."""
    turns: float
    """For each call, as are sampled tokens."""
    sampled: float
    surprise: float | None
    """Mean of -logprob over sampled tokens, in nats; None where they are not known."""
    truncated: float
    """Share that a limit cut short."""


def layers(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> list[DepthMetrics]:
    """By depth and kind. ``weights`` are the task's, by reward name; the root's reward is the
    rollout's."""
    members: dict[tuple[int, str], list[tuple[Call, float | None]]] = defaultdict(list)
    for tree in trajectories:
        for call in tree.calls:
            rewards = tree.call_rewards.get(call.id) or (
                tree.rewards if call.parent is None else {}
            )
            members[call.depth, call.kind].append(
                (call, total(rewards, weights) if rewards else None)
            )
    return [_layer(depth, kind, members[depth, kind]) for depth, kind in sorted(members)]


def _layer(depth: int, kind: str, members: Sequence[tuple[Call, float | None]]) -> DepthMetrics:
    calls = [call for call, _ in members]
    rewards = [reward for _, reward in members if reward is not None]
    replies = [turn.reply for call in calls for turn in call.turns]
    logprobs = [value for reply in replies for value in reply.logprobs or ()]
    cut_short = sum(call.stop is not None and call.stop.is_truncated() for call in calls)
    return DepthMetrics(
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
    """k -> pass@k for k = 2, 4, 8 … and the size of a group, over the groups that have so many
    attempts. A rollout that failed is none: it says nothing of what the policy tried."""
    right = [
        [total(tree.rewards, weights) >= RIGHT for tree in group.trajectories if tree.rewards]
        for group in groups
    ]
    most = max((len(each) for each in right), default=0)
    powers = {2**power for power in range(1, most.bit_length()) if 2**power <= most}
    found = {}
    for k in sorted(powers | ({most} if most > 1 else set())):
        enough = [pass_at_k(len(each), sum(each), k) for each in right if len(each) >= k]
        found[k] = math.fsum(enough) / len(enough)
    return found


def of_rollouts(
    groups: Sequence[Group], weights: Mapping[str, float], prefix: str = ""
) -> dict[str, float]:
    """pass@k of the rollouts that were scored, and the layers."""
    found = {f"{prefix}pass@{k}": value for k, value in passes(groups, weights).items()}
    trajectories = [tree for group in groups for tree in group.trajectories]
    for layer in layers(trajectories, weights):
        name = f"{prefix}depth{layer.depth}.{layer.kind}"
        values = {
            "reward": layer.reward,
            "calls": layer.calls / len(trajectories),
            "turns": layer.turns,
            "sampled": layer.sampled,
            "surprise": layer.surprise,
            "truncated": layer.truncated,
        }
        found |= {f"{name}/{what}": value for what, value in values.items() if value is not None}
    return found


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions older than ``version``, which learns from them, the weights were that
    sampled the tokens; empty where that is not known."""
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

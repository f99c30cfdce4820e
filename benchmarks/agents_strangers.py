"""Agents of other libraries, unchanged: steps trained, calls, and whether the ids are exact.

    python benchmarks/agents.py --part strangers         every agent of examples/agents
    python benchmarks/agents_strangers.py [SEED …]       openai-agents for 20 steps per seed

Needs the environments of ``scripts/setup --agents``. The second form takes minutes, since each
rollout starts a process that imports the library.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import Figure, show

from examples.agents import recipe
from examples.agents.small_policy import make
from ramify.train.metrics import read_metrics
from tests.agents.strangers import STRANGERS, missing, trained, turns_of, worst_logprob
from tests.shown import train


def figures(quick: bool) -> Iterator[Figure]:
    """Train each agent for two steps."""
    with tempfile.TemporaryDirectory() as folder:
        policy = make(Path(folder, "policy"))
        for name in STRANGERS:
            if reason := missing(name):
                yield Figure(f"{name}: steps trained", None, reason, {}, least=2)
                continue
            group = 3 if quick else 8
            steps = trained(name, policy, Path(folder, name), group=group)
            seen = turns_of(steps)
            num_ids, difference = worst_logprob(policy, steps[0])
            again = seen["continued"] + seen["rewritten"]
            share = seen["continued"] / again if again else None
            yield Figure(f"{name}: steps trained", len(steps), "steps", {}, least=2)
            yield Figure(f"{name}: calls", seen["calls"], "calls", {})
            yield Figure(f"{name}: turns", seen["turns"], "turns", {})
            yield Figure(
                f"{name}: repeated histories that continue their ids", share, "share", {}, least=1
            )
            yield Figure(f"{name}: sampled ids checked in step 1", num_ids, "ids", {}, least=6)
            yield Figure(
                f"{name}: largest difference of their log-probabilities",
                difference,
                "nats",
                {},
                1e-3,
            )


def rise(seed: int, folder: Path) -> Figure:
    """The reward of ``openai-agents`` as a command: the last five of 20 steps against the first."""
    policy = make(folder / "policy", seed=seed)
    run = recipe.run("openai_agents")
    run = msgspec.structs.replace(
        run, seed=seed, policy=msgspec.structs.replace(run.policy, path=str(policy))
    )
    train(run, folder / "out")
    rewards = [
        row.values["reward"]
        for row in read_metrics(folder / "out")
        if row.stage == "rl" and "loss" in row.values
    ]
    first, last = rewards[:5], rewards[-5:]
    error = sqrt(statistics.variance(first) / 5 + statistics.variance(last) / 5)
    print(f"seed {seed}: {' '.join(f'{each:.2f}' for each in rewards)}", flush=True)
    gain = (statistics.mean(last) - statistics.mean(first)) / error
    return Figure(
        f"openai_agents, seed {seed}: rise of the reward", gain, "standard errors", {}, least=3
    )


if __name__ == "__main__":
    found = []
    for given in sys.argv[1:] or ["0"]:
        with tempfile.TemporaryDirectory() as made:
            found.append(rise(int(given), Path(made)))
    show(found)

"""Train an agent from another library, unchanged: a command and a reward.

    scripts/setup --agents                                     installs the agents
    python examples/agents/small_policy.py runs/small          a policy for trying things out
    AGENT=langgraph ramify train examples/agents/recipe.py --out runs/boxes

``AGENT`` is the name of a folder beside this file. Each has an agent and its pins. The agent
runs unchanged, once for each rollout, and reads the address of the policy from its environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from ramify import Limits, train

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build/agents"


def command(name: str) -> str:
    """The command of an agent, in the environment that ``scripts/setup --agents`` made."""
    if name.endswith("_js"):
        return f"node {BUILT / name}/agent.mjs {{item_file}}"
    python = "{python}" if name == "verifiers" else BUILT / name / "bin/python"
    return f"{python} {HERE / name}/agent.py {{item_file}}"


def environment(name: str) -> tuple[str, ...]:
    """Variables that the agent needs in addition to its address."""
    if name == "verifiers":  # it makes the environment of its program, with uv, from files
        return (
            f"PATH={BUILT / 'uv/bin'}:{os.environ['PATH']}",
            f"HOME={BUILT / name}",
            f"UV_DEFAULT_INDEX=file://{BUILT / name}/index",
        )
    return ("OPENAI_AGENTS_DISABLE_TRACING=1",) if name.startswith("openai_agents") else ()


def run(name: str = "") -> train.Run:
    name = name or os.environ.get("AGENT", "openai_agents")
    return train.Run(
        name=f"boxes-{name}",
        policy=train.PolicySpec(path="runs/small", slots=32),
        task=train.ExternalAgentTask(
            command=command(name),
            env=environment(name),
            items=str(HERE / "boxes.jsonl"),
            reward=f"{HERE / 'score.py'}:score",
        ),
        rl=train.RlSpec(
            steps=20,
            sample=train.RolloutBatchSpec(items=2),
            rollout=train.RolloutOptions(group=8, concurrency=16),
            optim=train.OptimizerSpec(lr=1e-2, max_grad_norm=1.0),
        ),
        limits=Limits(max_reply_tokens=24, max_seconds=600),
        evaluate=train.EvaluateSpec(num=1, final=()),
        compute=train.TrainerComputeSpec(precision="fp32"),
        threads=1,
    )

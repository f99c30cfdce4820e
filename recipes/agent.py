"""An agent that was written elsewhere, trained as it is: a command, its items and a reward.

    ramify train recipes/agent.py policy.path=Qwen/Qwen3-0.6B --out runs/agent
    ramify train recipes/agent.py policy.path=… task.options.items=rows.jsonl \\
        'task.options.command={python} my_agent.py {item_file}' task.options.reward=score.py:score

The agent of this recipe is this file: a program that asks for an answer, and asks to check it.
It knows nothing but ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. See docs/agents.md.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

from ramify import Limits, train

ROWS = [
    {"question": f"{a} + {b} = ? End with the number.", "answer": a + b}
    for a in range(30)
    for b in range(30)
]


def score(run: train.AgentRun) -> dict[str, float]:
    """1 if the last word that the agent printed is the sum; a little for a short answer."""
    words = run.output.split()
    return {
        "correct": float(bool(words) and words[-1] == str(run.item.gold)),
        "short": float(len(run.output) < 200),
    }


def run() -> train.Run:
    return train.Run(
        name="agent",
        policy=train.PolicySpec(path="Qwen/Qwen3-0.6B"),
        task=train.ExternalAgentTask(
            command=f"{{python}} {__file__} {{item_file}}",
            items=ROWS,
            reward=score,
            weights={"short": 0.1},
            max_seconds=300,
        ),
        rl=train.RlSpec(
            steps=100,
            algorithm=train.GRPO(),
            sample=train.RolloutBatchSpec(items=16),
            rollout=train.RolloutOptions(group=8, concurrency=64),
            optim=train.OptimizerSpec(lr=1e-6),
        ),
        limits=Limits(max_reply_tokens=512, max_seconds=86_400, max_concurrency=128),
        evaluate=train.EvaluateSpec(num=32),
    )


def ask(messages: list[dict[str, str]]) -> str:
    """The reply of the model at the address that the environment names."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    item = json.loads(Path(sys.argv[1]).read_text())
    messages = [{"role": "user", "content": item["question"]}]
    first = ask(messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Check it, and give the number again."},
    ]
    print(ask(messages))

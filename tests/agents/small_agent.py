"""An agent of a few lines that speaks HTTP, and the reward of even token ids."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from ramify.agents.agent_job import AgentRolloutInput
from ramify.agents.agent_result import AgentRun

ROWS = [{"question": f"What comes after {number}?", "answer": "?"} for number in range(12)]


def chat(base_url: str, key: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Send one chat completion, and return the body of the reply."""
    body = {"model": "any", "messages": messages, **options}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def ask(job: AgentRolloutInput) -> str:
    """Ask the question, and return the reply."""
    messages = [{"role": "user", "content": job.item.question}]
    reply = chat(job.base_url, job.api_key, messages, max_tokens=8)
    return str(reply["choices"][0]["message"]["content"])


def even(run: AgentRun) -> float:
    """Share of the even ids among those that were sampled."""
    ids = [
        id
        for call in run.trajectory.calls
        for turn in call.turns
        for id in turn.reply.token_ids or ()
    ]
    return sum(id % 2 == 0 for id in ids) / len(ids) if ids else 0.0

"""`droste` as a library, for the one task that it can take part in. It runs in the peers'
environment.

Its batches are limited to 50 prompts, started 50 ms apart, and its children do not accept batches,
so the other tasks are omitted.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import droste


def answer(url: str, question: str, context: str) -> str:
    budget = droste.Budget()
    config = droste.EnvironmentConfig(kind="native", budget=budget)
    execution = droste.create_environment_context(config)
    subcalls = droste.OpenAICompatSubcallClient(
        model="test", context=execution, base_url=url, api_key="none", max_output_tokens=2048
    )
    environment = droste.create_environment(
        config,
        context=context,
        registry=None,
        subcalls=subcalls,
        execution_context=execution,
        capability_run_id=execution.trace.run_id,
        capability_parent_run_id=execution.trace.parent_run_id,
        capability_observer=execution.observe_capability,
    )
    result = droste.run_rlm(
        question,
        environment=environment,
        root_llm=droste.OpenAICompatClient(model="test", base_url=url, api_key="none"),
        subcalls=subcalls,
        config=droste.RLMConfig(budget=budget, sandbox=config.sandbox, root_model="test"),
        context=execution,
    )
    assert result.ready, result.error
    return str(result.answer)


def three(url: str, repeats: int) -> dict[str, Any]:
    context, seconds, responses = "line of a log\n" * 1000, [], []
    for _ in range(repeats):
        started = time.perf_counter()
        responses.append(answer(url, "<<scene:three.python>>", context))
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "responses": responses}


if __name__ == "__main__":
    print(json.dumps(three(**json.loads(sys.argv[2]))))

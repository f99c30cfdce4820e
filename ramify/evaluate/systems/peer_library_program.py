"""Answer one task item with a peer, which is another library for recursive language models.

This script runs in the virtual environment of that library.

    ENVIRONMENT/bin/python -I peer_library_program.py rlms item.json result.json

    item.json     {"question", "context", "base_url", "api_key", "model",
                   "max_calls", "max_tokens", "timeout_s"}       limits may be null
    result.json   {"answer", "failure", "requests", "input_tokens", "output_tokens"}

The script imports only the standard library and the peer, nothing of Ramify. Each peer is called as
its documentation shows, with its default settings. If it has an option for a limit on an item, that
limit is passed on, so that the peer can still answer before the meter refuses its requests. The
versions of the peers are listed in ``peer_libraries.py``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fields = dict[str, Any]


def answer_with_rlms(item: Fields) -> Fields:
    """Answer a task item with ``rlms``, the reference library for recursive language models.

    Returns the fields of the result file.
    """
    import rlm
    from rlm.utils.exceptions import TimeoutExceededError, TokenLimitExceededError

    engine = rlm.RLM(
        backend="openai",
        backend_kwargs={
            "model_name": item["model"],
            "base_url": item["base_url"],
            "api_key": item["api_key"],
        },
        environment="local",
        max_tokens=item["max_tokens"],
        max_timeout=item["timeout_s"],
    )
    try:
        done = engine.completion(item["context"], root_prompt=item["question"])
    except (TimeoutExceededError, TokenLimitExceededError) as error:
        if not error.partial_answer:
            raise
        return {"answer": str(error.partial_answer)}
    counts = done.usage_summary.model_usage_summaries.values()
    return {
        "answer": done.response,
        "requests": sum(count.total_calls for count in counts),
        "input_tokens": sum(count.total_input_tokens for count in counts),
        "output_tokens": sum(count.total_output_tokens for count in counts),
    }


def answer_with_droste(item: Fields) -> Fields:
    """Answer a task item with the ``droste`` library.

    Returns the fields of the result file.
    """
    import droste

    default = droste.Budget()
    budget = droste.Budget(
        # It refuses a budget that is smaller than one reply.
        tokens=max(item["max_tokens"] or 1 << 40, default.root_output_tokens),
        subcalls=item["max_calls"] or default.subcalls,
        wall_ms=int(1000 * item["timeout_s"]),
    )
    config = droste.EnvironmentConfig(kind="native", budget=budget)
    context = droste.create_environment_context(config)
    address = {"base_url": item["base_url"], "api_key": item["api_key"]}
    subcalls = droste.OpenAICompatSubcallClient(
        model=item["model"],
        context=context,
        max_output_tokens=budget.subcall_output_tokens,
        **address,
    )
    environment = droste.create_environment(
        config,
        context=item["context"],
        registry=None,
        subcalls=subcalls,
        execution_context=context,
        capability_run_id=context.trace.run_id,
        capability_parent_run_id=context.trace.parent_run_id,
        capability_observer=context.observe_capability,
    )
    done = droste.run_rlm(
        item["question"],
        environment=environment,
        root_llm=droste.OpenAICompatClient(model=item["model"], **address),
        subcalls=subcalls,
        config=droste.RLMConfig(budget=budget, sandbox=config.sandbox, root_model=item["model"]),
        context=context,
    )
    has_answer, counts = done.ready or done.extracted, context.stats
    return {
        "answer": str(done.answer) if has_answer else None,
        "failure": "" if has_answer else f"it ended without an answer: {done.error}",
        "requests": counts.root_requests + counts.calls_made,
        "input_tokens": counts.root_input_tokens + counts.subcall_input_tokens,
        "output_tokens": counts.root_output_tokens + counts.subcall_output_tokens,
    }


def answer_with_dspy(item: Fields) -> Fields:
    """Answer a task item with ``dspy.RLM``, the recursive language model of DSPy.

    Returns the fields of the result file. The model's code runs in a local process, because the
    default interpreter, Deno, loads a module from the network.
    """
    import dspy

    limits = {} if item["max_calls"] is None else {"max_llm_calls": item["max_calls"]}
    lm = dspy.LM(
        f"openai/{item['model']}",
        api_base=item["base_url"],
        api_key=item["api_key"],
        cache=False,
    )
    engine = dspy.RLM(
        "context, question -> answer", interpreter_factory=dspy.LocalInterpreter, **limits
    )
    with dspy.context(lm=lm), dspy.track_usage() as tracker:
        done = engine(context=item["context"], question=item["question"])
    entries = [entry for each in tracker.usage_data.values() for entry in each]
    return {
        "answer": str(done.answer),
        "requests": len(entries),
        "input_tokens": sum(entry.get("prompt_tokens") or 0 for entry in entries),
        "output_tokens": sum(entry.get("completion_tokens") or 0 for entry in entries),
    }


PEERS: dict[str, Callable[[Fields], Fields]] = {
    "rlms": answer_with_rlms,
    "droste": answer_with_droste,
    "dspy": answer_with_dspy,
}


def main(peer: str, item_file: str, result_file: str) -> None:
    item = json.loads(Path(item_file).read_text(encoding="utf-8"))
    try:
        result = PEERS[peer](item)
    except Exception as error:  # noqa: BLE001 -- whatever the peer raises is its failure
        traceback.print_exc()
        result = {"answer": None, "failure": f"{type(error).__name__}: {error}"}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

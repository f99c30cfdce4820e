"""The reference library, `rlms`, doing the same tasks. It uses only the standard library and `rlm`,
and runs in the peers' environment."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from contexts import log_text
from rlm import RLM
from rlm.environments.local_repl import LocalREPL
from rlm.logger import RLMLogger

Result = dict[str, Any]


def engine(url: str, **more: Any) -> RLM:
    kwargs = {"model_name": "test", "base_url": url, "api_key": "none", "max_retries": 0}
    return RLM(backend="openai", backend_kwargs=kwargs, environment="local", **more)


def timed(rlm: RLM, question: str, context: str, repeats: int) -> Result:
    seconds, responses = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        responses.append(rlm.completion(context, root_prompt=question).response)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "responses": responses}


def three(url: str, repeats: int) -> Result:
    return timed(engine(url), "<<scene:three>>", "line of a log\n" * 1000, repeats)


def children(url: str, repeats: int) -> Result:
    return timed(engine(url, max_depth=2), "<<scene:children>>", "c", repeats)


def calls(url: str, repeats: int, limit: int) -> Result:
    """``limit`` cannot be set: sixteen requests are concurrent."""
    responses = timed(engine(url), "<<scene:calls>>", "c", repeats)["responses"]
    return {"seconds": [float(each) for each in responses]}


def cell(url: str, repeats: int) -> Result:
    """Return the seconds of ``x = 1``; the session is a dict in this process."""
    with LocalREPL(context_payload="c") as session:
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            session.execute_code("x = 1")
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def big(url: str, repeats: int, chars: int) -> Result:
    context, seconds, written = log_text(chars), [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            rlm = engine(url, logger=RLMLogger(log_dir=folder))
            seconds += timed(rlm, "<<scene:three>>", context, 1)["seconds"]
            written.append(
                sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
            )
    return {"seconds": seconds, "bytes": written}


def loop(url: str, limit_s: float) -> Result:
    """Ends only because the caller stops it."""
    started = time.perf_counter()
    engine(url, max_timeout=limit_s).completion("c", root_prompt="<<scene:loop>>")
    return {"seconds": [time.perf_counter() - started]}


def usage(url: str) -> Result:
    summary = (
        engine(url, max_depth=2).completion("c", root_prompt="<<scene:children>>").usage_summary
    )
    models = summary.model_usage_summaries.values()
    return {
        "input": sum(model.total_input_tokens for model in models),
        "output": sum(model.total_output_tokens for model in models),
        "calls": sum(model.total_calls for model in models),
    }


def tokens(url: str, limit: int) -> Result:
    """A run with a budget of tokens; how many it spends is counted at the server."""
    try:
        engine(url, max_tokens=limit).completion("c", root_prompt="<<scene:budget>>")
    except Exception as error:  # noqa: BLE001
        return {"ended": type(error).__name__}
    return {"ended": "answer"}


TASKS: dict[str, Callable[..., Result]] = {
    "three": three,
    "children": children,
    "calls": calls,
    "cell": cell,
    "big": big,
    "loop": loop,
    "usage": usage,
    "tokens": tokens,
}

if __name__ == "__main__":
    print("\n" + json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))

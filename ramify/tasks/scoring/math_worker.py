"""A worker process that compares mathematical expressions.

It reads and writes one JSON object per line. ``math_answer.py`` starts it as a program and never
imports it.

    {"gold": "\\frac{1}{2}", "answer": "0.5"}  ->  {"same": true}

It imports only the standard library and ``math-verify``. The parent process kills it at a timeout:
a simplification can run for hours, and a signal handler would not run inside a library call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import warnings

MEMORY_BYTES = 2 << 30


def _latex_forms(text: str) -> list[str]:
    r"""Return a mathematical expression in the two LaTeX notations that the parser accepts.

    One form has dollar signs, the other a LaTeX box.
    """
    return [f"${text}$", f"\\boxed{{{text}}}"]


def main() -> None:
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def same(gold: str, answer: str) -> bool:
        for form_gold, form_answer in zip(_latex_forms(gold), _latex_forms(answer), strict=True):
            golds = parse(form_gold, parsing_timeout=None)
            answers = parse(form_answer, parsing_timeout=None)
            # The order matters: verify() expects the gold first.
            if golds and answers and verify(golds, answers, timeout_seconds=None):
                return True
        return False

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply: dict[str, object] = {"same": bool(same(request["gold"], request["answer"]))}
        except Exception as error:  # noqa: BLE001 -- expressions that cannot be compared differ
            reply = {"same": False, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

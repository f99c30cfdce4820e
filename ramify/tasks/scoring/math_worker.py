"""A process that compares mathematical expressions, a line of JSON each: started by
``math_answer.py``, never imported.

    {"gold": "\\frac{1}{2}", "answer": "0.5"}  ->  {"same": true}

It knows the standard library and ``math-verify`` alone. Whoever started it kills it when an answer
takes too long: a simplification can run for hours, and no signal reaches it inside a library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import warnings

MEMORY_BYTES = 2 << 30


def _forms(text: str) -> list[str]:
    r"""``text`` as the parser wants it: a formula within dollars, then within a box."""
    return [f"${text}$", f"\\boxed{{{text}}}"]


def main() -> None:
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def same(gold: str, answer: str) -> bool:
        for form_gold, form_answer in zip(_forms(gold), _forms(answer), strict=True):
            golds = parse(form_gold, parsing_timeout=None)
            answers = parse(form_answer, parsing_timeout=None)
            if (
                golds and answers and verify(golds, answers, timeout_seconds=None)
            ):  # the gold comes first: it matters
                return True
        return False

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            found = {"same": bool(same(asked["gold"], asked["answer"]))}
        except Exception as error:  # noqa: BLE001 -- what cannot be compared is not the same
            found = {"same": False, "error": f"{type(error).__name__}: {error}"[:200]}  # type: ignore[dict-item]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

r"""Rows of public sets of mathematical problems, as they are published, as items.

    DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024    prompt[0].content, reward_model.ground_truth
    zhuzilin/aime-2024                            prompt[0].content, label
    Maxwell-Jia/AIME_2024                         Problem, Answer
    yentinglin/aime_2025, HuggingFaceH4/aime_2024 problem, answer

What a set itself says about the form of the answer ("The last line of your response should be …
Answer: $Answer") is cut off, since it would teach another form than the one that is scored. Which
columns a row has decides how it is read; a row that fits none is an error that names its columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.tasks.base import Item

QUESTIONS = ("prompt", "problem", "Problem", "question")
GOLDS = ("reward_model", "label", "answer", "Answer", "expected_answer", "solution_answer")
_INSTRUCTIONS = (
    re.compile(
        r"\ASolve the following math problem step by step\. The last line of your response should be .*?\n\n",
        re.S,
    ),
    re.compile(r"\n\nRemember to put your answer on its own line after \"Answer:\"\.?\s*\Z"),
    re.compile(
        r"\n*(?:Please reason step by step, and |Let's think step by step and )?"
        r"(?:put|output) (?:your|the) final answer within \\boxed\{\}\.?\s*\Z",
        re.IGNORECASE,
    ),
)


def item_of(row: Mapping[str, Any]) -> Item:
    """The item that a row is. Raises ValueError, naming the columns, for a row of no known form."""
    question, gold = _question(row), _gold(row)
    if question is None or gold is None:
        missing = "problem" if question is None else "answer"
        raise ValueError(
            f"no {missing} was found among its columns {', '.join(map(str, row))}; known are "
            f"{_known()}"
        )
    kind = str(row.get("data_source") or "")
    return Item(question, gold=gold, kind=kind, wrong=_other(gold))


def bare_question(text: str) -> str:
    """A problem without what its set says about the form of the answer.

    >>> bare_question("What is 1+1? Please reason step by step, and put your final answer within \\\\boxed{}.")
    'What is 1+1?'
    """
    for instruction in _INSTRUCTIONS:
        text = instruction.sub("", text)
    return text.strip()


def _question(row: Mapping[str, Any]) -> str | None:
    found = next((row[name] for name in QUESTIONS if row.get(name)), None)
    if isinstance(found, Sequence) and not isinstance(found, str):  # a conversation
        said = [each for each in found if isinstance(each, Mapping) and each.get("role") == "user"]
        found = said[-1].get("content") if said else None
    return bare_question(found) or None if isinstance(found, str) else None


def _gold(row: Mapping[str, Any]) -> str | None:
    found = next((row[name] for name in GOLDS if row.get(name) not in (None, "")), None)
    if isinstance(found, Mapping):
        found = found.get("ground_truth")
    if isinstance(found, Sequence) and not isinstance(found, str) and len(found) == 1:
        found = found[0]
    return str(found).strip() or None if isinstance(found, str | int | float) else None


def _other(gold: str) -> str:
    """An answer that must not score."""
    return str(int(gold) + 1) if re.fullmatch(r"[-+]?\d{1,18}", gold) else f"{gold} + 1"


def _known() -> str:
    return f"{', '.join(QUESTIONS)} and {', '.join(GOLDS)}"

r"""Conversion of rows from public datasets of mathematical problems to items.

    DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024    prompt[0].content, reward_model.ground_truth
    zhuzilin/aime-2024                            prompt[0].content, label
    Maxwell-Jia/AIME_2024                         Problem, Answer
    yentinglin/aime_2025, HuggingFaceH4/aime_2024 problem, answer

A dataset's own instructions about the form of the answer ("The last line of your response should be
… Answer: $Answer") are removed, because they ask for another form than the one that is scored. The
columns of a row determine how it is read. A row without known columns is an error that names its
columns.
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
        r"\ASolve the following math problem step by step\. "
        r"The last line of your response should be .*?\n\n",
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
    """Convert a row to an item. Raises ValueError, naming the columns, if its form is unknown."""
    question, gold = _question(row), _gold(row)
    if question is None or gold is None:
        missing = "problem" if question is None else "answer"
        raise ValueError(
            f"no {missing} was found among its columns {', '.join(map(str, row))}; known columns "
            f"are {_known()}"
        )
    kind = str(row.get("data_source") or "")
    return Item(question, gold=gold, kind=kind, wrong=_other(gold))


def bare_question(text: str) -> str:
    """Remove a dataset's instructions about the form of the answer from a problem.

    >>> bare_question("What is 1+1? Please put your final answer within \\\\boxed{}.")
    'What is 1+1?'
    """
    for instruction in _INSTRUCTIONS:
        text = instruction.sub("", text)
    return text.strip()


def _question(row: Mapping[str, Any]) -> str | None:
    value = next((row[name] for name in QUESTIONS if row.get(name)), None)
    if isinstance(value, Sequence) and not isinstance(value, str):  # a conversation
        prompts = [
            turn for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"
        ]
        value = prompts[-1].get("content") if prompts else None
    return bare_question(value) or None if isinstance(value, str) else None


def _gold(row: Mapping[str, Any]) -> str | None:
    value = next((row[name] for name in GOLDS if row.get(name) not in (None, "")), None)
    if isinstance(value, Mapping):
        value = value.get("ground_truth")
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    return str(value).strip() or None if isinstance(value, str | int | float) else None


def _other(gold: str) -> str:
    """Return a wrong answer for validation."""
    return str(int(gold) + 1) if re.fullmatch(r"[-+]?\d{1,18}", gold) else f"{gold} + 1"


def _known() -> str:
    return f"{', '.join(QUESTIONS)} and {', '.join(GOLDS)}"

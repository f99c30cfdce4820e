r"""A task of solving math problems with a Python session.

Problems come from files, and the answer is the last ``\boxed{}`` of a reply.

    toolmath(train="dapo-math-17k.parquet", test="aime-2024.parquet")
    toolmath(test="aime-2025.jsonl")                                    evaluation only

The task is intended for the scaffolds ``retool`` (tags) and ``retool_native`` (native tool calls).
The only reward is ``correct``, so that pass@k, avg@k and majority@k count correct answers only.
Reward shaping and rewards for single turns are training signals instead (see ``train/signals/``).

The columns of a row determine how it is read. A row without known columns is an error that names
its columns:

    DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024    prompt[0].content, reward_model.ground_truth
    zhuzilin/aime-2024                            prompt[0].content, label
    Maxwell-Jia/AIME_2024                         Problem, Answer
    yentinglin/aime_2025, HuggingFaceH4/aime_2024 problem, answer

The instructions of a dataset about the form of the answer ("The last line of your response should
be … Answer: $Answer") are removed, because they ask for another form than the one that is scored.
Repeated problems of a dataset are used once. Without a validation file, a part of the training file
is held out, selected by a hash of the problem.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import ConfigError
from ramify.tasks.base import (
    AnswerReward,
    DatasetTask,
    Item,
    Score,
    TrajectoryRewardFunction,
    as_score,
)
from ramify.tasks.data import DatasetItems, rows_of
from ramify.tasks.scoring import SCORERS, exact, math_answer
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.trajectory import Trajectory, Turn

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


def row_to_item(row: Mapping[str, Any]) -> Item:
    """Convert a row of a known math dataset to a task item.

    Raises ValueError with the row's column names if its format is unknown.
    """
    question, gold = _question(row), _gold(row)
    if question is None or gold is None:
        missing = "problem" if question is None else "answer"
        raise ValueError(
            f"no {missing} was found among its columns {', '.join(map(str, row))}; known columns "
            f"are {', '.join(QUESTIONS)} and {', '.join(GOLDS)}"
        )
    kind = str(row.get("data_source") or "")
    return Item(question, gold=gold, kind=kind, wrong=_wrong_answer(gold))


def bare_question(text: str) -> str:
    """Remove a dataset's instructions on the answer format from the text of a problem.

    >>> bare_question("What is 1+1? Put your final answer within \\\\boxed{}.")
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


def _wrong_answer(gold: str) -> str:
    """Return a wrong answer to a math problem, for testing how answers are scored."""
    return str(int(gold) + 1) if re.fullmatch(r"[-+]?\d{1,18}", gold) else f"{gold} + 1"


_INTEGER = re.compile(r"\$?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,400}))(?:\.0{1,20})?\.?\s*\$?")
HELD_OUT = 1 / 64
"""Fraction of the training file that becomes the validation split if no validation file is
given."""


def toolmath(
    *, train: Any = "", validation: Any = "", test: Any = "", verifier: str = "auto"
) -> DatasetTask:
    """Return a task of math problems that are solved with a Python session.

    Args:
        train: A ``.jsonl`` or ``.parquet`` file, or a list of rows, in a form of ``row_to_item``.
        validation: Likewise.
        test: Likewise.
        verifier: Name of a score, or ``auto``: integers are compared as numbers, other answers by
        math-verify if it is installed, otherwise as exact texts.

    Raises ConfigError and SourceError.
    """
    sources = {"train": train, "validation": validation, "test": test}
    splits = {
        split: _deduplicate_problems(split, rows_of(source))
        for split, source in sources.items()
        if source is not None and not (isinstance(source, str) and source == "")
    }
    if not splits:
        raise ConfigError(
            "toolmath needs problems: give train, validation or test, each a .jsonl or .parquet "
            "file"
        )
    if "train" in splits and "validation" not in splits:
        splits |= _split_validation(splits["train"])
    score = _ToolMathScorer(score_auto if verifier == "auto" else SCORERS.resolve(verifier))
    return DatasetTask("toolmath", splits, TrajectoryRewardFunction(score))


class _ToolMathScorer:
    """A reward function with the reward ``correct`` and metrics about tool use."""

    def __init__(self, verifier: AnswerReward) -> None:
        self._verifier = verifier

    def __call__(self, item: Item, trajectory: Trajectory) -> Score:
        correct = as_score(self._verifier(trajectory.answer, item)).rewards["correct"]
        return Score({"correct": correct}, metrics=tool_usage_metrics(trajectory))


def tool_usage_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Return metrics of a rollout's use of the Python tool.

    ``tool_calls`` is the number of cells that ran. ``tool_errors`` and ``tool_silent`` are the
    shares of cells that raised an error and that showed nothing. ``used_tool`` is 1 if any cell
    ran. ``malformed`` is the number of replies that were neither code nor an answer. ``truncated``
    is 1 if a limit ended the rollout or a reply was cut off.
    """
    turns = [turn for call in trajectory.calls for turn in call.turns]
    cells = [cell for turn in turns for cell in turn.cells]
    cut = any(call.stop is not None and call.stop.is_truncated() for call in trajectory.calls)
    return {
        "tool_calls": float(len(cells)),
        "tool_errors": sum(cell.error is not None for cell in cells) / max(1, len(cells)),
        "tool_silent": sum(not (cell.error or cell.stdout or cell.value) for cell in cells)
        / max(1, len(cells)),
        "used_tool": float(bool(cells)),
        "malformed": float(
            sum(not turn.cells for turn in turns)
            - (trajectory.answer is not None and _has_answered(turns))
        ),
        "truncated": float(cut or any(turn.reply.finish == "length" for turn in turns)),
    }


def _has_answered(turns: Sequence[Turn]) -> bool:
    """Return True if the rollout's last turn ran no code, which means that it gave the answer."""
    return bool(turns) and not turns[-1].cells


def score_auto(answer: Any, item: Item) -> float:
    """Return the score of an answer to a math problem: 1.0 if it is right and 0.0 otherwise.

    An answer is right if it is the expected text or integer. If math-verify is installed, an equal
    mathematical value is right, too.
    """
    number, gold = parse_integer(answer), parse_integer(item.gold)
    if exact(answer, item) or (number is not None and number == gold):
        return 1.0
    if number is not None and gold is not None:
        return 0.0
    return float(
        bool(importlib.util.find_spec("math_verify"))
        and as_score(math_answer(answer, item)).rewards["correct"]
    )


def parse_integer(value: Any) -> int | None:
    """Return the integer that a value denotes, or None if it denotes no integer.

    >>> [parse_integer(text) for text in ("$1,024$", "034", "34.0", r"\\sqrt{34}")]
    [1024, 34, 34, None]
    """
    text = as_text(value)
    match = _INTEGER.fullmatch(text) if text is not None else None
    return int(match[1].replace(",", "")) if match is not None else None


def _deduplicate_problems(split: str, rows: Sequence[Any]) -> DatasetItems:
    """Return the math problems of a split without duplicates.

    The first occurrence of each is kept.
    """
    first: dict[bytes, int] = {}
    items = DatasetItems(f"toolmath/{split}", rows, row_to_item)
    for number in range(len(items)):
        first.setdefault(_key(items[number]), number)
    return DatasetItems(f"toolmath/{split}", rows, row_to_item, list(first.values()))


def _split_validation(train: DatasetItems) -> dict[str, DatasetItems]:
    """Divide the training problems into a training split and a validation split.

    Returns both splits.
    """
    held_out = [
        index
        for index in range(len(train))
        if int.from_bytes(_key(train[index])[:8], "big") < HELD_OUT * 2**64
    ]
    # A short file may have no problem below the threshold: hold out the last one.
    held_out = held_out or [len(train) - 1] * (len(train) > 1)
    if not held_out:
        return {}
    remaining = [index for index in range(len(train)) if index not in set(held_out)]
    return {
        "train": train.select("toolmath/train", remaining),
        "validation": train.select("toolmath/validation", held_out),
    }


def _key(item: Item) -> bytes:
    return hashlib.sha256(" ".join(item.question.split()).encode()).digest()

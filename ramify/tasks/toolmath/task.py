r"""The math agent's task: problems from files of the user's, whole Python in a session, the answer
in the last box.

    toolmath(train="dapo-math-17k.parquet", test="aime-2024.parquet")
    toolmath(test="aime-2025.jsonl")                                    to evaluate on

Meant for the scaffolds ``retool`` (tags) and ``retool_native`` (native calls). ``correct`` is the
only reward: shaping and marks for single turns are signals of a training run, never of the task,
since pass@k, avg@k and majority@k count what is right and nothing else. A problem that a set
repeats is taken once. Without a validation file a part of the training file is held out, by the
hash of the problem.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from ramify.errors import ConfigError, nearest
from ramify.tasks.base import Item, Score
from ramify.tasks.data import DatasetItems, rows_of
from ramify.tasks.scoring import SCORERS, exact, math_answer
from ramify.tasks.scoring.answer_text import as_text
from ramify.tasks.simple import AnswerReward, SimpleTask, WholeTrajectoryReward, as_score
from ramify.tasks.toolmath.problem_rows import item_of
from ramify.types.trajectory import Trajectory, Turn

_WHOLE = re.compile(r"\$?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,400}))(?:\.0{1,20})?\.?\s*\$?")
HELD_OUT = 1 / 64
"""Share of the training file that is the validation stream, where no file is given for it."""


def toolmath(
    *, train: Any = "", validation: Any = "", test: Any = "", verifier: str = "auto"
) -> SimpleTask:
    """The task. Each of ``train``, ``validation`` and ``test`` is a ``.jsonl`` or ``.parquet``
    file, or a list of rows, in one of the forms of ``problem_rows.py``. ``verifier`` is a score by
    name, or ``auto``: whole numbers as such, everything else by math-verify where it is installed,
    otherwise to the letter. Raises ConfigError, SourceError."""
    given = {"train": train, "validation": validation, "test": test}
    splits = {
        split: _once(split, rows_of(source)) for split, source in given.items() if _is_given(source)
    }
    if not splits:
        raise ConfigError(
            "toolmath needs problems: give train, validation or test, a .jsonl or .parquet file "
            "each"
        )
    if "train" in splits and "validation" not in splits:
        splits |= _divided(splits["train"])
    return SimpleTask(
        "toolmath", splits, WholeTrajectoryReward(_ToolMathScore(_verifier(verifier)))
    )


class _ToolMathScore:
    """``correct``, and how the tool was used."""

    def __init__(self, verifier: AnswerReward) -> None:
        self._verifier = verifier

    def __call__(self, item: Item, trajectory: Trajectory) -> Score:
        correct = as_score(self._verifier(trajectory.answer, item)).rewards["correct"]
        return Score({"correct": correct}, metrics=usage(trajectory))


def usage(trajectory: Trajectory) -> dict[str, float]:
    """What a rollout did with its tool: ``tool_calls`` (cells that ran), ``tool_errors`` and
    ``tool_silent`` (shares of them that raised or showed nothing), ``used_tool``, ``malformed``
    (replies that were neither code nor an answer), ``truncated`` (whether a limit ended it, or a
    reply was cut off)."""
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
            sum(not turn.cells for turn in turns) - (trajectory.answer is not None and _ends(turns))
        ),
        "truncated": float(cut or any(turn.reply.finish == "length" for turn in turns)),
    }


def _ends(turns: Sequence[Turn]) -> bool:
    """Whether the last reply gave the answer."""
    return bool(turns) and not turns[-1].cells


def auto(answer: Any, item: Item) -> float:
    """1 where ``answer`` is the gold: the same text or whole number; the same value where
    math-verify is installed."""
    said, gold = whole(answer), whole(item.gold)
    if exact(answer, item) or (said is not None and said == gold):
        return 1.0
    if said is not None and gold is not None:
        return 0.0
    return float(
        bool(importlib.util.find_spec("math_verify"))
        and as_score(math_answer(answer, item)).rewards["correct"]
    )


def whole(value: Any) -> int | None:
    """The whole number that ``value`` is written as; None for anything else.

    >>> whole("$1,024$"), whole("034"), whole("34.0"), whole(r"\\sqrt{34}")
    (1024, 34, 34, None)
    """
    text = as_text(value)
    found = _WHOLE.fullmatch(text) if text is not None else None
    return int(found[1].replace(",", "")) if found is not None else None


def _verifier(name: str) -> AnswerReward:
    if name == "auto":
        return auto
    if name not in SCORERS:
        raise ConfigError(
            f"toolmath: unknown verifier '{name}': {nearest(name, ['auto', *SCORERS])}"
        )
    return SCORERS[name]


def _is_given(source: Any) -> bool:
    return source is not None and (not isinstance(source, str) or source != "")


def _once(split: str, rows: Sequence[Any]) -> DatasetItems:
    """The problems of a split, each where it is met first."""
    first: dict[bytes, int] = {}
    every = DatasetItems(f"toolmath/{split}", rows, item_of)
    for number in range(len(every)):
        first.setdefault(_key(every[number]), number)
    return DatasetItems(f"toolmath/{split}", rows, item_of, list(first.values()))


def _divided(train: DatasetItems) -> dict[str, DatasetItems]:
    """``train`` less what is held out, and that as ``validation``."""
    held = [
        index
        for index in range(len(train))
        if int.from_bytes(_key(train[index])[:8], "big") < HELD_OUT * 2**64
    ]
    held = held or [len(train) - 1] * (len(train) > 1)
    if not held:
        return {}
    kept = [index for index in range(len(train)) if index not in set(held)]
    return {
        "train": train.some("toolmath/train", kept),
        "validation": train.some("toolmath/validation", held),
    }


def _key(item: Item) -> bytes:
    return hashlib.sha256(" ".join(item.question.split()).encode()).digest()

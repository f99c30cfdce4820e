"""The task ``programs``: generated problems, each solved by writing a short program.

The score depends on the number that it computes.

    programs()             six words per problem
    programs(steps=8)      eight words per problem

A problem is determined by its split and index. The splits share the library's secret (which
function each word stands for) but no problem. The only reward is ``correct``. The metrics of a
rollout are ``malformed`` (the share of turns that were neither a program nor an answer),
``code_turns`` (the number of programs) and ``raised`` (the share of programs that raised an error).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ramify.errors import ConfigError
from ramify.extras.studies.programs.toy_program_language import (
    MAX_OPERAND,
    MODULUS,
    NOT_IMPORTED,
    NUM_WORDS,
    ProgramWritingExercise,
    ToyProgram,
    ToyWordMeanings,
    generate_word_functions,
)
from ramify.sandbox.base import Session
from ramify.tasks.base import (
    DatasetTask,
    Item,
    RolloutInitialState,
    Score,
    TrajectoryRewardFunction,
    generated,
)
from ramify.tasks.scoring import exact
from ramify.types.trajectory import Cell, Trajectory

_ANSWER = re.compile(r"FINAL\(\d{1,2}\)")


def programs(*, seed: int = 0, steps: int = 6, secret: int = 0) -> DatasetTask:
    """Return the task ``programs``, whose problems are generated from a seed.

    Each is solved by writing a short program.

    ``steps`` is the number of different words in a problem; ``secret`` is the seed from which the
    meaning of the words is drawn. Raises ConfigError for an invalid number of steps.
    """
    if not 1 <= steps <= NUM_WORDS:
        raise ConfigError(f"programs: steps={steps} must be from 1 to {NUM_WORDS}")
    ops = generate_word_functions(secret)

    def make(rng: random.Random) -> Item:
        words = rng.sample(range(NUM_WORDS), steps)
        problem = ProgramWritingExercise(
            rng.randrange(MODULUS), tuple((word, rng.randint(1, MAX_OPERAND)) for word in words)
        )
        gold = ops.correct_answer(problem)
        return Item(
            problem.text, gold=gold, wrong=(gold + 1) % MODULUS, metadata={"secret": secret}
        )

    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(on_session=_InstallLibrary(ops))

    return DatasetTask(
        "programs",
        generated(f"programs-{secret}-{steps}", make, seed=seed),
        TrajectoryRewardFunction(score),
        begin=begin,
    )


class _InstallLibrary:
    """A session hook that installs the task's function library in every new session."""

    def __init__(self, ops: ToyWordMeanings) -> None:
        self._source = ops.python_module_source()

    async def __call__(self, session: Session) -> None:
        await session.install("ops", self._source)
        await session.install("not_imported", NOT_IMPORTED)


def score(item: Item, trajectory: Trajectory) -> Score:
    """Return the score of a rollout: the reward ``correct`` is 1 if the final number is right, else
    0.

    Metrics describe its turns and programs.
    """
    cells = [cell for call in trajectory.calls for turn in call.turns for cell in turn.cells]
    written = [cell for cell in cells if ToyProgram.parse(cell.code) is not None]
    malformed = [
        cell
        for cell in cells
        if ToyProgram.parse(cell.code) is None and not _ANSWER.fullmatch(cell.code)
    ]
    metrics = {
        "malformed": _share(malformed, cells),
        "code_turns": float(len(written)),
        "raised": _share([cell for cell in written if cell.error], written),
    }
    return Score({"correct": exact(trajectory.answer, item)}, metrics=metrics)


def _share(some: Sequence[Cell], of: Sequence[Cell]) -> float:
    return len(some) / len(of) if of else 0.0

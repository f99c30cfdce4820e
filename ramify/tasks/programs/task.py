"""Programs as a task: problems from seed streams, scored by their number.

    programs()             six words each
    programs(steps=8)      eight

Every problem can be made again from its split and index; what ``train`` shares with ``test`` is the
library's secret, and no problem. ``correct`` is the only reward. Metrics say how a rollout went:
``malformed`` (share of its turns that were no program and no answer), ``code_turns``, ``raised``
(share of its programs that raised).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ramify.errors import ConfigError
from ramify.sandbox.base import Session
from ramify.tasks.base import Item, Score, TaskStart, generated
from ramify.tasks.programs.program_library import (
    MAX_OPERAND,
    MODULUS,
    NOT_IMPORTED,
    NUM_WORDS,
    Program,
    ProgramLibrary,
    ProgramProblem,
    library,
)
from ramify.tasks.scoring import exact
from ramify.tasks.simple import SimpleTask, WholeTrajectoryReward
from ramify.types.trajectory import Cell, Trajectory

_ANSWER = re.compile(r"FINAL\(\d{1,2}\)")


def programs(*, seed: int = 0, steps: int = 6, secret: int = 0) -> SimpleTask:
    """The task. ``steps`` is the number of words in a problem, all different; ``secret`` draws the
    library. Raises ConfigError for what leaves nothing to ask."""
    if not 1 <= steps <= NUM_WORDS:
        raise ConfigError(
            f"programs: steps={steps}; a problem has 1 to {NUM_WORDS} different words"
        )
    known = library(secret)

    def make(rng: random.Random) -> Item:
        words = rng.sample(range(NUM_WORDS), steps)
        problem = ProgramProblem(
            rng.randrange(MODULUS), tuple((word, rng.randint(1, MAX_OPERAND)) for word in words)
        )
        gold = known.solve(problem)
        return Item(
            problem.text, gold=gold, wrong=(gold + 1) % MODULUS, metadata={"secret": secret}
        )

    async def begin(item: Item) -> TaskStart:
        return TaskStart(on_session=_Opening(known))

    return SimpleTask(
        "programs",
        generated(f"programs-{secret}-{steps}", make, seed=seed),
        WholeTrajectoryReward(score),
        begin=begin,
    )


class _Opening:
    """Puts the library into a fresh session."""

    def __init__(self, known: ProgramLibrary) -> None:
        self._source = known.source()

    async def __call__(self, session: Session) -> None:
        await session.install("ops", self._source)
        await session.install("not_imported", NOT_IMPORTED)


def score(item: Item, trajectory: Trajectory) -> Score:
    """``correct``, and how it went."""
    cells = [cell for call in trajectory.calls for turn in call.turns for cell in turn.cells]
    written = [cell for cell in cells if Program.read(cell.code) is not None]
    strange = [
        cell
        for cell in cells
        if Program.read(cell.code) is None and not _ANSWER.fullmatch(cell.code)
    ]
    metrics = {
        "malformed": _share(strange, cells),
        "code_turns": float(len(written)),
        "raised": _share([cell for cell in written if cell.error], written),
    }
    return Score({"correct": exact(trajectory.answer, item)}, metrics=metrics)


def _share(some: Sequence[Cell], of: Sequence[Cell]) -> float:
    return len(some) / len(of) if of else 0.0

"""Branching: several continuations of one turn of the root, and a choice among their answers.

    RLM(model, branches=4)             four first turns; the majority answer wins
    RLM(model, search=Branches(4, turn=2, choose_by=by_score(f)))
                                       of the third turn; the answer with the highest f(answer)
    rlm.completion(text, "…", search=4)              for this question only

Each continuation runs in a fork of the session and becomes a separate call in the trajectory
(``0:1``, ``0:2``, …) that shares everything before the turn. A custom ``BranchSearch`` may branch
at any turn, also within branches. A conversation continues from the chosen continuation.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from ramify.engine.event_recorder import CallOutcome, jsonable
from ramify.errors import ConfigError, RamifyError, ReplayDiverged, SandboxError
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.rlm_loop import RlmLoop
    from ramify.engine.run_state import LiveCall
    from ramify.engine.typed import AnswerType


@runtime_checkable
class BranchSearch(Protocol):
    """Decides when to branch and which answer to choose.

    A search with an attribute ``is_optional = True`` continues without a branch if the session
    cannot be forked at that moment (threads, open files)."""

    def width(self, call: LiveCall) -> int:
        """Number of continuations of the next turn of ``call``; 1 means no branching."""
        ...

    def choose(self, answers: Sequence[Any]) -> int:
        """Return the index of the answer to give. None stands for a continuation without an
        answer."""
        ...


def vote(answers: Sequence[Any]) -> int:
    """Index of the first answer that is most common among the continuations. Answers are equal if
    their JSON is.

    >>> ramify.vote(["a", None, "b", "b"])
    2
    """
    keys = [None if answer is None else _key(jsonable(answer)) for answer in answers]
    counts = Counter(key for key in keys if key is not None)
    return keys.index(counts.most_common(1)[0][0]) if counts else 0


def _key(plain: Any) -> bytes:
    try:
        return msgspec.json.encode(plain, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can represent
        return json.dumps(plain, sort_keys=True).encode()


def by_score(score: Callable[[Any], float]) -> Callable[[Sequence[Any]], int]:
    """Choose the first answer with the highest ``score``. A continuation without an answer is
    chosen only if none has one.

    >>> ramify.by_score(len)(["a", None, "bc", "de"])
    2
    """

    def choose(answers: Sequence[Any]) -> int:
        answered = [index for index, answer in enumerate(answers) if answer is not None]
        return max(answered, key=lambda index: score(answers[index]), default=0)

    return choose


class Branches(msgspec.Struct, frozen=True):
    """``num`` continuations of one turn.

    >>> ramify.Branches(4, turn=2, choose_by=ramify.by_score(len)).num
    4
    """

    num: int
    turn: int = 0
    """Index of the turn that has several continuations."""
    choose_by: Callable[[Sequence[Any]], int] = vote
    """Function from the answers to the index of the one to give."""

    def __post_init__(self) -> None:
        if self.num < 2 or self.turn < 0:
            raise ConfigError(
                f"Branches({self.num}, turn={self.turn}): num must be at least 2 and turn at "
                "least 0"
            )

    def width(self, call: LiveCall) -> int:
        return self.num if call.turn == self.turn and not call.is_branch else 1

    def choose(self, answers: Sequence[Any]) -> int:
        return self.choose_by(answers)


def search_of(given: BranchSearch | int) -> BranchSearch | None:
    """Convert a ``search=`` argument; 1 means no branching. Raises ConfigError if it is not a
    search."""
    if isinstance(given, int):
        return Branches(given) if given != 1 else None
    if not isinstance(given, BranchSearch):
        raise ConfigError(
            f"search is {given!r}: give a number of continuations, Branches(…), or width() and "
            "choose()"
        )
    return given


def recorded_search(config: Mapping[str, Any], known: BranchSearch | None) -> BranchSearch | None:
    """Return the search of a recorded run. A custom search is not stored, so it must be passed
    again as ``known``; otherwise raises ConfigError."""
    recorded = config.get("search")
    if recorded is None:
        return None
    if recorded.get("choose_by") == "vote":
        return Branches(recorded["num"], recorded["turn"])
    if known is None:
        raise ConfigError("the run used a custom search: pass the same search= again")
    return known


def config_of(search: BranchSearch) -> dict[str, Any]:
    """Return the journal's record of ``search``."""
    if isinstance(search, Branches):
        by = "vote" if search.choose_by is vote else "a function"
        return {"search": {"num": search.num, "turn": search.turn, "choose_by": by}}
    return {"search": {"choose_by": repr(search)}}


class BranchedLoop:
    """One continuation of the root, which branches when its search says so.

    ``answer`` does what ``RlmLoop.answer`` does, in several continuations.
    """

    def __init__(self, loop: RlmLoop, search: BranchSearch, branched_at: int = -1) -> None:
        """``branched_at`` is the turn at which this continuation has branched already."""
        self.chosen = loop
        """Loop whose answer is returned, and whose session the next question continues."""
        self.own: CallOutcome | None = None
        """Outcome of this continuation itself, if it was one of several."""
        self._loop = loop
        self._search = search
        self._branched_at = branched_at

    async def answer(self, question: str, kind: AnswerType | None = None) -> CallOutcome:
        self._loop.begin(question, kind)
        return await self._run_turns()

    async def _run_turns(self) -> CallOutcome:
        """Take turns until there is an answer, in several continuations if the search asks for
        them."""
        call = self._loop.call
        while True:
            width = self._search.width(call) if self._branched_at != call.turn else 1
            outcome = await (self._branch(width) if width > 1 else self._loop.step())
            if outcome is not None:
                return outcome

    async def _branch(self, width: int) -> CallOutcome:
        """Run the next turn in ``width`` concurrent continuations and return the outcome of the
        chosen one."""
        loop = self._loop
        self._branched_at = loop.call.turn
        branches: list[BranchedLoop] = [self]
        chosen: BranchedLoop | None = None
        try:
            while len(branches) < width:
                try:
                    fork = await loop.fork()
                except SandboxError:
                    if not getattr(self._search, "is_optional", False):
                        raise
                    break
                # A fork does not branch again at the turn where it starts.
                branches.append(BranchedLoop(fork, self._search, branched_at=0))
            outcomes = await asyncio.gather(
                self._run_turns_safely(), *(fork._run_fork() for fork in branches[1:])
            )
            index = self._chosen_of(outcomes)
            chosen = branches[index]
            loop.run.note(
                loop.call,
                f"of {len(branches)} continuations of turn {self._branched_at}, "
                f"{chosen._loop.call.id} answers",
            )
        finally:
            for branch in branches:
                if branch is not (chosen or self):
                    await branch.chosen.close()
        self.own = self.own or outcomes[0]
        self.chosen = chosen.chosen
        return outcomes[index]

    def _chosen_of(self, outcomes: Sequence[CallOutcome]) -> int:
        """Return the index of the outcome that the search chooses. Raises the error of a replay
        that diverged in any of them."""
        for outcome in outcomes:
            if isinstance(outcome.failure, ReplayDiverged):
                raise outcome.failure
        index = self._search.choose([outcome.answer for outcome in outcomes])
        if not 0 <= index < len(outcomes):
            raise ConfigError(
                f"the search chose {index} of {len(outcomes)} answers: choose() must return the "
                "index of an answer"
            )
        return index

    async def _run_fork(self) -> CallOutcome:
        outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
        try:
            outcome = await self._run_turns_safely()
        finally:
            self._loop.run.end(self._loop.call, self.own or outcome)
        return outcome

    async def _run_turns_safely(self) -> CallOutcome:
        """Run the turns and return errors as outcomes, so that a failed branch does not affect the
        others."""
        try:
            return await self._run_turns()
        except RamifyError as error:
            return CallOutcome(Stop.ERROR, error=str(error), failure=error)

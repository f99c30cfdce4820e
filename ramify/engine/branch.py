"""Several continuations of one turn of the root, and which of them answers.

    RLM(model, branches=4)                                         four first turns; the answer that most of them give
    RLM(model, search=Branches(4, turn=2, choose_by=by_score(f)))  of the third turn; the answer with the highest f(answer)
    rlm.completion(text, "…", search=4)                            for this question

Each continuation goes on with a fork of the session and ends as a call of its own in the trajectory
(``0:1``, ``0:2``, …) that shares everything before the turn. A ``BranchSearch`` of one's own may
branch at any turn, also within branches. A conversation goes on from the continuation that was
chosen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from ramify.engine.call import LiveCall, jsonable
from ramify.errors import ConfigError


@runtime_checkable
class BranchSearch(Protocol):
    """When to branch, and what to answer."""

    def width(self, call: LiveCall) -> int:
        """How many continuations the next turn of ``call`` gets; 1 is no branching."""
        ...

    def choose(self, answers: Sequence[Any]) -> int:
        """The index of the answer to give; None stands for a continuation without one."""
        ...


def vote(answers: Sequence[Any]) -> int:
    """The first of the answers that most continuations give; answers are the same if their JSON is.

    >>> vote(["a", None, "b", "b"])
    2
    """
    keys = [None if answer is None else _key(jsonable(answer)) for answer in answers]
    counts = Counter(key for key in keys if key is not None)
    return keys.index(counts.most_common(1)[0][0]) if counts else 0


def _key(plain: Any) -> bytes:
    try:
        return msgspec.json.encode(plain, order="sorted")
    except UnicodeEncodeError:  # half a surrogate pair in it, which only an escape can show
        return json.dumps(plain, sort_keys=True).encode()


def by_score(score: Callable[[Any], float]) -> Callable[[Sequence[Any]], int]:
    """Chooses the first of the answers with the highest ``score``; a continuation without an answer
    only where none has.

    >>> by_score(len)(["a", None, "bc", "de"])
    2
    """

    def choose(answers: Sequence[Any]) -> int:
        given = [index for index, answer in enumerate(answers) if answer is not None]
        return max(given, key=lambda index: score(answers[index]), default=0)

    return choose


class Branches(msgspec.Struct, frozen=True):
    """``num`` continuations of one turn."""

    num: int
    turn: int = 0
    """Index of the turn that has several continuations."""
    choose_by: Callable[[Sequence[Any]], int] = vote
    """Answers -> index of the one to give."""

    def __post_init__(self) -> None:
        if self.num < 2 or self.turn < 0:
            raise ConfigError(
                f"Branches({self.num}, turn={self.turn}): give at least 2 continuations of turn 0 "
                "or later"
            )

    def width(self, call: LiveCall) -> int:
        return self.num if call.turn == self.turn and not call.is_branch else 1

    def choose(self, answers: Sequence[Any]) -> int:
        return self.choose_by(answers)


def search_of(given: BranchSearch | int | None) -> BranchSearch | None:
    """What ``search=`` means; 1 is a question without branches. Raises ConfigError for what is no
    search."""
    if isinstance(given, int):
        return Branches(given) if given != 1 else None
    if given is not None and not isinstance(given, BranchSearch):
        raise ConfigError(
            f"search is {given!r}: give a number of continuations, Branches(…), or width() and "
            "choose()"
        )
    return given


def recorded_search(config: Mapping[str, Any], known: BranchSearch | None) -> BranchSearch | None:
    """The search of a recorded run. Raises ConfigError for one that only its author has, unless it
    is ``known``."""
    recorded = config.get("search")
    if recorded is None:
        return None
    if recorded.get("choose_by") == "vote":
        return Branches(recorded["num"], recorded["turn"])
    if known is None:
        raise ConfigError("the run was searched in a way of its own: give the same search= again")
    return known


def config_of(search: BranchSearch | None) -> dict[str, Any]:
    """What the journal says of ``search``."""
    if search is None:
        return {}
    if isinstance(search, Branches):
        by = "vote" if search.choose_by is vote else "a function"
        return {"search": {"num": search.num, "turn": search.turn, "choose_by": by}}
    return {"search": {"choose_by": repr(search)}}

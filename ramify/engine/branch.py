"""Several continuations of one turn of the root, and which of them answers.

    rlm.completion(text, "…", search=4)                            four first turns; the answer that most of them give
    rlm.completion(text, "…", search=Branches(4, 2, best))         of the third turn; ``best(answers) -> index``

Each continuation goes on with a fork of the session and ends as a call of its own in the trajectory (``0:1``, ``0:2``, …)
that shares everything before the turn. A ``Search`` of one's own may branch at any turn, also within branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ramify.engine.call import LiveCall, jsonable
from ramify.errors import ConfigError


class Search(Protocol):
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
    keys = [None if answer is None else msgspec.json.encode(jsonable(answer), order="sorted") for answer in answers]
    counts = Counter(key for key in keys if key is not None)
    return keys.index(counts.most_common(1)[0][0]) if counts else 0


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
                f"Branches({self.num}, turn={self.turn}): give at least 2 continuations of turn 0 or later"
            )

    def width(self, call: LiveCall) -> int:
        return self.num if call.turn == self.turn and not call.is_branch else 1

    def choose(self, answers: Sequence[Any]) -> int:
        return self.choose_by(answers)


def search_of(given: Search | int | None, config: Mapping[str, Any] | None = None) -> Search | None:
    """The search that was given, or that a recorded run's ``config`` names. Raises ConfigError for one that only its
    author has."""
    if isinstance(given, int):
        return Branches(given) if given != 1 else None
    recorded = (config or {}).get("search")
    if given is not None or recorded is None:
        return given
    if recorded.get("choose_by") != "vote":
        raise ConfigError("the run was searched in a way of its own: give the same search= again")
    return Branches(recorded["num"], recorded["turn"])


def config_of(search: Search | None) -> dict[str, Any]:
    """What the journal says of ``search``."""
    if search is None:
        return {}
    if isinstance(search, Branches):
        by = "vote" if search.choose_by is vote else "a function"
        return {"search": {"num": search.num, "turn": search.turn, "choose_by": by}}
    return {"search": {"choose_by": repr(search)}}

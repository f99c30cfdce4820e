"""Which turns of a run have several continuations, and which answer is chosen.

    RLM(model, branches=4)             four first turns; the majority answer wins
    RLM(model, search=Branches(4, turn=2, choose_by=by_score(f)))
                                       of the third turn; the answer with the highest f(answer)
    rlm.completion(text, "…", search=4)              for this question only

A custom ``BranchSearch`` may branch at any turn, also within branches. Not here: how continuations
are run (see ``branch.py``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from ramify.engine.answer_json import jsonable
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.engine.live_call import LiveCall


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
    """Samples several continuations of one turn, and chooses one of their answers.

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
    """Return the settings of ``search`` as the plain data that the run's journal stores."""
    if isinstance(search, Branches):
        by = "vote" if search.choose_by is vote else "a function"
        return {"search": {"num": search.num, "turn": search.turn, "choose_by": by}}
    return {"search": {"choose_by": repr(search)}}

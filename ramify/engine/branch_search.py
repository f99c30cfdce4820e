"""Decide which turns of a run to sample several times, and which resulting answer to keep.

    RLM(model, branches=4)             samples the first turn 4 times; the majority answer wins
    RLM(model, search=BestOfBranches(4, turn=2, choose_by=by_score(f)))
                                       samples the third turn; the highest f(answer) wins
    rlm.completion(text, "…", search=4)              samples the first turn of this question only

A custom ``BranchSearch`` may branch at any turn, also within branches. The continuations themselves
are run by ``run_branching.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from ramify.engine.answer_serialization import to_jsonable
from ramify.errors import ConfigError, StrictKeywordsMeta

if TYPE_CHECKING:
    from ramify.engine.live_call import LiveCall


@runtime_checkable
class BranchSearch(Protocol):
    """A search for the best answer among several continuations of a run.

    It decides when to branch, and which of the answers to choose.

    A search with an attribute ``is_optional = True`` continues without a branch if the Python
    session cannot be forked at that moment, for example because it has threads or open files.
    """

    def width(self, call: LiveCall) -> int:
        """Return how many continuations of the next turn of ``call`` to sample.

        1 means no branching.
        """
        ...

    def choose(self, answers: Sequence[Any]) -> int:
        """Choose the best of the continuations' answers, and return its index.

        An entry of ``answers`` is None if that continuation ended without an answer.
        """
        ...


def vote(answers: Sequence[Any]) -> int:
    """Return the index of the majority answer, which is the first of the most frequent answers.

    Two answers are equal if they have the same JSON. Missing answers (None) are not counted.

    >>> ramify.vote(["a", None, "b", "b"])
    2
    """
    keys = [None if answer is None else _key(to_jsonable(answer)) for answer in answers]
    counts = Counter(key for key in keys if key is not None)
    return keys.index(counts.most_common(1)[0][0]) if counts else 0


def _key(plain: Any) -> bytes:
    try:
        return msgspec.json.encode(plain, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can represent
        return json.dumps(plain, sort_keys=True).encode()


def by_score(score: Callable[[Any], float]) -> Callable[[Sequence[Any]], int]:
    """Return a function that chooses the answer with the highest ``score``.

    If several scores are equal, it chooses the first answer. A missing answer (None) is chosen only
    if there is no other.

    >>> ramify.by_score(len)(["a", None, "bc", "de"])
    2
    """

    def choose(answers: Sequence[Any]) -> int:
        answered = [index for index, answer in enumerate(answers) if answer is not None]
        return max(answered, key=lambda index: score(answers[index]), default=0)

    return choose


class BestOfBranches(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True):
    """A search that samples several continuations of one given turn, and chooses one answer.

    The choice is a majority vote unless another function is given.

    >>> ramify.BestOfBranches(4, turn=2, choose_by=ramify.by_score(len)).num
    4
    """

    num: int
    turn: int = 0
    """Index of the turn that is sampled ``num`` times; 0 is the first turn."""
    choose_by: Callable[[Sequence[Any]], int] = vote
    """Function that takes the list of answers and returns the index of the chosen one."""

    def __post_init__(self) -> None:
        if self.num < 2 or self.turn < 0:
            raise ConfigError(
                f"BestOfBranches({self.num}, turn={self.turn}): num must be at least 2 and turn at "
                "least 0"
            )

    def width(self, call: LiveCall) -> int:
        return self.num if call.turn == self.turn and not call.is_branch else 1

    def choose(self, answers: Sequence[Any]) -> int:
        return self.choose_by(answers)


def parse_search(given: BranchSearch | int) -> BranchSearch | None:
    """Convert the value of a ``search=`` argument to a ``BranchSearch``.

    It may be a number of continuations or a search object. Returns None for 1, which means no
    branching. Raises ConfigError for any other value.
    """
    if isinstance(given, int):
        return BestOfBranches(given) if given != 1 else None
    if not isinstance(given, BranchSearch):
        raise ConfigError(
            f"search is {given!r}: give a number of continuations, BestOfBranches(…), or an object "
            "with width() and choose()"
        )
    return given


def recorded_search(config: Mapping[str, Any], known: BranchSearch | None) -> BranchSearch | None:
    """Return the search of a recorded run, or None if the run did not branch.

    Only the settings of a majority vote are stored. A custom search must be passed again as
    ``known``; otherwise ConfigError is raised.
    """
    recorded = config.get("search")
    if recorded is None:
        return None
    if recorded.get("choose_by") == "vote":
        return BestOfBranches(recorded["num"], recorded["turn"])
    if known is None:
        raise ConfigError("the run used a custom search: pass the same search= again")
    return known


def search_to_config(search: BranchSearch) -> dict[str, Any]:
    """Return the settings of ``search`` as plain data for the run's journal.

    A custom search is described only by its ``repr``.
    """
    if isinstance(search, BestOfBranches):
        by = "vote" if search.choose_by is vote else "a function"
        return {"search": {"num": search.num, "turn": search.turn, "choose_by": by}}
    return {"search": {"choose_by": repr(search)}}

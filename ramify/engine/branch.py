"""Branching: several continuations of one turn of the root, and a choice among their answers.

Each continuation runs in a fork of the session and becomes a separate call in the trajectory
(``0:1``, ``0:2``, …) that shares everything before the turn. A conversation continues from the
chosen continuation. Not here: when to branch and which answer is chosen (see
``branch_search.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.engine.branch_search import BranchSearch
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.rlm_call import RlmCall
from ramify.errors import ConfigError, RamifyError, ReplayDiverged, SandboxError
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.typed import AnswerType
    from ramify.types.message import Message


class BranchedCall:
    """One continuation of the root, which branches when its search says so.

    ``answer`` does what ``RlmCall.answer`` does, in several continuations.
    """

    def __init__(self, call: RlmCall, search: BranchSearch, branched_at: int = -1) -> None:
        """``branched_at`` is the turn at which this continuation has branched already."""
        self.chosen = call
        """Call whose answer is returned, and whose session the next question continues."""
        self.own: CallOutcome | None = None
        """Outcome of this continuation itself, if it was one of several."""
        self._rlm_call = call
        self._search = search
        self._branched_at = branched_at

    async def answer(
        self, question: str, kind: AnswerType | None = None, before: Sequence[Message] = ()
    ) -> CallOutcome:
        self._rlm_call.begin(question, kind, before)
        return await self._run_turns()

    async def _run_turns(self) -> CallOutcome:
        """Take turns until there is an answer, in several continuations if the search asks for
        them."""
        call = self._rlm_call.call
        while True:
            width = self._search.width(call) if self._branched_at != call.turn else 1
            outcome = await (self._branch(width) if width > 1 else self._rlm_call.step())
            if outcome is not None:
                return outcome

    async def _branch(self, width: int) -> CallOutcome:
        """Run the next turn in ``width`` concurrent continuations and return the outcome of the
        chosen one."""
        origin = self._rlm_call
        self._branched_at = origin.call.turn
        branches: list[BranchedCall] = [self]
        chosen: BranchedCall | None = None
        try:
            while len(branches) < width:
                try:
                    fork = await origin.fork()
                except SandboxError:
                    if not getattr(self._search, "is_optional", False):
                        raise
                    break
                # A fork does not branch again at the turn where it starts.
                branches.append(BranchedCall(fork, self._search, branched_at=0))
            outcomes = await asyncio.gather(
                self._run_turns_safely(), *(fork._run_fork() for fork in branches[1:])
            )
            index = self._chosen_of(outcomes)
            chosen = branches[index]
            origin.run.note(
                origin.call,
                f"of {len(branches)} continuations of turn {self._branched_at}, "
                f"{chosen._rlm_call.call.id} answers",
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
            self._rlm_call.run.end(self._rlm_call.call, self.own or outcome)
        return outcome

    async def _run_turns_safely(self) -> CallOutcome:
        """Run the turns and return errors as outcomes, so that a failed branch does not affect the
        others."""
        try:
            return await self._run_turns()
        except RamifyError as error:
            return CallOutcome(Stop.ERROR, error=str(error), failure=error)

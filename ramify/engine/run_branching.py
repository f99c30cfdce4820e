"""Branching: sample several continuations of a run from one turn, and choose one of their answers.

Each continuation of the run's root call is run to its end. Each continuation runs in a fork of the
Python session and becomes a separate call in the trajectory (``0:1``, ``0:2``, …) that shares
everything before the turn. A conversation continues from the chosen continuation. When to branch
and which answer to choose is decided in ``branch_search.py``.
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
    from ramify.engine.typed_answers import AnswerSchema
    from ramify.types.message import Message


class BranchedCall:
    """One continuation of a run's root call.

    It may branch into further continuations at any turn, as the configured search decides.

    Its method ``answer`` corresponds to ``RlmCall.answer``.
    """

    def __init__(self, call: RlmCall, search: BranchSearch, branched_at: int = -1) -> None:
        """Create a continuation of the root call ``call``, which branches as ``search`` decides.

        ``branched_at`` is the index of the turn at which this continuation began, so that it does
        not branch there again. For the original call it is -1.
        """
        self.chosen = call
        """Call whose answer is returned, and whose session the next question continues."""
        self.own: CallOutcome | None = None
        """Outcome of this continuation if it has branched, while the returned outcome may be that
        of another one; None otherwise."""
        self._rlm_call = call
        self._search = search
        self._branched_at = branched_at

    async def answer(
        self, question: str, kind: AnswerSchema | None = None, before: Sequence[Message] = ()
    ) -> CallOutcome:
        self._rlm_call.begin(question, kind, before)
        return await self._run_turns()

    async def _run_turns(self) -> CallOutcome:
        """Take turns until this continuation ends, and return its outcome.

        Before each turn, ask the search how many continuations the turn should have, and branch if
        there is more than one.
        """
        call = self._rlm_call.call
        while True:
            # The turn at which this continuation has just branched must not branch again.
            width = self._search.width(call) if self._branched_at != call.turn else 1
            outcome = await (self._branch(width) if width > 1 else self._rlm_call.step())
            if outcome is not None:
                return outcome

    async def _branch(self, width: int) -> CallOutcome:
        """Branch into ``width`` continuations, and run each of them to its end.

        Returns the outcome of the continuation that the search chooses.
        """
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
            # If an error prevented the choice, this continuation keeps its session.
            for branch in branches:
                if branch is not (chosen or self):
                    await branch.chosen.close()
        self.own = self.own or outcomes[0]
        self.chosen = chosen.chosen
        return outcomes[index]

    def _chosen_of(self, outcomes: Sequence[CallOutcome]) -> int:
        """Return the index of the outcome that the search chooses.

        Raises ReplayDiverged if a continuation of a repeated run differed from its recording, and
        ConfigError if the chosen index does not exist.
        """
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
            self._rlm_call.run.end_call(self._rlm_call.call, self.own or outcome)
        return outcome

    async def _run_turns_safely(self) -> CallOutcome:
        """Take all turns of this continuation, and convert any RamifyError to an outcome.

        This way one failed continuation does not affect the others.
        """
        try:
            return await self._run_turns()
        except RamifyError as error:
            return CallOutcome(Stop.ERROR, error=str(error), failure=error)

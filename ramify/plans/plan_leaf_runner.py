"""Sends a running plan's questions to a model, and records which of them failed.

    AskEachItem ── ask(leaf, items) ──> LeafModelCaller ──> answers in order; LEAF_FAILED for some

If the replies to a question do not fit its schema, only that question fails. If the run reaches a
limit, no further questions are asked, but the steps that need no model still compute an answer from
what is known. The steps are in ``asking_steps.py`` and ``model_free_steps.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ramify.engine.call_outcome import CallOutcome
from ramify.engine.leaf_calls import LeafModelCaller, LeafRequest
from ramify.errors import LimitReached, RamifyError
from ramify.plans.leaf_questions import Leaf, truncate_text
from ramify.plans.text_parts import ContextPart
from ramify.types.trajectory import Stop

T = TypeVar("T")
LEAF_FAILED = object()
"""Placeholder for the answer of a model call that failed."""


class PlanStopped(Exception):
    """Raised if a step of a plan needs model calls after the run has reached one of its limits."""


class PlanLeafRunner:
    """The runner through which the steps of a plan ask a model their bounded questions (leaves).

    Failures are collected.
    """

    def __init__(self, calls: LeafModelCaller) -> None:
        self.question = calls.question.text
        self.num_leaves = 0
        """Number of questions that were asked or were refused because of a limit."""
        self.failures: list[str] = []
        """One line for each failed question, with the item it was about and the reason."""
        self.stop: Stop | None = None
        """The limit that has been reached, if any."""
        self._calls = calls

    async def run_in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread and return its result, so that the event loop is not
        blocked."""
        return await asyncio.to_thread(call, *args)

    async def ask_about_items(
        self, leaf: Leaf, items: Sequence[Any], step: str, *, is_preview: bool = False
    ) -> list[Any]:
        """Return a model's answers to one bounded question (a leaf) about each item, in order.

        Failed questions have the answer ``LEAF_FAILED``. Raises PlanStopped if the run has already
        reached a limit, and RamifyError if every question failed.
        """
        if self.stop is not None and items:
            raise PlanStopped
        requests = self._requests(leaf, items, is_preview)
        outcomes = await self._calls.ask_all(requests, len(items))
        self.num_leaves += len(items)
        answers = [
            self._extract_answer(leaf, item, outcome)
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        is_failed = all(answer is LEAF_FAILED for answer in answers)
        if items and is_failed and self.stop is None:
            num = f"all {len(items):,} leaves" if len(items) > 1 else "the leaf"
            raise RamifyError(f"{step}: {num} failed; the first: {self.failures[-len(items)]}")
        return answers

    def _requests(
        self, leaf: Leaf, items: Sequence[Any], is_preview: bool
    ) -> Iterator[LeafRequest]:
        for item in items:
            prompt = leaf.request_prompt(self.question, item, is_preview=is_preview)
            kind, most = leaf.answer_kind(item), leaf.max_reply_tokens(item)
            yield LeafRequest(_describe_call(leaf, item), prompt, kind, most)

    def _extract_answer(self, leaf: Leaf, item: Any, outcome: CallOutcome) -> Any:
        if outcome.stop is Stop.FINAL:
            answer = outcome.answer  # of another type, it has been checked
            return truncate_text(answer, leaf.max_answer_bytes) if leaf.schema is None else answer
        if isinstance(outcome.failure, LimitReached):
            self.stop = self.stop or outcome.stop
        self.failures.append(f"{_describe_call(leaf, item)}: {outcome.error or outcome.stop}")
        return LEAF_FAILED


def _describe_call(leaf: Leaf, item: Any) -> str:
    """Return a short description of one model call of a plan, for the run's record."""
    if isinstance(item, ContextPart):
        return f"{leaf.label}: {item.place}"
    if isinstance(item, list):
        return f"{leaf.label}: {len(item):,} items"
    return leaf.label

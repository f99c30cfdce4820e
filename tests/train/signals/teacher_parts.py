"""A small policy with rollouts of it, and teachers whose hints and scores are given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from ramify.clients.base import KnownPrefix, Request, Sampling
from ramify.extras.studies.hindsight_hints import HindsightHints
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy
from ramify.tasks.base import Item
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.signals.base import (
    JudgeVerdict,
    JudgeView,
    SignalContext,
    SignalScore,
    TokenScores,
    TokenScoringRequest,
)
from ramify.train.signals.teacher import TeacherSignal
from ramify.train.signals.teacher_logprobs import LocalTokenScorer
from ramify.types.message import Message
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn

TEXTS = ["what is w3 of 5? call f7 where w3 stands [A hint for this task] it raised an error"] * 50


ITEM = Item("what is w3 of 5?", gold="1742", id="t/0")


async def sampled(policy: Policy, num: int, temperature: float = 1.0) -> Group:
    client = LocalClient(policy)
    try:
        return Group(
            "t/0", [await conversation(client, number, temperature) for number in range(num)]
        )
    finally:
        await client.close()


async def conversation(client: LocalClient, seed: int, temperature: float) -> Trajectory:
    messages: tuple[Message, ...] = ()
    turns: list[Turn] = []
    path: tuple[int, ...] = ()
    for text in ("what is w3 of 5?", "it raised an error"):
        new = Message("user", text)
        sampling = Sampling(6, temperature, seed=seed, logprobs=True)
        known = KnownPrefix(len(messages), path) if path else None
        reply = await client.complete(
            Request((*messages, new), sampling, known=known, affinity=str(seed))
        )
        assert reply.prompt_ids is not None
        assert reply.token_ids is not None
        kept = msgspec.structs.replace(
            reply, prompt_ids=reply.prompt_ids[len(path) :], finish="stop"
        )
        turns.append(Turn(len(messages), (new,), kept, reused_ids=len(path)))
        path = (*reply.prompt_ids, *reply.token_ids)
        messages = (*messages, new, reply.message)
    call = Call("0", "rlm", "local:m", 0, ITEM.question, turns=turns, stop=Stop.FINAL)
    return Trajectory(f"r{seed}", ITEM.question, task="t/0", calls=[call], rewards={"correct": 0.0})


@asynccontextmanager
async def scorer_of(policy: Policy) -> AsyncIterator[LocalTokenScorer]:
    backend = SingleBackend(policy, None, TrainerComputeSpec(precision="fp32"))
    yield LocalTokenScorer(backend, policy.window, policy.config.vocab_size, asyncio.to_thread)


def read(
    teacher: TeacherSignal,
    group: Group,
    policy: Policy,
    *,
    temperature: float = 1.0,
    wants_reference: bool = False,
    **scorers: Any,
) -> list[SignalScore]:
    async def found() -> list[SignalScore]:
        async with scorer_of(policy) as scorer:
            context = SignalContext(
                step=0,
                items={"t/0": ITEM},
                scorers={"live": scorer, "reference": scorer, **scorers},
                writing=policy.renderer,
                temperature=temperature,
                wants_reference=wants_reference,
            )
            return await teacher.read(group, context)

    return asyncio.run(found())


class HintingJudge:
    """A judge that gives fixed hints to one rollout or to all, about a given turn or the last."""

    def __init__(self, *hints: str, only: str = "", about: int | None = None) -> None:
        self.hints, self.only, self.about = hints, only, about

    async def judge(self, view: JudgeView) -> JudgeVerdict:
        hints = self.hints if self.only in ("", view.trajectory.id) else ()
        place = None if self.about is None else ("0", self.about)
        return JudgeVerdict(
            accept=bool(hints), hint=hints[0] if hints else "", hints=hints, place=place
        )


class RecordingScorer:
    """A scorer that records its requests."""

    def __init__(self, policy: Policy) -> None:
        backend = SingleBackend(policy, None, TrainerComputeSpec(precision="fp32"))
        self.inner = LocalTokenScorer(
            backend, policy.window, policy.config.vocab_size, asyncio.to_thread
        )
        self.asked: list[Sequence[TokenScoringRequest]] = []

    async def score(
        self, rows: Sequence[TokenScoringRequest], *, top: int = 0
    ) -> list[TokenScores]:
        self.asked.append(rows)
        return await self.inner.score(rows, top=top)


def teacher_with_hints(*hints: str, **options: Any) -> TeacherSignal:
    return TeacherSignal(hints=HindsightHints(judge=HintingJudge(*hints)), **options)

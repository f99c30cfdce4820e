"""Sampling options of single runs."""

from __future__ import annotations

import asyncio

from ramify import RLM
from ramify.clients.base import Sampling
from tests.engine.helpers import SCAFFOLD, client, code


def test_each_run_can_have_its_own_seed() -> None:
    model = client([code("FINAL(1)")] * 3)

    async def ask() -> None:
        async with RLM(model, scaffold=SCAFFOLD, sampling=Sampling(temperature=0.7, seed=1)) as rlm:
            for seed in (5, 6):
                sampling = Sampling(temperature=1.0, seed=seed)
                result = await rlm.start("text", "?", sampling=sampling).result()
                assert result.trajectory.metadata["sampling"]["seed"] == seed
            await rlm.start("text", "?").result()

    asyncio.run(ask())
    assert [(r.sampling.temperature, r.sampling.seed) for r in model.requests] == [
        (1.0, 5),
        (1.0, 6),
        (0.7, 1),
    ]

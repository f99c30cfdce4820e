"""Replies that are not whole, and servers whose figures are wrong: over real HTTP, through whole runs."""

from __future__ import annotations

import asyncio

from ramify import RLM, Limits, Stop
from ramify.clients.base import Price
from ramify.clients.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, Usage


def test_a_gateway_that_counts_wrongly_does_not_take_a_run_past_its_cost() -> None:
    """Each reply reports a hundred times more cached tokens than the prompt has: at face value a negative cost."""

    async def main() -> None:
        limit = 0.02
        line = Reply(Message("assistant", "```repl\nllm_query('x' * 100)\n```"), Usage(50, 50, 5000, calls=1))
        async with ScriptedServer(lambda messages: line) as server:
            model = f"openai:gpt-5-mini@{server.url}"
            async with RLM(model, limits=Limits(max_cost=limit, max_turns=500)) as rlm:
                result = await rlm.acompletion("text " * 20_000, "?")
        assert result.stop is Stop.MAX_COST
        assert result.cost is not None
        assert 0 < result.cost <= limit
        price = Price(0.25, 2.0)
        assert all((call.cost or 0.0) >= 0.0 for call in result.trajectory.calls)
        assert server.answered * price.of(Usage(50, 50)) <= limit

    asyncio.run(main())

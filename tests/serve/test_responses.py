"""The responses API with the official client, and OpenAI's agents library over both APIs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agents
import openai
import pydantic
import pytest

from ramify import ScriptedClient, Store
from ramify.testing.scripted_client import refused
from tests.serve.serving import LONG, asking, cell, serving, session, user
from tests.serve.test_streams import progress_of

COUNT = session(
    cell("print(len(context))"), cell("FINAL(sum(int(l[-1]) for l in context.split()))")
)


def user_input(*parts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": part} for part in parts]}]


def test_response_with_text_and_file_input() -> None:
    async def test() -> None:
        model = ScriptedClient(COUNT)
        async with serving(model) as server, asking(server) as client:
            response = await client.responses.create(
                model="gpt-5", input=user_input(LONG, "Sum?"), instructions="Be exact."
            )
            assert (response.output_text, response.status, response.model) == (
                "14000",
                "completed",
                "mine",
            )
            assert response.usage is not None
            assert response.usage.total_tokens == model.served.total_tokens
            assert response.model_extra["ramify"]["stop"] == "final"
            file = {
                "type": "input_file",
                "filename": "a.csv",
                "file_data": base64.b64encode(LONG.encode()).decode(),
            }
            said = [{"role": "user", "content": [{"type": "input_text", "text": "Sum?"}, file]}]
            assert (await client.responses.create(model="m", input=said)).output_text == "14000"

    asyncio.run(test())


def test_streamed_response_events_are_ordered_and_complete(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        async with serving(COUNT, store=store) as server, asking(server) as client:
            events = []
            async with client.responses.stream(
                model="m", input=user_input(LONG, "Sum?")
            ) as stream:  # it checks the order
                async for event in stream:
                    events.append(event)
                final = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert final.output_text == "14000"
            reasoning = "".join(
                each.delta
                for each in events
                if each.type == "response.reasoning_summary_text.delta"
            )
            assert reasoning == progress_of(store, final.model_extra["ramify"]["run"])
            assert final.output[0].summary[0].text == reasoning

    asyncio.run(test())


def test_incomplete_and_failed_responses() -> None:
    async def test() -> None:
        idle = session(*[cell("answer['content'] = 'so far'")] * 9, "FINAL(3)")
        async with serving(idle) as server, asking(server) as client:
            one_turn = {"ramify": {"limits": {"max_turns": 1}}}
            response = await client.responses.create(
                model="m", input=user_input(LONG, "n?"), extra_body=one_turn
            )
            assert (response.status, response.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
            assert response.model_extra["ramify"]["stop"] == "max_turns"
        turns = iter([refused(401, "wrong key"), cell("print(1)"), refused(401, "wrong key")])
        async with serving(lambda _: next(turns)) as server, asking(server) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.responses.create(model="m", input=user_input(LONG, "n?"))
            assert (caught.value.status_code, caught.value.code) == (502, "model_failed")
            stream = await client.responses.create(
                model="m", input=user_input(LONG, "n?"), stream=True
            )
            last = [event async for event in stream][-1]
            assert (last.type, last.response.status) == ("response.failed", "failed")
            assert last.response.model_extra["ramify"]["run"]

    asyncio.run(test())


# --- an agent library
# --------------------------------------------------------------------------------------------------


class Total(pydantic.BaseModel):
    rows: int
    sum: int


@pytest.fixture
def tracing_disabled() -> Iterator[None]:
    agents.set_tracing_disabled(True)  # otherwise it uploads traces to OpenAI
    yield
    agents.set_tracing_disabled(False)


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.usefixtures("tracing_disabled")
def test_agents_library_gets_typed_output_and_stream(kind: Any) -> None:
    """Instructions, a typed output, a second question, and a stream with its reasoning."""

    async def test() -> None:
        script = session(cell("print(len(context))"), cell("FINAL({'rows': 4000, 'sum': 14000})"))
        async with serving(script) as server, asking(server) as client:
            model = kind(model="any", openai_client=client)
            agent = agents.Agent(
                name="Counter", instructions="Count.", model=model, output_type=Total
            )
            result = await agents.Runner.run(agent, f"{LONG}\nRows and sum?")
            assert result.final_output == Total(rows=4000, sum=14000)
            assert result.context_wrapper.usage.total_tokens > 0
            talker = agents.Agent(name="Talker", model=model)
            follow_up = [*result.to_input_list(), {"role": "user", "content": "And again?"}]
            streamed = agents.Runner.run_streamed(talker, follow_up)
            kinds = [
                event.data.type
                async for event in streamed.stream_events()
                if event.type == "raw_response_event"
            ]
            assert json.loads(streamed.final_output) == {"rows": 4000, "sum": 14000}
            assert "response.reasoning_summary_text.delta" in kinds
            assert "response.output_text.delta" in kinds

    asyncio.run(test())


def test_both_apis_send_the_same_prompt() -> None:
    async def test() -> None:
        model = ScriptedClient(session())
        async with serving(model) as server, asking(server) as client:
            await client.chat.completions.create(
                model="m", messages=[{"role": "system", "content": "Be."}, user("Hi")]
            )
            await client.responses.create(model="m", instructions="Be.", input="Hi")
            assert model.requests[0].messages == model.requests[1].messages

    asyncio.run(test())

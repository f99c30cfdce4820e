"""The ``null`` harness of verifiers, whose chat program is a process of its own: agent.py ITEM_FILE."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf


async def main() -> None:
    with open(sys.argv[1]) as file:
        question = json.load(file)["question"]
    config = vf.AgentConfig(
        model="policy",
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        client=vf.EvalClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
        ),
    )
    async with vf.Agent(config) as agent, agent.interaction(vf.Task(vf.TaskData())) as talk:
        await talk.turn(f"{question} Think first.")
        turn = await talk.turn("Now answer with the metal alone.")
    print(turn.last_reply)


asyncio.run(main())

"""The ``null`` harness of verifiers, with its chat program as a process: agent.py ITEM_FILE."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf

BOXES = {"red": "copper", "blue": "gold", "green": "silver"}


async def main(question: str) -> None:
    config = vf.AgentConfig(
        model="policy",
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        client=vf.EvalClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
        ),
    )
    async with vf.Agent(config) as agent, agent.interaction(vf.Task(vf.TaskData())) as talk:
        turn = await talk.turn(f"{question} Which box do you open?")
        metal = next((metal for box, metal in BOXES.items() if box in turn.last_reply), "nothing")
        turn = await talk.turn(f"It holds {metal}. Now answer with the metal alone.")
    print(turn.last_reply)


with open(sys.argv[1]) as file:
    asyncio.run(main(json.load(file)["question"]))

"""An agent of the OpenAI Agents SDK: agent.py ITEM_FILE."""

import json
import sys

from agents import Agent, Runner, function_tool

BOXES = {"red": "copper", "blue": "gold", "green": "silver"}


@function_tool
def look(box: str) -> str:
    """Look into the red, blue or green box."""
    return BOXES.get(box, "There is no such box.")


with open(sys.argv[1]) as file:
    question = json.load(file)["question"]
agent = Agent(
    name="finder",
    instructions="Look into the box. Then answer with the metal alone.",
    tools=[look],
    model="policy",
)
print(Runner.run_sync(agent, question, max_turns=5).final_output)

"""LangGraph's ReAct agent, as langchain builds it: agent.py ITEM_FILE."""

import json
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

BOXES = {"red": "copper", "blue": "gold", "green": "silver"}


def look(box: str) -> str:
    """Look into the red, blue or green box."""
    return BOXES.get(box, "There is no such box.")


with open(sys.argv[1]) as file:
    question = json.load(file)["question"]
agent = create_agent(
    ChatOpenAI(model="policy"),
    tools=[look],
    system_prompt="Look into the box. Then answer with the metal alone.",
)
asked = {"messages": [{"role": "user", "content": question}]}
print(agent.invoke(asked, {"recursion_limit": 10})["messages"][-1].text)

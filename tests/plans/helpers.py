"""Shared by the tests of plans: a model that answers leaves as their prompts ask, and contexts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ramify import RLM, Limits, ScriptedClient, plans
from ramify.types.message import Message

LABELS = ["ham", "spam"]
QUESTION = "How many are spam?"
_RECORD = re.compile(r"(?m)^\d+: (.*)$")


def lines(num: int, width: int = 40) -> str:
    """``num`` lines, every third of which is spam."""
    words = (("spam" if index % 3 == 0 else "ham") for index in range(num))
    return "".join(f"{index} {word} {'x' * width}\n" for index, word in enumerate(words))


def value_of(schema: Any, text: str) -> Any:
    """A value that matches ``schema``; a label is the one that ``text`` has."""
    if "enum" in schema:
        return next((label for label in schema["enum"] if f" {label} " in text), schema["enum"][0])
    match schema.get("type"):
        case "boolean":
            return "spam" in text
        case "integer" | "number":
            return len(text) % 10
        case "object":
            return {name: value_of(each, text) for name, each in schema["properties"].items()}
        case "array":
            records = _RECORD.findall(text)
            return [value_of(schema["items"], record) for record in records]
        case _:
            return text.split()[0] if text.split() else "empty"


def reply(messages: Sequence[Message]) -> str:
    """Answer a leaf as it is asked."""
    prompt = messages[-1].content
    body, _, form = prompt.partition("The answer must be a value of this JSON schema:\n")
    if not form:
        return f"read {len(prompt)} characters"
    schema = json.loads(form.removesuffix(" Reply with the JSON value alone."))
    return json.dumps(value_of(schema, body.partition("\n\n[")[2] or body))


def answered(
    plan: plans.Plan,
    context: Any,
    script: Callable[..., Any] | list[Any] = reply,
    *,
    question: str = QUESTION,
    limits: Limits | None = None,
    **options: Any,
) -> tuple[Any, ScriptedClient]:
    """Answer by ``plan``. Returns (the result, the model)."""
    client = script if isinstance(script, ScriptedClient) else ScriptedClient(script)
    with RLM(client, limits=limits, **options) as rlm:
        strategy = plans.PlanStrategy(plan)
        return rlm.completion(context, question, strategy=strategy), client


def label_leaf(tokens: int = 4000) -> plans.Leaf:
    return plans.Leaf("Label each record.", {"enum": LABELS}, tokens, 16, each=True, label="label")

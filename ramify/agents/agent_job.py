"""Prepare the inputs of one rollout of an agent, such as its working folder and the task item.

The agent also gets the addresses of the models and an API key.

    FOLDER/item.json    {"id": …, "question": …, "context": …, "kind": …, "messages": […]}
    FOLDER/work/        the working folder of the agent, empty at first

The item has no gold answer and no metadata, because only the reward may see them.
``agent_command.py`` decides which values a command gets as arguments, and its environment.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from ramify.errors import RamifyError
from ramify.evaluate.agent_model_server import MODEL
from ramify.tasks.base import Item


class AgentRolloutInput(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of one rollout of an agent: a task item, a folder, and access to models.

    Example:
        def agent(job: AgentRolloutInput) -> str:
            client = openai.OpenAI(base_url=job.base_url, api_key=job.api_key)
            messages = [{"role": "user", "content": job.item.question}]
            reply = client.chat.completions.create(model=job.model, messages=messages)
            return reply.choices[0].message.content
    """

    item: Item
    """The item, without its gold answer and its metadata."""
    item_file: Path
    """JSON file with the same item."""
    folder: Path
    """Working folder of the agent. Its files are passed to the reward, and then deleted."""
    base_url: str
    """Base URL for clients of OpenAI's APIs, which ends with ``/v1``."""
    anthropic_base_url: str
    """Base URL for clients of Anthropic's API."""
    api_key: str
    """API key for this rollout alone. It becomes invalid when the rollout ends."""
    model: str = MODEL
    """A model name, for an agent that must send one. Any other name is accepted, too."""


def hide_answer_fields(item: Item) -> Item:
    """Return a copy of a task item without the fields that the agent must not see, such as the gold
    answer."""
    return msgspec.structs.replace(item, gold=None, right=None, wrong=None, metadata={})


def create_rollout_folder() -> Path:
    """Create a temporary folder for one rollout, with the agent's working folder inside.

    Returns the outer folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="ramify-agent-"))
    (folder / "work").mkdir()
    return folder


def remove_folder(folder: Path) -> None:
    """Delete the temporary folder of an agent's rollout.

    Files that cannot be deleted are ignored. Calling this again has no effect.
    """
    shutil.rmtree(folder, ignore_errors=True)


def write_item_file(item: Item, folder: Path) -> Path:
    """Write a task item as JSON into the folder of a rollout, and return the file's path.

    Raises RamifyError if the item's context cannot be written as JSON.
    """
    shown = {
        "id": item.id,
        "question": item.question,
        "context": item.context,
        "kind": item.kind,
        "messages": [{"role": each.role, "content": each.content} for each in item.messages],
    }
    path = folder / "item.json"
    try:
        path.write_bytes(msgspec.json.encode(shown))
    except (TypeError, ValueError) as error:
        raise RamifyError(
            f"item {item.id}: its context cannot be written as JSON for the agent: {error}"
        ) from None
    return path

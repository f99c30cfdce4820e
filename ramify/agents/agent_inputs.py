"""What one rollout gives its agent: a folder, the item, addresses of models, and a key.

    FOLDER/item.json    {"id": …, "question": …, "context": …, "kind": …, "messages": […]}
    FOLDER/work/        the working folder of the agent, empty at first

The item has no gold answer and no metadata: they belong to the reward. Not here: which of these a
command gets as arguments, and its environment (``agent_command.py``).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from ramify.errors import RamifyError
from ramify.evaluate.agent_model_endpoint import MODEL
from ramify.tasks.base import Item


class AgentJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as its agent sees it.

    Example:
        def agent(job: AgentJob) -> str:
            client = openai.OpenAI(base_url=job.base_url, api_key=job.api_key)
            messages = [{"role": "user", "content": job.item.question}]
            reply = client.chat.completions.create(model=job.model, messages=messages)
            return reply.choices[0].message.content
    """

    item: Item
    """The item, without its gold answer and its metadata."""
    item_file: Path
    """File with the same item as JSON."""
    folder: Path
    """Working folder of the agent. Its files are shown to the reward, and are then deleted."""
    base_url: str
    """Base URL for clients of OpenAI's APIs, which ends with ``/v1``."""
    anthropic_base_url: str
    """Base URL for clients of Anthropic's API."""
    api_key: str
    """Key of this rollout alone. It ends with the rollout."""
    model: str = MODEL
    """A name of the model, for an agent that must give one. Any other is accepted, too."""


def visible_to_agent(item: Item) -> Item:
    """Return ``item`` without what only its score may see."""
    return msgspec.structs.replace(item, gold=None, right=None, wrong=None, metadata={})


def new_folder() -> Path:
    """Create the folder of one rollout, and return it."""
    folder = Path(tempfile.mkdtemp(prefix="ramify-agent-"))
    (folder / "work").mkdir()
    return folder


def remove_folder(folder: Path) -> None:
    """Delete the folder of a rollout, as far as its agent lets it be deleted. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)


def write_item_file(item: Item, folder: Path) -> Path:
    """Write ``item`` into ``folder`` as JSON, and return the file. Raises RamifyError if its
    context has no JSON form."""
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

"""A client that audits: it remembers which ids went through it, for the check that a trajectory has
exactly those (``selfcheck.py``). Rollout workers send what theirs remember to the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ramify.clients.base import Request
from ramify.inference.base import InferenceClient
from ramify.progress import heartbeat
from ramify.types.message import Reply


class AuditedClient:
    """A client that remembers, as hashes, which ids went through it. Everything else is delegated
    to the wrapped client."""

    def __init__(self, client: InferenceClient, max_token_staleness: int = 0) -> None:
        """It remembers the ids of the latest ``max_token_staleness + 1`` periods between calls of
        ``forget``: rollouts of later steps may complete before this step is learned from."""
        self.name = client.name
        self.window = client.window
        self.price = client.price
        self.client = client
        self._paths: deque[set[int]] = deque([set()], maxlen=max_token_staleness + 1)

    async def complete(self, request: Request) -> Reply:
        reply = await self.client.complete(request)
        heartbeat()
        if reply.prompt_ids is not None and reply.token_ids is not None:
            self._paths[-1].add(hash((*reply.prompt_ids, *reply.token_ids)))
        return reply

    def note(self, paths: Iterable[int]) -> None:
        """Add paths that went through a client in another process, as returned by its ``take``."""
        self._paths[-1].update(paths)

    def take(self) -> tuple[int, ...]:
        """The paths since the last call of ``take``."""
        paths = tuple(self._paths[-1])
        self._paths[-1].clear()
        return paths

    def has_seen(self, ids: tuple[int, ...]) -> bool:
        return any(hash(ids) in paths for paths in self._paths)

    def forget(self) -> None:
        self._paths.append(set())

    async def close(self) -> None:
        await self.client.close()

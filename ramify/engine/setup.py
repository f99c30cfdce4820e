"""How an ``RLM`` answers, in one piece: what its constructor was given, checked and completed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.engine.models import RunModels
from ramify.engine.resources import LoopResources
from ramify.engine.scaffold import Scaffold
from ramify.engine.tool_set import ToolSet
from ramify.sandbox.base import SandboxSpec


class ContentStore(Protocol):
    """Large things once, by content (see ``store.blobs``)."""

    def put(self, data: Any, digest: str | None = None) -> str: ...


class RlmSetup(msgspec.Struct, frozen=True):
    """How an ``RLM`` answers: what its constructor was given."""

    connect: Callable[[LoopResources], RunModels]
    limits: Limits
    scaffold: Scaffold
    sandbox: SandboxSpec
    sampling: Sampling
    tools: ToolSet
    child_tools: ToolSet
    blobs: ContentStore | None
    config: dict[str, Any]
    """The same as plain data, for the journal."""

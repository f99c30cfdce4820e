"""Settings of an ``RLM``: its constructor's arguments, validated and completed."""

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
    """Stores large values once, by their content hash (see ``store.blobs``)."""

    def put(self, data: Any, digest: str | None = None) -> str: ...


class RlmSetup(msgspec.Struct, frozen=True):
    """Validated settings of an ``RLM``."""

    connect: Callable[[LoopResources], RunModels]
    limits: Limits
    scaffold: Scaffold
    sandbox: SandboxSpec
    sampling: Sampling
    tools: ToolSet
    child_tools: ToolSet
    blobs: ContentStore | None
    config: dict[str, Any]
    """The same settings as plain data, for the journal."""

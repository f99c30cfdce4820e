"""How an ``RLM`` answers, in one piece: what its constructor was given, checked and completed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.engine.models import Models
from ramify.engine.resources import Resources
from ramify.engine.scaffold import Scaffold
from ramify.engine.tools import ToolSet
from ramify.sandbox.base import SandboxSpec


class Blobs(Protocol):
    """Large things once, by content (see ``store.blobs``)."""

    def put(self, data: Any, digest: str | None = None) -> str: ...


class Setup(msgspec.Struct, frozen=True):
    """How an ``RLM`` answers: what its constructor was given."""

    connect: Callable[[Resources], Models]
    limits: Limits
    scaffold: Scaffold
    sandbox: SandboxSpec
    sampling: Sampling
    tools: ToolSet
    child_tools: ToolSet
    blobs: Blobs | None
    config: dict[str, Any]
    """The same as plain data, for the journal."""

"""Ramify: answer questions over inputs of any size with recursive language models, and train them.

    >>> import ramify
    >>> rlm = ramify.RLM("openai:gpt-5-mini")
    >>> rlm.completion(open("huge.log").read(), "Which host failed first, and why?").response

Names are loaded when they are first used, so that ``import ramify`` stays fast and needs no
optional package.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # not from typing, which takes longer to import than all else here
if TYPE_CHECKING:
    from typing import Any

    from ramify.clients.base import Client as Client
    from ramify.clients.base import Sampling as Sampling
    from ramify.clients.scripted import ScriptedClient as ScriptedClient
    from ramify.engine.limits import Limits as Limits
    from ramify.engine.mcp_tools import McpTools as McpTools
    from ramify.engine.rlm import RLM as RLM
    from ramify.engine.rlm import Result as Result
    from ramify.engine.scaffold import Scaffold as Scaffold
    from ramify.engine.typed import Citation as Citation
    from ramify.errors import ConfigError as ConfigError
    from ramify.errors import ModelError as ModelError
    from ramify.errors import RamifyError as RamifyError
    from ramify.errors import SandboxError as SandboxError
    from ramify.errors import SourceError as SourceError
    from ramify.errors import StoreError as StoreError
    from ramify.sandbox.base import SandboxSpec as SandboxSpec
    from ramify.sources.load_sources import load as load
    from ramify.store.store import Store as Store
    from ramify.types.trajectory import Stop as Stop
    from ramify.types.trajectory import Trajectory as Trajectory

__version__ = "0.1.0"

_HOMES = {
    "Citation": "ramify.engine.typed",
    "Client": "ramify.clients.base",
    "ConfigError": "ramify.errors",
    "Limits": "ramify.engine.limits",
    "McpTools": "ramify.engine.mcp_tools",
    "ModelError": "ramify.errors",
    "RLM": "ramify.engine.rlm",
    "RamifyError": "ramify.errors",
    "Result": "ramify.engine.rlm",
    "Sampling": "ramify.clients.base",
    "SandboxError": "ramify.errors",
    "SandboxSpec": "ramify.sandbox.base",
    "Scaffold": "ramify.engine.scaffold",
    "ScriptedClient": "ramify.clients.scripted",
    "SourceError": "ramify.errors",
    "Stop": "ramify.types.trajectory",
    "Store": "ramify.store.store",
    "StoreError": "ramify.errors",
    "Trajectory": "ramify.types.trajectory",
    "load": "ramify.sources.load_sources",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ramify' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""The public list is exactly this one, and every name on it is there."""

from __future__ import annotations

import pytest

import ramify

PUBLIC = [
    "Citation",
    "Client",
    "ConfigError",
    "Limits",
    "McpTools",
    "ModelError",
    "RLM",
    "RamifyError",
    "Result",
    "Sampling",
    "SandboxError",
    "SandboxSpec",
    "Scaffold",
    "ScriptedClient",
    "SourceError",
    "Stop",
    "Store",
    "StoreError",
    "Trajectory",
    "load",
]


def test_public_list() -> None:
    assert ramify.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name: str) -> None:
    assert getattr(ramify, name).__name__ == name
    assert name in dir(ramify)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'ramify' has no attribute 'Frobnicator'"):
        ramify.Frobnicator  # noqa: B018

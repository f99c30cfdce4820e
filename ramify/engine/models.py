"""Which model answers at which depth, and which ones a session may ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.clients.base import Client
from ramify.errors import ConfigError

ModelSpec = str | Client
"""A name ``provider:model``, or a client of one's own."""


class RunModels:
    """The models of one run.

    ``model`` answers as RLM: one for all depths, or a list by depth whose last entry holds for all
    deeper ones. ``sub_model`` answers everything below the root: ``llm_query``, and children where
    ``model`` is not a list. Given a list, its first entry does so, and a session may ask for the
    others by name (``llm_query(…, model="…")``).
    """

    def __init__(
        self,
        model: ModelSpec | Sequence[ModelSpec],
        sub_model: ModelSpec | Sequence[ModelSpec] | None,
        connect: Callable[[ModelSpec], Client],
    ) -> None:
        by_depth = [connect(spec) for spec in listed(model)]
        if not by_depth:
            raise ConfigError("no model: give 'provider:model', for example 'openai:gpt-5-mini'")
        subs = [connect(spec) for spec in listed(sub_model)] if sub_model is not None else []
        self.root = by_depth[0]
        self.plain = subs[0] if subs else by_depth[min(1, len(by_depth) - 1)]
        self._by_depth = by_depth if len(by_depth) > 1 or not subs else [by_depth[0], subs[0]]
        self.all: tuple[Client, ...] = tuple(
            {id(client): client for client in [*by_depth, *subs]}.values()
        )

    def rlm(self, depth: int) -> Client:
        """The model of a session at ``depth``."""
        return self._by_depth[min(depth, len(self._by_depth) - 1)]

    def named(self, name: str) -> Client | None:
        """The model that a session asked for, by its full name or the part after the provider."""
        for client in self.all:
            if name in (client.name, client.name.partition(":")[2]):
                return client
        return None


def listed(spec: ModelSpec | Sequence[ModelSpec]) -> list[ModelSpec]:
    """``spec`` as a list. Raises ConfigError for what is no model."""
    given = (
        [spec] if isinstance(spec, str | Client) or not isinstance(spec, Sequence) else list(spec)
    )
    for each in given:
        if not isinstance(each, str | Client):
            raise ConfigError(
                f"{each!r} is not a model: give 'provider:model', for example 'openai:gpt-5-mini'"
            )
    return given

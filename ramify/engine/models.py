"""Choice of the model for each depth, and of the models that a session may request by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.clients.base import Client
from ramify.errors import ConfigError

ModelSpec = str | Client
"""A name ``provider:model``, or a client."""


class RunModels:
    """The models of one run.

    ``model`` answers as the RLM: one model for all depths, or a list by depth whose last entry also
    serves all deeper levels. ``sub_model`` answers everything below the root: ``llm_query``, and
    children if ``model`` is not a list. If ``sub_model`` is a list, its first entry does this, and
    a session can choose the others by name (``llm_query(…, model="…")``).
    """

    def __init__(
        self,
        model: ModelSpec | Sequence[ModelSpec],
        sub_model: ModelSpec | Sequence[ModelSpec] | None,
        connect: Callable[[ModelSpec], Client],
    ) -> None:
        by_depth = [connect(spec) for spec in as_list(model)]
        if not by_depth:
            raise ConfigError("no model: give 'provider:model', for example 'openai:gpt-5-mini'")
        subs = [connect(spec) for spec in as_list(sub_model)] if sub_model is not None else []
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
        """The model that a session requested, by its full name or by the part after the
        provider."""
        for client in self.all:
            if name in (client.name, client.name.partition(":")[2]):
                return client
        return None


def as_list(spec: ModelSpec | Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return ``spec`` as a list. Raises ConfigError for anything that is not a model."""
    specs = (
        [spec] if isinstance(spec, str | Client) or not isinstance(spec, Sequence) else list(spec)
    )
    for item in specs:
        if not isinstance(item, str | Client):
            raise ConfigError(
                f"{item!r} is not a model: give 'provider:model', for example 'openai:gpt-5-mini'"
            )
    return specs

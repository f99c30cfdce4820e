"""Rebuild the ``RLM`` of a stored run from its journal, in order to resume or replay the run.

The journal is the file that records the run's events.

Models, limits, prompts, sandbox and sampling are those recorded in the journal. MCP servers are
started again. A replay calls no model, so it uses placeholder clients that need no key.
``engine/rerun.py`` restores tools over files, such as ``sql``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.cli.settings import named_models, open_configured_store
from ramify.clients.base import Price, Request, Sampling
from ramify.clients.model_config import Model
from ramify.clients.providers import PriceTable
from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, ReplayDiverged
from ramify.sandbox.base import provider_spec
from ramify.store.base import RunStore
from ramify.store.recorded_replies import RunEventIndex
from ramify.types.event import RunStarted
from ramify.types.message import Reply


def load_recorded_run(run: str) -> tuple[RunStore, RunEventIndex]:
    """Open the default run store, and read the recorded replies of the run with the given id."""
    store = open_configured_store()
    return store, RunEventIndex(store.events(run))


def rebuild_rlm(
    started: RunStarted,
    store: RunStore,
    *,
    stand_ins: bool = False,
    with_tools: bool = True,
    allow_weaker: bool = False,
    limits: Limits | None = None,
    keys: Mapping[str, str] | None = None,
) -> RLM:
    """Create an RLM with the settings recorded in a stored run.

    ``stand_ins`` replaces the models with placeholders. ``allow_weaker`` accepts a sandbox that is
    weaker than the recorded one. ``limits`` replace the recorded ones. ``keys`` maps a model's name
    to its API key; other models take theirs from the environment. Raises ConfigError if this
    version cannot read the recorded settings.
    """
    config = started.config
    models = [*config.get("model", [])]
    subs = [*config.get("sub_model", [])]
    # A model of the settings file keeps its key there; other models that were given as objects
    # get the key of their provider.
    own = {(model.name, alias): model for alias, model in named_models().items()}
    aliases = {each["name"]: each.get("alias", "") for each in config.get("models", [])}

    def known(name: str) -> str | Model:
        model = own.get((name, aliases.get(name, "")), name)
        key = (keys or {}).get(name)
        if key is None:
            return model
        return (Model(model) if isinstance(model, str) else model).with_key(key)

    if not models:
        raise ConfigError(f"run {started.id} does not record its model: ask the question again")
    try:
        sandbox = provider_spec(config.get("sandbox", {}))
        return RLM(
            [ReplayPlaceholderClient(n) if stand_ins else known(n) for n in models],
            sub_model=[ReplayPlaceholderClient(n) if stand_ins else known(n) for n in subs] or None,
            limits=limits or msgspec.convert(config.get("limits", {}), Limits),
            scaffold=msgspec.convert(config.get("scaffold", {}), Scaffold),
            sandbox=msgspec.structs.replace(
                sandbox, allow_weaker=sandbox.allow_weaker or allow_weaker
            ),
            sampling=msgspec.convert(config.get("sampling", {}), Sampling),
            tools=(_connect_tools(started) if with_tools else None) or None,
            store=store,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the recorded settings of run {started.id} are invalid here: {error}; "
            "ask the question again"
        ) from None


def _connect_tools(started: RunStarted) -> dict[str, Any]:
    servers = started.config.get("mcp") or ()
    if not servers:
        return {}
    from ramify.engine.mcp_tools import McpTools

    return dict(McpTools(*servers))  # stays connected until the process ends


class ReplayPlaceholderClient:
    """A placeholder for a model's client in a replay, which calls no model.

    It has the model's name, context window and price, but raises an error if it receives a request.
    """

    def __init__(self, name: str) -> None:
        prices = PriceTable.load()
        self.name = name
        self.window = prices.context_window(name) or 128_000
        self.price: Price | None = prices.price(name)
        self.vision: bool | None = None

    async def complete(self, request: Request) -> Reply:
        raise ReplayDiverged(
            f"{self.name} received a request that the run did not record: ask the question as a "
            "new run"
        )

    async def close(self) -> None:
        """Do nothing, because a placeholder holds no connection."""

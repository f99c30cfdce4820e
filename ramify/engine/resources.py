"""Define what the runs of one ``RLM`` share: settings, models and per-event-loop resources.

Such resources are a connection pool, a sandbox, and objects that tasks open once for all their
rollouts.

Pool and sandbox are opened by the first run that needs them and closed by the last one that ends,
unless they are pinned by ``async with`` or by the synchronous API, which keeps them until
``RLM.close``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.clients.base import Client, Price, Sampling
from ramify.clients.model_config import Model, bare_name, check_aliases
from ramify.clients.providers import import_client_modules
from ramify.engine.answer_strategies import plan_tool, strategy_record
from ramify.engine.branch_search import BranchSearch, parse_search
from ramify.engine.branch_search import search_to_config as search_config
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.prompt_scaffold import Scaffold, scaffold_of
from ramify.engine.prompt_text import PromptExample, parse_prompt_examples
from ramify.engine.question import ModelSpec, Question, RunOptions
from ramify.engine.tool_set import ToolSet
from ramify.errors import ConfigError, StrictKeywordsMeta, WeakSandboxWarning
from ramify.logging import ComponentLogger
from ramify.sandbox.base import Sandbox, SandboxSpec, isolation_warning, open_sandbox
from ramify.sandbox.prewarm import prewarm_sandbox

if TYPE_CHECKING:
    from ramify.clients.rate_limited_requests import RateLimitedClientPool
    from ramify.engine.reply_cache_lookup import ReusableReplies
    from ramify.store.base import RunBlobs, RunStore

T = TypeVar("T")
_log = ComponentLogger("engine")


class ModelsByDepth:
    """The models of one run, chosen by a call's depth in the call tree.

    This class chooses the model that answers at each depth of the call tree.

    ``model`` answers the calls with a session: one model for all depths, or a list by depth whose
    last entry also serves all deeper levels. ``sub_model`` answers everything below the root:
    ``llm_query``, and child calls if ``model`` is not a list. If ``sub_model`` is a list, its first
    entry does this, and a session can choose the others by name (``llm_query(…, model="…")``).
    """

    def __init__(
        self,
        model: Sequence[Model | Client],
        sub_model: Sequence[Model | Client],
        pool: RateLimitedClientPool,
    ) -> None:
        self.pool = pool
        """Pool that connected the clients and sends their requests."""
        self._bound: dict[int, Model] = {}
        """Id of a client -> the model for which it was connected."""

        def connect(spec: Model | Client) -> Client:
            if not isinstance(spec, Model):
                return pool.register(spec)
            client = pool.client_for_model(spec)
            self._bound[id(client)] = spec
            return client

        by_depth = [connect(spec) for spec in model]
        if not by_depth:
            raise ConfigError("no model: give 'provider:model', for example 'openai:gpt-5-mini'")
        subs = [connect(spec) for spec in sub_model]
        self.root = by_depth[0]
        self.plain = subs[0] if subs else by_depth[min(1, len(by_depth) - 1)]
        self._by_depth = by_depth if len(by_depth) > 1 or not subs else [by_depth[0], subs[0]]
        self.all: tuple[Client, ...] = tuple(
            {id(client): client for client in [*by_depth, *subs]}.values()
        )
        self._aliases = _aliases(self.all, self._bound)

    def client_at_depth(self, depth: int) -> Client:
        """Return the client of the model that works in sessions at ``depth``."""
        return self._by_depth[min(depth, len(self._by_depth) - 1)]

    def find_by_name(self, name: str) -> Client | None:
        """Return the client of the model with the given name, or None if the run has no such model.

        The name may be the model's alias, its full name, or the part after the provider.
        """
        for client in self.all:
            if name == self._aliases[id(client)]:
                return client
        for client in self.all:
            if name in (client.name, client.name.partition(":")[2], bare_name(client.name)):
                return client
        return None

    def model_description(self, client: Client) -> RunModelDescription:
        """Return the facts about a client's model that prompts may mention, such as its window."""
        bound = self._bound.get(id(client))
        vision = getattr(client, "vision", None) if bound is None else bound.vision
        return RunModelDescription(
            self._aliases[id(client)], client.name, client.window, client.price, vision
        )

    def can_read_pictures(self, client: Client) -> bool | None:
        """Return True if a client's model can read images, False if not, and None if unknown.

        The user's own statement takes precedence over the model's name. The result is False for a
        client that cannot send pictures.
        """
        known: bool | None = getattr(client, "vision", False)
        bound = self._bound.get(id(client))
        is_stated = bound is not None and bound.vision is not None and hasattr(client, "vision")
        return bound.vision if bound is not None and is_stated else known

    def pictures_unsupported_message(self, client: Client) -> str:
        """Return the error message for images that were given to a model that cannot read them."""
        seeing = [
            self._aliases[id(each)]
            for each in self.all
            if self.can_read_pictures(each) is not False
        ]
        remedy = "name one that does: " + ", ".join(seeing) if seeing else "name a model that does"
        is_able = hasattr(client, "vision")
        stated = "; if it does, say so: ramify.Model(…, vision=True), or vision = true in settings"
        return f"{client.name} reads no pictures: {remedy}{stated if is_able else ''}"

    def merged_sampling(self, client: Client, run: Sampling) -> Sampling:
        """Return the run's sampling options, overridden by the settings of the client's model."""
        bound = self._bound.get(id(client))
        return run if bound is None else bound.merge_sampling(run)


class RunModelDescription(msgspec.Struct, frozen=True):
    """The facts about one model of a run that prompts may mention, such as its window and price."""

    alias: str
    """Short name by which a session chooses the model; unique in the run unless clients have the
    same name."""
    name: str
    """Name of the model in the form ``provider:model``."""
    window: int
    """Maximum tokens of prompt and reply together."""
    price: Price | None
    """Dollars per million tokens; None if it is unknown."""
    vision: bool | None
    """Whether the model reads images; None if unknown."""


def _aliases(clients: Sequence[Client], bound: Mapping[int, Model]) -> dict[int, str]:
    """Return a short name of each client's model, keyed by the client's ``id()``.

    The user's alias is preferred, then the shortest unique part of the model's name. Clients with
    the same full name share it.
    """
    given = {id(c): bound[id(c)].alias for c in clients if id(c) in bound}
    aliases: dict[int, str] = {}
    for client in clients:
        forms = [bare_name(client.name).rpartition("/")[2], bare_name(client.name), client.name]
        others = [
            form
            for other in clients
            if other is not client
            for form in (given.get(id(other)), other.name, *_name_forms(bare_name(other.name)))
        ]
        free = [form for form in forms if form not in others]
        aliases[id(client)] = given.get(id(client)) or (free or forms[-1:])[0]
    return aliases


def _name_forms(name: str) -> tuple[str, str]:
    return name, name.rpartition("/")[2]


def as_models(spec: ModelSpec | Sequence[ModelSpec]) -> tuple[Model | Client, ...]:
    """Convert the user's model argument, which names one model or several, to a tuple.

    API keys are read now. Raises ConfigError for a value that is not a model.
    """
    specs = [spec] if isinstance(spec, str | Client) or not isinstance(spec, Sequence) else spec
    models: list[Model | Client] = []
    for item in specs:
        if not isinstance(item, str | Model | Client):
            raise ConfigError(
                f"{item!r} is not a model: give 'provider:model', for example 'openai:gpt-5-mini', "
                "or a ramify.Model(…)"
            )
        models.append(Model(item) if isinstance(item, str) else item)
    return tuple(models)


MakePool = Callable[[int], "RateLimitedClientPool"]


def open_client_pool(max_in_flight: int) -> RateLimitedClientPool:
    """Open a client pool that limits the number of model requests in flight."""
    from ramify.clients.rate_limited_requests import RateLimitedClientPool

    return RateLimitedClientPool(max_in_flight)


class EventLoopResources:
    """Resources shared by all runs on one event loop, such as the connection pool and the sandbox.

    They also include objects that tasks open once for all their rollouts.
    """

    def __init__(self, max_in_flight: int, spec: SandboxSpec, make_pool: MakePool) -> None:
        self.pool = make_pool(max_in_flight)
        self._spec = spec
        self._sandbox: Sandbox | None = None
        self._shared: dict[object, Any] = {}
        self._entered = AsyncExitStack()
        self._entering = asyncio.Lock()

    async def get_or_open(
        self, key: object, open: Callable[[], AbstractAsyncContextManager[T]]
    ) -> T:
        """Return the shared object stored under ``key``, opening it on first use.

        The first call for a key enters the context manager that ``open()`` returns. The context
        manager is exited before the connection pool closes.
        """
        async with self._entering:
            if key not in self._shared:
                self._shared[key] = await self._entered.enter_async_context(open())
        value: T = self._shared[key]
        return value

    def sandbox(self) -> Sandbox:
        """Return the sandbox that runs the sessions, opening it on first use.

        A jailed sandbox first tests its isolation, unless it passed the test since this machine was
        booted. The test takes a tenth of a second.

        Raises ConfigError for invalid settings and SandboxError if the sandbox is not available.
        """
        if self._sandbox is None:
            # It is needed soon. It reports its own isolation, so no separate test is needed.
            prewarm_sandbox(self._spec)
            self._sandbox = open_sandbox(self._spec)
            if warning := isolation_warning(self._sandbox, self._spec):
                _log.issue_python_warning(warning, WeakSandboxWarning, stacklevel=2)
        return self._sandbox

    def prestart_sandbox(self) -> None:
        """Start preparing a session in the background, so that the next one opens sooner."""
        if self._sandbox is None:
            prewarm_sandbox(self._spec)

    async def close(self) -> None:
        try:
            await self._entered.aclose()
        finally:
            if self._sandbox is not None:
                await self._sandbox.close()
            await self.pool.close()


class RefCountedLoopResources:
    """Creates the shared resources of each event loop on first use, and closes them once unused."""

    def __init__(
        self, max_in_flight: int, spec: SandboxSpec, make_pool: MakePool = open_client_pool
    ) -> None:
        """Store how to create the resources that all runs on an event loop share.

        ``make_pool`` creates the connection pool of an event loop from the maximum number of
        requests in flight.
        """
        self._make_pool = make_pool
        self._max_in_flight = max_in_flight
        self._spec = spec
        self._open: dict[asyncio.AbstractEventLoop, tuple[EventLoopResources, int]] = {}

    def prestart_sandbox(self) -> None:
        """Start preparing the first session in the background, unless some event loop has
        resources."""
        if not self._open:
            prewarm_sandbox(self._spec)

    def pin(self) -> EventLoopResources:
        """Mark the running event loop's resources as used by one more caller, and return them.

        Each call must be followed by one call of ``unpin``.
        """
        loop = asyncio.get_running_loop()
        resources, count = self._open.get(loop) or (
            EventLoopResources(self._max_in_flight, self._spec, self._make_pool),
            0,
        )
        self._open[loop] = (resources, count + 1)
        return resources

    async def unpin(self) -> None:
        loop = asyncio.get_running_loop()
        resources, count = self._open.pop(loop)
        if count > 1:
            self._open[loop] = (resources, count - 1)
        else:
            await resources.close()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[EventLoopResources]:
        resources = self.pin()
        try:
            yield resources
        finally:
            await self.unpin()


INSTRUCTIONS = ("instructions", "examples")
"""Settings that tell the model how to answer. A resumed, replayed or forked run takes them from the
recorded run."""


class DepthOptions(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True, omit_defaults=True):
    """Options for the calls at one depth of the call tree that override those of the run.

    >>> ramify.DepthOptions(max_turns=3, tools=("search",)).max_turns
    3
    """

    max_turns: int | None = None
    """Maximum turns of a call at this depth; None means ``Limits.max_turns``."""
    scaffold: Scaffold | None = None
    """Scaffold of the calls at this depth, with the same protocol as the run's scaffold; None means
    the scaffold of the run."""
    tools: tuple[str, ...] | None = None
    """Names of the tools in the sessions at this depth; None means all tools."""
    max_reply_tokens: int | None = None
    """Maximum tokens of a reply at this depth, at most ``Limits.max_reply_tokens``; None means that
    limit."""


_SAME = DepthOptions()


class RlmSetup(msgspec.Struct, frozen=True):
    """The validated settings of an ``RLM``, or of one of its runs."""

    model: tuple[Model | Client, ...]
    """Model per depth, the root's first. The last one also serves all deeper calls."""
    sub_model: tuple[Model | Client, ...]
    """Models below the root, of which the first is the default; empty if ``model`` answers there
    too."""
    limits: Limits
    scaffold: Scaffold
    sandbox: SandboxSpec
    sampling: Sampling
    tools: ToolSet
    child_tools: ToolSet
    blobs: RunBlobs | None
    has_own_scaffold: bool
    """True if the user chose the scaffold, which is then used for every model."""
    search: BranchSearch | None = None
    depths: Sequence[DepthOptions] = ()
    """Options per depth, the root's first. The last entry also applies to all deeper calls."""
    instructions: str = ""
    """Instructions of the user that are added to each session's prompt."""
    examples: tuple[PromptExample, ...] = ()
    config: dict[str, Any] = {}
    """The same settings as plain data, for the journal."""
    budget: BudgetLedger | None = None
    """Budget that this run shares with other runs; None if it is not shared."""

    def __post_init__(self) -> None:
        check_aliases([*self.model, *self.sub_model])

    async def connect_models(self, resources: EventLoopResources) -> ModelsByDepth:
        await import_client_modules(
            spec.provider for spec in (*self.model, *self.sub_model) if isinstance(spec, Model)
        )
        return ModelsByDepth(self.model, self.sub_model, resources.pool)

    def options_at_depth(self, depth: int) -> DepthOptions:
        """Return the options for calls at ``depth``, where 0 is the root call."""
        return self.depths[min(depth, len(self.depths) - 1)] if self.depths else _SAME

    def max_turns(self, depth: int) -> int:
        return self.options_at_depth(depth).max_turns or self.limits.max_turns

    def scaffold_at(self, depth: int) -> Scaffold:
        return self.options_at_depth(depth).scaffold or self.scaffold

    def tools_at(self, depth: int, tools: Mapping[str, Any]) -> ToolSet:
        """Return the tools of a session at ``depth``: the RLM's own and the question's ``tools``.

        Raises ConfigError if the options for this depth name a tool that does not exist.
        """
        own = self.child_tools if depth else self.tools
        given = own.plus({n: t for n, t in tools.items() if not own.overrides_optional(n, t)})
        if not self.scaffold_at(depth).lists_tools:
            given = given.without_optional()
        if self.scaffold_at(depth).plans:
            given = given.plus(plan_tool())
        names = self.options_at_depth(depth).tools
        return given if names is None else given.only(names)

    def for_run(self, options: RunOptions) -> RlmSetup:
        """Return the settings of a run: those of the RLM, overridden by ``options``.

        The configuration for the journal is updated accordingly.
        """
        changes: dict[str, Any] = {
            name: value
            for name in ("limits", "sampling")
            if (value := getattr(options, name)) is not None
        }
        for name in ("model", "sub_model"):
            if (spec := getattr(options, name)) is not None:
                changes[name] = as_models(spec)
        if options.model is not None and not self.has_own_scaffold:
            changes["scaffold"] = scaffold_of(None, options.model)
        if options.instructions:
            changes["instructions"] = options.instructions
        if options.examples:
            changes["examples"] = parse_prompt_examples(options.examples)
        search = self.search if options.search is None else parse_search(options.search)
        special = {} if search is None else search_config(search)
        if options.strategy is not None:
            special["strategy"] = strategy_record(options.strategy)
        setup = msgspec.structs.replace(self, **changes, search=search, budget=options.budget)
        plain = setup.as_plain_data() if changes else {}
        recorded = {name: plain[name] for name in changes}
        if not {"model", "sub_model"}.isdisjoint(changes):
            recorded["models"] = plain.get("models", [])
        config = {**self.config, **recorded, **special, **(options.metadata or {})}
        if options.direct is not True:
            # A replayed or resumed run must make the same decision.
            config["direct"] = options.direct
        if options.mode is not None:
            config["mode"] = options.mode
        return msgspec.structs.replace(setup, config=config)

    def with_instructions(self, text: str, examples: Sequence[PromptExample]) -> RlmSetup:
        """Return a copy of the settings with the instructions and examples replaced by the given
        ones."""
        setup = msgspec.structs.replace(self, instructions=text, examples=tuple(examples))
        config = {name: v for name, v in self.config.items() if name not in INSTRUCTIONS}
        return msgspec.structs.replace(setup, config={**config, **setup._instructions()})

    def with_question_instructions(self, question: Question) -> RlmSetup:
        """Return a copy of the settings with the instructions and examples of ``question``
        added."""
        if not question.instructions and not question.examples:
            return self
        text = "\n\n".join(filter(None, [self.instructions, question.instructions]))
        return self.with_instructions(text, (*self.examples, *question.examples))

    def with_recorded_instructions(self, config: Mapping[str, Any]) -> RlmSetup:
        """Return a copy of the settings with the instructions and examples of a recorded run.

        ``config`` is the recorded configuration.
        """
        examples = msgspec.convert(config.get("examples", ()), tuple[PromptExample, ...])
        return self.with_instructions(config.get("instructions", ""), examples)

    def _instructions(self) -> dict[str, Any]:
        """Return the user's instructions and examples as plain data, leaving out empty ones."""
        both = {"instructions": self.instructions, "examples": self.examples}
        given = {name: value for name, value in both.items() if value}
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given))
        return plain

    def as_plain_data(self) -> dict[str, Any]:
        """Return the settings as plain data, exactly as they are written to the journal."""
        servers, tools = self.tools.servers, self.tools.journal_record()
        config = {
            "model": [model.name for model in self.model],
            "sub_model": [model.name for model in self.sub_model],
            **({"models": given} if (given := _model_settings(self.model, self.sub_model)) else {}),
            "limits": self.limits,
            "scaffold": self.scaffold,
            "sandbox": self.sandbox,
            "sampling": self.sampling,
            **({"mcp": servers} if servers else {}),
            **({"tools": tools} if tools else {}),
            **({"depths": self.depths} if any(each != _SAME for each in self.depths) else {}),
            **self._instructions(),
        }
        # Decode what the journal will contain, so that the config is what its readers will see.
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
        return plain


def _model_settings(*models: Sequence[Model | Client]) -> list[dict[str, Any]]:
    """Return the settings that the user gave for each model, as plain data without secrets.

    Models without such settings are omitted.
    """
    every = [model for group in models for model in group if isinstance(model, Model)]
    distinct = [model for index, model in enumerate(every) if model not in every[:index]]
    return [{"name": m.name, **settings} for m in distinct if (settings := m.settings())]


def require_store(store: RunStore | None, what: str) -> RunStore:
    """Return ``store``, or raise ConfigError if the ``RLM`` has no store.

    ``what`` names the operation that needs a store.
    """
    if store is None:
        raise ConfigError(
            f"{what} needs the store that holds the run: RLM(…, store=ramify.Store())"
        )
    return store


def reply_cache(store: RunStore | None, is_enabled: bool) -> ReusableReplies | None:
    """Return the cache of the replies recorded in ``store``, or None if caching is not enabled.

    Raises ConfigError if the store cannot provide them.
    """
    if not is_enabled:
        return None
    from ramify.engine.reply_cache_lookup import ReusableReplies
    from ramify.store.folder_store import Store

    kept = require_store(store, "cache=True")
    if not isinstance(kept, Store):
        raise ConfigError(
            f"cache=True needs a store in a folder, which a {type(kept).__name__} is not: RLM(…, "
            "store=ramify.Store())"
        )
    return ReusableReplies(kept)


def new_run_id() -> str:
    """Return a unique id for a run that is not stored."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"

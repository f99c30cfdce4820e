"""A client of inference engines behind HTTP.

It behaves like a single engine: the sampled ids and log-probabilities do not depend on the number
of servers.

    complete ─▶ wait until open ─▶ pick a server ─▶ send ids, get ids ─▶ Reply
                                    ▲    server gone: pick the next │
                                    └── ended by an update: resume ─┘

A reply that an update interrupts is continued from its ids under the new weights, and records which
version sampled which tokens. When no server is left, waiting callers get an error with the reason.

Which servers answer is decided by ``fleet.py``; weights are sent to them by
``engine_weight_updates.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ramify.actors.launcher import Launcher, LocalLauncher
from ramify.clients.base import Price, Request, Sampling
from ramify.errors import (
    ConfigError,
    ModelError,
    ReplyLostError,
    ServerStatusError,
    TrainError,
    Unreachable,
)
from ramify.inference.base import CachePressure, EngineLost, prompt_too_long_error
from ramify.inference.http.engine_client import (
    EngineClient,
    SampledTokenIds,
    combine_kv_cache_pressure,
)
from ramify.inference.http.engine_recovery import AvailableEngineUrls, EngineAvailabilityTracker
from ramify.inference.http.engine_weight_updates import EngineWeightSync
from ramify.inference.http.fleet import EngineFleet
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.weight_sync import WEIGHT_SYNCS
from ramify.inference.weight_sync.base import WeightSync
from ramify.models.chat_renderer import make_prompt_renderer, parse_reply, prompt_ids
from ramify.models.load import Policy
from ramify.step_time_accounting import WallAndCpuTimer, WallTimer
from ramify.types.message import Finish, Reply, Usage, VersionSpan

_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
_MAX_ABORTS = 64
"""Maximum number of weight updates that may interrupt one reply."""
T = TypeVar("T")
Routes = tuple[tuple[int, ...], ...]
"""For each sampled token, the experts in all layers that predicted it, which are those that
processed the preceding token."""


class HttpEngineClient:
    """A client that makes one or more engine servers usable as a single engine.

    It belongs to one event loop. Call ``start`` before the first request.
    """

    def __init__(self, policy: Policy, spec: InferenceSpec, *, name: str) -> None:
        """Create a client of engines that serve the given policy.

        The policy defines what the engines must serve, and how prompts become token ids. Ports,
        weight sync and options are checked before anything is started. Raises ConfigError.
        """
        self.name = name
        self.window = policy.window
        self.price: Price | None = Price(0.0, 0.0)
        self.rendering = make_prompt_renderer(policy.renderer, policy.tokenizer)
        self.card = policy.card
        self._policy = policy
        self.fleet = EngineFleet(policy, spec, name)
        self.sync = EngineWeightSync(self.fleet, _weight_sync(spec, policy), policy.version)

    @property
    def version(self) -> int:
        """The version of the weights that all engines use now."""
        return self.sync.version

    @property
    def engines(self) -> list[EngineCheckClient]:
        """One client for each individual engine, so that engines can be checked separately."""
        return [EngineCheckClient(self, self.fleet, server) for server in self.fleet.alive]

    @property
    def uses_checkpoint_tensor_names(self) -> bool:
        """True if the engines expect a checkpoint's tensor names instead of the in-memory
        model's."""
        return self.fleet.spec.engine != "ramify"

    @property
    def availability(self) -> EngineAvailabilityTracker:
        """The tracker of which engines were lost and which have recovered."""
        return self.fleet.membership

    # --- from start to end

    async def start(
        self,
        out: Path,
        save: Callable[[Path], None],
        launcher: Launcher | None = None,
        *,
        gone: Callable[[str], None] | None = None,
    ) -> None:
        """Start the engine servers or connect to running ones, and prepare them for weight updates.

        Each server is checked. ``save`` writes a checkpoint below the folder ``out``, from which
        new servers load the model. ``launcher`` starts those servers; the default starts them on
        this machine.

        If another process updates the weights and this client only samples, pass ``gone``. It is
        called with the address of an engine that does not answer. The other process then reports
        through ``listed`` which engines may be used.

        Raises ConfigError for a server that does not fit the policy.
        """
        try:
            await self.fleet.start(out, save, launcher or LocalLauncher(), leads=gone is None)
            if gone is None:
                await self.sync.open()
            else:
                spec = self.fleet.spec
                self.fleet.listed = AvailableEngineUrls(
                    gone, spec.start_s + 2 * spec.update_s + spec.return_s
                )
                self.availability.on_return = self._ask_again
        except BaseException:
            await self.close()
            raise

    def record_external_update(self, version: int) -> None:
        """Record that another process has loaded version ``version`` of the weights into the
        servers."""
        self.sync.record_external_update(version)

    def set_usable_urls(self, urls: Sequence[str]) -> None:
        """Set the addresses of the engines that this client may use.

        Called if another process updates the weights.
        """
        self.fleet.set_engines_with_current_weights(urls)

    @property
    def up_to_date_urls(self) -> tuple[str, ...]:
        """The addresses of usable engines with the newest weights."""
        return self.fleet.up_to_date_urls

    async def handle_reported_loss(self, url: str, who: str) -> None:
        """Check an engine that is reported as unreachable, and recover it if it is lost.

        If it is really gone, it is dropped and brought back. ``who`` names the reporter in the log.
        """
        for server in [each for each in self.fleet.alive if each.url == url]:
            await self.fleet.drop_if_gone(server, Unreachable(f"by {who}"))

    async def _ask_again(self) -> None:
        """Put recovered engines back into use, and wake the requests that wait for an engine.

        Another process updates their weights, so they are assumed to be current. If they are not,
        their replies are rejected.
        """
        self.fleet.readmit_returned()
        self.fleet.mark_all_updated()
        self.availability.notify()

    async def close(self) -> None:
        """End weight updates, and stop the servers that this client started.

        A second call has no effect.
        """
        await self.availability.close()
        self.sync.close()
        await self.fleet.close()

    # --- replies

    async def complete(self, request: Request) -> Reply:
        """Return one reply to a request, sampled by any of the engines.

        Raises RequestRefusedError if the prompt does not fit in the context window, and
        ServerStatusError if no engine is left.
        """
        return await self.complete_on_engine(request, None)

    async def complete_on_engine(self, request: Request, only: EngineClient | None) -> Reply:
        """Sample one reply to a request, from the engine ``only`` if one is given."""
        started = time.perf_counter()
        sampling = self._with_defaults(request.sampling)
        with WallAndCpuTimer("rendering"):
            ids = prompt_ids(self._policy.renderer, request)
        if len(ids) >= self.window:
            raise prompt_too_long_error(self.name, self.window, request, len(ids))
        so_far = InterruptedReplyAccumulator(ids, min(sampling.max_tokens, self.window - len(ids)))
        for _ in range(_MAX_ABORTS):
            with WallTimer("sampling"):
                version, part, routes = await self._sample_tokens(so_far, sampling, request, only)
            so_far.add(part, version, routes)
            if part.end != "abort" or so_far.left < 1:
                break
        with WallAndCpuTimer("rendering"):
            return self._reply(so_far, request, time.perf_counter() - started)

    async def _sample_tokens(
        self,
        so_far: InterruptedReplyAccumulator,
        sampling: Sampling,
        request: Request,
        only: EngineClient | None,
    ) -> tuple[int, SampledTokenIds, Routes]:
        """Sample the next part of a reply, trying other servers if one is lost.

        Returns the weight version at the time of the request, the sampled ids, and the experts that
        predicted each id, for a mixture-of-experts model.
        """
        fleet, tree = self.fleet, call_tree_key(request)
        remaining = msgspec.structs.replace(sampling, max_tokens=so_far.left)
        while True:
            await self.sync.is_open.wait()
            if only is None and not fleet.alive and self.availability.is_any_expected:
                await fleet.wait_for_engine()
                continue
            server, version = only or fleet.pick_for_tree(tree), self.version
            fleet.in_flight[server.url] += 1
            try:
                stop_ids = self._policy.renderer.stop_ids
                sampled = await server.sample(so_far.ids, remaining, stop_ids, request.affinity)
                if not await fleet.drop_if_outdated(server, sampled, version):
                    return (
                        version,
                        sampled,
                        fleet.experts_by_token(server, sampled, len(so_far.ids)),
                    )
                if only is not None:
                    raise EngineLost(self.availability.reasons[-1])
            except (Unreachable, ReplyLostError, ServerStatusError) as error:
                if not await fleet.drop_if_gone(server, error) or only is not None:
                    raise
            finally:
                fleet.in_flight[server.url] -= 1

    def _with_defaults(self, sampling: Sampling) -> Sampling:
        if sampling.extra:
            raise ConfigError(
                f"{self.name} does not support {', '.join(sorted(sampling.extra))}: remove "
                "sampling.extra"
            )
        default = self._policy.defaults
        if sampling.temperature is None:
            drawn = {
                "temperature": default.temperature,
                "top_p": default.top_p,
                "top_k": default.top_k,
            }
            return msgspec.structs.replace(sampling, **drawn)
        return sampling

    def _reply(
        self, so_far: InterruptedReplyAccumulator, request: Request, seconds: float
    ) -> Reply:
        message = parse_reply(
            self._policy.renderer,
            so_far.sampled,
            request.sampling.stop,
            tool_calls=bool(request.tools),
        )
        return Reply(
            message=message,
            usage=Usage(
                len(so_far.ids) - len(so_far.sampled),
                len(so_far.sampled),
                cached_tokens=so_far.cached,
                calls=1,
            ),
            finish="tool_calls" if message.tool_calls else _FINISHES.get(so_far.end, "other"),
            model=self._policy.name,
            seconds=seconds,
            prompt_ids=tuple(so_far.ids[: len(so_far.ids) - len(so_far.sampled)]),
            token_ids=tuple(so_far.sampled),
            logprobs=tuple(so_far.logprobs),
            versions=tuple(so_far.versions),
            kept=tuple(so_far.kept)
            if len(so_far.kept) == len(so_far.sampled) and so_far.kept
            else None,
            routes=tuple(so_far.routes) if any(so_far.routes) else None,
        )

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        return await self.fleet.pick_for_tree("logprobs").score(ids)

    async def fingerprint(self) -> str | None:
        """Return the fingerprint of the weights, after checking that all servers agree on it.

        Raises TrainError if servers have different weights.
        """
        servers = list(self.fleet.alive)
        fingerprints = dict(
            zip(
                servers,
                await asyncio.gather(*(server.fingerprint() for server in servers)),
                strict=True,
            )
        )
        if len(set(fingerprints.values())) > 1:
            details = ", ".join(f"{server.url}: {value}" for server, value in fingerprints.items())
            raise TrainError(
                f"the engines have different weights ({details}): the weight sync failed"
            )
        return next(iter(fingerprints.values()), None)

    async def pressure(self) -> CachePressure | None:
        """Return the combined KV cache load of all servers.

        It has the utilization of the fullest cache, and total numbers of waiting and preempted
        sequences. Returns None if no server reports it.
        """

        async def of(server: EngineClient) -> CachePressure | None:
            try:
                return await server.pressure()
            except ModelError:
                return None

        return combine_kv_cache_pressure(await asyncio.gather(*map(of, self.fleet.alive)))

    async def sleep(self) -> bool:
        """Release the engines' memory until the next ``update``, for a trainer on the same devices.

        Requests wait in the meantime. Returns False if the engines are configured never to sleep.
        Raises ServerStatusError if no engine is left.
        """
        return await self.sync.sleep_engines()

    def engine_count_metrics(self) -> dict[str, float]:
        """Return metrics that count the live, lost and recovered engines.

        Returns an empty dict if none was ever lost.
        """
        return self.fleet.engine_count_metrics()

    # --- weights

    async def update(self, weights: object, version: int) -> None:
        """Load version ``version`` of the weights into every engine server.

        ``weights`` is a list of ``LazyExportWeight``, one per tensor. Raises TrainError with the
        last good version if a server does not accept them.
        """
        assert isinstance(weights, list)
        await self.sync.update(weights, version)

    async def update_returned_engines(self, weights: object, version: int) -> bool:
        """Send the current weights to the engine servers that have recovered.

        ``version`` is the version that the other servers already use. Returns False if no server
        needed them.
        """
        assert isinstance(weights, list)
        return await self.sync.update_returned_engines(weights, version)


def _weight_sync(spec: InferenceSpec, policy: Policy) -> WeightSync:
    """Create the weight sync that the inference configuration selects.

    Options that are not configured get defaults that suit the engine. Raises ConfigError for an
    option that the weight sync does not have.
    """
    options = dict(spec.weight_sync_options)
    if (
        spec.weight_sync_name == "shared"
        and spec.engine == "ramify"
        and policy.device.type == "cpu"
    ):
        options = {"in_place": True, **options}
    if spec.weight_sync_name == "delta" and spec.engine == "vllm":
        options |= {"places": False, "layers": True}
    weight_sync: WeightSync = WEIGHT_SYNCS.resolve(spec.weight_sync_name)(**options)
    return weight_sync


class EngineCheckClient:
    """A client for checking one particular engine server among several.

    It has only the methods needed to check that server.
    """

    def __init__(self, engines: HttpEngineClient, fleet: EngineFleet, server: EngineClient) -> None:
        self._engines = engines
        self.fleet = fleet
        self._server = server
        self.name = server.url

    async def complete(self, request: Request) -> Reply:
        return await self._await_answer(self._engines.complete_on_engine(request, self._server))

    async def fingerprint(self) -> str | None:
        return await self._await_answer(self._server.fingerprint())

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        return await self._await_answer(self._server.score(ids))

    async def _await_answer(self, answer: Awaitable[T]) -> T:
        """Await this engine's answer to a request.

        Raises EngineLost if the engine is gone.
        """
        try:
            return await answer
        except (Unreachable, ReplyLostError, ServerStatusError) as error:
            if await self.fleet.drop_if_gone(self._server, error):
                raise EngineLost(str(error)) from error
            raise


class InterruptedReplyAccumulator:
    """Collects the parts of a reply whose sampling is interrupted by weight updates.

    A reply has several parts if weight updates interrupt it.
    """

    def __init__(self, prompt: Iterable[int], left: int) -> None:
        self.ids = list(prompt)
        """Prompt ids, followed by the ids sampled so far."""
        self.left = left
        """Maximum number of tokens still to sample."""
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[tuple[int, ...]] = []
        self.routes: list[tuple[int, ...]] = []
        """For each sampled token, the experts that predicted it, which are those that processed the
        preceding token. Empty if the engine reported none."""
        self.versions: list[VersionSpan] = []
        self.cached = 0
        self.end = ""

    def add(self, part: SampledTokenIds, version: int, routes: Routes) -> None:
        begin = len(self.sampled)
        self.cached = self.cached if self.sampled else part.cached
        self.ids += part.ids
        self.sampled += part.ids
        self.logprobs += part.logprobs
        self.kept += part.kept or ()
        self.routes += routes
        self.left -= len(part.ids)
        self.end = part.end
        spans = (
            part.versions
            if part.versions is not None
            else (VersionSpan(0, len(part.ids), version),)
        )
        for span in spans:
            start, end = begin + span.start, begin + span.end
            last = self.versions[-1] if self.versions else None
            if last is not None and last.version == span.version:
                self.versions[-1] = VersionSpan(last.start, end, span.version)
            elif end > start or not self.versions:
                self.versions.append(VersionSpan(start, end, span.version))


def call_tree_key(request: Request) -> Hashable:
    """Return the key of the call tree to which a request belongs.

    All calls of a tree use the same server. The key is a rollout's seed if there is one, and
    otherwise the conversation's first message.
    """
    if request.sampling.seed is not None:
        return request.sampling.seed
    return request.messages[0].content if request.messages else request.affinity

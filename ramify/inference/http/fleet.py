"""The engine servers of one run: their health, request routing, and failover.

    calls of one tree             go to the same server, which has cached their prefix
    a new tree                    goes to the server with the least load
    a server that does not answer is dropped with a log line, and brought back if allowed
                                  (``engine_recovery.py``); its trees move to other servers

An engine that was started for the run is started again, possibly elsewhere and then at another
address. A client that only samples, while another process updates the weights, gets the list of
engines with current weights from that process (``engine_recovery.py``).

Requests are sent by ``http_engines.py``, and weights by ``engine_weight_updates.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path

from ramify.actors.launcher import Launcher
from ramify.clients.base import Sampling
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    ReplyLostError,
    ServerStatusError,
    Unreachable,
)
from ramify.inference.base import TAGS
from ramify.inference.http.engine_client import EngineClient, SampledTokenIds
from ramify.inference.http.engine_json_http import (
    EngineStateConflict,
    check_engine_fits_policy,
    wait_until_up,
)
from ramify.inference.http.engine_process import (
    EngineProcess,
    check_ports_free,
    engine_exit_status,
    wait_briefly_for_exit,
)
from ramify.inference.http.engine_recovery import AvailableEngineUrls, EngineAvailabilityTracker
from ramify.inference.http.inference_spec import ENGINES, InferenceSpec
from ramify.inference.http.reported_experts import decode_reported_experts
from ramify.logging import ComponentLogger
from ramify.models.load import Policy
from ramify.models.moe_routing import moe_layout
from ramify.secret_redaction import register_secret

_log = ComponentLogger("inference")
_MAX_TREES = 65_536
_MAX_REASONS = 3
"""Number of recent losses whose reasons are listed in an error."""


class EnginesDroppedError(Exception):
    """Raised when some engine servers were lost during an operation on all of them.

    The lost servers have been dropped.
    """


class EngineFleet:
    """The engine servers of one run.

    A fleet belongs to one event loop.
    """

    def __init__(self, policy: Policy, spec: InferenceSpec, name: str) -> None:
        """Create a fleet without starting its servers, after checking that their ports are free.

        ``name`` appears in errors. Raises ConfigError.
        """
        self.spec = spec
        self._name = name
        self._vocabulary: int = policy.config.vocab_size
        self._dtype = str(policy.dtype).removeprefix("torch.")
        self._window = policy.window
        self._experts = moe_layout(policy.model) if spec.report_experts else None
        if spec.report_experts and self._experts is None:
            raise ConfigError(
                f"{name} is not a mixture-of-experts model, so it has no experts to report"
            )
        self._key = os.environ.get(spec.key_variable, "")
        register_secret(spec.key_variable, self._key)
        check_ports_free(spec)
        self._processes: dict[str, EngineProcess] = {}
        """Each address that a process has had -> the process."""
        self._urls: list[str] = []
        self.alive: list[EngineClient] = []
        """Servers that can receive requests."""
        self.in_flight: dict[str, int] = {}
        """URL -> number of requests that the server is currently processing."""
        self.trees: OrderedDict[Hashable, EngineClient] = OrderedDict()
        """Call tree -> server that handles its requests, with the most recently used tree last."""
        self.membership = EngineAvailabilityTracker(spec.restarts, self._bring_back)
        self._asleep: dict[str, list[str]] = {}
        """URL -> kinds of memory (``TAGS``) that this sleeping server has released."""
        self._older: set[str] = set()
        """URLs of servers that have returned after a loss but do not have the newest weights
        yet."""
        self._leads = False
        self.listed: AvailableEngineUrls | None = None
        """If another process updates the weights, the URLs of the engines that have the current
        weights; otherwise None."""

    # --- from start to end

    async def start(
        self, out: Path, save: Callable[[Path], None], launcher: Launcher, *, leads: bool = True
    ) -> None:
        """Start the engine servers or connect to running ones, and check each server.

        ``leads`` is False if another process decides when they sleep. Raises ConfigError for a
        server that does not answer or does not fit the policy.
        """
        self._leads = leads
        self._urls = list(self.spec.urls) or self._launch_servers(out, save, launcher)
        self.alive = [self._server(url) for url in self._urls]
        self.in_flight = dict.fromkeys(self._urls, 0)
        await asyncio.gather(*(self._until_up(server, self.spec.probe_s) for server in self.alive))
        await asyncio.gather(*map(self._check, self.alive))

    async def close(self) -> None:
        """Stop the servers of this run, and wake other servers that are asleep.

        The servers of this run are those that it started. A second call has no effect.
        """
        await self.membership.close()
        if self.spec.urls:
            await asyncio.gather(
                *(
                    self._wake_and_resume(server)
                    for server in self.alive
                    if server.url in self._asleep
                )
            )
        servers, self.alive = self.alive, []
        for server in servers:
            await server.close()
        processes, self._processes = set(self._processes.values()), {}
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))

    def _launch_servers(
        self, out: Path, save: Callable[[Path], None], launcher: Launcher
    ) -> list[str]:
        checkpoint = out / "checkpoint"
        save(checkpoint)
        for index in range(len(self.spec.ports) or self.spec.num):
            log = out / f"server-{index}.log"
            process = EngineProcess(
                launcher, self.spec, index, checkpoint, self._dtype, self._window, log
            )
            self._processes[process.url] = process
        return list(self._processes)

    def _server(self, url: str) -> EngineClient:
        server: EngineClient = ENGINES.resolve(self.spec.engine)(url, self.spec, self._key)
        return server

    async def _until_up(self, server: EngineClient, attached_s: float) -> None:
        process = self._processes.get(server.url)
        wait_s = self.spec.start_s if process is not None else attached_s
        await wait_until_up(server, process, wait_s, self.spec.restarts)

    async def _check(self, server: EngineClient) -> None:
        # A run that was killed may have left its servers asleep.
        if self._leads and self.spec.urls and await server.is_asleep():
            self._asleep[server.url] = list(TAGS)
            await self._wake_and_resume(server)
        policy = {"vocabulary": self._vocabulary, "window": self._window}
        await check_engine_fits_policy(
            server,
            self.spec.engine,
            dtype=self._dtype,
            level=self.spec.effective_sleep_level if self._leads else 0,
            **policy,
        )
        if self._experts is not None and self._leads:
            sampling = Sampling(1, 1.0)
            try:
                self.experts_by_token(server, await server.sample([0] * 4, sampling, (), ""), 4)
            except ModelError as error:
                raise ConfigError(str(error)) from None

    def experts_by_token(
        self, server: EngineClient, sampled: SampledTokenIds, num_prompt: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the experts that were active when each token of a reply was predicted.

        The model is a mixture of experts. They are the experts that processed the token before it.
        For each token an empty tuple is returned if experts were not requested, or if a pause ended
        the reply before they were reported. Raises MalformedResponse.
        """
        num = len(sampled.ids)
        if self._experts is None or not num or (sampled.end == "abort" and sampled.routed is None):
            return ((),) * num
        try:
            return decode_reported_experts(sampled.routed, self._experts, num_prompt, num)
        except MalformedResponse as error:
            raise MalformedResponse(f"{server.url}: {error}") from None

    # --- who sleeps

    async def sleep(self) -> None:
        """Put all engine servers that are awake to sleep.

        Raises the error of a server that refuses, or EnginesDroppedError if servers were lost.
        """

        async def act(server: EngineClient) -> None:
            if server.url not in self._asleep:
                await server.sleep(self.spec.effective_sleep_level)
                self._asleep[server.url] = list(TAGS)

        await self.call_on_all(act)

    async def wake(self, tag: str) -> None:
        """Reallocate ``weights`` or ``kv_cache`` memory on every server that released it.

        Raises the error of a server that refuses, or EnginesDroppedError if servers were lost.
        """
        if self._asleep:
            await self.call_on_all(lambda server: self._wake(server, tag))

    async def _wake(self, server: EngineClient, tag: str) -> None:
        asleep = self._asleep.get(server.url, [])
        if tag in asleep:
            await server.wake(tag)
            asleep.remove(tag)
            if not asleep:
                del self._asleep[server.url]

    async def _wake_and_resume(self, server: EngineClient) -> None:
        """Wake a server and resume sampling, so that others can use it after this run.

        Errors are ignored.
        """
        with contextlib.suppress(ModelError):
            for tag in TAGS:
                await self._wake(server, tag)
            await server.resume()
        self._asleep.pop(server.url, None)

    # --- who is asked

    def pick_for_tree(self, tree: Hashable) -> EngineClient:
        """Choose the engine server for the next model call of a call tree.

        Calls of a known tree stay on its server. A new tree gets the server with the fewest
        requests in flight and, among equals, the fewest trees. Raises ServerStatusError if no
        server is left.
        """
        if not self.alive:
            raise self.no_engine_left_error()
        server = self.trees.get(tree)
        if server is None or server not in self.alive:
            load = dict.fromkeys((candidate.url for candidate in self.alive), 0)
            for candidate in self.trees.values():
                if candidate.url in load:
                    load[candidate.url] += 1
            server = min(
                self.alive,
                key=lambda candidate: (self.in_flight[candidate.url], load[candidate.url]),
            )
        self.trees[tree] = server
        self.trees.move_to_end(tree)
        while len(self.trees) > _MAX_TREES:
            self.trees.popitem(last=False)
        return server

    def set_engines_with_current_weights(self, urls: Sequence[str]) -> None:
        """Set the list of engines that have current weights, and connect to those that are new."""
        assert self.listed is not None
        self.listed.set(urls)
        known_urls = {
            server.url for server in (*self.alive, *self.membership.ready)
        } | self.membership.returning_urls
        for url in urls:
            if url not in known_urls:
                self.membership.reconnect(url)

    async def call_on_all(self, act: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Call ``act(server)`` for all engine servers of the fleet concurrently.

        If calls fail, only the most important error is raised: EnginesDroppedError if servers were
        lost, or else EngineStateConflict if a server was not in the expected state, or else the
        first error. The former two may be the cause of the others.
        """
        servers = list(self.alive)
        results = await asyncio.gather(*map(act, servers), return_exceptions=True)
        failed = [
            (server, result)
            for server, result in zip(servers, results, strict=True)
            if isinstance(result, BaseException)
        ]
        lost_errors = (Unreachable, ReplyLostError, ServerStatusError)
        remaining = [
            error
            for server, error in failed
            if not isinstance(error, lost_errors) or not await self.drop_if_gone(server, error)
        ]
        if len(remaining) < len(failed):
            raise EnginesDroppedError
        if remaining:
            raise min(remaining, key=lambda error: not isinstance(error, EngineStateConflict))

    # --- servers that go and come

    def engine_count_metrics(self) -> dict[str, float]:
        """Return metrics that count the live, lost and recovered engines.

        Returns an empty dict if none was ever lost.
        """
        if not self.membership.num_lost:
            return {}
        lost, back = float(self.membership.num_lost), float(self.membership.num_back)
        return {"engines": float(len(self.alive)), "engines_lost": lost, "engines_back": back}

    async def drop_if_gone(self, server: EngineClient, error: Exception) -> bool:
        """Remove a failed engine server from the fleet if it no longer answers.

        The loss is logged. Returns True if the server is gone.
        """
        if server not in self.alive:
            return True
        process = self._processes.get(server.url)
        try:
            if await engine_exit_status(process) is None:
                await server.check_health()
                return False
        except ModelError:
            pass
        ended, how = await wait_briefly_for_exit(process), ""
        if process is not None and ended is not None:
            how = f"; {await asyncio.to_thread(process.exit_reason)}"
        if server in self.alive:  # another request may have dropped it meanwhile
            await self._drop(
                server, f"{server.url} no longer answers; the failed request: {error}{how}"
            )
        return True

    async def drop_if_outdated(
        self, server: EngineClient, sampled: SampledTokenIds, version: int
    ) -> bool:
        """Drop a server that still answers with weights older than ``version`` after an update to
        it.

        Another program must have restarted it. Returns True if the server is outdated.
        """
        first = min((span.version for span in sampled.versions or ()), default=version)
        if first >= version:
            return False
        if server in self.alive:
            await self._drop(
                server,
                f"{server.url} answers with version {first} of the weights, but was given version "
                f"{version}",
            )
        return True

    @property
    def up_to_date_urls(self) -> tuple[str, ...]:
        """The URLs of servers with the newest weights.

        Other clients may use these.
        """
        return tuple(server.url for server in self.alive if server.url not in self._older)

    def readmit_returned(self) -> None:
        """Add the engine servers that have recovered to those in use.

        A process that updates the weights calls this before sending them, so that these servers
        receive them, too.
        """
        back = self.membership.take_ready()
        self.in_flight |= {server.url: 0 for server in back if server.url not in self.in_flight}
        self._older |= {server.url for server in back}
        self.alive += back

    def mark_all_updated(self) -> None:
        """Record that all engine servers in use have loaded the newest weights."""
        self._older.clear()

    async def wait_for_engine(self) -> None:
        """Wait until a lost engine server answers again or is given up.

        Raises ServerStatusError if that takes too long.
        """
        wait_s = 2 * self.spec.update_s + (
            self.spec.start_s if self._processes else self.spec.return_s
        )
        if not await self.membership.wait_for_change(wait_s):
            raise self.no_engine_left_error(f"; none came back within {wait_s:g} s")

    def no_engine_left_error(self, more: str = "") -> ServerStatusError:
        error = ServerStatusError(f"{self._name}: no engine is left: {self.drop_reasons()}{more}")
        error.transient = False
        return error

    def drop_reasons(self) -> str:
        """Return why the most recent servers were lost, as text for an error."""
        return "; ".join(self.membership.reasons[-_MAX_REASONS:]) or "none was started"

    async def _drop(self, server: EngineClient, why: str) -> None:
        self.alive.remove(server)
        self._asleep.pop(server.url, None)
        self._older.discard(server.url)
        process = self._processes.get(server.url)
        if self.listed is not None:
            self.listed.remove(server.url)
        num, of = len(self.alive), len(self._urls)
        rest = f"continuing with {num} of {of} engines" if num else "no engine is left"
        back = (
            "it is started again"
            if process is not None
            else f"waiting for it for at most {self.spec.return_s:g} s"
        )
        back = back if self.listed is None else "the run brings it back"
        event = "engine_lost" if process is None else "restart"
        self.membership.handle_loss(server.url, why, rest, back, event=event, left=num)
        await server.close()

    async def _bring_back(self, url: str) -> EngineClient:
        """Recover a lost server, and return its client once the server passes all checks.

        If this run started its process, the process is restarted.
        """
        if self.listed is not None:
            await self.listed.wait_until_listed(url)
            return self._server(url)
        process = self._processes.get(url)
        if process is not None:
            await process.restart()
            if process.url not in self._processes:
                _log.debug(
                    "engine_moved",
                    f"the engine of {url} was started again at {process.url}",
                    shown=True,
                    engine=process.url,
                )
            self._processes[process.url], url = process, process.url
        server = self._server(url)
        try:
            await self._until_up(server, self.spec.return_s)
            await self._check(server)
        except BaseException:
            await server.close()
            raise
        return server

"""The engines of one run: which of them answer, who is asked next, and what happens when one goes.

    a tree's calls     go to one server, where what they share is computed already
    a new tree         goes to the one with least to do
    a server that does not answer is dropped, aloud, and brought back where it may be (``membership.py``); its trees move

One that was started for the run is started again, perhaps elsewhere, and then has another address.
Who only asks, while another gives the weights, is told by that other which ones have them
(``engine_list.py``).

Leaves out what is asked (``http_engines.py``) and how weights reach them (``update_engines.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path

from ramify.errors import ModelError, ReplyLost, ServerFailed, Unreachable
from ramify.inference.base import TAGS
from ramify.inference.http.api import EngineStateConflict
from ramify.inference.http.engine_list import EngineList
from ramify.inference.http.engine_process import (
    EngineHandle,
    EngineProcess,
    ended_soon,
    ports_for,
    status_of,
)
from ramify.inference.http.engine_server import EngineServer, SampledIds
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.http.membership import EngineMembership
from ramify.inference.http.server_checks import check, until_up
from ramify.inference.http.sglang import SglangServer
from ramify.inference.http.vllm import RamifyServer, VllmServer
from ramify.models.load import Policy

ENGINES: dict[str, Callable[[str, InferenceSpec, str], EngineServer]] = {
    "ramify": RamifyServer,
    "vllm": VllmServer,
    "sglang": SglangServer,
}
Launch = Callable[[InferenceSpec, int, Path, str, int, Path], EngineHandle]
"""What starts an engine: of the spec, which one, a checkpoint, dtype, window and the file for its
output."""
_MAX_TREES = 65_536
_TOLD = 3
"""Of the engines that went last an error says why."""


class EnginesDropped(Exception):
    """Servers were dropped in the middle of something that all of them had to do."""


class EngineFleet:
    """Belongs to one event loop."""

    def __init__(
        self, policy: Policy, spec: InferenceSpec, name: str, say: Callable[[str], None]
    ) -> None:
        """Ports are checked here, before anything is started. ``name`` is told in errors."""
        self.spec, self._name, self._say = spec, name, say
        self._vocabulary: int = policy.config.vocab_size
        self._dtype = str(policy.dtype).removeprefix("torch.")
        self._window = policy.window
        self._key = os.environ.get(spec.key_variable, "")
        self._ports = [] if spec.urls else ports_for(spec)
        self._processes: dict[str, EngineHandle] = {}
        """By each address that one had."""
        self._urls: list[str] = []
        self.alive: list[EngineServer] = []
        """Those that may be asked."""
        self.in_flight: dict[str, int] = {}
        """URL -> requests that it is answering."""
        self.trees: OrderedDict[Hashable, EngineServer] = OrderedDict()
        """Tree -> the server that it began at."""
        self.membership = EngineMembership(spec.restarts, self._bring, say)
        self._asleep: dict[str, list[str]] = {}
        """URL -> what of ``TAGS`` sleeps there."""
        self._older: set[str] = set()
        """URLs of those that are back, and do not have the newest weights yet."""
        self._leads = False
        self.listed: EngineList | None = None
        """Who says which engines may be asked, where that is another."""

    # --- from start to end
    # ---------------------------------------------------------------------------------------

    async def start(
        self, out: Path, save: Callable[[Path], None], launch: Launch | None, *, leads: bool = True
    ) -> None:
        """Start the servers, or attach to them, and check each. Raises ConfigError. ``leads``:
        False where another decides when they sleep."""
        self._leads = leads
        self._urls = list(self.spec.urls) or self._launched(out, save, launch)
        self.alive = [self._server(url) for url in self._urls]
        self.in_flight = dict.fromkeys(self._urls, 0)
        await asyncio.gather(*(self._until_up(each, self.spec.probe_s) for each in self.alive))
        await asyncio.gather(*map(self._check, self.alive))

    async def close(self) -> None:
        """End what was started here; what goes on without this run answers again. Idempotent."""
        await self.membership.close()
        if self.spec.urls:
            await asyncio.gather(
                *(self._leave(each) for each in self.alive if each.url in self._asleep)
            )
        servers, self.alive = self.alive, []
        for server in servers:
            await server.close()
        processes, self._processes = set(self._processes.values()), {}
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))

    def _launched(
        self, out: Path, save: Callable[[Path], None], launch: Launch | None
    ) -> list[str]:
        checkpoint = out / "checkpoint"
        save(checkpoint)
        for index, port in enumerate(self._ports):
            log = out / f"server-{index}.log"
            process = (
                launch(self.spec, index, checkpoint, self._dtype, self._window, log)
                if launch is not None
                else EngineProcess(
                    self.spec, index, port, checkpoint, self._dtype, self._window, log
                )
            )
            self._processes[process.url] = process
        return list(self._processes)

    def _server(self, url: str) -> EngineServer:
        return ENGINES[self.spec.engine](url, self.spec, self._key)

    async def _until_up(self, server: EngineServer, attached_s: float) -> None:
        process = self._processes.get(server.url)
        wait_s = self.spec.start_s if process is not None else attached_s
        await until_up(server, process, wait_s, self.spec.restarts)

    async def _check(self, server: EngineServer) -> None:
        if (
            self._leads and self.spec.urls and await server.is_asleep()
        ):  # a run that was killed left it so
            self._asleep[server.url] = list(TAGS)
            await self._leave(server)
        policy = {"vocabulary": self._vocabulary, "window": self._window}
        await check(
            server,
            self.spec.engine,
            dtype=self._dtype,
            level=self.spec.level if self._leads else 0,
            **policy,
        )

    # --- who sleeps
    # ----------------------------------------------------------------------------------------------

    @property
    def is_any_asleep(self) -> bool:
        return bool(self._asleep)

    async def sleep(self) -> None:
        """All that do not sleep give their memory back. Raises what one refuses; Lost where some
        went."""

        async def act(server: EngineServer) -> None:
            if server.url not in self._asleep:
                await server.sleep(self.spec.level)
                self._asleep[server.url] = list(TAGS)

        await self.all(act)

    async def wake(self, tag: str) -> None:
        """All where it sleeps take ``tag`` back. Raises as ``sleep``."""
        if self._asleep:
            await self.all(lambda server: self._wake(server, tag))

    async def _wake(self, server: EngineServer, tag: str) -> None:
        asleep = self._asleep.get(server.url, [])
        if tag in asleep:
            await server.wake(tag)
            asleep.remove(tag)
            if not asleep:
                del self._asleep[server.url]

    async def _leave(self, server: EngineServer) -> None:
        """Have it answer, as far as it does."""
        with contextlib.suppress(ModelError):
            for tag in TAGS:
                await self._wake(server, tag)
            await server.resume()
        self._asleep.pop(server.url, None)

    # --- who is asked
    # --------------------------------------------------------------------------------------------

    def pick(self, tree: Hashable) -> EngineServer:
        """The server that the tree began at; for a new one that with least to do, of equals the one
        with fewest trees. Raises ServerFailed where none is left."""
        if not self.alive:
            raise self.none_left()
        server = self.trees.get(tree)
        if server is None or server not in self.alive:
            load = dict.fromkeys((each.url for each in self.alive), 0)
            for each in self.trees.values():
                if each.url in load:
                    load[each.url] += 1
            server = min(self.alive, key=lambda each: (self.in_flight[each.url], load[each.url]))
        self.trees[tree] = server
        self.trees.move_to_end(tree)
        while len(self.trees) > _MAX_TREES:
            self.trees.popitem(last=False)
        return server

    def told(self, urls: Sequence[str]) -> None:
        """Whoever gives the weights asks the engines at ``urls`` now."""
        assert self.listed is not None
        self.listed.told(urls)
        known = {
            server.url for server in (*self.alive, *self.membership.ready)
        } | self.membership.expected
        for url in urls:
            if url not in known:
                self.membership.expect(url)

    async def all(self, act: Callable[[EngineServer], Awaitable[None]]) -> None:
        """``act`` at every server. Raises Lost where some went, else Conflict where one is in
        another state, for either may be why others refuse; else what the first refuses."""
        servers = list(self.alive)
        results = await asyncio.gather(*map(act, servers), return_exceptions=True)
        failed = [
            (server, each)
            for server, each in zip(servers, results, strict=True)
            if isinstance(each, BaseException)
        ]
        gone = (Unreachable, ReplyLost, ServerFailed)
        left = [
            error
            for server, error in failed
            if not isinstance(error, gone) or not await self.is_gone(server, error)
        ]
        if len(left) < len(failed):
            raise EnginesDropped
        if left:
            raise min(left, key=lambda error: not isinstance(error, EngineStateConflict))

    # --- servers that go and come
    # --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """How many engines answer, how often one went away and came back; nothing where none ever
        went."""
        if not self.membership.num_lost:
            return {}
        lost, back = float(self.membership.num_lost), float(self.membership.num_back)
        return {"engines": float(len(self.alive)), "engines_lost": lost, "engines_back": back}

    async def is_gone(self, server: EngineServer, error: Exception) -> bool:
        """Whether ``server``, at which ``error`` was met, does not answer any more; it is dropped
        then, and that is said."""
        if server not in self.alive:
            return True
        process = self._processes.get(server.url)
        try:
            if await status_of(process) is None:
                await server.healthy()
                return False
        except ModelError:
            pass
        ended, how = await ended_soon(process), ""
        if process is not None and ended is not None:
            how = f", and ended with status {ended}: {await asyncio.to_thread(process.said)}"
        if server in self.alive:  # another request may have found out meanwhile
            await self._drop(
                server, f"{server.url} does not answer any more; it was asked {error}{how}"
            )
        return True

    async def is_older(self, server: EngineServer, sampled: SampledIds, version: int) -> bool:
        """Whether the server has weights from before ``version``, which it was given: somebody else
        started it anew. It is dropped then."""
        first = min((span.version for span in sampled.versions or ()), default=version)
        if first >= version:
            return False
        if server in self.alive:
            await self._drop(
                server,
                f"{server.url} answers with version {first} of the weights, and was given version "
                f"{version}",
            )
        return True

    @property
    def answering(self) -> tuple[str, ...]:
        """URLs of those that have the newest weights: others may be told of them."""
        return tuple(server.url for server in self.alive if server.url not in self._older)

    def take_back(self) -> None:
        """Those that are back are asked from now on, and given weights first where that is done
        here."""
        back = self.membership.take_ready()
        self.in_flight |= {server.url: 0 for server in back if server.url not in self.in_flight}
        self._older |= {server.url for server in back}
        self.alive += back

    def all_given(self) -> None:
        """All that are asked have the newest weights."""
        self._older.clear()

    async def one_is_back(self) -> None:
        """Return once a server answers, or none is expected any more. Raises ServerFailed where
        nothing happens."""
        wait_s = 2 * self.spec.update_s + (
            self.spec.start_s if self._processes else self.spec.return_s
        )
        if not await self.membership.news(wait_s):
            raise self.none_left(f"; none came back within {wait_s:g} s")

    def none_left(self, more: str = "") -> ServerFailed:
        error = ServerFailed(f"{self._name}: no engine is left: {self.why()}{more}")
        error.transient = False
        return error

    def why(self) -> str:
        """What became of those that went last."""
        return "; ".join(self.membership.why[-_TOLD:]) or "none was started"

    async def _drop(self, server: EngineServer, why: str) -> None:
        self.alive.remove(server)
        self._asleep.pop(server.url, None)
        self._older.discard(server.url)
        process = self._processes.get(server.url)
        if self.listed is not None:
            self.listed.went(server.url)
        is_expected = self.membership.left(server.url, why)
        num, of = len(self.alive), len(self._urls)
        left = f"goes on with {num} of {of} engines" if num else "no engine is left"
        back = (
            "it is started again"
            if process is not None
            else f"it is waited for, {self.spec.return_s:g} s at most"
        )
        back = back if self.listed is None else "the run looks after it"
        self._say(f"{why}; {left}{f'; {back}' if is_expected else ''}")
        await server.close()

    async def _bring(self, url: str) -> EngineServer:
        """The server of ``url`` once it answers again and fits."""
        if self.listed is not None:
            await self.listed.back(url)
            return self._server(url)
        process = self._processes.get(url)
        if process is not None:
            await process.restart()
            if process.url not in self._processes:
                self._say(f"the engine of {url} is started again at {process.url}")
            self._processes[process.url], url = process, process.url
        server = self._server(url)
        try:
            await self._until_up(server, self.spec.return_s)
            await self._check(server)
        except BaseException:
            await server.close()
            raise
        return server

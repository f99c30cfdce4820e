"""Engines behind HTTP as one ``InferenceClient``: the same ids, the same numbers, whether they are one or many.

    complete ── gate ── which server ── ids in, ids out ── server gone? the next one ── ended by an update? go on ──▶ Reply
    update   ── pause all ─ chunks of weights to all ─ end ─ resume all

A tree's calls go to one server, where what they share is computed already; a new tree goes to the one with least to do. A
reply that an update interrupts is continued from its ids under the new weights, and says which version sampled what. A
server that no longer answers is dropped, aloud, and brought back where it may be (``absent.py``); its trees move, or wait
where there is no other. When none is left, whoever asks is told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ramify.clients.base import Price, Request, Sampling
from ramify.errors import ConfigError, ModelError, ReplyLost, ServerFailed, TrainError, Unreachable
from ramify.inference.base import EngineLost, Pressure
from ramify.inference.http.absent import Absent
from ramify.inference.http.api import Conflict
from ramify.inference.http.pressure import together
from ramify.inference.http.process import Engine, EngineProcess, ports_for
from ramify.inference.http.server import Sampled, Server
from ramify.inference.http.sglang import Sglang
from ramify.inference.http.so_far import SoFar, tree_of
from ramify.inference.http.spec import InferenceSpec
from ramify.inference.http.vllm import Ramify, Vllm
from ramify.inference.prompts import prompt_ids, spoken, too_long
from ramify.inference.weights.base import Carrier, Source, carrier_class
from ramify.policy.load import Policy
from ramify.types.message import Finish, Reply, Usage

ENGINES: dict[str, Callable[[str, InferenceSpec, str], Server]] = {"ramify": Ramify, "vllm": Vllm, "sglang": Sglang}
Launch = Callable[[InferenceSpec, int, Path, str, int, Path], Engine]
"""What starts an engine: of the spec, which one, a checkpoint, dtype, window and the file for its output."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
_MAX_TREES = 65_536
_MAX_ABORTS = 64
"""Updates that one reply may live through."""
_POLL_S = 0.1
_TOLD = 3
"""Of the engines that went last an error says why."""
T = TypeVar("T")


class _Lost(Exception):
    """Servers were dropped in the middle of an update."""


class HttpEngines:
    """Belongs to one event loop. ``start`` comes first."""

    def __init__(self, policy: Policy, spec: InferenceSpec, *, name: str, say: Callable[[str], None] = print) -> None:
        """``policy`` says what engines must be: its renderer writes the ids. Ports, carrier and spec are checked here,
        before anything is started; raises ConfigError."""
        self.name, self.window = name, policy.window
        self.price: Price | None = Price(0.0, 0.0)
        self.scaffold = "tiny" if policy.renderer.name == "tiny" else None
        self.spec = spec
        self._policy, self._say = policy, say
        self._dtype = str(policy.dtype).removeprefix("torch.")
        self._key = os.environ.get(spec.key_variable, "")
        self._carrier: Carrier = carrier_class(spec.carried_by)(**spec.carrier_options)
        self._ports = [] if spec.urls else ports_for(spec)
        self._processes: dict[str, Engine] = {}
        self._alive: list[Server] = []
        self._in_flight: dict[str, int] = {}
        self._trees: OrderedDict[Hashable, Server] = OrderedDict()
        self.absent = Absent(spec.restarts, self._bring, say)
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()
        self._version = policy.version

    @property
    def version(self) -> int:
        return self._version

    @property
    def engines(self) -> list[OneEngine]:
        """Each by itself, for checks that every one has to pass."""
        return [OneEngine(self, server) for server in self._alive]

    # --- from start to end ---------------------------------------------------------------------------------------

    async def start(
        self, out: Path, save: Callable[[Path], None], launch: Launch | None = None, *, carries: bool = True
    ) -> None:
        """Start the servers, or attach to them; check each; open the way for weights. ``save`` writes a checkpoint for
        those that are started, below ``out``, by ``launch`` where it is not on this machine. Raises ConfigError for a server
        that is not what the policy needs. ``carries``: False for who only asks, while another gives the weights."""
        try:
            urls = list(self.spec.urls) or self._launch(out, save, launch)
            servers = [ENGINES[self.spec.engine](url, self.spec, self._key) for url in urls]
            self._alive = servers
            self._in_flight = {server.url: 0 for server in servers}
            waits = [self._wait_until_up(each, self._start_s(each, self.spec.probe_s)) for each in servers]
            await asyncio.gather(*waits)
            await asyncio.gather(*map(self._check, servers))
            if carries:
                await self._open_carrier()
            else:
                self.absent.came = self._ask_again
        except _Lost:
            await self.close()
            raise ConfigError(f"an engine went away while it was prepared for weights: {self._why()}") from None
        except BaseException:
            await self.close()
            raise

    def follow(self, version: int) -> None:
        """Another has given the servers this version."""
        self._version = version
        self.absent.took()

    async def _ask_again(self) -> None:
        """Ask those that are back, which another gives the weights to; a reply by older ones is not taken."""
        self._alive += self.absent.take_ready()
        self.absent.tell()

    def _launch(self, out: Path, save: Callable[[Path], None], launch: Launch | None) -> list[str]:
        checkpoint = out / "checkpoint"
        save(checkpoint)
        for index, port in enumerate(self._ports):
            log = out / f"server-{index}.log"
            process = (
                launch(self.spec, index, checkpoint, self._dtype, self.window, log)
                if launch is not None
                else EngineProcess(self.spec, index, port, checkpoint, self._dtype, self.window, log)
            )
            self._processes[process.url] = process
        return list(self._processes)

    def _start_s(self, server: Server, else_s: float) -> float:
        return self.spec.start_s if server.url in self._processes else else_s

    async def _wait_until_up(self, server: Server, wait_s: float) -> None:
        process = self._processes.get(server.url)
        deadline, left = time.monotonic() + wait_s, self.spec.restarts
        while True:
            try:
                return await server.healthy()
            except ModelError as error:
                ended = process.ended if process is not None else None
                was_killed = ended is not None and ended < 0
                if isinstance(process, EngineProcess) and was_killed and left:  # another may fare better
                    left -= 1
                    process.close()
                    process.start()
                elif process is not None and ended is not None:
                    raise ConfigError(
                        f"the engine at {server.url} ended with status {ended} before it answered; its log "
                        f"{process.log} ends: {process.said()}"
                    ) from None
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"no engine answers: {error}; is the server up, and inference.engine right?"
                    ) from None
            await asyncio.sleep(_POLL_S)

    async def _check(self, server: Server) -> None:
        try:
            facts = await server.facts()
            vocabulary = self._policy.config.vocab_size
            fits = facts.vocabulary == vocabulary
            if facts.vocabulary is None:
                fits = await server.takes_id(vocabulary - 1) and not await server.takes_id(vocabulary)
        except ModelError as error:
            raise ConfigError(f"the engine does not speak the protocol of '{self.spec.engine}': {error}") from None
        if not fits:
            raise ConfigError(
                f"the engine at {server.url} has another vocabulary ({facts.vocabulary or 'found by asking'}) than the policy "
                f"({vocabulary}): serve the policy's own checkpoint"
            )
        if facts.dtype and facts.dtype != self._dtype:
            raise ConfigError(
                f"the engine at {server.url} computes in {facts.dtype} and the policy in {self._dtype}: serve it with --dtype "
                f"{self._dtype}, or set policy.dtype={facts.dtype}"
            )
        if facts.window is not None and facts.window < self.window:
            raise ConfigError(
                f"the engine at {server.url} has a window of {facts.window} tokens and the policy one of {self.window}: serve "
                "it with the policy's (--max-model-len)"
            )
        if facts.logprobs_mode not in ("", "processed_logprobs"):
            raise ConfigError(
                f"the engine at {server.url} returns {facts.logprobs_mode}, which are not those that were drawn from: start it "
                "with --logprobs-mode processed_logprobs"
            )

    async def close(self) -> None:
        """Free the carrier and end what was started here. Idempotent."""
        await self.absent.close()
        servers, self._alive = self._alive, []
        self._carrier.close()
        for server in servers:
            await server.close()
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))

    # --- replies -------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Reply:
        """One reply. Raises Refused where the prompt does not fit, ServerFailed where no engine is left."""
        return await self.complete_at(request, None)

    async def complete_at(self, request: Request, only: Server | None) -> Reply:
        """As ``complete``, by one server."""
        started = time.perf_counter()
        sampling = self._with_defaults(request.sampling)
        ids = prompt_ids(self._policy.renderer, request)
        if len(ids) >= self.window:
            raise too_long(self.name, self.window, request, len(ids))
        so_far = SoFar(ids, min(sampling.max_tokens, self.window - len(ids)))
        for _ in range(_MAX_ABORTS):
            version, part = await self._sampled(so_far, sampling, request, only)
            so_far.add(part, version)
            if part.end != "abort" or so_far.left < 1:
                break
        return self._reply(so_far, request, time.perf_counter() - started)

    async def _sampled(
        self, so_far: SoFar, sampling: Sampling, request: Request, only: Server | None
    ) -> tuple[int, Sampled]:
        """(the version that was asked, what it sampled), by the first server that answers."""
        tree = tree_of(request)
        asked = msgspec.structs.replace(sampling, max_tokens=so_far.left)
        while True:
            await self._open.wait()
            if only is None and not self._alive and self.absent.is_any_expected:
                await self._one_is_back()
                continue
            server, version = only or self._pick(tree), self._version
            self._in_flight[server.url] += 1
            try:
                stop_ids = self._policy.renderer.stop_ids
                sampled = await server.sample(so_far.ids, asked, stop_ids, request.affinity)
                if not await self._is_older(server, sampled, version):
                    return version, sampled
                if only is not None:
                    raise EngineLost(self.absent.why[-1])
            except (Unreachable, ReplyLost, ServerFailed) as error:
                if not await self.is_gone(server, error) or only is not None:
                    raise
            finally:
                self._in_flight[server.url] -= 1

    def _pick(self, tree: Hashable) -> Server:
        """The server that the tree began at; for a new one that with least to do, of equals the one with fewest trees."""
        if not self._alive:
            raise self._none_left()
        server = self._trees.get(tree)
        if server is None or server not in self._alive:
            load = dict.fromkeys((each.url for each in self._alive), 0)
            for each in self._trees.values():
                if each.url in load:
                    load[each.url] += 1
            server = min(self._alive, key=lambda each: (self._in_flight[each.url], load[each.url]))
        self._trees[tree] = server
        self._trees.move_to_end(tree)
        while len(self._trees) > _MAX_TREES:
            self._trees.popitem(last=False)
        return server

    def _with_defaults(self, sampling: Sampling) -> Sampling:
        if sampling.extra:
            raise ConfigError(
                f"{self.name}: no field {', '.join(sorted(sampling.extra))} here: leave sampling.extra out"
            )
        default = self._policy.defaults
        if sampling.temperature is None:
            drawn = {"temperature": default.temperature, "top_p": default.top_p, "top_k": default.top_k}
            return msgspec.structs.replace(sampling, **drawn)
        return sampling

    def _reply(self, so_far: SoFar, request: Request, seconds: float) -> Reply:
        message = spoken(self._policy.renderer, so_far.sampled, request.sampling.stop)
        return Reply(
            message=message,
            usage=Usage(
                len(so_far.ids) - len(so_far.sampled), len(so_far.sampled), cached_tokens=so_far.cached, calls=1
            ),
            finish="tool_calls" if message.tool_calls else _FINISHES.get(so_far.end, "other"),
            model=self._policy.name,
            seconds=seconds,
            prompt_ids=tuple(so_far.ids[: len(so_far.ids) - len(so_far.sampled)]),
            token_ids=tuple(so_far.sampled),
            logprobs=tuple(so_far.logprobs),
            versions=tuple(so_far.versions),
            kept=tuple(so_far.kept) if len(so_far.kept) == len(so_far.sampled) and so_far.kept else None,
        )

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        return await self._pick("logprobs").score(ids)

    async def fingerprint(self) -> str | None:
        """Of all servers; raises TrainError where they are not the same."""
        found = dict(zip(self._alive, await asyncio.gather(*(each.fingerprint() for each in self._alive)), strict=True))
        if len(set(found.values())) > 1:
            told = ", ".join(f"{server.url}: {value}" for server, value in found.items())
            raise TrainError(f"the engines have different weights ({told}): the weight sync failed")
        return next(iter(found.values()), None)

    async def pressure(self) -> Pressure | None:
        """How their caches bear what is asked: of the fullest, and what waits at all of them."""

        async def of(server: Server) -> Pressure | None:
            try:
                return await server.pressure()
            except ModelError:
                return None

        return together(await asyncio.gather(*map(of, self._alive)))

    async def sleep(self) -> None:
        """Let the engines give their memory back, for a trainer on the same device."""
        await self._all(lambda server: server.sleep())

    async def wake(self) -> None:
        await self._all(lambda server: server.wake())

    # --- servers that go -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """How many engines answer, how often one went away and came back; nothing where none ever went."""
        if not self.absent.num_lost:
            return {}
        lost, back = float(self.absent.num_lost), float(self.absent.num_back)
        return {"engines": float(len(self._alive)), "engines_lost": lost, "engines_back": back}

    async def is_gone(self, server: Server, error: Exception) -> bool:
        """Whether ``server``, at which ``error`` was met, does not answer any more; it is dropped then, and that is said."""
        if server not in self._alive:
            return True
        process = self._processes.get(server.url)
        try:
            if process is None or process.ended is None:
                await server.healthy()
                return False
        except ModelError:
            pass
        if server in self._alive:  # another request may have found out meanwhile
            ended = process.ended if process is not None else None
            how = f", and ended with status {ended}: {process.said()}" if process and ended is not None else ""
            why = f"{server.url} does not answer any more; it was asked {error}{how}"
            await self._drop(server, why)
        return True

    async def _is_older(self, server: Server, sampled: Sampled, version: int) -> bool:
        """Whether the server has weights from before ``version``, which it was given: somebody else started it anew."""
        first = min((span.version for span in sampled.versions or ()), default=version)
        if first >= version:
            return False
        if server in self._alive:
            await self._drop(
                server, f"{server.url} answers with version {first} of the weights, and was given version {version}"
            )
        return True

    async def _drop(self, server: Server, why: str) -> None:
        self._alive.remove(server)
        process = self._processes.get(server.url)
        may_return = process is None or isinstance(process, EngineProcess)  # one that Ray started is not started again
        is_expected = self.absent.left(server.url, why, may_return=may_return)
        num, of = len(self._alive), len(self._in_flight)
        left = f"goes on with {num} of {of} engines" if num else "no engine is left"
        back = "it is started again" if process is not None else f"it is waited for, {self.spec.return_s:g} s at most"
        self._say(f"{why}; {left}{f'; {back}' if is_expected else ''}")
        await server.close()

    async def _bring(self, url: str) -> Server:
        """The server of ``url`` once it answers again and fits."""
        process = self._processes.get(url)
        if isinstance(process, EngineProcess):
            await asyncio.to_thread(process.close)  # it may still run, and not answer
            process.start()
        server = ENGINES[self.spec.engine](url, self.spec, self._key)
        try:
            await self._wait_until_up(server, self._start_s(server, self.spec.return_s))
            await self._check(server)
        except BaseException:
            await server.close()
            raise
        return server

    async def _one_is_back(self) -> None:
        """Return once a server answers, or none is expected any more. Raises ServerFailed where nothing happens."""
        wait_s = 2 * self.spec.update_s + (self.spec.start_s if self._processes else self.spec.return_s)
        if not await self.absent.news(wait_s):
            raise self._none_left(f"; none came back within {wait_s:g} s")

    def _none_left(self, more: str = "") -> ServerFailed:
        error = ServerFailed(f"{self.name}: no engine is left: {self._why()}{more}")
        error.transient = False
        return error

    def _why(self) -> str:
        return "; ".join(self.absent.why[-_TOLD:]) or "none was started"

    async def _all(self, act: Callable[[Server], Awaitable[None]]) -> None:
        """``act`` at every server. Raises what one refuses; _Lost where some went."""
        servers = list(self._alive)
        results = await asyncio.gather(*map(act, servers), return_exceptions=True)
        failed = [
            (server, each) for server, each in zip(servers, results, strict=True) if isinstance(each, BaseException)
        ]
        lost = False
        for server, error in failed:
            gone = (Unreachable, ReplyLost, ServerFailed)
            if not isinstance(error, gone) or not await self.is_gone(server, error):
                raise error
            lost = True
        if lost:
            raise _Lost

    # --- weights -------------------------------------------------------------------------------------------------

    async def update(self, weights: object, version: int) -> None:
        """From now on ``weights``, the sources of all tensors, answer as ``version`` at every server. Raises TrainError
        with the last good version where a server does not take them."""
        assert isinstance(weights, list)
        async with self._updating:
            await self._give(weights, version)
            self.absent.took()

    async def welcome(self, weights: object, version: int) -> bool:
        """Give ``weights``, which answer as ``version`` already, to servers that came back; whether there were any."""
        assert isinstance(weights, list)
        async with self._updating:
            if not self.absent.ready:  # an update came first
                return False
            await self._give(weights, version)
        names = ", ".join(server.url for server in self._alive)
        self._say(f"an engine is back, with version {version} of the weights; now there are {names}")
        return True

    async def _give(self, sources: list[Source], version: int) -> None:
        try:
            await self._sent(sources, version)
            self._version = version
        except (ModelError, ConfigError, OSError, RuntimeError) as error:
            raise TrainError(
                f"the engines did not take version {version} of the weights: {error}; the last good one is version "
                f"{self._version}"
            ) from error
        finally:
            self._open.set()
            self.absent.tell()

    async def _sent(self, sources: list[Source], version: int) -> None:
        whole = False
        while True:  # at most as often as servers may go
            if self.absent.ready:
                self._open.clear()
                self._alive += self.absent.take_ready()
                whole = await self._reopened()
            elif not self._alive and self.absent.is_any_expected:
                await self._one_is_back()
            elif not self._alive:
                raise TrainError(
                    f"version {version} of the weights cannot be given to anybody: {self._why()}; the last good one is "
                    f"version {self._version}"
                )
            else:
                try:
                    return await self._send(sources, version, whole)
                except _Lost:
                    whole = await self._reopened()
                except Conflict as error:
                    if whole:
                        raise
                    self._say(f"{error}: all weights are sent")
                    whole = await self._reopened()

    async def _send(self, sources: list[Source], version: int, whole: bool) -> None:
        chunks = iter(self._carrier.chunks(sources, version, whole=whole))
        chunk = await asyncio.to_thread(next, chunks, None)  # engines go on meanwhile: finding differences takes time
        self._open.clear()
        await self._all(lambda server: server.pause())
        await self._all(lambda server: server.begin_update())
        while chunk is not None:
            info = chunk.info
            told = asyncio.ensure_future(self._all(lambda server, info=info: server.update(info, version)))  # type: ignore[misc]
            try:
                if chunk.send is not None:
                    await self._broadcast(chunk.send, told)
                chunk = await asyncio.to_thread(next, chunks, None)  # written while the engines read the one before
            finally:
                await told
        await self._all(lambda server: server.end_update(version))
        await self._all(lambda server: server.resume())

    async def _broadcast(self, send: Callable[[], None], told: asyncio.Future[None]) -> None:
        try:
            await asyncio.to_thread(send)
        except RuntimeError:
            await told  # says who is gone, or what was refused
            raise

    async def _open_carrier(self) -> None:
        """Raises _Lost where a server went meanwhile."""
        infos = dict(zip([each.url for each in self._alive], self._carrier.open(len(self._alive)), strict=True))
        joined = asyncio.ensure_future(asyncio.to_thread(self._carrier.join))
        try:
            await self._all(lambda server: server.open_weights(infos[server.url]))
        except ModelError as error:
            raise ConfigError(f"an engine cannot be given weights by '{self.spec.carried_by}': {error}") from None
        finally:
            with contextlib.suppress(RuntimeError):
                await joined

    async def _reopened(self) -> bool:
        """Another group, of those that are left; True."""
        while True:
            self._carrier.close()
            try:
                if self._alive:
                    await self._open_carrier()
                return True
            except _Lost:
                pass


class OneEngine:
    """One server of several, as far as a check needs it."""

    def __init__(self, engines: HttpEngines, server: Server) -> None:
        self._engines, self._server = engines, server
        self.name = server.url

    async def complete(self, request: Request) -> Reply:
        return await self._asked(self._engines.complete_at(request, self._server))

    async def fingerprint(self) -> str | None:
        return await self._asked(self._server.fingerprint())

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        return await self._asked(self._server.score(ids))

    async def _asked(self, answer: Awaitable[T]) -> T:
        """Raises EngineLost where the server is gone."""
        try:
            return await answer
        except (Unreachable, ReplyLost, ServerFailed) as error:
            if await self._engines.is_gone(self._server, error):
                raise EngineLost(str(error)) from error
            raise

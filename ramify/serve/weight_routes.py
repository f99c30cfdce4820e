"""HTTP routes that update a served policy's weights and free its memory, in the formats of vLLM and
SGLang.

    vLLM     POST /pause?mode=abort|wait|keep  /resume  /reset_prefix_cache
             POST /init_weight_transfer_engine  /start_weight_update  /update_weights
                  /finish_weight_update
             GET  /is_paused  /weight_info  /get_world_size
    SGLang   POST /pause_generation  /continue_generation  /flush_cache  /update_weights_from_disk
    ours     GET  /fingerprint

The routes exist only if the server was started with ``--weight-transfer``, because their clients
can replace the model. Nothing is sampled during an update. If an update breaks off, every request
fails with the reason until a complete update has arrived.

    vLLM     POST /sleep?level=0     keep all memory, but answer no request until it is woken
                  /sleep?level=1     free the KV cache; weights on a GPU move to main memory
                  /sleep?level=2     free the KV cache and drop the weights: requests wait until an
                                     update has sent all of them
                  /sleep?tags=kv_cache&mode=abort|wait|keep
                                     only the named parts; weights are dropped
             POST /wake_up           wake everything; or /wake_up?tags=weights, then a weight
                                     update, then /wake_up?tags=kv_cache
             GET  /is_sleeping       true until everything is awake
    SGLang   POST /release_memory_occupation   {"tags": ["kv_cache", "weights"]}; drops weights
                  /resume_memory_occupation

Requests wait until the engine is ready again, and fail after ten minutes. ``GET /health`` still
answers in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ramify import __version__
from ramify.errors import ConfigError, RamifyError, ServerStatusError
from ramify.http_server.base_server import receive_body
from ramify.http_server.rejections import RequestRejected
from ramify.inference.base import PROTOCOL, TAGS
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync import WEIGHT_SYNCS
from ramify.inference.weight_sync.base import (
    Info,
    MissingDeltaBaseError,
    WeightReceiver,
    WeightUpdateTensor,
)

Body = dict[str, Any]
_SCHEDULING = "scheduling"
"""vLLM's tag for a server that answers no requests. It is set as long as any part of the engine
sleeps."""
WAIT_S = 600.0
"""Maximum time that a request waits for a sleeping engine, in seconds."""
_NAMED = 3
"""Maximum number of missing tensors that an error names."""


class EngineSleepState:
    """Tracks which parts of a server's engine are asleep, and lets requests wait until they are
    awake.

    It records which parts of the engine are asleep, and which requests wait for them to wake up.
    """

    def __init__(
        self,
        client: LocalClient,
        stop: Callable[[str], Awaitable[object]],
        resume_sampling: Callable[[], None],
        is_updating: Callable[[], bool],
        wait_s: float = WAIT_S,
    ) -> None:
        """Create the sleep state of an engine that is awake.

        ``stop``: stops sampling; its argument is one of vLLM's modes ``abort``, ``wait`` and
        ``keep``.
        ``resume_sampling``: resumes sampling, unless the server is paused or ``is_updating``
        returns True.
        ``wait_s``: maximum seconds that a request waits for a sleeping engine.
        """
        self._client = client
        self._stop = stop
        self._resume_sampling = resume_sampling
        self._is_updating = is_updating
        self._wait_s = wait_s
        self._asleep: set[str] = set()
        self._changing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._ready.set()

    @property
    def sleeping_parts(self) -> list[str]:
        """The parts of the engine that are asleep, named as in vLLM's API."""
        return sorted(self._asleep)

    @property
    def can_serve_requests(self) -> bool:
        """True if the engine can answer requests: it is awake and has all its weights."""
        return not self._asleep and not self._client.missing

    def notify_waiters(self) -> None:
        """Wake the waiting requests if the engine can now serve them."""
        if self.can_serve_requests:
            self._ready.set()

    async def wait(self) -> None:
        """Wait until the engine is awake and has all its weights.

        Raises ServerStatusError if that takes longer than ``wait_s`` seconds.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._ready.wait()
        except TimeoutError:
            raise ServerStatusError(
                f"the engine did not become ready within {self._wait_s:g} s: "
                f"{self.unavailable_reason() or 'a weight update has only just completed'}"
            ) from None

    def unavailable_reason(self) -> str:
        """Return the reason why the engine cannot serve requests, or an empty string if it can."""
        if self._asleep:
            return f"the server sleeps ({', '.join(self.sleeping_parts)}): POST /wake_up"
        missing = self._client.missing
        if missing:
            return (
                f"the server dropped its weights while it slept, and {len(missing)} tensors have "
                f"not been sent since ({', '.join(missing[:_NAMED])}…): send all weights"
            )
        return ""

    # --- routes

    async def handle_sleep(self, http: web.Request, _: Body) -> Body:
        level, tags = int(http.query.get("level", "1")), http.query.getall("tags", [])
        if level not in (0, 1, 2):
            raise ValueError(f"level={level}: give 0, 1 or 2")
        parts = _check_tags(tags) if tags else TAGS if level else ()
        await self._fall_asleep(
            parts, http.query.get("mode", "abort"), keep=not tags and level == 1
        )
        return {"status": "asleep"}

    async def handle_memory_release(self, _: web.Request, body: Body) -> Body:
        await self._fall_asleep(_check_tags(body.get("tags") or TAGS), "abort", keep=False)
        return {"status": "asleep"}

    async def wake(self, http: web.Request, _: Body) -> Body:
        tags = http.query.getall("tags", [])
        return await self._wake_up(_check_tags(tags) if tags else TAGS)

    async def restore_memory(self, _: web.Request, body: Body) -> Body:
        return await self._wake_up(_check_tags(body.get("tags") or TAGS))

    async def report_is_sleeping(self, _: web.Request, __: Body) -> Body:
        return {"is_sleeping": bool(self._asleep)}

    async def _fall_asleep(self, tags: Collection[str], mode: str, *, keep: bool) -> None:
        async with self._changing:
            if self._is_updating():
                raise RuntimeError(
                    "a weight update is in progress: finish it before the server sleeps"
                )
            before = set(self._asleep)
            self._ready.clear()
            self._asleep.add(_SCHEDULING)
            try:
                await self._stop(mode)
                await self._client.sleep([tag for tag in tags if tag not in before], keep=keep)
            except BaseException:
                self._asleep = before
                self._resume_sampling()
                raise
            self._asleep |= set(tags)

    async def _wake_up(self, tags: Collection[str]) -> Body:
        async with self._changing:
            await self._client.wake([tag for tag in tags if tag in self._asleep])
            self._asleep -= set(tags)
            if not self._asleep & set(TAGS):
                self._asleep.clear()
            self._resume_sampling()
        return {"status": "awake"}


def _check_tags(tags: Collection[str]) -> Collection[str]:
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags={str(tags)[:80]}: give some of {', '.join(TAGS)}")
    return tags


_MODES = ("abort", "wait", "keep")
_SGLANG_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_POLL_S = 0.01
_NOT_WHOLE = "half of the weights are new"


class WeightUpdateRoutes:
    """The HTTP handlers through which a trainer updates the weights of a served policy.

    They record whether sampling is paused, whether an update is in progress, and whether the
    weights are complete.
    """

    def __init__(
        self,
        client: LocalClient,
        in_flight: Callable[[], int],
        *,
        weight_syncs: Sequence[str] = (),
        root: Path | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """Create the HTTP handlers through which a trainer updates a served policy's weights.

        ``in_flight`` returns the number of requests in progress. ``weight_syncs`` are the user's
        own weight sync classes, which a trainer may use in addition to the built-in ones. Weight
        files are read only below ``root``, if it is given. ``wait_s`` limits how long a request
        waits for a sleeping engine.
        """
        self._client = client
        self._in_flight = in_flight
        self._weight_syncs = {*WEIGHT_SYNCS.ours, *weight_syncs}
        self._root = root.resolve() if root is not None else None
        self._receiver: WeightReceiver | None = None
        self._is_paused = self._is_updating = False
        self.sleep = EngineSleepState(
            client, self._stop_sampling, self._resume_sampling, lambda: self._is_updating, wait_s
        )
        self._num_chunks = 0
        """Number of chunks received in the current update."""
        self.broken = ""
        """Reason why the weights are incomplete; empty if they are complete."""

    def add_to(self, app: web.Application) -> None:
        for path, act in {
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset,
            "/sleep": self.sleep.handle_sleep,
            "/wake_up": self.sleep.wake,
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/shutdown_weight_transfer_engine": self._shut_down,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._resume,
            "/flush_cache": self._reset,
            "/update_weights_from_disk": self._from_disk,
            "/release_memory_occupation": self.sleep.handle_memory_release,
            "/resume_memory_occupation": self.sleep.restore_memory,
        }.items():
            app.router.add_post(path, _make_handler(act))
        for path, tell in {
            "/is_paused": self._tell_paused,
            "/is_sleeping": self.sleep.report_is_sleeping,
            "/weight_info": self._tell_version,
            "/get_world_size": self._tell_size,
            "/fingerprint": self._tell_fingerprint,
        }.items():
            app.router.add_get(path, _make_handler(tell))

    def close(self) -> None:
        """Leave the trainer's process group and release its shared memory.

        Calling this twice is harmless.

        If the process stayed in the group, a later broadcast of the trainer would wait for it.
        """
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    # --- pause

    async def _pause(self, http: web.Request, _: Body) -> Body:
        return await self._pause_sampling(http.query.get("mode", "abort"))

    async def _pause_generation(self, _: web.Request, body: Body) -> Body:
        mode = str(body.get("mode", "abort"))
        return await self._pause_sampling(_SGLANG_MODES.get(mode, mode))

    async def _pause_sampling(self, mode: str) -> Body:
        await self._stop_sampling(mode)
        self._is_paused = True
        return {"status": "paused"}

    async def _stop_sampling(self, mode: str) -> None:
        """Stop sampling in the way that vLLM's mode ``abort``, ``wait`` or ``keep`` prescribes."""
        if mode not in _MODES:
            raise ValueError(f"mode='{mode[:20]}': give {', '.join(_MODES)}")
        while mode == "wait" and self._in_flight():  # noqa: ASYNC110 (rare, and the server counts)
            await asyncio.sleep(_POLL_S)
        self._client.pause(abort=mode == "abort")

    async def _resume(self, _: web.Request, __: Body) -> Body:
        self._is_paused = False
        self._resume_sampling()
        return {"status": "resumed"}

    async def _reset(self, _: web.Request, __: Body) -> Body:
        await self._client.forget(self._client.version)
        return {"success": True}

    def _resume_sampling(self) -> None:
        if not (self._is_paused or self._is_updating) and self.sleep.can_serve_requests:
            self._client.resume()
        self.sleep.notify_waiters()

    # --- weights

    async def _init(self, http: web.Request, body: Body) -> Body:
        info = _required_object(body, "init_info")
        name = str(info.get("weight_sync", ""))
        if name not in self._weight_syncs:
            raise ConfigError(
                f"the weight sync '{name[:80]}' is not allowed here; this server has "
                f"{', '.join(sorted(self._weight_syncs))}: to add your own, start the server with "
                "--weight-sync"
            )
        if name == "file":
            self._check_folder(Path(str(info["folder"])))
        await self._shut_down(http, body)
        make = WEIGHT_SYNCS.resolve(name).receiver
        self._receiver = await asyncio.get_running_loop().run_in_executor(None, make, info)
        return {"message": "Weight transfer initialized"}

    async def _shut_down(self, _: web.Request, __: Body) -> Body:
        self.close()
        return {"message": "Weight transfer shut down"}

    async def _start(self, _: web.Request, __: Body) -> Body:
        if self._receiver is None:
            raise MissingDeltaBaseError(
                "init_weight_transfer_engine must come before an update: was this engine restarted?"
            )
        self._check_awake()
        self._client.pause()
        self._is_updating, self._num_chunks = True, 0
        return {"message": "Weight update started"}

    async def _update(self, http: web.Request, body: Body) -> Body:
        """Receive one chunk of the new weights from the trainer.

        If the request contains ``begins``, it also starts the update; if it contains
        ``weight_version``, it also ends the update.
        """
        info = _required_object(body, "update_info")
        if body.get("begins"):
            await self._start(http, body)
        receiver = self._receiver
        if receiver is None or not self._is_updating:
            raise RuntimeError("start_weight_update must come before update_weights")
        ends = "weight_version" in body
        await self._receive_weights(
            lambda: receiver.unpack_chunk(info),
            self._version_number(body["weight_version"]) if ends else None,
        )
        if ends:
            self._complete_update(receiver, body["weight_version"])
        return {"message": "Weights updated"}

    async def _receive_weights(
        self, pieces: Callable[[], Iterator[WeightUpdateTensor]], version: int | None = None
    ) -> None:
        try:
            await self._client.receive_weights(pieces, version)
        except MissingDeltaBaseError:  # no weight of this chunk was changed
            self.broken = self.broken or (
                f"an update was interrupted: {_NOT_WHOLE}" if self._num_chunks else ""
            )
            raise
        except BaseException as error:
            self.broken = f"an update was interrupted ({error}): {_NOT_WHOLE}"
            raise
        self._num_chunks += 1

    async def _finish(self, _: web.Request, body: Body) -> Body:
        if self._receiver is None or not self._is_updating:
            raise RuntimeError("start_weight_update must come before finish_weight_update")
        version = body.get("weight_version")
        if not self._client.missing:
            await self._client.forget(self._version_number(version))
        self._complete_update(self._receiver, version)
        return {"message": "Weight update finished"}

    def _complete_update(self, receiver: WeightReceiver, version: object) -> None:
        if self._client.missing:
            raise MissingDeltaBaseError(self.sleep.unavailable_reason())
        receiver.finished(str(version))
        self._end()

    def _end(self) -> None:
        self.broken, self._is_updating = "", False
        self._resume_sampling()

    def _version_number(self, version: object) -> int:
        """Return the version number of the policy's weights after this update.

        It is ``version`` if that is a number, otherwise the number after the current one.
        """
        text = str(version)
        return int(text) if text.isdigit() else self._client.version + 1

    async def _from_disk(self, _: web.Request, body: Body) -> Body:
        from ramify.models.weights import check_weights, read_weights

        self._check_awake()
        path = Path(str(body["model_path"]))
        self._check_folder(path)
        tensors = await asyncio.get_running_loop().run_in_executor(None, read_weights, path)
        check_weights(self._client.policy.model, tensors, str(path))
        self._client.pause(abort=bool(body.get("abort_all_requests")))
        self._is_updating, self._num_chunks = True, 0
        version = self._version_number(body.get("weight_version"))
        await self._receive_weights(
            lambda: (WeightUpdateTensor(name, tensor) for name, tensor in tensors.items()), version
        )
        self._end()
        return {"success": True, "message": "Succeeded to update model weights."}

    def _check_awake(self) -> None:
        if "weights" in self.sleep.sleeping_parts:
            raise RuntimeError(
                "the weights are asleep: wake them first (POST /wake_up?tags=weights)"
            )

    def _check_folder(self, folder: Path) -> None:
        if self._root is not None and not folder.resolve().is_relative_to(self._root):
            raise ConfigError(
                f"weights are read only from inside {self._root}, but {folder} is outside it"
            )

    # --- state

    async def _tell_paused(self, _: web.Request, __: Body) -> Body:
        return {"is_paused": self._is_paused}

    async def _tell_version(self, _: web.Request, __: Body) -> Body:
        return {"weight_version": str(self._client.version)}

    async def _tell_size(self, _: web.Request, __: Body) -> Body:
        return {"world_size": 1}

    async def _tell_fingerprint(self, _: web.Request, __: Body) -> Body:
        if "weights" in self.sleep.sleeping_parts or self._client.missing:
            raise RuntimeError(self.sleep.unavailable_reason())
        return {"fingerprint": await self._client.fingerprint(), "version": self._client.version}


def served_policy_info(client: LocalClient, name: str) -> dict[str, Any]:
    """Return the served policy's properties, for example its vocabulary size, so that a trainer can
    check them.

    A trainer compares them with its own policy before it sends weights.
    """
    policy = client.policy
    return {
        "version": __version__,
        "ramify_protocol": PROTOCOL,
        "model": name,
        "max_model_len": client.window,
        "vocab_size": policy.config.vocab_size,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "logprobs_mode": "processed_logprobs",
        "weight_version": str(client.version),
    }


def _make_handler(
    act: Callable[[web.Request, Body], Awaitable[Body]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(http: web.Request) -> web.StreamResponse:
        try:
            async with receive_body(http) as data:
                body = msgspec.json.decode(data or b"{}")
            if not isinstance(body, dict):
                raise ValueError("the body is not a JSON object")
            return web.json_response(await act(http, body))
        except MissingDeltaBaseError as error:
            raise RequestRejected(str(error), status=409, code="stale_base") from None
        except KeyError as error:
            raise RequestRejected(f"{http.path}: the body has no {error}") from None
        except (ValueError, TypeError, RuntimeError, RamifyError) as error:
            raise RequestRejected(f"{http.path}: {error}") from None

    return answer


def _required_object(body: Mapping[str, Any], name: str) -> Info:
    value = body.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"the body has no object '{name}'")
    return value

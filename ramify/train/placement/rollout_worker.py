"""A rollout worker: a process with its own sandboxes and connections to the engines, which samples
rollouts and scores them.

    run ── RolloutRequest: item, name, seed, version ──> worker: ``evaluate.attempt`` ──> engines
        <── trajectory (in its stored form), and hashes of the ids that engines received ──

The run starts the worker (``rollout_workers.py``), and the worker connects back with the key that
it was given. It decides nothing: a rollout depends only on the request, not on where it runs.
Requests are pickled, by the run that started the worker. Replies are not, because model-written
code may have run here: they are decoded as exactly the expected type.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.actors.connect_back import beat, connect_back
from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.errors import RamifyError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.log_outputs import Sender
from ramify.logging import SentRecord, attach
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import Item, task_of
from ramify.train.depth_models import DepthModels, DepthSpec, FrozenSpec


class RolloutWorkerSpec(msgspec.Struct, frozen=True):
    """The part of a run that its rollouts need."""

    name: str
    task: str
    options: dict[str, Any]
    """Options of the task."""
    scaffold: str
    limits: Limits
    sandbox: SandboxSpec
    inference: InferenceSpec
    """With the addresses of the running engines."""
    checkpoint: str
    """Folder with the policy's configuration and tokenizer; its weights are not read."""
    dtype: str
    """Data type of the engines' weights."""
    grace_s: float
    direct: bool = False
    """Whether a single plain call may answer a short context."""
    thinking: bool | None = None
    """See ``PolicySpec.thinking``."""
    depths: tuple[DepthSpec, ...] = ()
    """See ``Run.depths``; all have the policy."""
    variables: tuple[str, ...] = ()
    """Environment variables that hold the addresses of services."""


class RolloutRequest(NamedTuple):
    """A request for one rollout."""

    id: int
    item: Item
    name: str
    sampling: Sampling
    version: int
    """Version of the weights that the engines have."""


class AvailableEngines(NamedTuple):
    """The engines that the worker may call from now on."""

    urls: tuple[str, ...]


class WorkerMessage(NamedTuple):
    """A message from a worker to the run."""

    kind: str
    """``ready``, ``said`` (a ``SentRecord``), ``done``, ``broke`` (a bug), ``failed`` (the worker
    cannot start), ``gone`` (with the address of an engine that does not answer) or ``beat``."""
    id: int = 0
    data: bytes = b""
    """A trajectory or a record as JSON for ``done`` and ``said``, otherwise text."""
    paths: tuple[int, ...] = ()
    """Hashes of the ids that went through engines since the last message with hashes."""


def receive(connection: Connection) -> WorkerMessage:
    """The worker's next message. Raises EOFError if the worker has ended, and MsgspecError if it
    sent anything else."""
    return msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerMessage)


def _send(connection: Connection, message: WorkerMessage) -> None:
    connection.send_bytes(msgspec.msgpack.encode(message))


def main() -> None:
    """Run a rollout worker until the run ends."""
    connection = connect_back()
    spec: RolloutWorkerSpec = connection.recv()
    try:
        asyncio.run(_RolloutWorker(connection, spec).serve())
    except RamifyError as error:
        _send(connection, WorkerMessage("failed", data=str(error).encode()))
    except EOFError:
        pass
    sys.stdout.flush()
    os._exit(0)


class _RolloutWorker:
    def __init__(self, connection: Connection, spec: RolloutWorkerSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._sending = threading.Lock()
        self._is_ended = threading.Event()
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        attach(Sender(self._forward))

    async def serve(self) -> None:
        """Sample rollouts as requested until the run ends. Raises RamifyError if the worker cannot
        start."""
        spec = self._spec
        # Fails fast if the task is unknown, before imports that take seconds.
        self._task = task_of(spec.task, **spec.options)

        import torch

        from ramify.engine.rlm import RLM
        from ramify.engine.scaffold import scaffold_of
        from ramify.inference.http.http_engines import HttpEngines
        from ramify.models.load import load_policy
        from ramify.train.selfcheck import AuditedClient

        torch.set_num_threads(1)
        policy = load_policy(
            spec.checkpoint, getattr(torch, spec.dtype), "meta", thinking=spec.thinking
        )
        self._engines = HttpEngines(policy, spec.inference, name=spec.name)
        await self._engines.start(
            Path(),
            lambda folder: None,
            gone=lambda url: self._send(WorkerMessage("gone", data=url.encode())),
        )
        self._client = AuditedClient(self._engines)
        self._rlm = RLM(
            DepthModels(spec.depths, FrozenSpec(), self._client).clients,
            limits=spec.limits,
            scaffold=scaffold_of(spec.scaffold),
            sandbox=spec.sandbox,
            depths=[each.options() for each in spec.depths],
        )
        try:
            async with self._rlm:
                await self._rlm.prepare()
                beat(lambda: self._send(WorkerMessage("beat")), self._is_ended)
                self._send(WorkerMessage("ready"))
                await self._until_closed()
        finally:
            self._is_ended.set()
            for task in self._rollouts.values():
                task.cancel()
            await self._engines.close()

    async def _until_closed(self) -> None:
        loop = asyncio.get_running_loop()
        requests: asyncio.Queue[Any] = asyncio.Queue()

        def read() -> None:
            request: Any = None
            with contextlib.suppress(EOFError, OSError):
                while (request := self._connection.recv()) is not None:
                    loop.call_soon_threadsafe(requests.put_nowait, request)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(requests.put_nowait, None)

        threading.Thread(target=read, daemon=True, name="ramify rollout worker").start()
        while (request := await requests.get()) is not None:
            if isinstance(request, RolloutRequest):
                self._rollouts[request.id] = asyncio.create_task(self._roll(request))
            elif isinstance(request, AvailableEngines):
                self._engines.listed(request.urls)
            elif task := self._rollouts.get(request):  # the id of a cancelled request
                task.cancel()

    async def _roll(self, request: RolloutRequest) -> None:
        from ramify.evaluate.attempt import attempt

        self._engines.follow(request.version)
        try:
            trajectory = await attempt(
                self._rlm,
                self._task,
                request.item,
                name=request.name,
                sampling=request.sampling,
                metadata={"rollout": request.name},
                grace_s=self._spec.grace_s,
                direct=self._spec.direct,
            )
            self._send(
                WorkerMessage(
                    "done", request.id, msgspec.json.encode(trajectory), self._client.take()
                )
            )
        except Exception as error:  # noqa: BLE001 -- the run raises it
            self._send(
                WorkerMessage("broke", request.id, f"{error!r}\n{traceback.format_exc()}".encode())
            )
        finally:
            self._rollouts.pop(request.id, None)

    def _forward(self, record: SentRecord) -> None:
        self._send(WorkerMessage("said", data=msgspec.json.encode(record)))

    def _send(self, message: WorkerMessage) -> None:
        with self._sending, contextlib.suppress(OSError):
            _send(self._connection, message)


if __name__ == "__main__":
    # Pickled classes must belong to the imported module, not to __main__.
    from ramify.train.placement.rollout_worker import main as imported_main

    imported_main()

"""A process that rolls out: its own sandboxes, its own connections to the engines, and the scores
of its rollouts.

    run ── Ask: item, name, seed, version ──> runner: ``evaluate.attempt`` ──> engines, over HTTP
        <── trajectory (as it is stored), and what engines were given ──

Started by the run (``rollout_workers.py``), to which it connects with the key that it was given.
Decides nothing: what a rollout samples follows from what it is asked, wherever it runs. What is
asked is pickled, by the run that started it. What comes back is not, since code of models may have
run here: it is decoded as what it has to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.errors import RamifyError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import Item

AT, KEY, NUMBER = "RAMIFY_RUNNER_AT", "RAMIFY_RUNNER_KEY", "RAMIFY_RUNNER_NUMBER"


class RolloutWorkerSpec(msgspec.Struct, frozen=True):
    """Of a run what its rollouts need."""

    name: str
    task: str
    options: dict[str, Any]
    """Of the task."""
    scaffold: str
    limits: Limits
    sandbox: SandboxSpec
    inference: InferenceSpec
    """With the addresses of engines that run."""
    checkpoint: str
    """A folder with the policy's configuration and tokenizer; its weights are not read."""
    dtype: str
    """Of the engines."""
    grace_s: float
    direct: bool = False
    """Whether one plain call may answer a short context."""
    variables: tuple[str, ...] = ()
    """Environment variables with the addresses of services."""


class RolloutRequest(NamedTuple):
    """One rollout that is wanted."""

    id: int
    item: Item
    name: str
    sampling: Sampling
    version: int
    """Of the weights that the engines have."""


class AvailableEngines(NamedTuple):
    """Which engines may be asked from now on."""

    urls: tuple[str, ...]


class WorkerMessage(NamedTuple):
    """What a runner says."""

    kind: str
    """``ready``, ``said``, ``done``, ``broke`` (a bug), ``failed`` (it cannot begin) or ``gone``:
    the address of an engine that does not answer."""
    id: int = 0
    data: bytes = b""
    """A trajectory as JSON; else text."""
    paths: tuple[int, ...] = ()
    """Hashes of the ids that went through engines since it was last said."""


def heard(connection: Connection) -> WorkerMessage:
    """What a runner says next. Raises EOFError where it has ended, MsgspecError for anything
    else."""
    return msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerMessage)


def _say(connection: Connection, told: WorkerMessage) -> None:
    connection.send_bytes(msgspec.msgpack.encode(told))


def main() -> None:
    """Be a runner until the run ends."""
    host, _, port = os.environ[AT].rpartition(":")
    connection = Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(KEY)))
    connection.send(int(os.environ[NUMBER]))
    spec: RolloutWorkerSpec = connection.recv()
    try:
        asyncio.run(_RolloutWorker(connection, spec).serve())
    except RamifyError as error:
        _say(connection, WorkerMessage("failed", data=str(error).encode()))
    except EOFError:
        pass
    sys.stdout.flush()
    os._exit(0)


class _RolloutWorker:
    def __init__(self, connection: Connection, spec: RolloutWorkerSpec) -> None:
        self._connection, self._spec = connection, spec
        self._sending = threading.Lock()
        self._rolling: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Roll out what is asked until nothing more will be. Raises RamifyError where that cannot
        begin."""
        from ramify.tasks.base import task_of

        spec = self._spec
        self._task = task_of(spec.task, **spec.options)  # before anything that takes seconds

        import torch

        from ramify.engine.rlm import RLM
        from ramify.engine.scaffold import scaffold_of
        from ramify.inference.http.http_engines import HttpEngines
        from ramify.models.load import load
        from ramify.train.selfcheck import AuditedClient

        torch.set_num_threads(1)
        policy = load(spec.checkpoint, getattr(torch, spec.dtype), "meta")
        self._engines = HttpEngines(policy, spec.inference, name=spec.name, say=self._say)
        await self._engines.start(
            Path(),
            lambda folder: None,
            gone=lambda url: self._tell(WorkerMessage("gone", data=url.encode())),
        )
        self._seen = AuditedClient(self._engines)
        self._rlm = RLM(
            self._seen,
            limits=spec.limits,
            scaffold=scaffold_of(spec.scaffold),
            sandbox=spec.sandbox,
        )
        try:
            async with self._rlm:
                await self._rlm.prepare()
                self._tell(WorkerMessage("ready"))
                await self._until_told()
        finally:
            for task in self._rolling.values():
                task.cancel()
            await self._engines.close()

    async def _until_told(self) -> None:
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[Any] = asyncio.Queue()

        def read() -> None:
            word: Any = None
            with contextlib.suppress(EOFError, OSError):
                while (word := self._connection.recv()) is not None:
                    loop.call_soon_threadsafe(asked.put_nowait, word)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(asked.put_nowait, None)

        threading.Thread(target=read, daemon=True, name="ramify runner").start()
        while (word := await asked.get()) is not None:
            if isinstance(word, RolloutRequest):
                self._rolling[word.id] = asyncio.create_task(self._roll(word))
            elif isinstance(word, AvailableEngines):
                self._engines.listed(word.urls)
            elif task := self._rolling.get(word):  # the id of one that is wanted no more
                task.cancel()

    async def _roll(self, ask: RolloutRequest) -> None:
        from ramify.evaluate.attempt import attempt

        self._engines.follow(ask.version)
        try:
            trajectory = await attempt(
                self._rlm,
                self._task,
                ask.item,
                name=ask.name,
                sampling=ask.sampling,
                metadata={"rollout": ask.name},
                grace_s=self._spec.grace_s,
                on_stall=self._say,
                direct=self._spec.direct,
            )
            self._tell(
                WorkerMessage("done", ask.id, msgspec.json.encode(trajectory), self._seen.take())
            )
        except Exception as error:  # noqa: BLE001 -- raised by the run
            self._tell(
                WorkerMessage("broke", ask.id, f"{error!r}\n{traceback.format_exc()}".encode())
            )
        finally:
            self._rolling.pop(ask.id, None)

    def _say(self, text: str) -> None:
        self._tell(WorkerMessage("said", data=text.encode()))

    def _tell(self, told: WorkerMessage) -> None:
        with self._sending, contextlib.suppress(OSError):
            _say(self._connection, told)


if __name__ == "__main__":
    from ramify.train.placement.rollout_worker import (
        main as begin,
    )  # what is pickled is of the module, not of __main__

    begin()

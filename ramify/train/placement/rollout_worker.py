"""Run a rollout worker, a process that samples rollouts with its own sandboxes and engine
connections.

It also scores them, unless the task scores whole steps. In that case the run's own process scores
them.

    run ── RolloutRequest: item, name, seed, version ──> worker: ``evaluate.attempt`` ──> engines
        <── trajectory (in its stored form), and hashes of the ids that engines received ──

The run starts the worker (``rollout_workers.py``), and the worker connects back with the ticket
that it was given. The worker decides nothing: a rollout depends only on the request, not on where
it runs. It creates the task itself, from the task's name and options. Since code written by a model
may have run in the worker, the run decodes its replies strictly as the expected types.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from ramify.actors.connect_back import connect_back, start_heartbeat_thread
from ramify.actors.run_channel import AuthenticatedChannel
from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.errors import ConfigError, RamifyError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.log_handlers import ForwardedLogRecord, ForwardingLogHandler
from ramify.logging import attach_handler
from ramify.sandbox.base import AnySandboxSpec, SharedContextValue, provider_spec
from ramify.sandbox.guest.message_frames import pack_value, unpack_value
from ramify.sandbox.guest.value_encoding import ValueEncodingError
from ramify.tasks.base import Item, task_of
from ramify.tasks.batch_scoring import is_batch_scored
from ramify.train.branch_sampler import BranchOptions, branch_sampling_arguments
from ramify.train.call_depth_models import DepthSpec, FrozenModelBudget, ModelsByCallDepth
from ramify.types.message import Message


class RolloutWorkerSpec(msgspec.Struct, frozen=True, tag=True):
    """The part of a run's configuration that is sent to a rollout worker.

    It is the first message to the worker.
    """

    name: str
    task: str
    options: dict[str, Any]
    """Options of the task."""
    scaffold: str
    limits: Limits
    sandbox: AnySandboxSpec
    inference: InferenceSpec
    """Options of inference, with the addresses of the running engines."""
    checkpoint: str
    """Folder with the policy's configuration and tokenizer. Its weights are not read."""
    dtype: str
    """Data type of the engines' weights."""
    grace_s: float
    direct: bool = False
    """True if a single plain call may answer an item with a short context."""
    thinking: bool | None = None
    """See ``PolicySpec.thinking``."""
    depths: tuple[DepthSpec, ...] = ()
    """The model of the calls at each depth, as in ``Run.depths``. Empty: the policy answers at all
    depths.
    """
    variables: tuple[str, ...] = ()
    """Environment variables that hold the addresses of services."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "sandbox", provider_spec(self.sandbox))


class SerializedTaskItem(msgspec.Struct, frozen=True):
    """A task item serialized for a rollout worker.

    Its values are encoded like those of a session's variables, so that their types are kept.
    """

    question: str
    kind: str
    id: str
    values: bytes
    """Context, right answers, metadata and messages."""

    @classmethod
    def from_item(cls, item: Item) -> SerializedTaskItem:
        """Encode a task item for sending it to a rollout worker.

        Raises ConfigError if it has a value that cannot be sent to a session either.
        """
        values = {name: getattr(item, name) for name in _VALUES}
        if isinstance(item.context, SharedContextValue):
            values["context"] = item.context.value
        values["metadata"] = dict(item.metadata)
        values["messages"] = msgspec.to_builtins(item.messages)
        try:
            parts, _ = pack_value(values)
        except ValueEncodingError as error:
            raise ConfigError(
                f"the item {item.id or item.question[:40]!r} cannot be sent to a rollout worker: "
                f"{error}"
            ) from None
        return cls(item.question, item.kind, item.id, b"".join(parts))

    def to_item(self) -> Item:
        values, _ = unpack_value(self.values)
        values["messages"] = msgspec.convert(values["messages"], tuple[Message, ...])
        return Item(self.question, kind=self.kind, id=self.id, **values)


_VALUES = ("context", "gold", "right", "wrong", "metadata")


class RolloutRequest(msgspec.Struct, frozen=True, tag=True):
    """A message that asks a worker to sample one rollout."""

    id: int
    item: SerializedTaskItem
    name: str
    sampling: Sampling
    version: int
    """Version of the weights that the engines have."""
    branch: BranchOptions | None = None
    """Where the rollout forks. None: it does not fork."""


class AvailableEnginesMessage(msgspec.Struct, frozen=True, tag="AvailableEngines"):
    """A message with the list of engines that a worker may call from now on."""

    urls: tuple[str, ...]


class CancelRolloutMessage(msgspec.Struct, frozen=True, tag="CancelRollout"):
    """A message that cancels a requested rollout whose result is no longer needed."""

    id: int


class EndWorkerMessage(msgspec.Struct, frozen=True, tag="EndWorker"):
    """The last message to a worker, which then exits."""


RunMessage = (
    RolloutWorkerSpec
    | RolloutRequest
    | AvailableEnginesMessage
    | CancelRolloutMessage
    | EndWorkerMessage
)


class RolloutWorkerMessage(msgspec.Struct, frozen=True):
    """A message from a rollout worker to the run, such as a finished rollout, a log record or a
    heartbeat."""

    kind: str
    """``ready``, ``said`` (a ``ForwardedLogRecord``), ``done``, ``broke`` (a bug), ``failed`` (the
    worker cannot start), ``gone`` (with the address of an engine that does not answer) or
    ``beat``."""
    id: int = 0
    data: bytes = b""
    """A trajectory or a record as JSON for ``done`` and ``said``, otherwise text."""
    paths: tuple[int, ...] = ()
    """Hashes of the token sequences that passed through engines since the last message with
    hashes.
    """


def main() -> None:
    """Run this process as a rollout worker until the run ends."""
    channel = connect_back()
    spec: RolloutWorkerSpec = channel.receive(RolloutWorkerSpec)
    try:
        asyncio.run(_RolloutWorker(channel, spec).serve())
    except RamifyError as error:
        channel.send(RolloutWorkerMessage("failed", data=str(error).encode()))
    except EOFError:
        pass
    sys.stdout.flush()
    os._exit(0)


class _RolloutWorker:
    def __init__(self, channel: AuthenticatedChannel, spec: RolloutWorkerSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._is_ended = threading.Event()
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        attach_handler(ForwardingLogHandler(self._forward))

    async def serve(self) -> None:
        """Sample rollouts on request until the run ends.

        Raises RamifyError if the worker cannot start.
        """
        spec = self._spec
        # Fails fast if the task is unknown, before imports that take seconds.
        self._task = task_of(spec.task, **spec.options)

        import torch

        from ramify.engine.prompt_scaffold import scaffold_of
        from ramify.engine.rlm import RLM
        from ramify.inference.http.http_engines import HttpEngineClient
        from ramify.models.load import load_policy
        from ramify.train.engine_consistency_checks import TokenIdHashingClient

        torch.set_num_threads(1)
        policy = load_policy(
            spec.checkpoint, getattr(torch, spec.dtype), "meta", thinking=spec.thinking
        )
        self._engines = HttpEngineClient(policy, spec.inference, name=spec.name)
        await self._engines.start(
            Path(),
            lambda folder: None,
            gone=lambda url: self._send(RolloutWorkerMessage("gone", data=url.encode())),
        )
        self._client = TokenIdHashingClient(self._engines)
        self._rlm = RLM(
            ModelsByCallDepth(spec.depths, FrozenModelBudget(), self._client).clients,
            limits=spec.limits,
            scaffold=scaffold_of(spec.scaffold),
            sandbox=spec.sandbox,
            depths=[each.options() for each in spec.depths],
        )
        try:
            async with self._rlm:
                await self._rlm.prepare()
                start_heartbeat_thread(
                    lambda: self._send(RolloutWorkerMessage("beat")), self._is_ended
                )
                self._send(RolloutWorkerMessage("ready"))
                await self._until_closed()
        finally:
            self._is_ended.set()
            for task in self._rollouts.values():
                task.cancel()
            await self._engines.close()

    async def _until_closed(self) -> None:
        loop = asyncio.get_running_loop()
        requests: asyncio.Queue[RunMessage] = asyncio.Queue()

        def read() -> None:
            request: RunMessage = EndWorkerMessage()
            with contextlib.suppress(EOFError, OSError):
                while not isinstance(
                    request := self._channel.receive(RunMessage), EndWorkerMessage
                ):
                    loop.call_soon_threadsafe(requests.put_nowait, request)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(requests.put_nowait, EndWorkerMessage())

        threading.Thread(target=read, daemon=True, name="ramify rollout worker").start()
        while not isinstance(request := await requests.get(), EndWorkerMessage):
            match request:
                case RolloutRequest():
                    self._rollouts[request.id] = asyncio.create_task(self._run_rollout(request))
                case AvailableEnginesMessage():
                    self._engines.set_usable_urls(request.urls)
                case CancelRolloutMessage():
                    if task := self._rollouts.get(request.id):
                        task.cancel()

    async def _run_rollout(self, request: RolloutRequest) -> None:
        from ramify.evaluate.attempt import attempt

        self._engines.record_external_update(request.version)
        item = request.item.to_item()
        try:
            trajectory = await attempt(
                self._rlm,
                self._task,
                item,
                name=request.name,
                sampling=request.sampling,
                metadata={"rollout": request.name},
                grace_s=self._spec.grace_s,
                direct=self._spec.direct,
                is_scored=not is_batch_scored(self._task, item),
                **branch_sampling_arguments(request.branch, self._rlm.limits),
            )
            self._send(
                RolloutWorkerMessage(
                    "done", request.id, msgspec.json.encode(trajectory), self._client.take_hashes()
                )
            )
        except Exception as error:  # noqa: BLE001 -- the run raises it
            self._send(
                RolloutWorkerMessage(
                    "broke", request.id, f"{error!r}\n{traceback.format_exc()}".encode()
                )
            )
        finally:
            self._rollouts.pop(request.id, None)

    def _forward(self, record: ForwardedLogRecord) -> None:
        self._send(RolloutWorkerMessage("said", data=msgspec.json.encode(record)))

    def _send(self, message: RolloutWorkerMessage) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(message)


if __name__ == "__main__":
    main()

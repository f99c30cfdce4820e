"""Key-value store through which the processes of a group exchange their addresses. It has torch's
interface and uses authenticated channels.

    rank 0           HashStore <── KeyValueStoreServer, one thread per channel <──┐
    rank 1, 2, …     ChannelStore ── SetKeyRequest, WaitForKeysRequest, … ────────┘

torch's own stores accept every process that connects (``TCPStore``), or need a shared folder
(``FileStore``). A process that writes to a group's store decides to which addresses its ranks
connect, so it must have the run's key. Not here: the connections themselves, which gloo or NCCL
open (see ``group_proof.py``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch import distributed as dist

from ramify.actors.run_channel import Channel
from ramify.errors import TrainError

_POLL_S = 0.2


class SetKeyRequest(msgspec.Struct, tag=True, frozen=True):
    key: str
    value: bytes


class GetKeyRequest(msgspec.Struct, tag=True, frozen=True):
    """Request for the value of a key that exists."""

    key: str


class WaitForKeysRequest(msgspec.Struct, tag=True, frozen=True):
    """Request to wait until all keys exist."""

    keys: list[str]
    timeout_s: float


class CheckKeysRequest(msgspec.Struct, tag=True, frozen=True):
    """Request that asks whether all keys exist."""

    keys: list[str]


class IncrementKeyRequest(msgspec.Struct, tag=True, frozen=True):
    """Request to add a number to the value of a key. A missing key counts as 0."""

    key: str
    amount: int


class CompareAndSetRequest(msgspec.Struct, tag=True, frozen=True):
    """Request to replace the value of a key if it equals the expected one."""

    key: str
    expected: bytes
    desired: bytes


class DeleteKeyRequest(msgspec.Struct, tag=True, frozen=True):
    key: str


StoreRequest = (
    SetKeyRequest
    | GetKeyRequest
    | WaitForKeysRequest
    | CheckKeysRequest
    | IncrementKeyRequest
    | CompareAndSetRequest
    | DeleteKeyRequest
)


class StoreReply(msgspec.Struct, frozen=True):
    """The answer to any request."""

    value: bytes = b""
    number: int = 0
    error: str = ""


class KeyValueStoreServer:
    """Holds the store in rank 0, and answers the requests of the other ranks."""

    def __init__(
        self, channels: Sequence[Channel], look: Callable[[], None] = lambda: None
    ) -> None:
        """``look`` is called while a rank waits for keys. It should raise TrainError if another
        rank has ended; the wait then fails with that error."""
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._look = look
        ours, theirs = (Channel(each) for each in socket.socketpair())
        self.store = ChannelStore(ours)
        """Rank 0's own client of the store."""
        self._channels = [ours, *channels]
        for channel in (theirs, *channels):
            threading.Thread(
                target=self._serve, args=(channel,), daemon=True, name="ramify store"
            ).start()

    def close(self) -> None:
        """End the channels. Idempotent."""
        for channel in self._channels:
            channel.shut()
        self._channels[0].close()

    def _serve(self, channel: Channel) -> None:
        with channel:
            try:
                while True:
                    request: StoreRequest = channel.receive(StoreRequest)
                    channel.send(self._answered(request, channel))
            except (EOFError, OSError, msgspec.MsgspecError):
                return

    def _answered(self, request: StoreRequest, channel: Channel) -> StoreReply:
        store: Any = self._store
        try:
            match request:
                case SetKeyRequest():
                    store.set(request.key, request.value)
                case GetKeyRequest():
                    return StoreReply(value=bytes(store.get(request.key)))
                case WaitForKeysRequest():
                    return self._awaited(request, channel)
                case CheckKeysRequest():
                    return StoreReply(number=int(store.check(request.keys)))
                case IncrementKeyRequest():
                    return StoreReply(number=store.add(request.key, request.amount))
                case CompareAndSetRequest():
                    value = store.compare_set(request.key, request.expected, request.desired)
                    return StoreReply(value=bytes(value))
                case DeleteKeyRequest():
                    return StoreReply(number=int(store.delete_key(request.key)))
        except (RuntimeError, dist.DistError) as error:
            return StoreReply(error=str(error).partition("\n")[0])
        return StoreReply()

    def _awaited(self, request: WaitForKeysRequest, channel: Channel) -> StoreReply:
        """Wait for the keys, in short steps, so that the thread ends soon after its rank."""
        until = time.monotonic() + request.timeout_s
        while not channel.is_ended:
            left_s = until - time.monotonic()
            try:
                self._look()
                self._store.wait(request.keys, timedelta(seconds=max(0.001, min(_POLL_S, left_s))))
                return StoreReply()
            except TrainError as error:
                return StoreReply(error=str(error))
            except (RuntimeError, dist.DistError):
                if left_s <= _POLL_S:
                    break
        return StoreReply(error=f"timed out after {request.timeout_s:g} s: {request.keys}")


class ChannelStore(dist.Store):  # type: ignore[name-defined, misc]
    """torch.distributed store of a rank other than 0. It is a client of the key-value store that
    rank 0 hosts. torch may call its methods from any thread, and the caller must keep it alive as
    long as torch uses it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._asking = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        self._ask(SetKeyRequest(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(GetKeyRequest(key)).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        self._ask(WaitForKeysRequest(list(keys), seconds))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(CheckKeysRequest(list(keys))).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask(IncrementKeyRequest(key, amount)).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(CompareAndSetRequest(key, _bytes(expected), _bytes(desired))).value

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(DeleteKeyRequest(key)).number)

    deleteKey = delete_key
    """torch's own threads call ``delete_key`` by this name."""

    def clone(self) -> ChannelStore:
        return self

    def _ask(self, request: StoreRequest) -> StoreReply:
        try:
            with self._asking:
                self._channel.send(request)
                reply: StoreReply = self._channel.receive(StoreReply)
        except (EOFError, OSError):
            raise dist.DistNetworkError("rank 0, which has the store, is gone") from None
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

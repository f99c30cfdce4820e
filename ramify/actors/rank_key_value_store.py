"""Provide the key-value store in which the ranks of a process group exchange their addresses.

All requests travel over authenticated channels.

    rank 0           HashStore <── KeyValueStoreServer, one thread per channel <──┐
    rank 1, 2, …     KeyValueStoreClient ── KeyValueSetRequest, WaitForKeysRequest, … ────────┘

torch's own stores accept every process that connects (``TCPStore``), or need a shared folder
(``FileStore``). A process that writes to a group's store decides to which addresses its ranks
connect, so it must have the run's key. The connections between the ranks are opened by gloo or
NCCL, and authenticated by ``rank_group_authentication.py``.
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

from ramify.actors.run_channel import AuthenticatedChannel
from ramify.errors import TrainError

_POLL_S = 0.2


class KeyValueSetRequest(msgspec.Struct, tag="SetKeyRequest", frozen=True):
    key: str
    value: bytes


class KeyValueGetRequest(msgspec.Struct, tag="GetKeyRequest", frozen=True):
    """A request for the value of an existing key."""

    key: str


class WaitForKeysRequest(msgspec.Struct, tag=True, frozen=True):
    """A request to wait until all of the given keys exist in the store."""

    keys: list[str]
    timeout_s: float


class KeysExistRequest(msgspec.Struct, tag=True, frozen=True):
    """A request to check, without waiting, whether the store has all of the given keys."""

    keys: list[str]


class IncrementKeyRequest(msgspec.Struct, tag=True, frozen=True):
    """A request to add a number to the value of a key.

    A missing key counts as 0.
    """

    key: str
    amount: int


class CompareAndSetRequest(msgspec.Struct, tag=True, frozen=True):
    """A request to replace the value of a key if the current value equals the expected one."""

    key: str
    expected: bytes
    desired: bytes


class KeyValueDeleteRequest(msgspec.Struct, tag="DeleteKeyRequest", frozen=True):
    key: str


StoreRequest = (
    KeyValueSetRequest
    | KeyValueGetRequest
    | WaitForKeysRequest
    | KeysExistRequest
    | IncrementKeyRequest
    | CompareAndSetRequest
    | KeyValueDeleteRequest
)


class KeyValueStoreReply(msgspec.Struct, frozen=True):
    """The store's response to a request: a value, a number, or an error."""

    value: bytes = b""
    number: int = 0
    error: str = ""


class KeyValueStoreServer:
    """Holds a process group's key-value store on rank 0, and answers the other ranks' requests."""

    def __init__(
        self, channels: Sequence[AuthenticatedChannel], look: Callable[[], None] = lambda: None
    ) -> None:
        """Start a key-value store server that answers each connected rank in a separate thread.

        Each thread answers the requests of one rank.

        ``look`` is called while a rank waits for keys. It should raise TrainError if another rank
        has ended; the wait then fails with that error.
        """
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._look = look
        ours, theirs = (AuthenticatedChannel(each) for each in socket.socketpair())
        self.store = KeyValueStoreClient(ours)
        """Rank 0's own client of the store."""
        self._channels = [ours, *channels]
        for channel in (theirs, *channels):
            threading.Thread(
                target=self._serve, args=(channel,), daemon=True, name="ramify store"
            ).start()

    def close(self) -> None:
        """Close the channels to all ranks.

        Calling this again has no effect.
        """
        for channel in self._channels:
            channel.shutdown()
        self._channels[0].close()

    def _serve(self, channel: AuthenticatedChannel) -> None:
        with channel:
            try:
                while True:
                    request: StoreRequest = channel.receive(StoreRequest)
                    channel.send(self._answer_request(request, channel))
            except (EOFError, OSError, msgspec.MsgspecError):
                return

    def _answer_request(
        self, request: StoreRequest, channel: AuthenticatedChannel
    ) -> KeyValueStoreReply:
        store: Any = self._store
        try:
            match request:
                case KeyValueSetRequest():
                    store.set(request.key, request.value)
                case KeyValueGetRequest():
                    return KeyValueStoreReply(value=bytes(store.get(request.key)))
                case WaitForKeysRequest():
                    return self._await_keys(request, channel)
                case KeysExistRequest():
                    return KeyValueStoreReply(number=int(store.check(request.keys)))
                case IncrementKeyRequest():
                    return KeyValueStoreReply(number=store.add(request.key, request.amount))
                case CompareAndSetRequest():
                    value = store.compare_set(request.key, request.expected, request.desired)
                    return KeyValueStoreReply(value=bytes(value))
                case KeyValueDeleteRequest():
                    return KeyValueStoreReply(number=int(store.delete_key(request.key)))
        except (RuntimeError, dist.DistError) as error:
            return KeyValueStoreReply(error=str(error).partition("\n")[0])
        return KeyValueStoreReply()

    def _await_keys(
        self, request: WaitForKeysRequest, channel: AuthenticatedChannel
    ) -> KeyValueStoreReply:
        """Wait until the requested keys exist or the timeout expires.

        The wait is split into short intervals, so that this thread ends soon after the requesting
        rank ends.
        """
        until = time.monotonic() + request.timeout_s
        while not channel.is_ended:
            left_s = until - time.monotonic()
            try:
                self._look()
                self._store.wait(request.keys, timedelta(seconds=max(0.001, min(_POLL_S, left_s))))
                return KeyValueStoreReply()
            except TrainError as error:
                return KeyValueStoreReply(error=str(error))
            except (RuntimeError, dist.DistError):
                if left_s <= _POLL_S:
                    break
        return KeyValueStoreReply(error=f"timed out after {request.timeout_s:g} s: {request.keys}")


class KeyValueStoreClient(dist.Store):  # type: ignore[name-defined, misc]
    """A torch.distributed store for all ranks except rank 0.

    It forwards each request to the key-value store that rank 0 hosts.

    torch may call the methods from any thread, and the caller must keep the store alive as long as
    torch uses it.
    """

    def __init__(self, channel: AuthenticatedChannel) -> None:
        super().__init__()
        self._channel = channel
        self._asking = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        self._ask(KeyValueSetRequest(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(KeyValueGetRequest(key)).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        self._ask(WaitForKeysRequest(list(keys), seconds))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(KeysExistRequest(list(keys))).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask(IncrementKeyRequest(key, amount)).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(CompareAndSetRequest(key, _bytes(expected), _bytes(desired))).value

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(KeyValueDeleteRequest(key)).number)

    deleteKey = delete_key
    """Alias of ``delete_key``, because torch's own threads call the method by this name."""

    def clone(self) -> KeyValueStoreClient:
        return self

    def _ask(self, request: StoreRequest) -> KeyValueStoreReply:
        try:
            with self._asking:
                self._channel.send(request)
                reply: KeyValueStoreReply = self._channel.receive(KeyValueStoreReply)
        except (EOFError, OSError):
            raise dist.DistNetworkError(
                "the connection to rank 0, which hosts the rendezvous store, was lost: see its "
                "output"
            ) from None
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

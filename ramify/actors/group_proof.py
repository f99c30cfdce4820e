"""The connections that gloo and NCCL open between the processes of a group.

gloo takes the first connection with the right number, which is small, for another rank: a stranger
who connects first would be sent gradients and weights, and could send others. It has no key and, as
it is built into torch, no TLS. So a group proves over its own connections, before it carries
anything else, that the process at the other end of each has the run's key:

    rank i ── nonce i ─────────────────────────────> rank j
           <─ nonce j, HMAC(key, j, i, nonce i) ────   both directions, every pair of the group

On one machine gloo's listeners are also bound to loopback. A stranger can thus make a start fail,
but can neither read nor change anything. Between machines the connections are neither encrypted nor
signed afterwards.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from ramify.errors import TrainError

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIZE = 32
_WAIT_S = 40.0
_SETTING = threading.RLock()


class GroupMembers:
    """Forms the groups of processes that have a common key."""

    def __init__(self, key: bytes, is_local: bool) -> None:
        """``is_local``: all of them are on this machine."""
        self._key = key
        self._is_local = is_local

    def formed(self, form: Callable[[], Any], *devices: str) -> Any:
        """The group of torch.distributed that ``form`` returns, once its members have proved the
        key over its connections for ``devices`` (``cpu``, ``cuda``)."""
        with on_loopback(self._is_local):
            group = form()
        for device in devices:
            self._prove(group, device)
        return group

    def formed_mesh(self, form: Callable[[], Any], device: str) -> Any:
        """The device mesh that ``form`` returns, once the same holds for the groups of its
        axes."""
        with on_loopback(self._is_local):
            mesh = form()
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                self._prove(mesh.get_group(axis), device)
        return mesh

    def _prove(self, group: Any, device: str) -> None:
        import torch

        prove_members(group._get_backend(torch.device(device)), self._key, device)


def prove_members(group: Any, key: bytes, device: Any = "cpu") -> None:
    """Check that every other process of ``group``, a backend's process group, has ``key``. Every
    process of the group calls it at the same time, before it uses the group. Raises TrainError."""
    rank, size = group.rank(), group.size()
    if size < 2:
        return
    ours = secrets.token_bytes(_SIZE)
    try:
        nonces = _exchanged(group, [ours] * size, device)
        proofs = _exchanged(
            group, [_proof(key, size, rank, j, nonces[j]) for j in range(size)], device
        )
    except RuntimeError as error:
        raise TrainError(
            f"a process of the group is lost, or a stranger took its place: {_first(error)}"
        ) from None
    for j in range(size):
        if j != rank and not hmac.compare_digest(proofs[j], _proof(key, size, j, rank, ours)):
            raise TrainError(
                f"the process in the place of rank {j} does not have this run's key: a stranger "
                "connected first, and nothing was sent to it; start again"
            )


@contextlib.contextmanager
def on_loopback(is_local: bool) -> Iterator[None]:
    """Bind the listeners that gloo opens in the block to loopback. By default they are bound to
    this host's name, which may be reachable from elsewhere, or not resolve. ``is_local``: all
    processes are on this machine; if not, nothing changes."""
    with _SETTING:
        if not is_local or _INTERFACE in os.environ or not sys.platform.startswith("linux"):
            yield
            return
        os.environ[_INTERFACE] = "lo"
        try:
            yield
        finally:
            del os.environ[_INTERFACE]


def _exchanged(group: Any, messages: list[bytes], device: Any) -> list[bytes]:
    """Message j goes to rank j; returns the messages of all ranks to this one."""
    import torch
    from torch import distributed as dist

    sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8).to(device)
    received = torch.empty_like(sent)
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=_WAIT_S)
    group.alltoall_base(received, sent, [], [], options).wait()
    data = received.cpu().numpy().tobytes()
    return [data[at : at + _SIZE] for at in range(0, len(data), _SIZE)]


def _proof(key: bytes, size: int, prover: int, verifier: int, nonce: bytes) -> bytes:
    text = b"ramify group %d %d %d " % (size, prover, verifier)
    return hmac.digest(key, text + nonce, "sha256")


def _first(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] ", "", text)[:200]  # without torch's place in its source

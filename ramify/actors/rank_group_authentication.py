"""Authenticate the gloo and NCCL connections between the processes of a group.

gloo identifies a rank by a small number that any process can send. A stranger who connects first
with that number would receive gradients and weights, and could send false ones. gloo checks no key,
and torch builds it without TLS. So before a group's connections carry anything else, every process
proves over them that it has the run's key:

    rank i ── nonce i ─────────────────────────────> rank j
           <─ nonce j, HMAC(key, j, i, nonce i) ────   both directions, every pair of the group

On one machine gloo's listeners are also bound to loopback. So a stranger can make a start fail, but
cannot read or change anything. Between machines, the data that follows is neither encrypted nor
signed.
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
# A stranger in a rank's place stalls a start for this long, not for the group's own timeout.
_WAIT_S = 40.0
_SETTING = threading.RLock()


class AuthenticatedGroupFactory:
    """Creates torch.distributed groups, and checks that every member has the run's secret key."""

    def __init__(self, key: bytes, is_local: bool) -> None:
        """Create a factory for groups whose members must have ``key``.

        ``is_local`` is True if all members run on this machine.
        """
        self._key = key
        self._is_local = is_local

    def create_group(self, form: Callable[[], Any], *devices: str) -> Any:
        """Create a process group by calling ``form``, and verify that every member has the run's
        key.

        The members exchange this proof over the group's own connections, separately for each of the
        ``devices`` (``cpu``, ``cuda``).
        """
        with gloo_on_loopback(self._is_local):
            group = form()
        for device in devices:
            self._prove(group, device)
        return group

    def create_mesh(self, form: Callable[[], Any], device: str) -> Any:
        """Create a device mesh by calling ``form``, and verify that every member has the run's key.

        The proof is repeated within the group of each mesh axis.
        """
        with gloo_on_loopback(self._is_local):
            mesh = form()
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                self._prove(mesh.get_group(axis), device)
        return mesh

    def _prove(self, group: Any, device: str) -> None:
        import torch

        verify_members(group._get_backend(torch.device(device)), self._key, device)


def verify_members(group: Any, key: bytes, device: Any = "cpu") -> None:
    """Check that every other member of a process group has the run's key.

    All members must call this together before they use the group. Raises TrainError if a member has
    another key or is lost.
    """
    rank, size = group.rank(), group.size()
    if size < 2:
        return
    ours = secrets.token_bytes(_SIZE)
    try:
        nonces = _exchange_messages(group, [ours] * size, device)
        proofs = _exchange_messages(
            group, [_proof(key, size, rank, j, nonces[j]) for j in range(size)], device
        )
    except RuntimeError as error:
        raise TrainError(
            "a process of this run was lost, or another program answers at its address: "
            f"{_first_error_line(error)}; start the run again"
        ) from None
    for j in range(size):
        if j != rank and not hmac.compare_digest(proofs[j], _proof(key, size, j, rank, ours)):
            raise TrainError(
                f"another program connected as rank {j} without this run's key; nothing was sent "
                "to it; start the run again"
            )


@contextlib.contextmanager
def gloo_on_loopback(is_local: bool) -> Iterator[None]:
    """Make gloo listen on loopback during a ``with`` block if all processes are on this machine.

    By default gloo listens on the host's name, which may not resolve, or may be reachable from
    other machines.
    """
    # The environment belongs to the whole process, so only one thread may change it at a time.
    with _SETTING:
        if not is_local or _INTERFACE in os.environ or not sys.platform.startswith("linux"):
            yield
            return
        os.environ[_INTERFACE] = "lo"
        try:
            yield
        finally:
            del os.environ[_INTERFACE]


def _exchange_messages(group: Any, messages: list[bytes], device: Any) -> list[bytes]:
    """Send message j to rank j of a group, and return the messages received from the ranks."""
    import torch
    from torch import distributed as dist

    sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8).to(device)
    received = torch.empty_like(sent)
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=_WAIT_S)
    # On the backend itself, because torch.distributed does not know the group of a weight sync.
    group.alltoall_base(received, sent, [], [], options).wait()
    data = received.cpu().numpy().tobytes()
    return [data[at : at + _SIZE] for at in range(0, len(data), _SIZE)]


def _proof(key: bytes, size: int, prover: int, verifier: int, nonce: bytes) -> bytes:
    # The proof names both ranks, so it cannot be replayed for another rank or direction.
    text = b"ramify group %d %d %d " % (size, prover, verifier)
    return hmac.digest(key, text + nonce, "sha256")


def _first_error_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] ", "", text)[:200]  # without the position in torch's source

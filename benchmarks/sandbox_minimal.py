"""The smallest confined loop: what a session costs without the guest, the protocol and the event
loop.

A server builds the walls of the product and forks. Each child enters them, then reads code as JSON
and runs it. The host waits for each answer with blocking calls. Nothing can be called, printed,
interrupted or forked, so this is a lower bound and no alternative.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<I")


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    text = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([_HEAD.pack(len(text)) + text], rights)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    data, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(16))
    if not data:
        raise EOFError
    while len(data) < 4 + _HEAD.unpack_from(data)[0]:
        data += sock.recv(1 << 16)
    fds = [fd for _, _, packed in ancillary for fd in array.array("i", packed)]
    return json.loads(data[4:]), fds


# --- the server, in its own process: standard library and the jail's own walls -----------------------


def main(control_fd: int) -> None:
    walls: Any = sys.modules["ramify_jail_walls"]
    forkserver: Any = sys.modules["ramify_server_forkserver"]
    control = socket.socket(fileno=control_fd)
    config, _ = receive(control)
    built = walls.isolate_zygote(
        config, control.close, lambda more: forkserver.preload([], forkserver.PRELOAD)
    )
    forkserver.prepare_first_fork(built.proc if built.proc >= 0 else None)
    send(control, built.tier)
    while True:
        try:
            _, (wire,) = receive(control)
        except EOFError:
            os._exit(0)
        prepared = built.confinement.prepare_session()
        pid = os.fork()
        if not pid:
            _child(built.confinement, prepared, wire, control)
        prepared.close_rules_descriptor()
        prepared.drop_scratch()
        os.close(wire)
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass


def _child(confinement: Any, prepared: Any, wire: int, control: socket.socket) -> None:
    confinement.set_up_session_process(prepared)
    sock = socket.socket(fileno=os.dup2(wire, 3, inheritable=False))
    os.closerange(4, 1 << 20)
    confinement.apply_resource_limits()
    confinement.finish(3)
    names: dict[str, Any] = {}
    while True:
        try:
            message, _ = receive(sock)
        except EOFError:
            os._exit(0)
        exec(compile(message["code"], "<cell>", "exec"), names)
        send(sock, {"op": "done", "id": message["id"], "value": None, "error": None})


# --- the host ---------------------------------------------------------------------------------------


class MinimalServer:
    """The host's end of the server."""

    def __init__(self) -> None:
        import subprocess

        from ramify.sandbox.host.forkserver_process import ENVIRONMENT, JAIL_MODULES
        from ramify.sandbox.host.guest_module_files import FOLDER, LOADER
        from ramify.sandbox.providers.jail import EMPTY

        ours, theirs = socket.socketpair()
        boot = f"{LOADER}\nimport runpy\nload(sys.argv[1], sys.argv[3:-1])\n"
        boot += "runpy.run_path(sys.argv[2])['main'](int(sys.argv[-1]))"
        here = str(Path(__file__).resolve())
        with theirs:
            command = [sys.executable, "-s", "-S", "-P", "-c", boot, FOLDER, here, *JAIL_MODULES]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        send(ours, EMPTY)
        self.tier, _ = receive(ours)

    def open(self) -> MinimalSession:
        ours, theirs = socket.socketpair()
        with theirs:
            send(self._control, {"op": "open"}, (theirs.fileno(),))
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
        listener = array.array("i", ancillary[0][2])[0]
        return MinimalSession(ours, listener)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class MinimalSession:
    def __init__(self, sock: socket.socket, listener: int) -> None:
        self._sock = sock
        self._listener = listener

    def run(self, code: str) -> None:
        send(self._sock, {"op": "run", "id": 1, "code": code})
        receive(self._sock)

    def close(self) -> None:
        self._sock.close()
        os.close(self._listener)

"""Processes of another user beside the parts of a training run: what reaches our stores, channels
and rendezvous, which keys are learned, and which starts are delayed.

    ranks        FsdpRanks with 2 and 4 ranks: start, one step, gather
    gloo sync    a weight sync from a trainer to an engine's receiver
    channels     started processes that connect back, over the Unix socket and over TCP
    engine       `ramify serve-policy --weight-transfer`
    Ray          a cluster that a run starts

The strangers (``edges_stranger.py``) attack every socket that appears. Their user is another one, so
this needs root, or the figures are empty and say so. Everything runs in a network namespace of its
own: the strangers must not reach other programs of the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure

STRANGER = Path(__file__).with_name("edges_stranger.py")
NOBODY = 65534
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
WAS_HERE = Path("/tmp/ramify-stranger-was-here")
"""The strangers' pickles make this file if anything unpickles them."""
LONGEST_HANDSHAKE = 1024
"""Bytes that a connection may bring a stranger before it counts as a leak: nonces, refusals."""
CHILD = """
import time
from ramify.actors.connect_back import read_ticket
from ramify.actors.run_channel import connect
ticket = read_ticket()
began = time.monotonic()
channel = connect(ticket.address, ticket.key, ticket.name)
channel.send(time.monotonic() - began)
channel.receive(str)
"""


def measure(quick: bool) -> list[Figure]:
    python = strangers_python()
    if os.getuid() != 0 or python is None:
        return _without("another user needs root and a Python that it can run")
    command = ["unshare", "--net", sys.executable, __file__, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return _without(f"no network namespace, or a failure: {error}")
    return [Figure(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def _without(why: str) -> list[Figure]:
    return [Figure("strangers beside a run", None, "", {"not measured": why})]


def _set_loopback_up() -> None:
    """As ``ip link set lo up``."""
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _measured(python: str, quick: bool) -> Iterator[Figure]:
    WAS_HERE.unlink(missing_ok=True)
    accepted = learned = leaked = tried = 0
    ours: list[str] = []
    failed: list[str] = []
    parts: dict[str, Any] = {
        "2 ranks": lambda: ranks(2),
        "4 ranks": lambda: ranks(4),
        "gloo sync": gloo_sync,
        "engine": engine,
        "Ray": ray_cluster,
    }
    slowest, secrets, entered = channels(python, 3 if quick else 20)
    learned += secrets
    accepted += entered
    losses: dict[str, list[Any]] = {}
    received: dict[str, float | str] = {}
    for name, part in parts.items():
        calm = part()
        with strangers(python) as found:
            try:
                keys, result = part()
            except Exception as error:  # noqa: BLE001 (a figure)
                failed.append(f"{name}: {error}"[:120].replace("[", "("))
                keys, result = [], None
        losses[name] = [calm[1], result]
        tried += sum(found["ports"].values())
        learned += sum(key.hex() in text for key in keys for text in found["seen"])
        entered_here = [path for path in found["entered"] if "ramify" in path]
        ours += entered_here
        most = max(found["received"].values(), default=0)
        received[f"{name}: most bytes from one socket of a library"] = float(most)
        leaked += most > LONGEST_HANDSHAKE and name not in ("Ray", "engine")
    accepted += len(ours) + WAS_HERE.exists()
    about: dict[str, float | str] = {"connections tried": float(tried), **received}
    yield Figure("messages of strangers that our sockets accepted", accepted, "", about, 0)
    yield Figure("keys that strangers learned", learned, "", {}, 0)
    yield Figure("longest wait of a peer with the key, under attack", slowest, "s", {}, 1.0)
    changed = sum(after is not None and after != before for before, after in losses.values())
    yield Figure("results that strangers changed", changed, "", {}, 0)
    yield Figure("parts whose connections brought a stranger more than a nonce", leaked, "", {}, 0)
    why: dict[str, float | str] = {f"failure {i}": text for i, text in enumerate(failed)}
    yield Figure("starts that strangers made fail at a library's socket", len(failed), "", why)


# --- strangers


def strangers_python() -> str | None:
    """A Python that the other user can run."""
    name = "python{}.{}".format(*sys.version_info)
    for python in (
        f"/usr/bin/{name}",
        "/usr/bin/python3",
        "/usr/local/bin/python3",
        sys.executable,
    ):
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [python, "-I", "-S", "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/"
            )
            if done.returncode == 0:
                return python
    return None


@contextlib.contextmanager
def strangers(python: str, num: int = 2) -> Iterator[dict[str, Any]]:
    """Run strangers during the block; afterwards the dict holds what they got together."""
    found: dict[str, Any] = {"ports": {}, "received": {}, "entered": [], "seen": []}
    running = [
        subprocess.Popen(
            [python, "-I", "-S", "-c", STRANGER.read_text(), str(os.getuid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            text=True,
        )
        for _ in range(num)
    ]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    try:
        yield found
    finally:
        for each in running:
            out, _ = each.communicate()
            got = json.loads(out)
            for name in ("ports", "received"):
                for place, count in got[name].items():
                    found[name][place] = max(count, found[name].get(place, 0))
            found["entered"] += got["entered"]
            found["seen"] += got["seen"]


# --- parts of a run: each returns (its keys, its result)


def channels(python: str, rounds: int) -> tuple[float, int, int]:
    """(longest wait of a peer, keys learned, strangers accepted)"""
    from ramify.actors.child_process import ChildProcess, pythonpath_environment
    from ramify.actors.connect_back import ConnectBackListener

    slowest, keys, extra = 0.0, [], 0
    with strangers(python) as found:
        for number in range(rounds):
            for host in ("127.0.0.1", "127.0.0.2"):
                with ConnectBackListener(host) as listener:
                    keys.append(listener.key)
                    time.sleep(0.3)  # the strangers come first
                    names = [f"{number}-{index}" for index in range(3)]
                    children = [
                        ChildProcess(
                            [sys.executable, "-c", CHILD],
                            environment=pythonpath_environment(),
                            stdin=listener.create_ticket(name),
                        )
                        for name in names
                    ]
                    joined = [listener.accept(str, 60.0) for _ in names]
                    extra += len({name for _, name in joined} - set(names))
                    with contextlib.suppress(TimeoutError):
                        listener.accept(str, 0.2)
                        extra += 1
                    for channel, _ in joined:
                        with channel:
                            slowest = max(slowest, channel.receive(float))
                            channel.send("end")
                    for child in children:
                        child.wait(30.0)
    return slowest, sum(key.hex() in text for key in keys for text in found["seen"]), extra


def ranks(num: int) -> tuple[list[bytes], Any]:
    import scale_fsdp
    import torch

    from ramify.train.backends.fsdp import FsdpRanks

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        group = FsdpRanks(scale_fsdp.compute_spec(num, timeout_s=60), dumps=Path(folder))
        try:
            model = group.shard_model(scale_fsdp.DENSE, scale_fsdp.dense().model.state_dict())
            backend = model.create_backend(scale_fsdp.OPTIM)
            loss = backend.forward_backward(scale_fsdp.batches(300), scale_fsdp.LOSS)["loss"]
            backend.optim_step()
            return [], (loss, sum(float(each.double().sum()) for _, each in model.weights()))
        finally:
            group.close()


def gloo_sync() -> tuple[list[bytes], Any]:
    import base64

    import torch

    from ramify.actors.connect_back import WorkerConnectInfo
    from ramify.actors.message_encoding import decode
    from ramify.inference.weight_sync.base import to_lazy_weights
    from ramify.inference.weight_sync.broadcast import GlooWeightSync

    weights = [("w", torch.arange(100_000, dtype=torch.float32))]
    sync = GlooWeightSync(timeout_s=60)
    (info,) = sync.open(1)
    ticket: WorkerConnectInfo = decode(base64.b64decode(info["ticket"]), WorkerConnectInfo)
    total: list[float] = []
    chunks: list[dict[str, Any]] = []
    sent = threading.Event()

    def receive() -> None:
        receiver = GlooWeightSync.receiver(info)
        sent.wait(60)
        total.extend(float(piece.tensor.sum()) for piece in receiver.unpack_chunk(chunks[0]))
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        sync.join()
        for chunk in sync.chunks(to_lazy_weights(weights, torch.float32), 1, whole=True):
            chunks.append(chunk.info)
            sent.set()
            assert chunk.send is not None
            chunk.send()
    finally:
        sent.set()
        thread.join()
        sync.close()
    return [ticket.key], total


def engine() -> tuple[list[bytes], Any]:
    """A server that takes weights, started like an engine of a run."""
    from ramify.actors.launcher import LocalLauncher
    from ramify.inference.http.engine_process import EngineProcess
    from ramify.inference.http.inference_spec import InferenceSpec
    from ramify.trained_policy_settings import packaged_policy_folder

    key = os.urandom(16).hex()
    os.environ["RAMIFY_ENGINE_KEY"] = key
    launcher = LocalLauncher()
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            process = EngineProcess(
                launcher, InferenceSpec(), 0, packaged_policy_folder("tiny"), "float32", 1024, log
            )
            answers = _answered(process.url, key, process)
            process.close()
            return [key.encode()], answers
    finally:
        del os.environ["RAMIFY_ENGINE_KEY"]
        launcher.close()


def _answered(url: str, key: str, process: Any) -> Any:
    import urllib.request

    until = time.monotonic() + 120
    while time.monotonic() < until and process.ended is None:
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{url}/v1/models")
            request.add_header("Authorization", f"Bearer {key}")
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status
        time.sleep(0.2)
    raise RuntimeError(f"the engine did not answer: {process.exit_reason()}")


def ray_cluster() -> tuple[list[bytes], Any]:
    from ramify.actors.launcher import HardwareResources, NodeResourceSlot, RoleInstanceId
    from ramify.actors.ray_launcher import RayLauncher

    member = RoleInstanceId("trainer", 0)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    launcher = RayLauncher(
        [NodeResourceSlot("", 0, HardwareResources(cpus=1), (member,))], start_s=300.0
    )
    try:
        key = os.environ["RAY_AUTH_TOKEN"].encode()
        with tempfile.TemporaryDirectory() as folder:
            process = launcher.start(member, [sys.executable, "-c", ""], {}, Path(folder) / "log")
            while process.poll() is None:
                time.sleep(0.1)
        return [key], (launcher.address, launcher._own, process.poll())
    finally:
        launcher.close()


if __name__ == "__main__":
    _set_loopback_up()
    interpreter = strangers_python()
    assert interpreter is not None
    found = [each._asdict() for each in _measured(interpreter, "--quick" in sys.argv)]
    print(json.dumps(found))

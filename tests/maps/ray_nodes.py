"""Ray nodes of this machine in another process, for tests: Ray belongs to one process, and its
nodes have the environment of the process that starts them.

    with RayNodes(folder, {"OPENAI_BASE_URL": …}) as nodes:
        nodes.add()             a second node
        nodes.map(…)            ``ramify map … --placement ray`` on them, as another process
        nodes.remove()          SIGKILL for the node that was added last
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class RayNodes:
    """A cluster with one node, until further nodes are added."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # A short path, since Ray keeps sockets in it. Not /tmp/ray*, which another test checks.
        self._folder = tempfile.mkdtemp(prefix="m-", dir="/tmp")
        self.environ = {
            **os.environ,
            **environ,
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
        }
        # As ``patch_ray_loopback`` sets it, for the processes that join.
        self.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        self._stderr = open(f"{self._folder}/stderr", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.maps.ray_nodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env=self.environ,
        )
        self.address = self._read()
        self.environ["RAY_ADDRESS"] = self.address

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, Path(f"{self._folder}/stderr").read_text()[-3000:]
        return line

    def _tell(self, *words: Any) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._read()

    def add(self, **environ: str) -> None:
        """Add a node, whose processes have ``environ`` in addition."""
        self._tell("add", environ)

    def remove(self) -> None:
        """Kill the node that was added last."""
        self._tell("remove")

    def set_version(self, name: str, version: str) -> str:
        """Change what the cluster says of its versions. Returns what it said."""
        return self._tell("version", name, version)

    def workers(self, name: str = "ray::MapWorker") -> list[int]:
        """Return the pids of the processes of the cluster with this name."""
        mark, found = f"RAY_TMPDIR={self._folder}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_named = (path / "cmdline").read_bytes().startswith(name.encode())
                if is_named and mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return sorted(found)

    def map(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """Start ``ramify map WORDS… --placement ray``."""
        return subprocess.Popen(
            [sys.executable, "-m", "ramify", "map", *words, "--placement", "ray"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env={**self.environ, **environ},
        )

    def close(self) -> None:
        self._process.communicate(timeout=60)
        self._stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def set_version(address: str, name: str, version: str) -> str:
    """Change a version in the records of the cluster. Returns the one before."""
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    place = (b"CLUSTER_METADATA", b"cluster")
    found = json.loads(client.internal_kv_get(*place))
    data = json.dumps({**found, name: version}).encode()
    client.internal_kv_put(place[0], data, True, place[1])
    return str(found[name])


def started(start: Callable[[], Any]) -> Any:
    """Start a node, again if Ray gives up: it waits for 30 s, which a busy machine may need."""
    for _ in range(5):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def main() -> None:
    """Start a node, and follow what stdin says until it ends."""
    from ramify.actors.ray_cluster import patch_ray_loopback

    patch_ray_loopback()
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {
        "num_cpus": 1,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
        "node_ip_address": "127.0.0.1",
    }
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=node))
    print(cluster.address, flush=True)
    added: list[Any] = []
    for line in sys.stdin:
        answer = "done"
        match json.loads(line):
            case ["add", environ]:
                added.append(started(partial(cluster.add_node, **node, env_vars=environ)))
            case ["remove"]:
                cluster.remove_node(added.pop(), allow_graceful=False)
            case ["version", name, version]:
                answer = set_version(cluster.address, name, version)
        print(answer, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

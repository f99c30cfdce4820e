"""Files by URL: what a fetch costs beside urllib, what a second one sends, and what is refused.

    python benchmarks/inputs.py --part places

The server is a separate process on loopback. CPU time of this process and of the one that fetches
counts, because the time on a busy machine says nothing.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure

_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        kind, _, rest = self.path[1:].partition("/")
        size = int(rest.partition(".")[0]) if kind == "bytes" else 0
        is_known = self.headers.get("If-None-Match") == '"one"'
        to = "http:/" + self.path[len("/redirect"):]
        self.send_response(302 if kind == "redirect" else 304 if is_known else 200)
        self.send_header("ETag", '"one"')
        if kind == "redirect": self.send_header("Location", to)
        self.send_header("Content-Length", str(0 if is_known else size))
        self.end_headers()
        block = (b"x" * 99 + b"\\n") * 10000
        sent = size if is_known else 0
        while sent < size:
            part = block[: size - sent]
            self.wfile.write(part)
            sent += len(part)
        print(self.path, 0 if is_known else size, flush=True)

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
_INSIDE = (
    "http://127.0.0.1:{port}/bytes/9.txt",
    "http://localhost:{port}/bytes/9.txt",
    "http://[::ffff:127.0.0.1]:{port}/bytes/9.txt",
    "http://2130706433:{port}/bytes/9.txt",
    "http://0x7f.1:{port}/bytes/9.txt",
    "http://0.0.0.0:{port}/bytes/9.txt",
    "http://127.1:{port}/bytes/9.txt",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]:{port}/bytes/9.txt",
    "http://[64:ff9b::7f00:1]:{port}/bytes/9.txt",
)


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("RAMIFY_HOME")
        os.environ["RAMIFY_HOME"] = folder
        server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            yield from _figures(port, 50_000_000 if quick else 500_000_000, Path(folder))
        finally:
            server.kill()
            server.communicate()
            del os.environ["RAMIFY_HOME"]
            if before is not None:
                os.environ["RAMIFY_HOME"] = before


def _figures(port: int, num_bytes: int, folder: Path) -> Iterator[Figure]:
    from ramify.errors import SourceError
    from ramify.sources.load_sources import load
    from ramify.sources.loaded_sources import SourceCollector
    from ramify.sources.remote_files import fetch_files

    url = f"http://127.0.0.1:{port}/bytes/{num_bytes}.txt"

    def fetch() -> None:
        fetch_files([url], SourceCollector(1 << 40), is_alone=True, allow_private=True)

    def alone() -> None:
        with urllib.request.urlopen(url) as reply, (folder / "alone").open("wb") as out:
            while data := reply.read(1 << 20):
                out.write(data)

    fetch_files(  # imports, and the start of the process, whose time does not grow with the size
        [f"http://127.0.0.1:{port}/bytes/1.txt"],
        SourceCollector(1 << 40),
        is_alone=True,
        allow_private=True,
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours_s = _cpu_s(fetch)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    alone_s = _cpu_s(alone)
    megabytes = num_bytes // 1_000_000
    yield Figure(
        f"CPU time to fetch a file of {megabytes} MB",
        round(ours_s, 2),
        "s",
        {"urllib to a file": round(alone_s, 2)},
    )
    yield Figure(f"memory of the host while {megabytes} MB arrive", round(grown, 1), "MB", {}, 64.0)
    again_s = _cpu_s(fetch)
    yield Figure("CPU time of a second fetch, unchanged", round(again_s, 2), "s", {})
    refused = 0
    for inside in _INSIDE:
        try:
            load([inside.format(port=port)])
        except SourceError as error:
            refused += "an address inside" in str(error)
    yield Figure(
        "addresses inside, written in ten ways, that are refused",
        refused,
        "of 10",
        {},
        least=len(_INSIDE),
    )


def _cpu_s(work: Callable[[], None]) -> float:
    """CPU time of ``work`` in this process and those that it started and ended."""

    def used() -> float:
        own, ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime

    before = used()
    work()
    return used() - before

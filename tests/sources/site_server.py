"""A real HTTP server on loopback whose pages a test sets, and which records what it was asked."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Page = tuple[int, dict[str, str], bytes]
"""(status, headers, body)"""


class SiteServer:
    """Serves ``pages``, by path without parameters; a function gets the handler. ``asked`` has
    (method, path with parameters, headers) of each request."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, Page | Callable[[Any], Page]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                site.asked.append((self.command, self.path, headers))
                path = self.path.partition("?")[0]
                page = site.pages.get(path, site.pages.get("*", (404, {}, b"no such page")))
                status, headers, body = page(self) if callable(page) else page
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "content-length" not in {name.lower() for name in headers}:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port = self._server.server_port
        self.url = f"http{'s' if tls else ''}://localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def paths(self) -> list[str]:
        """The paths that were asked for since the last call."""
        paths = [path for _, path, _ in self.asked]
        self.asked.clear()
        return paths

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

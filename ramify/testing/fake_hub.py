"""A local imitation of the Hugging Face hub for tests.

It keeps repositories in memory, and serves them over the hub's HTTP API.

    with FakeHubServer(token="hf_x") as hub:
        os.environ["HF_ENDPOINT"] = hub.url          before huggingface_hub is imported
        …upload_folder…
        hub.repositories["me/mine"]["README.md"]     the bytes of a file

It creates repositories, takes commits with small files in the request and large ones through the
LFS protocol, and serves listings and files. It does not support revisions other than main,
deletion, and Xet: set HF_HUB_DISABLE_XET=1 as well.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LFS = (".safetensors", ".bin")


class FakeHubServer:
    """A local test server that imitates the Hugging Face hub while its ``with`` block runs.

    Example:
        with testing.FakeHubServer(token="hf_x") as hub:
            subprocess.run([…], env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x"})
    """

    def __init__(self, token: str = "") -> None:
        """Create a server with no repositories.

        Clients need ``token`` to write, unless it is empty.
        """
        self.token = token
        self.repositories: dict[str, dict[str, bytes]] = {}
        """Maps ``owner/name`` of each repository to its files: file name -> content."""
        self.private: set[str] = set()
        """Names of private repositories."""
        self.messages: list[str] = []
        """Summaries of the commits, in order."""
        self._objects: dict[str, bytes] = {}
        hub = self

        class Exchange(_HubExchange):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Base URL: ``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHubServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repository: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Apply a client's commit to a repository, and return the JSON response to send."""
        files = self.repositories[repository]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
        where = f"{self.url}/{repository}/commit/{_COMMIT}"
        return {"commitOid": _COMMIT, "commitUrl": where, "hookOutput": "", "success": True}

    def store(self, oid: str, content: bytes) -> bool:
        """Store an uploaded large file under its id, as Git LFS does.

        Returns False if the content does not match the checksum that is its id.
        """
        if hashlib.sha256(content).hexdigest() != oid:
            return False
        self._objects[oid] = content
        return True


class _HubExchange(BaseHTTPRequestHandler):
    """The handler of the requests on one connection to a ``FakeHubServer``."""

    server_hub: FakeHubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        """Do nothing, so that requests are not logged."""

    def do_POST(self) -> None:
        hub, path, body = self.server_hub, self._path(), self._body()
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        if path == "api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            hub.repositories.setdefault(name, {})
            if given.get("private") or given.get("visibility") == "private":
                hub.private.add(name)
            return self._answer(200, {"url": f"{hub.url}/{name}", "name": name})
        if path == "api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            return self._answer(200, self._batch(json.loads(body)))
        name = "/".join(path.split("/")[2:4])
        if name not in hub.repositories:
            return self._answer(404, {"error": "Repository not found"})
        if "/preupload/" in path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(_LFS) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for each in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        return self._answer(200, hub.commit(name, lines))

    def do_PUT(self) -> None:
        oid = self._path().rpartition("/")[2]
        is_kept = self.server_hub.store(oid, self._body())
        self._answer(200 if is_kept else 422, {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server_hub, self._path()
        if path == "api/whoami-v2":
            return self._answer(200, {"name": "me", "type": "user", "orgs": []})
        parts = path.split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        files = hub.repositories.get(name)
        if files is None:
            return self._answer(404, {"error": "Repository not found"})
        if parts[0] == "api" and "tree" in parts:
            listed = [
                {
                    "type": "file",
                    "path": each,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for each, data in files.items()
            ]
            return self._answer(200, json.dumps(listed).encode())
        if parts[0] == "api":
            siblings = [{"rfilename": each} for each in files]
            about = {"id": name, "sha": _COMMIT, "siblings": siblings, "private": False}
            return self._answer(200, {**about, "tags": [], "downloads": 0, "modelId": name})
        content = files.get("/".join(parts[4:]))
        if content is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT}
            return self._answer(404, {"error": "Entry not found"}, missing)
        etag = hashlib.sha256(content).hexdigest()
        return self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT})

    def _batch(self, given: dict[str, Any]) -> dict[str, Any]:
        hub = self.server_hub
        objects = [
            {**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}}
            for each in given["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(
        self, status: int, content: bytes | dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        given = {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

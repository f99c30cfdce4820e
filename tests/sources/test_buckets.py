"""Files in buckets, from small servers that speak the protocols of S3, Google and Azure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import LoadedContext, load
from tests.sources.site_server import Page, SiteServer

pytest.importorskip("pyarrow")
XML = {"Content-Type": "application/xml"}


class BucketServer(SiteServer):
    """Serves ``files`` of one bucket named ``box``. ``denied`` has keys that may not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.denied: set[str] = set()

    def under(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """(keys, common prefixes) of a listing"""
        keys = [key for key in sorted(self.files) if key.startswith(prefix)]
        if not delimiter:
            return keys, []
        deeper = {
            key[: key.index("/", len(prefix)) + 1] for key in keys if "/" in key[len(prefix) :]
        }
        return [key for key in keys if "/" not in key[len(prefix) :]], sorted(deeper)


class S3Server(BucketServer):
    def __init__(self) -> None:
        super().__init__()
        self.pages["*"] = self._answer

    def _answer(self, handler: Any) -> Page:
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket != "box":
            return 404, XML, b"<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>"
        if "list-type" in query:
            if "" in self.denied:
                return 403, XML, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
            keys, prefixes = self.under(query.get("prefix", ""), query.get("delimiter", ""))
            entries = "".join(
                f"<Contents><Key>{each}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<Size>{len(self.files[each])}</Size></Contents>"
                for each in keys
            ) + "".join(f"<CommonPrefixes><Prefix>{p}</Prefix></CommonPrefixes>" for p in prefixes)
            head = (
                f"<Name>box</Name><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>"
            )
            return 200, XML, f"<ListBucketResult>{head}{entries}</ListBucketResult>".encode()
        if key in self.denied:
            return 403, XML, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        if key not in self.files:
            return 404, XML, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
        return _file(handler, self.files[key])


class GcsServer(BucketServer):
    def __init__(self) -> None:
        super().__init__()
        self.pages["*"] = self._answer

    def _answer(self, handler: Any) -> Page:
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        kind = {"Content-Type": "application/json"}
        path = unquote(parts.path)
        if path == "/storage/v1/b/box/o":
            if "" in self.denied:
                return 403, kind, json.dumps({"error": {"code": 403, "message": "no"}}).encode()
            keys, prefixes = self.under(query.get("prefix", ""), query.get("delimiter", ""))
            items = [self._about(key) for key in keys]
            return 200, kind, json.dumps({"items": items, "prefixes": prefixes}).encode()
        key = path.partition("/o/")[2] or path.removeprefix("/box/")
        if key in self.denied:
            return 403, kind, json.dumps({"error": {"code": 403, "message": "no"}}).encode()
        if key not in self.files or not path.startswith(("/storage/v1/b/box/o/", "/box/")):
            return 404, kind, json.dumps({"error": {"code": 404, "message": "none"}}).encode()
        if path.startswith("/storage/") and query.get("alt") != "media":
            return 200, kind, json.dumps(self._about(key)).encode()
        return _file(handler, self.files[key])

    def _about(self, key: str) -> dict[str, Any]:
        return {
            "kind": "storage#object",
            "bucket": "box",
            "name": key,
            "size": str(len(self.files[key])),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "generation": "1",
            "etag": f"e{hash(self.files[key])}",
        }


class AzureServer(BucketServer):
    def __init__(self) -> None:
        super().__init__()
        self.pages["*"] = self._answer

    def _answer(self, handler: Any) -> Page:
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        account, _, rest = unquote(parts.path).lstrip("/").partition("/")
        container, _, key = rest.partition("/")
        assert account == "devaccount"
        version = {"x-ms-version": "2023-01-01", "x-ms-request-id": "1"}
        if container != "box":
            return 404, {**version, "x-ms-error-code": "ContainerNotFound"}, b""
        if query.get("comp") == "list":
            keys, prefixes = self.under(query.get("prefix", ""), query.get("delimiter", ""))
            blobs = "".join(
                f"<Blob><Name>{each}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT"
                f"</Last-Modified><Etag>e{hash(self.files[each])}</Etag><Content-Length>"
                f"{len(self.files[each])}</Content-Length><BlobType>BlockBlob</BlobType>"
                "</Properties></Blob>"
                for each in keys
            ) + "".join(f"<BlobPrefix><Name>{each}</Name></BlobPrefix>" for each in prefixes)
            body = f'<?xml version="1.0"?><EnumerationResults ContainerName="box"><Blobs>{blobs}'
            return 200, XML | version, f"{body}</Blobs><NextMarker/></EnumerationResults>".encode()
        if query.get("restype") == "container" and not key:
            return 200, {**version, "ETag": '"c"', "Last-Modified": _TIME}, b""
        if key in self.denied:
            return 403, {**version, "x-ms-error-code": "AuthorizationPermissionMismatch"}, b""
        if key not in self.files:
            return 404, {**version, "x-ms-error-code": "BlobNotFound"}, b""
        status, headers, body = _file(handler, self.files[key])
        blob = {"x-ms-blob-type": "BlockBlob", "x-ms-creation-time": _TIME, **version}
        blob["x-ms-server-encrypted"] = "true"
        return status, headers | blob, body


_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"


def _file(handler: Any, data: bytes) -> Page:
    headers = {
        "ETag": f'"{abs(hash(data))}"',
        "Last-Modified": _TIME,
        "Content-Type": "application/octet-stream",
    }
    asked = handler.headers.get("Range") or handler.headers.get("x-ms-range")
    if not asked:
        return 200, headers, data
    first, _, last = asked.removeprefix("bytes=").partition("-")
    end = min(int(last) + 1 if last else len(data), len(data))
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
    return 206, headers, data[int(first) : end]


SERVERS = {"s3": S3Server, "gs": GcsServer, "az": AzureServer}


@pytest.fixture(scope="module", params=list(SERVERS))
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, BucketServer]]:
    server = SERVERS[request.param]()
    yield request.param, server
    server.close()


@pytest.fixture
def bucket(
    running: tuple[str, BucketServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, BucketServer]:
    scheme, server = running
    place = f"127.0.0.1:{server.port}"
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{place}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-of-a-bucket")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{place}")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName=devaccount;AccountKey=c2VjcmV0a2V5;BlobEndpoint=http://{place}/devaccount;",
    )
    server.files = {
        "logs/a.txt": b"first",
        "logs/2026/b.txt": b"second",
        "logs/2026/c.csv": b"x,y\n1,2\n",
        "logs/.hidden": b"hidden",
        "logs/lib.so": b"binary",
        "logs-old/d.txt": b"another prefix",
    }
    server.denied = set()
    server.asked.clear()
    return f"{scheme}://box", server


def refused(*urls: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        load(list(urls), **options)
    return str(caught.value)


def texts(loaded: LoadedContext) -> dict[str, str]:
    assert isinstance(loaded.context, dict)
    return loaded.context


def test_a_file_a_folder_and_a_pattern(bucket: tuple[str, BucketServer]):
    box, _ = bucket
    single = load(f"{box}/logs/a.txt")
    assert (single.context, single.items[0].name) == ("first", "a.txt")
    folder = load(f"{box}/logs/")
    assert texts(folder) == {
        "2026/b.txt": "second",
        "2026/c.csv": "x,y\n1,2\n",
        "a.txt": "first",
    }
    assert folder.left_out == {"hidden": [".hidden"]}
    assert [str(problem) for problem in folder.problems] == ["lib.so is binary"]
    assert texts(load(f"{box}/logs/2026/*.txt")) == {"b.txt": "second"}
    both = load([f"{box}/logs/a.txt", f"{box}/logs/*/b*"])
    assert texts(both) == {"box/logs/a.txt": "first", "box/logs/2026/b.txt": "second"}


def test_an_unchanged_file_is_not_read_again(bucket: tuple[str, BucketServer], tmp_path: Path):
    box, server = bucket
    assert load(f"{box}/logs/a.txt").context == "first"
    (copy,) = (tmp_path / "home").rglob("*.data")
    before = copy.stat().st_mtime_ns
    assert load(f"{box}/logs/a.txt").context == "first"
    assert list((tmp_path / "home").rglob("*.data")) == [copy]
    assert copy.stat().st_mtime_ns == before
    server.files["logs/a.txt"] = b"changed"
    assert load(f"{box}/logs/a.txt").context == "changed"


def test_sizes_are_checked_before_anything_is_fetched(
    bucket: tuple[str, BucketServer], tmp_path: Path
):
    box, server = bucket
    server.files = {f"big/{number}.txt": b"x" * 400 for number in range(5)}
    assert "has 400 bytes, over the limit of 300 bytes" in refused(
        f"{box}/big/1.txt", max_bytes=300
    )
    message = refused(f"{box}/big", max_bytes=1000)
    assert "the 5 files at" in message
    assert "have 2,000 bytes, over the limit of 1,000 bytes; nothing was fetched" in message
    assert not list((tmp_path / "home").rglob("*.data"))


def test_what_cannot_be_read_is_one_sentence(bucket: tuple[str, BucketServer]):
    box, server = bucket
    scheme = box.partition(":")[0]
    server.denied = {"logs/a.txt"}
    message = refused(f"{box}/logs/a.txt")
    assert message.startswith(f"{box}/logs/a.txt may not be read with these credentials: "), message
    loaded = load(f"{box}/logs")
    assert [str(each) for each in loaded.problems] == [
        "lib.so is binary",
        f"{box}/logs/a.txt may not be read with these credentials: give others in the "
        "environment, or ask its owner",
    ]
    assert set(texts(loaded)) == {"2026/b.txt", "2026/c.csv"}
    for place in (f"{box}/none", f"{box}/logs/none.txt", f"{scheme}://no-such-box/a"):
        assert refused(place).startswith(f"{place} does not exist"), place
    assert f"{box}/logs/*.xml matches no file" in refused(f"{box}/logs/*.xml")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-of-a-bucket")
    assert "no connection to its server" in refused("s3://box/a.txt")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert "names no account: set AZURE_STORAGE_ACCOUNT_NAME" in refused("az://box/a.txt")
    assert "has a pattern in its bucket name" in refused("s3://b*/a.txt")


def test_the_hugging_face_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its own client, from a small server that speaks the hub's protocol."""
    pytest.importorskip("huggingface_hub")
    kind, commit, file = {"Content-Type": "application/json"}, "a" * 40, "b" * 40
    about = {"id": "ann/box", "sha": commit, "siblings": [], "private": False, "tags": []}
    tree = [
        {"type": "file", "oid": file, "size": 5, "path": "a.txt"},
        {"type": "directory", "oid": "c" * 40, "size": 0, "path": "sub"},
        {"type": "file", "oid": "d" * 40, "size": 6, "path": "sub/b.txt"},
    ]
    headers = {"X-Repo-Commit": commit, "ETag": f'"{file}"'}
    api, files = "/api/datasets/ann/box", "/datasets/ann/box/resolve/main"
    hub = SiteServer()
    hub.pages = {
        api: (200, kind, json.dumps(about).encode()),
        f"{api}/tree/main": (200, kind, json.dumps(tree).encode()),
        f"{files}/a.txt": (200, headers, b"first"),
        f"{files}/sub/b.txt": (200, headers, b"second"),
        "/api/datasets/ann/locked": (403, {"X-Error-Code": "GatedRepo"}, b"{}"),
    }
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    try:
        assert texts(load("hf://datasets/ann/box")) == {"a.txt": "first", "sub/b.txt": "second"}
        hub.asked.clear()
        assert load("hf://datasets/ann/box/a.txt").context == "first"
        assert not [path for path in hub.paths() if path.startswith(files)]  # it is unchanged
        for name in ("box/none.txt", "none", "locked"):
            message = refused(f"hf://datasets/ann/{name}")
            assert message.endswith(
                f"{name} does not exist: check its name, and HF_TOKEN if it is private"
            )
    finally:
        hub.close()

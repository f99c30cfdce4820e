"""A small server that speaks S3, in which files can be written, too."""

from __future__ import annotations

import itertools
import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.sources.site_server import Page
from tests.sources.test_buckets import XML, S3Server


class WritableS3Server(S3Server):
    """``files`` has the objects of the bucket ``box``."""

    def __init__(self) -> None:
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._ids = itertools.count()
        super().__init__()

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which clients of S3 use this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret-of-a-bucket",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _answer(self, handler: Any) -> Page:
        data = _body(handler)
        parts = urlsplit(handler.path)
        query = {name: v[0] for name, v in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        upload = query.get("uploadId", "")
        match handler.command:
            case "POST" if "uploads" in query:
                upload = f"u{next(self._ids)}"
                self._uploads[upload] = {}
                return 200, XML, _xml("InitiateMultipartUploadResult", UploadId=upload)
            case "POST" if upload:
                self.files[key] = b"".join(d for _, d in sorted(self._uploads.pop(upload).items()))
                return 200, XML, _xml("CompleteMultipartUploadResult", ETag='"e"')
            case "POST" if "delete" in query:
                for found in re.findall(r"<Key>(.*?)</Key>", data.decode()):
                    self.files.pop(found, None)
                return 200, XML, _xml("DeleteResult")
            case "PUT" if upload:
                self._uploads[upload][int(query["partNumber"])] = data
                return 200, {"ETag": '"e"'}, b""
            case "PUT" if copied := handler.headers.get("x-amz-copy-source"):
                self.files[key] = self.files[unquote(copied).lstrip("/").partition("/")[2]]
                return 200, XML, _xml("CopyObjectResult", ETag='"e"')
            case "PUT":
                self.files[key] = data
                return 200, {"ETag": '"e"'}, b""
            case "DELETE":
                self.files.pop(key, None)
                return 204, {}, b""
            case "HEAD" if bucket == "box" and not key:
                return 200, {"x-amz-bucket-region": "us-east-1"}, b""
        return super()._answer(handler)


def _xml(name: str, **values: str) -> bytes:
    inside = "".join(f"<{key}>{value}</{key}>" for key, value in values.items())
    return f"<{name}>{inside}</{name}>".encode()


def _body(handler: Any) -> bytes:
    """Read the body of a request, which may be in the chunks of AWS."""
    data: bytes = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    if handler.headers.get("Transfer-Encoding", "") == "chunked":
        data = b"".join(_chunks(handler.rfile.readline, handler.rfile.read))
    if "aws-chunked" in handler.headers.get("Content-Encoding", ""):
        lines = _Buffer(data)
        data = b"".join(_chunks(lines.readline, lines.read))
    return data


def _chunks(readline: Any, read: Any) -> Any:
    while size := int(readline().partition(b";")[0], 16):
        yield read(size)
        readline()
    while readline().strip():  # checksums
        pass


class _Buffer:
    def __init__(self, data: bytes) -> None:
        import io

        file = io.BytesIO(data)
        self.readline, self.read = file.readline, file.read

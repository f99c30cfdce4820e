"""List and read files in cloud storage buckets and on the Hugging Face hub.

    s3://bucket/key       AWS_… variables, ~/.aws; AWS_ENDPOINT_URL for other servers
    gs://bucket/key       GOOGLE_APPLICATION_CREDENTIALS, or the login of gcloud
    az://container/path   AZURE_STORAGE_ACCOUNT_NAME, …_KEY, …; AZURE_STORAGE_CONNECTION_STRING
    hf://datasets/a/b/c   HF_TOKEN

A name may be a file, a prefix (all files below it), or a pattern with ``*``, ``?``, ``[…]`` and
``**``. Buckets are read with the clients of pyarrow, and the Hugging Face hub with its own client,
through fsspec. Without credentials, requests are anonymous, so public buckets can be read. The
clients may hang, so this module runs in a separate process (``fetch_process.py``). Web addresses,
limits and the cache are handled by other modules.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ramify.secret_redaction import redact_likely_secrets
from ramify.sources.loaded_sources import UnreadableSourceError, missing_library_advice
from ramify.sources.url_recognition import RemoteFileEntry, RemoteFileInfo, redact_url_for_display

_CONNECT_S, _REQUEST_S, _TRIES = 10, 30, 3
_BLOCK_BYTES = 1 << 20


class BucketObjectReader:
    """A bucket file that is open for reading.

    ``head`` describes the file.
    """

    def __init__(self, stream: Any, head: RemoteFileInfo) -> None:
        self._stream = stream
        self.head = head

    def read(self) -> bytes:
        """Return the next bytes of the file, or b"" at its end.

        Raises UnreadableSourceError if they cannot be read.
        """
        with _convert_client_errors(self.head.final_url):
            return bytes(self._stream.read(_BLOCK_BYTES))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()


def list_bucket(url: str) -> list[RemoteFileEntry]:
    """List the files in a cloud bucket that a URL names.

    The URL may contain a wildcard pattern. Raises UnreadableSourceError if the bucket cannot be
    listed.
    """
    if re.match(r"[^/]*://[^/]*[*?\[]", url):
        raise UnreadableSourceError("has a pattern in its bucket name", "name one bucket")
    with _convert_client_errors(url):
        files, path = _open_bucket(url)
        import pyarrow.fs as pafs

        found = files.get_file_info(path) if path.strip("/") else None
        if found is not None and found.type == pafs.FileType.File and not path.endswith("/"):
            return [RemoteFileEntry(url, path.rpartition("/")[2], found.size, _version(found))]
        first = re.search(r"[*?\[]", path)
        base = path[: first.start()].rpartition("/")[0] if first else path.rstrip("/")
        infos = files.get_file_info(pafs.FileSelector(base, recursive=True))
        pattern = re.compile(_regex(path)) if first else None
        scheme, _, place = url.partition("://")
        bucket = place.partition("/")[0]
        listed = [
            RemoteFileEntry(
                f"{scheme}://{bucket}/{info.path.partition('/')[2]}",
                info.path[len(base) :].lstrip("/"),
                info.size,
                _version(info),
            )
            for info in infos
            if info.type == pafs.FileType.File and (pattern is None or pattern.fullmatch(info.path))
        ]
        if not listed:
            raise UnreadableSourceError(
                "matches no file" if first else "does not exist, or is empty", "check its name"
            )
        return listed


def open_file(url: str, version: str) -> BucketObjectReader:
    """Open one file in a cloud bucket for reading.

    ``version`` identifies a copy that is already on this machine, or is empty. Raises
    UnreadableSourceError if the file cannot be opened.
    """
    with _convert_client_errors(url):
        files, path = _open_bucket(url)
        stream = files.open_input_stream(path, compression=None)
        found, size = "", -1
        with contextlib.suppress(OSError, NotImplementedError):
            about = {name.lower(): value for name, value in (stream.metadata() or {}).items()}
            found = about.get("etag", b"").decode("latin-1")
            size = int(about.get("content-length", -1))
        if not found and url.lower().startswith("hf:"):
            about = files.handler.fs.info(path)
            found, size = str(about.get("blob_id") or ""), about["size"]
        elif not found:
            info = files.get_file_info(path)
            found, size = _version(info), info.size
        head = RemoteFileInfo(size, found, found == version != "", final_url=url)
        return BucketObjectReader(stream, head)


def _version(info: Any) -> str:
    """Return a string that changes whenever a bucket file does, or "" if no such string is known.

    It consists of the file's size and time.
    """
    return f"{info.size} bytes of {info.mtime_ns} ns" if info.mtime_ns else ""


def _regex(pattern: str) -> str:
    """Translate a path pattern with wildcards to a regular expression.

    ``*`` does not match a slash, but ``**`` does.
    """
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )


# --- the client of each provider ------------------------------------------------------------------


def _open_bucket(url: str) -> tuple[Any, str]:
    """Return a client for the bucket that a URL names, and the file's path in the bucket."""
    scheme, _, rest = url.partition("://")
    files, path = _CLIENTS[scheme.lower()](rest)
    return files, path


def _open_s3(rest: str) -> tuple[Any, str]:
    import pyarrow.fs as pafs

    given: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        given["endpoint_override"] = endpoint
    elif not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        with contextlib.suppress(OSError):
            given["region"] = pafs.resolve_s3_region(rest.partition("/")[0])
    retries = pafs.AwsStandardS3RetryStrategy(max_attempts=_TRIES)
    files = pafs.S3FileSystem(
        connect_timeout=_CONNECT_S, request_timeout=_REQUEST_S, retry_strategy=retries, **given
    )
    return files, rest


def _open_gcs(rest: str) -> tuple[Any, str]:
    import datetime

    import pyarrow.fs as pafs

    given: dict[str, Any] = {"retry_time_limit": datetime.timedelta(seconds=_REQUEST_S)}
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        scheme, _, host = emulator.rpartition("://")
        given |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "http"}
        given["anonymous"] = True
    elif not _has_google_login():
        given["anonymous"] = True
    return pafs.GcsFileSystem(**given), rest


def _has_google_login() -> bool:
    """Return True if Google's client library would find credentials on this machine.

    Without credentials, it would wait for a server that exists only on Google's machines.
    """
    login = Path.home() / ".config/gcloud/application_default_credentials.json"
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or login.exists():
        return True
    with contextlib.suppress(OSError):
        return "Google" in Path("/sys/class/dmi/id/product_name").read_text()
    return False


def _open_azure(rest: str) -> tuple[Any, str]:
    import pyarrow.fs as pafs

    given = _connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    for field, variable in _AZURE_VARIABLES.items():
        if value := os.environ.get(variable):
            given.setdefault(field, value)
    container, slash, path = rest.partition("/")
    container, _, server = container.partition("@")
    if server:
        given["account_name"] = server.partition(".")[0]
    if "account_name" not in given:
        raise UnreadableSourceError("names no account", "set AZURE_STORAGE_ACCOUNT_NAME")
    if "account_key" in given:
        given.pop("sas_token", None)
    return pafs.AzureFileSystem(**given), f"{container}{slash}{path}"


_AZURE_VARIABLES = {
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
}


def _connection_string(text: str) -> dict[str, str]:
    fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {"AccountName": "account_name", "AccountKey": "account_key"}
    given = {name: fields[field] for field, name in names.items() if field in fields}
    if "SharedAccessSignature" in fields:
        given["sas_token"] = "?" + fields["SharedAccessSignature"].lstrip("?")
    if "BlobEndpoint" in fields:
        scheme, _, place = fields["BlobEndpoint"].partition("://")
        authority = place.strip("/").removesuffix(f"/{given.get('account_name', '')}")
        given |= {"blob_storage_authority": authority, "blob_storage_scheme": scheme}
        given |= {"dfs_storage_authority": authority, "dfs_storage_scheme": scheme}
    return given


def _open_hub(rest: str) -> tuple[Any, str]:
    import pyarrow.fs as pafs

    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise UnreadableSourceError(
            "is on the Hugging Face hub", missing_library_advice()
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(HfFileSystem())), rest


_CLIENTS: dict[str, Callable[[str], tuple[Any, str]]] = {
    "s3": _open_s3,
    "s3a": _open_s3,
    "gs": _open_gcs,
    "gcs": _open_gcs,
    "az": _open_azure,
    "abfs": _open_azure,
    "abfss": _open_azure,
    "hf": _open_hub,
}

# --- errors ---------------------------------------------------------------------------------------

_SIGNS = {
    r"ACCESS_DENIED|PermissionDenied|Forbidden|AuthorizationFailure|AuthenticationFailed|\b40[13]\b"
    r"|InvalidAccessKeyId|SignatureDoesNotMatch|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH"
    r"|Gated|UNAUTHENTICATED": (
        "may not be read with these credentials",
        "give others in the environment, or ask its owner",
    ),
    r"NO_SUCH_BUCKET|No such file|ContainerNotFound|RepositoryNotFound|Not ?Found|\b404\b": (
        "does not exist",
        "",
    ),
    r"NETWORK_CONNECTION|resolve host|Could not connect|ConnectError|ConnectionError"
    r"|ConnectTimeout|TIMEOUT|UNAVAILABLE|Max retries": (
        "cannot be fetched (no connection to its server)",
        "check the network",
    ),
    r"SLOW_DOWN|\b429\b|\b503\b": ("cannot be fetched (too many requests)", "try again later"),
}
"""Regular expression for the message of a bucket client's error -> reason and remedy to report."""


def _name_check(url: str) -> str:
    """Return advice for a user whose URL names a bucket file that does not exist.

    The Hugging Face hub also reports private files as missing, so its advice mentions the token.
    """
    is_hub = url.lower().startswith("hf:")
    return "check its name, and HF_TOKEN if it is private" if is_hub else "check its name"


@contextlib.contextmanager
def _convert_client_errors(url: str) -> Iterator[None]:
    """Convert errors of the bucket clients in the ``with`` block to UnreadableSourceError.

    The new messages are readable sentences without secrets.
    """
    try:
        yield
    except UnreadableSourceError:
        raise
    except FileNotFoundError:
        raise UnreadableSourceError("does not exist", _name_check(url)) from None
    except ModuleNotFoundError:
        raise UnreadableSourceError("is in a bucket", missing_library_advice()) from None
    except Exception as error:  # noqa: BLE001 -- each client has its own errors
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        for signs, (reason, remedy) in _SIGNS.items():
            if re.search(signs, text):
                raise UnreadableSourceError(reason, remedy or _name_check(url)) from None
        text = redact_likely_secrets(text)[:200]
        raise UnreadableSourceError(
            f"cannot be fetched ({text})", f"check {redact_url_for_display(url)}"
        ) from None

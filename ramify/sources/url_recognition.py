"""Recognises which sources are URLs of files, and removes secrets from URLs.

    https://me:pw@host/report?sig=abc      redact_url_for_display:     https://host/report
                                           reloadable_redacted_url:  https://host/report?sig=«redacted»
    s3://bucket/logs/                      both:          s3://bucket/logs/

A login, and the value of a parameter that is named like a key, are never shown or recorded. Such
values are also redacted from logs and journals, wherever they occur. Databases on servers are
handled by ``database_urls.py``, and fetching by ``remote_files.py``.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import msgspec

from ramify.errors import SourceError
from ramify.secret_redaction import MARK, QUERY, register_secret

WEB_SCHEMES = ("http", "https")
BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")


def is_remote(name: str) -> bool:
    return _scheme(name) in (*WEB_SCHEMES, *BUCKET_SCHEMES)


def is_web(url: str) -> bool:
    return _scheme(url) in WEB_SCHEMES


def _scheme(name: str) -> str:
    scheme, separator, _ = name.partition("://")
    return scheme.lower() if separator else ""


def redact_url_for_display(url: str) -> str:
    """Return a URL without secrets, for use in error messages and names.

    The login is removed, and so are the parameters and the fragment of a web address.
    """
    scheme, _, rest = url.partition("://")
    if is_web(url):
        rest = rest.partition("#")[0].partition("?")[0]
    host, slash, path = rest.partition("/")
    login, _, place = host.rpartition("@")
    if is_web(url) or ":" in login:  # abfs://container@account has no login
        host = place
    return f"{scheme.lower()}://{host}{slash}{path}"


def reloadable_redacted_url(url: str) -> str:
    """Return a URL without its secrets, so that a run can record it and load it again later.

    The login is removed, and each key is replaced by a placeholder.
    """
    if not is_web(url):
        return redact_url_for_display(url)
    query = url.partition("#")[0].partition("?")[2]
    return redact_url_for_display(url) + (QUERY.sub(rf"\1{MARK}", f"?{query}") if query else "")


def check_url(url: str) -> str:
    """Check that a URL can be downloaded, and return it without its fragment.

    Raises SourceError if it cannot.

    From then on, secrets in the URL are redacted in logs and journals.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SourceError(
            f"{redact_url_for_display(url)} is not a URL: write https://host/path"
        ) from None
    if MARK in url:
        raise SourceError(
            f"{redact_url_for_display(url)} was fetched with a key that is not recorded: "
            "ask the question again "
            "with the whole URL"
        )
    if not parts.hostname:
        wanted = "https://host/path" if is_web(url) else f"{parts.scheme}://bucket/path"
        raise SourceError(f"{redact_url_for_display(url)} names no host: write {wanted}")
    if parts.password:
        register_secret("the password of a URL", unquote(parts.password))
    if not is_web(url):
        if parts.password:
            raise SourceError(
                f"{redact_url_for_display(url)} contains a key: remove it, and set the "
                "environment variables "
                "that its provider's tools read"
            )
        return url
    for name, value in parse_qsl(parts.query):
        if QUERY.search(f"?{name}={value}"):
            register_secret(f"{name} of a URL", value)
    return urlunsplit(parts._replace(fragment=""))


class RemoteFileInfo(msgspec.Struct, frozen=True):
    """What the server reports about a remote file before its contents are read, such as size and
    version."""

    num_bytes: int = -1
    """Size of the file in bytes; -1 if the server does not say."""
    version: str = ""
    """ETag, or another text that changes with the file. Empty if the server gives neither."""
    is_unchanged: bool = False
    """True if the file has not changed since the earlier copy. The server then sends no
    contents.
    """
    content_type: str = ""
    """Media type and parameters, such as ``text/html; charset=utf-8``."""
    file_name: str = ""
    """File name that the server suggests."""
    final_url: str = ""
    """URL after redirects."""
    may_keep: bool = True
    """False if the server forbids storing a copy."""


class RemoteFileEntry(msgspec.Struct, frozen=True):
    """A remote file in a listing, before its download."""

    url: str
    name: str
    """Path relative to the folder or pattern that the user named, or the file name if the user
    named the file itself.
    """
    num_bytes: int = -1
    """Size of the file in bytes; -1 if unknown."""
    version: str = ""
    """Version of the file, as in ``RemoteFileInfo``, if the listing includes it."""

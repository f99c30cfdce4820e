"""Recognises and parses the URLs of database servers, and removes passwords from them.

    postgresql://me:pw@host/shop?sslmode=require&x=1    without_password:
                                                        postgresql://me@host/shop?sslmode=require

The databases are read by ``database_servers.py``, which is imported only if there is such a URL.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from ramify.errors import SourceError
from ramify.secret_redaction import register_secret

SCHEMES = ("postgresql://", "postgres://", "mysql://", "mariadb://")
PASSWORD_VARIABLES = {"postgresql": "PGPASSWORD", "mysql": "MYSQL_PWD"}
"""Kind of database -> environment variable that holds its password."""
_OPTIONS_OF = {
    "postgresql": ("sslmode", "sslrootcert", "sslcert", "sslkey", "channel-binding"),
    "mysql": ("ssl-mode", "ssl-ca", "ssl-cert", "ssl-key"),
}
"""Kind of database -> supported URL options, all for TLS. Other options are rejected, because they
could override the limits that are set for the connection."""
_OPTIONS = frozenset(name for names in _OPTIONS_OF.values() for name in names)
_MYSQL_MODES = ("DISABLED", "PREFERRED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")


class DatabaseAddress(msgspec.Struct, frozen=True):
    """The address of a database on a server, parsed from a URL."""

    kind: str
    """Kind of database: ``postgresql`` or ``mysql``."""
    host: str
    port: int
    user: str
    password: str
    database: str
    options: dict[str, str] = {}
    """URL options by name, such as ``sslmode`` -> ``require``."""

    @property
    def url_without_password(self) -> str:
        """The database's URL for messages, without password and options."""
        return f"{self.kind}://{self.host}:{self.port}/{self.database}"


def is_database_url(name: str) -> bool:
    return name.startswith(SCHEMES)


def without_password(name: str) -> str:
    """Return the name of a source with passwords removed, so that it is safe to record.

    In the URL of a database server, the password and all unsupported options are removed.
    """
    if not is_database_url(name):
        return name
    scheme, _, rest = name.partition("://")
    login, at, place = rest.rpartition("@")
    place, _, query = place.partition("?")
    options = [(each, value) for each, value in parse_qsl(query) if _plain_option(each) in _OPTIONS]
    kept = f"?{urlencode(options, safe='/')}" if options else ""
    return f"{scheme}://{login.partition(':')[0]}{at}{place}{kept}"


def parse_address(url: str) -> DatabaseAddress:
    """Parse the URL of a database.

    A missing password is read from the environment. Raises SourceError, whose message has no
    password, if the URL does not name a database.
    """
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SourceError(f"{shown} is not an address: write postgresql://user@host/name") from None
    kind = "postgresql" if parts.scheme.startswith("postgres") else "mysql"
    database = unquote(parts.path.strip("/"))
    if not database:
        raise SourceError(f"{shown} names no database: write {parts.scheme}://user@host/name")
    password = unquote(parts.password or "")
    if password:
        register_secret("the password of a database", password)
    else:
        password = os.environ.get(PASSWORD_VARIABLES[kind], "")
        if password:
            register_secret(PASSWORD_VARIABLES[kind], password)
    return DatabaseAddress(
        kind,
        parts.hostname or "localhost",
        port or (5432 if kind == "postgresql" else 3306),
        unquote(parts.username or ""),
        password,
        database,
        _options(kind, parts.query, shown),
    )


def _plain_option(name: str) -> str:
    return name.lower().replace("_", "-")


def _options(kind: str, query: str, shown: str) -> dict[str, str]:
    """Parse the TLS options in the query part of a database URL.

    Raises SourceError for an unsupported option.
    """
    options = {_plain_option(name): value for name, value in parse_qsl(query)}
    names = _OPTIONS_OF[kind]
    for name in options:
        if "passw" in name:
            raise SourceError(
                f"{shown} has the password option {name!r}: remove it and set "
                f"{PASSWORD_VARIABLES[kind]}"
            )
        if name not in names:
            raise SourceError(
                f"{shown} has the option {name!r}, which is not supported: remove it; only these "
                f"TLS options are: {', '.join(names)}"
            )
    if "ssl-key" in options and "ssl-cert" not in options:
        raise SourceError(f"{shown} has an ssl-key without ssl-cert: give both")
    mode = options.get("ssl-mode", "")
    if mode and mode.upper() not in _MYSQL_MODES:
        raise SourceError(f"{shown} has ssl-mode={mode}: write one of {', '.join(_MYSQL_MODES)}")
    return options

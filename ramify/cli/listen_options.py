"""Define the options shared by all commands that start an HTTP server: address and API key.

    a key    $RAMIFY_SERVE_KEY, or --key-file; otherwise a new one, which the command prints
    no key   --unix-socket (only this user's processes can connect), or --open-to-this-machine

No option takes a key itself, because every user of a machine can read the arguments of all
processes. ``ramify/http_server/access.py`` checks the requests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.parser import CliOptionSpec, UsageError
from ramify.cli.terminal_text import write_stderr
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.http_server.access import ListenAddress

SERVE_KEY = "RAMIFY_SERVE_KEY"


def listen_options(
    port: int, variable: str = SERVE_KEY, key: str = "key"
) -> tuple[CliOptionSpec, ...]:
    """Return the address and key options for a command that starts an HTTP server.

    ``port`` is the default port. ``key`` is the word for the key in the help texts, such as "key"
    or "token".
    """
    return (
        CliOptionSpec("host", str, "address to listen on (default: 127.0.0.1)", "HOST"),
        CliOptionSpec("port", int, f"port to listen on; 0 picks a free one (default: {port})"),
        CliOptionSpec(
            f"{key}_file",
            str,
            f"file with the {key} that clients must present (default: ${variable}, otherwise a new "
            f"{key} at each start)",
            "FILE",
        ),
        CliOptionSpec(
            "unix_socket",
            bool,
            "listen on a Unix socket in the store, open only to your own processes, instead of a "
            "port",
            has_no=False,
        ),
        CliOptionSpec(
            "open_to_this_machine",
            bool,
            f"accept requests from any user or process on this machine without a {key}",
            has_no=False,
        ),
    )


def listen_address(
    options: Mapping[str, Any], command: str, port: int, root: Path | None = None
) -> ListenAddress:
    """Return the address on which a server should listen, according to its command-line options.

    ``root`` is the folder of the run store; None means the default folder. Raises UsageError or
    ConfigError for bad options.
    """
    from ramify.http_server.access import ListenAddress

    if not options["unix_socket"]:
        return ListenAddress(
            options["host"] or "127.0.0.1",
            port if options["port"] is None else options["port"],
            is_open=bool(options["open_to_this_machine"]),
        )
    for name in ("host", "port", "open_to_this_machine"):
        if options[name] is not None:
            raise UsageError(f"--unix-socket replaces a port: remove --{name.replace('_', '-')}")
    if root is None:
        from ramify.store.folder_store import Store

        root = Store().root
    return ListenAddress(socket=root / "sockets" / f"{command}.sock")


def client_access_key(
    options: Mapping[str, Any], variable: str = SERVE_KEY, key: str = "key"
) -> str | None:
    """Return the key that clients must send, from the options or the environment.

    Returns None if the user chose to run without a key, or if the address needs none. Raises
    UsageError or ConfigError for bad options.
    """
    path, needs_none = options[f"{key}_file"], options["open_to_this_machine"]
    if path is None:
        return None if needs_none else os.environ.get(variable) or None
    if needs_none:
        raise UsageError(f"--open-to-this-machine cannot be combined with --{key}-file: remove one")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text"
        raise ConfigError(f"--{key}-file {path} cannot be read: {reason}") from None
    if not text or any(char.isspace() for char in text):
        raise ConfigError(f"--{key}-file {path} must hold one {key} on one line")
    return text


def print_server_address(name: str, url: str, address: ListenAddress, new_key: str) -> None:
    """Print the address of a server that has just started, and how to stop it.

    If a key was generated for this start, also print the key.
    """
    where = f" on the Unix socket {address.socket}" if address.socket is not None else ""
    stop = "open to every user of this machine; Ctrl-C" if address.is_open else "Ctrl-C"
    write_stderr(f"{name} at {url}{where} ({stop} to stop)")
    if new_key:
        write_stderr(
            f"key: {new_key} (send it as a bearer token; set {SERVE_KEY} to choose your own)"
        )

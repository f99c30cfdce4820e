"""Builds the ``pip install`` command that adds optional extras to this installation of Ramify.

    install_command("ray")    pip install -e '/home/me/ramify[ray]'    from a clone, editable
                              pip install '/home/me/ramify[ray]'       from a folder or a wheel
                              pip install 'ramify[ray]'                from a package index

A package name alone would fail if no index has the package, and might install another version. So
the command is derived from what the installer recorded (``direct_url.json``, PEP 610). Which
package belongs to which extra is defined in ``pyproject.toml``.
"""

from __future__ import annotations

import os


def install_command(*extras: str) -> str:
    """Return the ``pip install`` command that adds optional extras to this installation."""
    from importlib import metadata  # takes 10 ms, and only errors need it

    try:
        record = metadata.distribution("ramify").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        record = None
    return install_command_from_record(record, extras)


def install_command_from_record(record: str | None, extras: tuple[str, ...]) -> str:
    """Return the ``pip install`` command that adds ``extras`` to an installation of Ramify.

    ``record`` is the text of its ``direct_url.json``, or None if there is no such file.
    """
    import json
    import shlex
    from urllib.parse import unquote, urlsplit

    named = f"[{','.join(extras)}]"
    origin = json.loads(record) if record else {}
    url = urlsplit(origin.get("url", ""))
    if url.scheme == "file":
        path = unquote(url.path)
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        # The folder may be gone, or be one of the machine that built an image.
        if os.path.exists(path):
            return f"pip install {option}{shlex.quote(path + named)}"
    elif "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{origin['url']}"
        return f"pip install {shlex.quote(f'ramify{named} @ {source}')}"
    return f"pip install {shlex.quote(f'ramify{named}')}"

"""The page's script: its modules put together as they are sent, without a build step.

A browser asks for twenty modules six at a time, and for the page's data after them; and a file from
disk may not import others. So ``main.js`` and all that it imports are one script, ``app.js``: one
module after the other without its import lines, which asks that the names of all of them are
distinct (a test holds them to it). Modules that are imported only when a page wants them stay
files, and take what they import from ``app.js``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
APP = "app.js"
_IMPORT = re.compile(r'^import (.+?) from "\./(.+?)";\n', re.MULTILINE)
_VENDOR_EXPORT = re.compile(r"export\s*(?:\{\s*(\w+) as default\s*\}|default (\w+));?")


def app() -> str:
    """``main.js`` after the modules that it imports, with what they export."""
    return "".join(f"// --- {name}\n{source}\n" for name, source in _modules().items())


def early() -> str:
    """What stands in the page itself: the data that it asks for takes longest, and waits for no
    other file."""
    return (STATIC / "early.js").read_text(encoding="utf-8")


def module(name: str) -> str:
    """A module that is imported when it is wanted."""
    source = (STATIC / name).read_text(encoding="utf-8")
    return _IMPORT.sub(
        lambda found: found[0].replace(found[2], APP) if found[2] in _modules() else found[0],
        source,
    )


def hashed(text: str) -> str:
    """How a Content-Security-Policy names the one script or style sheet that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _modules() -> dict[str, str]:
    done: dict[str, str] = {}
    _add("main.js", done)
    return done


def _add(name: str, done: dict[str, str]) -> None:
    """``name`` after all that it imports."""
    source = (STATIC / name).read_text(encoding="utf-8")
    for names, other in _IMPORT.findall(source):
        if other in done:
            continue
        if other.startswith("vendor/"):
            done[other] = _vendored(names, (STATIC / other).read_text(encoding="utf-8"))
        else:
            _add(other, done)
    done[name] = _IMPORT.sub("", source)


def _vendored(name: str, source: str) -> str:
    """A module with one default export as a constant called ``name``."""
    inside = _VENDOR_EXPORT.sub(lambda found: f"return {found[1] or found[2]};", source)
    return f"const {name} = (() => {{\n{inside}\n}})();"

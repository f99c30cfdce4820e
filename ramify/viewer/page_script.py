"""Bundles the page's JavaScript modules into one script when it is served, without a build step.

A browser would load twenty modules six at a time, and the page's data only after them; and a page
opened from disk cannot import modules. So ``main.js`` and everything that it imports become one
script, ``app.js``: the modules one after another without their import lines. For this the names in
all modules must be distinct (a test checks it). Modules that are imported on demand stay separate
files, and import from ``app.js``.
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
    """Source of ``app.js``: the modules that ``main.js`` imports, then ``main.js`` itself."""
    return "".join(f"// --- {name}\n{source}\n" for name, source in _modules().items())


def early() -> str:
    """Inline script that requests the run's data at once, because that takes longest."""
    return (STATIC / "early.js").read_text(encoding="utf-8")


def module(name: str) -> str:
    """Source of a module that is imported on demand, with its imports redirected to ``app.js``."""
    source = (STATIC / name).read_text(encoding="utf-8")
    return _IMPORT.sub(
        lambda match: match[0].replace(match[2], APP) if match[2] in _modules() else match[0],
        source,
    )


def hashed(text: str) -> str:
    """Hash of a script or style sheet in the form of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _modules() -> dict[str, str]:
    done: dict[str, str] = {}
    _add("main.js", done)
    return done


def _add(name: str, done: dict[str, str]) -> None:
    """Add the modules that ``name`` imports, then ``name`` itself, to ``done``."""
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
    """Turn a module with one default export into a constant called ``name``."""
    body = _VENDOR_EXPORT.sub(lambda match: f"return {match[1] or match[2]};", source)
    return f"const {name} = (() => {{\n{body}\n}})();"
